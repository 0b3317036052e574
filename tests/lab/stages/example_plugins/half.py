"""half: float16 with one scale per unit, written using only the guide."""

import numpy as np

from trishul_ray.lab.codecs.base import Codec, register_codec


@register_codec("half")
class Half(Codec):
    """Two bytes per entry, relative to the largest entry of its unit."""

    def pack(self, values, sizes, rng):
        scales = self._scales(values, sizes)
        return scales.tobytes() + (values / np.repeat(scales, sizes)).astype("<f2").tobytes()

    def unpack(self, body, sizes):
        scales = np.frombuffer(body, dtype="<f4", count=len(sizes))
        values = np.frombuffer(body[scales.nbytes :], dtype="<f2").astype(np.float32)
        return values * np.repeat(scales, sizes)

    def bound(self, values, sizes):
        # Half the distance of neighbors: 2^-11 of an entry, and 2^-25 below the smallest normal.
        scales = np.repeat(self._scales(values, sizes), sizes)
        return 2.0**-11 * np.abs(values) + 2.0**-25 * scales

    def _scales(self, values, sizes):
        return np.maximum.reduceat(np.abs(values), np.cumsum(sizes) - sizes).astype("<f4")
