"""topk: the entries of largest magnitude in float32, and their positions.

The codec selects ``ceil(density n)`` of all n entries, among equal magnitudes the first. Positions
are encoded as a bitmap of n bits or as four bytes each, whichever is shorter.
"""

from __future__ import annotations

import math

import numpy as np

from trishul_ray.lab.codecs.base import Codec, register_codec
from trishul_ray.runtime.proportions import exact_fraction


@register_codec("topk")
class TopK(Codec):
    """Send the entries of largest magnitude; the receiver sets all other entries to zero."""

    fields_read = frozenset({"density"})

    def pack(self, values: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Encode the positions of the selected entries, then their values."""
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
        """Write the received values to their positions, and zero elsewhere."""
        length = int(sizes.sum())
        # The bytes of a bitmap. A list of positions is used only if it is at most as long; then the
        # values have as many bytes as the positions.
        size = -(-length // 8)
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
        """Return the smallest selected magnitude, which no other entry exceeds."""
        return np.full(len(values), self._limit(values)[0])

    def _limit(self, values: np.ndarray) -> tuple[float, int]:
        """Return the smallest selected magnitude (0 if all are selected), and their number."""
        count = math.ceil(exact_fraction(len(values), self.fields.density))
        if count == len(values):
            return 0.0, count
        place = len(values) - count
        return float(np.partition(np.abs(values), place)[place]), count
