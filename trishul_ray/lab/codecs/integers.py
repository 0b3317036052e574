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

    def pack(
        self, values: np.ndarray, units: Units, known: np.ndarray, rng: np.random.Generator
    ) -> bytes:
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

    def unpack(self, body: bytes, units: Units, known: np.ndarray) -> np.ndarray:
        """Return steps times scales."""
        _, lengths = self._blocks(units)
        scales = np.frombuffer(body, dtype="<f4", count=len(lengths))
        steps = unpack_integers(body[scales.nbytes :], self.bits, units.length)
        found: np.ndarray = steps * np.repeat(scales, lengths)
        return found

    def bound(self, values: np.ndarray, units: Units, known: np.ndarray) -> np.ndarray:
        """Return half a step, or a whole one of stochastic rounding."""
        scales, lengths = self._scales(values, units)
        return np.repeat(scales if self.unbiased else scales / 2, lengths)

    def _blocks(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        return units.blocks(self.block) if self.block else (units.starts, units.sizes)

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
    """Return the largest integer of so many bits, of which the negative exists as well."""
    return int(2 ** (bits - 1) - 1)


def pack_integers(steps: np.ndarray, bits: int) -> bytes:
    """Return whole numbers [n] as integers of 8, 4 or 2 bits, several to a byte; clip them."""
    limit = largest(bits)
    integers = np.clip(steps, -limit, limit).astype(np.int8)
    if bits == 8:
        return bytes(integers.tobytes())
    share = 8 // bits
    padded = np.zeros(-(-len(integers) // share) * share, dtype=np.uint8)
    padded[: len(integers)] = integers + (limit + 1)  # from 1 to 2^bits - 1
    packed = np.zeros(len(padded) // share, dtype=np.uint8)
    for position in range(share):
        packed |= padded[position::share] << (bits * position)
    return bytes(packed.tobytes())


def unpack_integers(body: bytes, bits: int, count: int) -> np.ndarray:
    """Return the numbers that :meth:`pack_integers` has packed, float32 [count]."""
    if bits == 8:
        return np.frombuffer(body, dtype=np.int8, count=count).astype(np.float32)
    share = 8 // bits
    packed = np.frombuffer(body, dtype=np.uint8, count=-(-count // share))
    found = np.empty(len(packed) * share, dtype=np.float32)
    for position in range(share):
        found[position::share] = (packed >> (bits * position)) & (2**bits - 1)
    found -= largest(bits) + 1
    return found[:count]
