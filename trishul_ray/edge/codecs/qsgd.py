"""qsgd: random rounding to steps of a bucket's norm, without bias.

Alistarh, Grubic, Li, Tomioka, Vojnovic: "QSGD: Communication-Efficient SGD via Gradient
Quantization and Encoding", NeurIPS 2017, arXiv 1610.02132. With s levels, an entry x of a bucket
with norm N becomes ``N sgn(x) l / s``, where l is ``s |x| / N`` rounded up or down at random. The
expected squared error of d entries is at most ``min(d / s^2, sqrt(d) / s) N^2``. Levels are sent in
2, 4 or 8 bits each and norms in float32, in place of the paper's Elias codes; the defaults of
levels and buckets are our own.
"""

from __future__ import annotations

import numpy as np

from trishul_ray.edge.codecs.base import Codec, Units, register_codec
from trishul_ray.edge.codecs.integers import largest, pack_integers, unpack_integers


@register_codec("qsgd")
class QSGD(Codec):
    """Round at random to levels of the norm of a bucket."""

    fields_read = frozenset({"levels", "bucket"})
    unbiased = True

    def pack(
        self, values: np.ndarray, units: Units, known: np.ndarray, rng: np.random.Generator
    ) -> bytes:
        """Return the norms, float32, and the signed levels."""
        norms, lengths = self._norms(values, units)
        steps = values / np.repeat(np.where(norms > 0, norms, 1), lengths)
        steps *= np.float32(self.fields.levels)
        steps += rng.random(len(steps), dtype=np.float32)
        return norms.tobytes() + pack_integers(np.floor(steps, out=steps), self._bits)

    def unpack(self, body: bytes, units: Units, known: np.ndarray) -> np.ndarray:
        """Return levels times norms."""
        _, lengths = units.blocks(self.fields.bucket)
        norms = np.frombuffer(body, dtype="<f4", count=len(lengths))
        steps = unpack_integers(body[norms.nbytes :], self._bits, units.length)
        return steps * np.repeat(norms / np.float32(self.fields.levels), lengths)

    def bound(self, values: np.ndarray, units: Units, known: np.ndarray) -> np.ndarray:
        """Return a step: a bucket's norm by the number of levels."""
        norms, lengths = self._norms(values, units)
        return np.repeat(norms / self.fields.levels, lengths)

    @property
    def _bits(self) -> int:
        return next(bits for bits in (2, 4, 8) if self.fields.levels <= largest(bits))

    def _norms(self, values: np.ndarray, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return the norm of every bucket, float32, and the lengths of buckets."""
        starts, lengths = units.blocks(self.fields.bucket)
        squares = np.add.reduceat(np.square(values, dtype=np.float64), starts)
        return np.sqrt(squares).astype("<f4"), lengths
