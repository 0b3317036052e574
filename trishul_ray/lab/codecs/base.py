"""The contract of a codec, and the registry of codecs.

A codec turns a change into a byte string and back; what a record counts is the length of that
string. A change is a float32 vector of units: core heads [r, r], and whole tensors. A unit whose
change is zero throughout is not sent, whatever the codec: a payload begins with one bit for each
unit, and what a codec sees are the other units alone, one after the other.

Legend: W entries of a vector, U its units, n entries of those that are sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.plugins.registry import Registry

if TYPE_CHECKING:
    from trishul_ray.adapters.layout import Unit

#: The name that stands for no codec.
NONE = "none"

_ZLIB_LEVEL = 6


class CodecFields(Section):
    """Codec in use, and the fields that codecs read."""

    codec: str = Field(
        NONE, description="how numbers are sent: none (as they are), or a codec's name"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="int8, int4: to the nearest step, or at random up or down, without bias",
    )
    density: float = Field(
        0.25,
        description="topk: share of the entries that are sent, those of largest magnitude",
        gt=0,
        le=1,
    )
    deflate: bool = Field(
        False,
        description="also compress with zlib; the number of bytes then depends on zlib's version",
    )

    @model_validator(mode="after")
    def _check_codec(self) -> CodecFields:
        if self.codec == NONE:
            read = frozenset[str]()
        elif self.codec in codec_names():
            read = codec_class(self.codec).fields_read | {"codec", "deflate"}
        else:
            raise ValueError(CODECS.unknown(self.codec))
        unread = (name for name in CodecFields.model_fields if name not in read)
        self.reject_unused(unread, f"with codec={self.codec!r}")
        return self


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a vector, in order.

    Attributes:
        sizes: int64 [U], their entries.
    """

    sizes: np.ndarray

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Units:
        """Return the units of a layout (see :meth:`Layout.units`)."""
        return cls(np.array([unit.size for unit in units], dtype=np.int64))

    @cached_property
    def length(self) -> int:
        """W, the length of the vector."""
        return int(self.sizes.sum())

    @cached_property
    def starts(self) -> np.ndarray:
        """The first position of every unit, int64 [U]."""
        found: np.ndarray = np.cumsum(self.sizes) - self.sizes
        return found

    def some(self, chosen: np.ndarray) -> Units:
        """Return the units of a mask [U]."""
        return Units(self.sizes[chosen])

    def entries(self, chosen: np.ndarray) -> np.ndarray:
        """Return the entries of the units of a mask [U], bool [W]."""
        found: np.ndarray = np.repeat(chosen, self.sizes)
        return found

    def changed(self, change: np.ndarray) -> np.ndarray:
        """Return the units with an entry of ``change`` [W] that is not zero, bool [U]."""
        found = np.zeros(len(self.sizes), dtype=bool)
        filled = self.sizes > 0
        found[filled] = np.logical_or.reduceat(change != 0, self.starts[filled])
        return found


class Codec:
    """Base class of codecs: override :meth:`pack`, :meth:`unpack`, :meth:`bound`.

    An instance only has its fields: one object serves every client.
    """

    #: The fields of :class:`CodecFields` that it reads, besides ``codec`` and ``deflate``.
    fields_read: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, fields: CodecFields) -> None:
        self.fields = fields

    @property
    def unbiased(self) -> bool:
        """Whether the mean of many encodings with independent streams tends to the change."""
        return False

    def pack(self, values: np.ndarray, units: Units, rng: np.random.Generator) -> bytes:
        """Return ``values`` as bytes.

        Args:
            values: float32 [n], finite, one unit after the other; no unit is zero throughout.
            units: These units.
            rng: For random rounding.
        """
        raise NotImplementedError(f"{type(self).__name__} must define pack()")

    def unpack(self, body: bytes, units: Units) -> np.ndarray:
        """Return what the receiver reads, float32 [n], from the result of :meth:`pack`."""
        raise NotImplementedError(f"{type(self).__name__} must define unpack()")

    def bound(self, values: np.ndarray, units: Units) -> np.ndarray:
        """Return the largest error of each entry, up to rounding in float32: float [n].

        The arguments are those of :meth:`pack`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define bound()")

    def encode(self, change: np.ndarray, units: Units, rng: np.random.Generator) -> bytes:
        """Return the payload of a change: float32 [W], finite."""
        chosen = units.changed(change)
        body = self.pack(change[units.entries(chosen)], units.some(chosen), rng)
        payload = np.packbits(chosen).tobytes() + body
        return zlib.compress(payload, _ZLIB_LEVEL) if self.fields.deflate else payload

    def decode(self, payload: bytes, units: Units) -> np.ndarray:
        """Return what the receiver reads of a payload, float32 [W]."""
        content = zlib.decompress(payload) if self.fields.deflate else payload
        count = len(units.sizes)
        flags = np.frombuffer(content, dtype=np.uint8, count=-(-count // 8))
        chosen = np.unpackbits(flags, count=count).astype(bool)
        found = np.zeros(units.length, dtype=np.float32)
        found[units.entries(chosen)] = self.unpack(content[len(flags) :], units.some(chosen))
        return found


CODECS = Registry[type[Codec]]("codec", "codec", "trishul_ray.lab.codecs", taken=[NONE])

#: Class decorator: ``@register_codec("mine")`` makes a codec available as ``uploads.codec=mine``.
register_codec = CODECS.register
#: The names of all codecs, and the class of a name.
codec_names, codec_class = CODECS.names, CODECS.__getitem__


def build_codec(fields: CodecFields) -> Codec:
    """Return the codec that a section names."""
    return codec_class(fields.codec)(fields)
