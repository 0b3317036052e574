"""int8 and int4: uniform quantization, with one scale per unit or per block.

With b bits, ``scale = max|x| / (2^(b-1) - 1)`` and ``q = round(x / scale)``. Scales are sent in
float32, and each q in b bits. int4 divides units into blocks of 64 entries, with one scale per
block. Stochastic rounding is unbiased: ``floor(x / scale + u)`` with u uniform in [0, 1).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trishul_ray.lab.codecs.base import Codec, register_codec


@register_codec("int8")
class Int8(Codec):
    """One byte per entry, and one scale per unit."""

    fields_read = frozenset({"rounding"})
    largest: ClassVar[int] = 127

    def pack(self, values: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Encode the scales in float32, followed by the integers."""
        lengths = self.lengths(sizes)
        scales = self._scales(values, lengths)
        # The scale of a block of zeros is 0; divide the zeros by 1 instead.
        steps = values / np.repeat(np.where(scales > 0, scales, 1), lengths)
        if self.fields.rounding == "stochastic":
            steps = np.floor(steps + rng.random(len(steps), dtype=np.float32))
        else:
            steps = np.rint(steps)
        integers = np.clip(steps, -self.largest, self.largest).astype(np.int8)
        return bytes(scales.tobytes() + self.join(integers))

    def unpack(self, body: bytes, sizes: np.ndarray) -> np.ndarray:
        """Multiply the integers by their scales."""
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
        """Return the number of entries per scale."""
        return sizes

    def join(self, integers: np.ndarray) -> bytes:
        """Convert integers, int8 [n], to bytes."""
        return integers.tobytes()

    def split(self, body: bytes, count: int) -> np.ndarray:
        """Convert the bytes of :meth:`join` to integers, int8 [count]."""
        return np.frombuffer(body, dtype=np.int8, count=count)


@register_codec("int4")
class Int4(Int8):
    """Two entries per byte, and one scale per 64 entries."""

    largest = 7
    block: ClassVar[int] = 64

    def lengths(self, sizes: np.ndarray) -> np.ndarray:
        """Return the length of each block; the last block of a unit may be shorter."""
        counts = -(-sizes // self.block)
        found = np.full(counts.sum(), self.block)
        found[np.cumsum(counts) - 1] -= counts * self.block - sizes
        return found

    def join(self, integers: np.ndarray) -> bytes:
        """Pack two integers into each byte, as numbers from 1 to 15."""
        padded = np.zeros(-(-len(integers) // 2) * 2, dtype=np.uint8)
        padded[: len(integers)] = integers + 8
        return bytes((padded[::2] | (padded[1::2] << 4)).tobytes())

    def split(self, body: bytes, count: int) -> np.ndarray:
        """Unpack the integers of :meth:`join`."""
        packed = np.frombuffer(body, dtype=np.int8)
        found: np.ndarray = np.stack([packed & 15, (packed >> 4) & 15], axis=1).ravel()[:count] - 8
        return found
