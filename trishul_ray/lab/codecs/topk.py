"""topk: the entries of largest magnitude in float32, and their positions.

``ceil(density n)`` of n entries are sent, over the whole vector; the first of equal magnitudes.
Positions are sent as a bitmap of n bits or as four bytes each, the shorter of the two.
"""

from __future__ import annotations

import math

import numpy as np

from trishul_ray.lab.codecs.base import Codec, register_codec
from trishul_ray.runtime.proportions import exact_fraction


@register_codec("topk")
class TopK(Codec):
    """Send the entries of largest magnitude; the others are zero."""

    fields_read = frozenset({"density"})

    def pack(self, values: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Return the positions of the entries that are sent, then their values."""
        limit, count = self._limit(values)
        magnitudes = np.abs(values)
        sent = magnitudes > limit
        # Break ties by index; argpartition differs between CPUs.
        equal = np.flatnonzero((magnitudes == limit) & (values != 0))
        sent[equal[: count - int(sent.sum())]] = True
        positions, bitmap = np.flatnonzero(sent).astype("<u4"), np.packbits(sent).tobytes()
        first = positions.tobytes() if positions.nbytes <= len(bitmap) else bitmap
        return bytes(first + values[positions].astype("<f4").tobytes())

    def unpack(self, body: bytes, sizes: np.ndarray) -> np.ndarray:
        """Return zeros, and the entries that were sent at their positions."""
        length = int(sizes.sum())
        size = -(-length // 8)  # of a bitmap; with positions, both parts have at most so much
        listed = len(body) <= 2 * size
        cut = len(body) // 2 if listed else size
        found = np.zeros(length, dtype=np.float32)
        if listed:
            positions = np.frombuffer(body[:cut], dtype="<u4")
        else:
            flags = np.frombuffer(body[:cut], dtype=np.uint8)
            positions = np.flatnonzero(np.unpackbits(flags, count=length))
        found[positions] = np.frombuffer(body[cut:], dtype="<f4")
        return found

    def bound(self, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the smallest magnitude that is sent; no entry that is left out exceeds it."""
        return np.full(len(values), self._limit(values)[0])

    def _limit(self, values: np.ndarray) -> tuple[float, int]:
        """Return the magnitude of the last entry that is sent, and the number of entries."""
        count = math.ceil(exact_fraction(len(values), self.fields.density))
        if count == len(values):
            return 0.0, count
        place = len(values) - count
        return float(np.partition(np.abs(values), place)[place]), count
