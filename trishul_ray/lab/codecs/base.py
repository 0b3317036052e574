"""The contract of a codec, and the registry of codecs.

A codec turns a change into a byte string and back; a record counts the length of that string. A
change is a float32 vector of units: core heads [r, r], and whole tensors. Every payload begins with
one bit for each unit; a unit whose change is zero throughout is not sent, and no codec sees it.

Legend: W entries of a vector, U its units, n entries of the units that are sent.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.plugins.registry import Registry

#: The name that stands for no codec.
NONE = "none"


class CodecFields(Section):
    """Codec in use, and the fields that codecs read."""

    codec: str = Field(
        NONE, description="how numbers are sent: none (unchanged), or a codec's name"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="int8, int4: to the nearest step, or at random up or down, without bias",
    )
    density: float = Field(
        0.25,
        description="topk: fraction of the entries that are sent, those of largest magnitude",
        gt=0,
        le=1,
    )

    @model_validator(mode="after")
    def _check_codec(self) -> CodecFields:
        if self.codec == NONE:
            read = frozenset[str]()
        elif self.codec in CODECS.names():
            read = CODECS[self.codec].fields_read | {"codec"}
        else:
            raise ValueError(CODECS.unknown(self.codec))
        unread = (name for name in CodecFields.model_fields if name not in read)
        self.reject_unused(unread, f"with codec={self.codec!r}")
        return self


class Codec:
    """Base class of codecs: override :meth:`pack`, :meth:`unpack`, :meth:`bound`.

    An instance only has its fields: one object serves every client.
    """

    #: The fields of :class:`CodecFields` that it reads, in addition to ``codec``.
    fields_read: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, fields: CodecFields) -> None:
        self.fields = fields

    def pack(self, values: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Return ``values`` as bytes.

        Args:
            values: float32 [n], finite, one unit after the other; no unit is zero throughout.
            sizes: int64, the entries of each unit.
            rng: For random rounding.
        """
        raise NotImplementedError(f"{type(self).__name__} must define pack()")

    def unpack(self, body: bytes, sizes: np.ndarray) -> np.ndarray:
        """Return the values that the receiver reads from :meth:`pack`'s bytes, float32 [n]."""
        raise NotImplementedError(f"{type(self).__name__} must define unpack()")

    def bound(self, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the largest error of each entry, up to rounding in float32: float [n]."""
        raise NotImplementedError(f"{type(self).__name__} must define bound()")

    def encode(self, change: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Return the payload of a change, float32 [W], finite, of units of these sizes [U]."""
        sent = changed_units(change, sizes)
        body = self.pack(change[np.repeat(sent, sizes)], sizes[sent], rng)
        return np.packbits(sent).tobytes() + body

    def decode(self, payload: bytes, sizes: np.ndarray) -> np.ndarray:
        """Return the change that the receiver reads from a payload, float32 [W]."""
        flags = np.frombuffer(payload, dtype=np.uint8, count=-(-len(sizes) // 8))
        sent = np.unpackbits(flags, count=len(sizes)).astype(bool)
        found = np.zeros(sizes.sum(), dtype=np.float32)
        found[np.repeat(sent, sizes)] = self.unpack(payload[len(flags) :], sizes[sent])
        return found


def changed_units(change: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the units of ``change`` [W] with an entry that is not zero, bool [U]."""
    unit = np.repeat(np.arange(len(sizes)), sizes)
    found: np.ndarray = np.bincount(unit[change != 0], minlength=len(sizes)) > 0
    return found


CODECS = Registry[type[Codec]]("codec", "codec", "trishul_ray.lab.codecs", taken=[NONE])

#: Class decorator: ``@register_codec("mine")`` makes a codec available as ``uploads.codec=mine``.
register_codec = CODECS.register


def build_codec(fields: CodecFields) -> Codec:
    """Return the codec that a section names."""
    return CODECS[fields.codec](fields)
