"""int8 and int4: steps of equal width between the largest magnitudes of a unit, or of a block.

With b bits, ``scale = max|x| / (2^(b-1) - 1)`` and ``q = round(x / scale)``; sent are the scales in
float32 and the q in b bits. Below 8 bits, units are divided into blocks of 64 entries with a scale
each. Stochastic rounding is without bias: ``floor(x / scale + u)`` with u uniform in [0, 1).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trishul_ray.lab.codecs.base import Codec, Units, register_codec


@register_codec("int8")
class Int8(Codec):
    """One byte an entry, one scale a unit."""

    fields_read = frozenset({"rounding"})
    bits: ClassVar[int] = 8
    #: Entries that share a scale; None is the whole unit.
    block: ClassVar[int | None] = None

    @property
    def unbiased(self) -> bool:
        """Stochastic rounding is."""
        return self.fields.rounding == "stochastic"

    def pack(self, values: np.ndarray, units: Units, rng: np.random.Generator) -> bytes:
        """Return the scales, float32, and the steps in ``bits`` bits each."""
        scales, lengths = self._scales(values, units)
        # A block of zeros has no scale; any other number divides zeros as well.
        steps = values / np.repeat(np.where(scales > 0, scales, 1), lengths)
        if self.unbiased:
            steps += rng.random(len(steps), dtype=np.float32)
            np.floor(steps, out=steps)
        else:
            np.rint(steps, out=steps)
        return scales.tobytes() + pack_integers(steps, self.bits)

    def unpack(self, body: bytes, units: Units) -> np.ndarray:
        """Return steps times scales."""
        _, lengths = self._blocks(units)
        scales = np.frombuffer(body, dtype="<f4", count=len(lengths))
        steps = unpack_integers(body[scales.nbytes :], self.bits, units.length)
        found: np.ndarray = steps * np.repeat(scales, lengths)
        return found

    def bound(self, values: np.ndarray, units: Units) -> np.ndarray:
        """Return half a step, or a whole one of stochastic rounding."""
        scales, lengths = self._scales(values, units)
        return np.repeat(scales if self.unbiased else scales / 2, lengths)

    def _blocks(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return the first positions and the lengths of blocks that divide each unit."""
        if self.block is None:
            return units.starts, units.sizes
        counts = -(-units.sizes // self.block)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(units.starts, counts) + self.block * number
        return starts, np.diff(starts, append=units.length)

    def _scales(self, values: np.ndarray, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return the scale of every block, float32, and the lengths of blocks."""
        starts, lengths = self._blocks(units)
        peaks = np.maximum.reduceat(np.abs(values), starts)
        return (peaks / largest(self.bits)).astype("<f4"), lengths


@register_codec("int4")
class Int4(Int8):
    """Two entries a byte, one scale for 64."""

    bits = 4
    block = 64


def largest(bits: int) -> int:
    """Return the largest integer with so many bits whose negative exists."""
    return int(2 ** (bits - 1) - 1)


def pack_integers(steps: np.ndarray, bits: int) -> bytes:
    """Return whole numbers [n] as clipped integers of 8 bits, or of 4 bits, two per byte."""
    limit = largest(bits)
    integers = np.clip(steps, -limit, limit).astype(np.int8)
    if bits == 8:
        return bytes(integers.tobytes())
    padded = np.zeros(-(-len(integers) // 2) * 2, dtype=np.uint8)
    padded[: len(integers)] = integers + (limit + 1)  # from 1 to 15
    return bytes((padded[::2] | (padded[1::2] << 4)).tobytes())


def unpack_integers(body: bytes, bits: int, count: int) -> np.ndarray:
    """Return the numbers that :func:`pack_integers` has packed, float32 [count]."""
    if bits == 8:
        return np.frombuffer(body, dtype=np.int8, count=count).astype(np.float32)
    packed = np.frombuffer(body, dtype=np.uint8, count=-(-count // 2))
    found = np.stack([packed & 15, packed >> 4], axis=1).ravel()[:count].astype(np.float32)
    return found - (largest(bits) + 1)
