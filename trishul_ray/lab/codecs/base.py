"""Base class and registry of codecs.

A codec encodes a change as a byte string and decodes it; the record counts the length of the
string. A change is a float32 vector of units: core heads [r, r], and whole tensors. Every payload
begins with one bit per unit. Units whose change is zero are not sent, and codecs do not receive
them.

Legend: W entries of a vector, U its units, n entries of the units that are sent.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.plugins.registry import Registry

#: Value of ``codec`` that disables encoding.
NONE = "none"


class CodecFields(Section):
    """The codec of a section, and the fields that codecs read."""

    codec: str = Field(
        NONE, description="encoding of the numbers: none (float32), or the name of a codec"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="int8, int4: round to the nearest step, or stochastically (unbiased)",
    )
    density: float = Field(
        0.25,
        description="topk: fraction of the entries to send, by largest magnitude",
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
    """Base class of codecs: subclasses override :meth:`pack`, :meth:`unpack` and :meth:`bound`.

    Instances store only their fields, because one instance serves every client.

    Args:
        fields: The section that names the codec.

    Example:
        A codec that sends the upper 16 bits of each entry, in a file that ``--plugin`` loads::

            @register_codec("upper")
            class Upper(Codec):
                "Truncate each entry to bfloat16."

                def pack(self, values, sizes, rng):
                    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

                def unpack(self, body, sizes):
                    return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)

                def bound(self, values, sizes):
                    return np.abs(values) / 128
    """

    #: The fields of :class:`CodecFields` that the codec reads, in addition to ``codec``.
    fields_read: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, fields: CodecFields) -> None:
        self.fields = fields

    def pack(self, values: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Encode values as bytes.

        Args:
            values: float32 [n], finite, one unit after the other; in each unit, an entry is not
                zero.
            sizes: int64, the number of entries of each unit.
            rng: Random stream of the client and round, for stochastic rounding.

        Returns:
            The bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} must define pack()")

    def unpack(self, body: bytes, sizes: np.ndarray) -> np.ndarray:
        """Decode the bytes of :meth:`pack`.

        Args:
            body: The bytes.
            sizes: int64, the number of entries of each unit.

        Returns:
            The values that the receiver reads, float32 [n].
        """
        raise NotImplementedError(f"{type(self).__name__} must define unpack()")

    def bound(self, values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the maximum error of each entry, up to rounding in float32.

        Args:
            values: float32 [n], as in :meth:`pack`.
            sizes: int64, the number of entries of each unit.

        Returns:
            float [n].
        """
        raise NotImplementedError(f"{type(self).__name__} must define bound()")

    def encode(self, change: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> bytes:
        """Encode a change.

        Args:
            change: float32 [W], finite.
            sizes: int64 [U], the number of entries of each unit.
            rng: Random stream of the client and round.

        Returns:
            The payload: one bit per unit, and the bytes of :meth:`pack`.
        """
        sent = changed_units(change, sizes)
        body = self.pack(change[np.repeat(sent, sizes)], sizes[sent], rng)
        return np.packbits(sent).tobytes() + body

    def decode(self, payload: bytes, sizes: np.ndarray) -> np.ndarray:
        """Decode a payload.

        Args:
            payload: The result of :meth:`encode`.
            sizes: int64 [U], the number of entries of each unit.

        Returns:
            The change that the receiver reads, float32 [W].
        """
        flags = np.frombuffer(payload, dtype=np.uint8, count=-(-len(sizes) // 8))
        sent = np.unpackbits(flags, count=len(sizes)).astype(bool)
        found = np.zeros(sizes.sum(), dtype=np.float32)
        found[np.repeat(sent, sizes)] = self.unpack(payload[len(flags) :], sizes[sent])
        return found


def changed_units(change: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the units with at least one nonzero entry.

    Args:
        change: [W].
        sizes: int64 [U], the number of entries of each unit.

    Returns:
        bool [U].
    """
    unit = np.repeat(np.arange(len(sizes)), sizes)
    found: np.ndarray = np.bincount(unit[change != 0], minlength=len(sizes)) > 0
    return found


CODECS = Registry[type[Codec]]("codec", "codec", "trishul_ray.lab.codecs", taken=[NONE])

#: Class decorator: ``@register_codec("mine")`` makes a codec available as ``uploads.codec=mine``.
register_codec = CODECS.register


def build_codec(fields: CodecFields) -> Codec:
    """Create the codec of a section.

    Args:
        fields: The section; its codec is not ``none``.
    """
    return CODECS[fields.codec](fields)
