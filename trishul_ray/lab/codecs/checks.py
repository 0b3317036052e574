"""Checks of a codec, on changes of cores and other tensors: small, huge, sparse and empty."""

import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from trishul_ray.contract.checks import Check, require
from trishul_ray.contract.plugin_checks import CHECKS
from trishul_ray.lab.codecs.base import CODECS, Codec, CodecFields, build_codec, changed_units

#: The number of entries of each unit, and a change, float32 [W].
Message: typing.TypeAlias = tuple[np.ndarray, np.ndarray]

#: Tolerance for rounding in float32, relative to the largest entry.
ROUNDING = 1e-6


def checks_of(name: str) -> list[Check]:

    def each_message(check: Callable[[Codec, Message], None]) -> Callable[[Path], None]:
        def run(folder: Path) -> None:
            for codec in variants(name):
                for message in messages(np.random.default_rng(0)):
                    check(codec, message)

        return run

    return [
        Check("stays within its bound", each_message(stays_within_bound)),
        Check("repeats its bytes", each_message(repeats_bytes)),
        Check("sends no unchanged unit", each_message(sends_no_unchanged_unit)),
    ]


def variants(name: str) -> Iterator[Codec]:
    """Yield the codec with its default fields, and with each other choice of a field."""
    yield build_codec(CodecFields(codec=name))
    for field in sorted(CODECS[name].fields_read):
        info = CodecFields.model_fields[field]
        for choice in typing.get_args(info.annotation):
            if choice != info.default:
                yield build_codec(CodecFields.model_validate({"codec": name, field: choice}))


def messages(rng: np.random.Generator) -> Iterator[Message]:
    """Yield changes of each scale, with small and large, sparse and dense units."""
    for scale in (1.0, 1e-30, 1e-6, 1e9):
        for sparse in (False, True):
            sizes = rng.integers(0, 90, size=int(rng.integers(0, 6)))
            change = rng.standard_normal(int(sizes.sum())) * scale
            if sparse:
                change *= rng.random(len(change)) < 0.2
            values = change.astype(np.float32)
            values.flags.writeable = False  # as in Ray's object store
            yield sizes, values


def stays_within_bound(codec: Codec, message: Message) -> None:
    """Check that the decoded change is within ``bound`` of the change."""
    sizes, change = message
    payload = codec.encode(change, sizes, np.random.default_rng(0))
    require(isinstance(payload, bytes), f"pack() returns {type(payload).__name__}, not bytes")
    read = codec.decode(payload, sizes)
    sent = changed_units(change, sizes)
    entries, size = np.repeat(sent, sizes), float(np.abs(change).max(initial=0))
    bound = codec.bound(change[entries], sizes[sent])
    over = np.abs(read[entries] - change[entries]) - bound - ROUNDING * size
    require(
        bool((over <= 0).all()),  # also False for NaN
        f"the error of an entry is {float(over.max(initial=0)):.2g} more than bound(), in a change "
        f"with entries up to {size:.2g}",
    )


def repeats_bytes(codec: Codec, message: Message) -> None:
    """Check that a codec has no state, and no randomness except from its stream."""
    sizes, change = message
    first, second = (codec.encode(change, sizes, np.random.default_rng(3)) for _ in range(2))
    require(first == second, "encoding a change twice from the same stream gives different bytes")
    again = build_codec(codec.fields)
    read = [each.decode(first, sizes).tobytes() for each in (codec, again)]
    require(
        read[0] == read[1],
        "another instance decodes different numbers: instances must not have a state",
    )


def sends_no_unchanged_unit(codec: Codec, message: Message) -> None:
    """Check that a unit that did not change costs one bit."""
    sizes, change = message
    more, longer = np.append(sizes, [81, 10]), np.append(change, np.zeros(91, "f4"))
    payload = codec.encode(change, sizes, np.random.default_rng(1))
    larger = codec.encode(longer, more, np.random.default_rng(1))
    bits = -(-len(more) // 8) - -(-len(sizes) // 8)  # flags, in whole bytes
    extra = len(larger) - len(payload)
    require(extra == bits, f"two units of zeros cost {extra} bytes instead of {bits}")


CHECKS["codec"] = checks_of
