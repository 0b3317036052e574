"""int8 and int4: steps of equal width between the largest magnitudes of a unit, or of a block.

With b bits, ``scale = max|x| / (2^(b-1) - 1)`` and ``q = round(x / scale)``; the scales are sent in
float32 and the q in b bits. int4 divides units into blocks of 64 entries, with one scale per block.
Stochastic rounding is without bias: ``floor(x / scale + u)`` with u uniform in [0, 1).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trishul_ray.lab.codecs.base import Codec, register_codec


@register_codec("int8")
class Int8(Codec):
    """One byte per entry, one scale per unit."""

    fields_read = frozenset({"rounding"})
    #: The largest integer.
    largest: ClassVar[int] = 127

    def pack(self, values: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Return the scales, float32, and the steps."""
        lengths = self.lengths(sizes)
        scales = self._scales(values, lengths)
        # A block of zeros has no scale; any other number divides zeros as well.
        steps = values / np.repeat(np.where(scales > 0, scales, 1), lengths)
        if self.fields.rounding == "stochastic":
            steps = np.floor(steps + rng.random(len(steps), dtype=np.float32))
        else:
            steps = np.rint(steps)
        integers = np.clip(steps, -self.largest, self.largest).astype(np.int8)
        return bytes(scales.tobytes() + self.join(integers))

    def unpack(self, body: bytes, sizes: np.ndarray) -> np.ndarray:
        """Return steps times scales."""
        lengths = self.lengths(sizes)
        scales = np.frombuffer(body, dtype="<f4", count=len(lengths))
        steps = self.split(body[scales.nbytes :], int(sizes.sum())).astype(np.float32)
        found: np.ndarray = steps * np.repeat(scales, lengths)
        return found

    def bound(self, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return half a step, or a whole step with stochastic rounding."""
        lengths = self.lengths(sizes)
        scales = self._scales(values, lengths)
        return np.repeat(scales if self.fields.rounding == "stochastic" else scales / 2, lengths)

    def _scales(self, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        peaks = np.maximum.reduceat(np.abs(values), np.cumsum(lengths) - lengths)
        scales: np.ndarray = (peaks / self.largest).astype("<f4")
        return scales

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Return how many entries share each scale."""
        return sizes

    def join(self, integers: np.ndarray) -> bytes:
        """Return integers, int8 [n], as bytes."""
        return integers.tobytes()

    def split(self, body: bytes, count: int) -> np.ndarray:
        """Return the integers of :meth:`join`, int8 [count]."""
        return np.frombuffer(body, dtype=np.int8, count=count)


@register_codec("int4")
class Int4(Int8):
    """Two entries per byte, one scale for 64 entries."""

    largest = 7
    block: ClassVar[int] = 64

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Return the lengths of blocks; a unit's last block may be shorter."""
        counts = -(-sizes // self.block)
        found = np.full(counts.sum(), self.block)
        found[np.cumsum(counts) - 1] -= counts * self.block - sizes
        return found

    def join(self, integers: np.ndarray) -> bytes:
        """Return two integers per byte, as numbers from 1 to 15."""
        padded = np.zeros(-(-len(integers) // 2) * 2, dtype=np.uint8)
        padded[: len(integers)] = integers + 8
        return bytes((padded[::2] | (padded[1::2] << 4)).tobytes())

    def split(self, body: bytes, count: int) -> np.ndarray:
        """Return the integers of :meth:`join`."""
        packed = np.frombuffer(body, dtype=np.int8)
        found: np.ndarray = np.stack([packed & 15, (packed >> 4) & 15], axis=1).ravel()[:count] - 8
        return found
