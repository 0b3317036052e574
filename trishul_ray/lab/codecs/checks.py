"""Checks of a codec, on messages of cores and other tensors: small, huge, sparse and empty."""

import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from trishul_ray.contract.checks import Check, require
from trishul_ray.contract.plugin_checks import CHECKS
from trishul_ray.lab.codecs.base import Codec, CodecFields, Units, build_codec, codec_class

#: Units, and a change of them, float32 [W].
Message: typing.TypeAlias = tuple[Units, np.ndarray]

#: Rounding of a result in float32, relative to the largest entry.
ROUNDING = 1e-6


def checks_of(name: str) -> list[Check]:
    """Return the checks of a codec."""

    def on(
        codecs: Callable[[], Iterable[Codec]], promise: Callable[[Codec, Message], None]
    ) -> Callable[[Path], None]:
        def run(folder: Path) -> None:
            for codec in codecs():
                for message in messages(np.random.default_rng(0)):
                    promise(codec, message)

        return run

    return [
        Check("stays within its bound", on(lambda: variants(name), stays_within_bound)),
        Check("repeats its bytes", on(lambda: variants(name), repeats_bytes)),
        Check("sends no unchanged unit", on(lambda: [_codec(name)], sends_no_unchanged_unit)),
    ]


def variants(name: str) -> Iterator[Codec]:
    """Yield the codec at its defaults, compressed, and with each choice that it reads."""
    yield _codec(name)
    yield _codec(name, deflate=True)
    for field in sorted(codec_class(name).fields_read):
        info = CodecFields.model_fields[field]
        for choice in typing.get_args(info.annotation):
            if choice != info.default:
                yield _codec(name, **{field: choice})


def _codec(name: str, **fields: object) -> Codec:
    return build_codec(CodecFields.model_validate({"codec": name, **fields}))


def messages(rng: np.random.Generator) -> Iterator[Message]:
    """Yield messages of each scale, of small and large, sparse and dense units."""
    for scale in (1.0, 1e-30, 1e-6, 1e9):
        for sparse in (False, True):
            sizes = rng.integers(0, 90, size=int(rng.integers(0, 6)))
            change = rng.standard_normal(int(sizes.sum())) * scale
            if sparse:
                change *= rng.random(len(change)) < 0.2
            values = change.astype(np.float32)
            values.flags.writeable = False  # as in the object store
            yield Units(sizes.astype(np.int64)), values


def stays_within_bound(codec: Codec, message: Message) -> None:
    """The decoded change differs from the change by ``bound`` at most."""
    units, change = message
    payload = codec.encode(change, units, np.random.default_rng(0))
    require(isinstance(payload, bytes), f"pack() returns {type(payload).__name__}, not bytes")
    read = codec.decode(payload, units)
    require(read.shape == change.shape, f"{len(read)} numbers are read, of {len(change)}")
    require(read.dtype == np.float32, f"unpack() returns {read.dtype}, not float32")
    sent = units.changed(change)
    entries = units.entries(sent)
    require(not read[~entries].any(), "a unit without a change is read with one")
    size = float(np.abs(change).max(initial=0))
    bound = codec.bound(change[entries], units.some(sent))
    over = np.abs(read[entries] - change[entries]) - bound - ROUNDING * size
    require(
        bool((over <= 0).all()),  # also False for NaN
        f"an entry is off by {float(over.max(initial=0)):.2g} more than bound() says, in a change "
        f"of up to {size:.2g}",
    )


def repeats_bytes(codec: Codec, message: Message) -> None:
    """A codec has no state, and no randomness but its stream's."""
    units, change = message
    first, second = (codec.encode(change, units, np.random.default_rng(3)) for _ in range(2))
    require(first == second, "the same change and stream give other bytes")
    again = build_codec(codec.fields)
    read = [each.decode(first, units).tobytes() for each in (codec, again)]
    require(read[0] == read[1], "an instance must hold no state: another one reads other numbers")


def sends_no_unchanged_unit(codec: Codec, message: Message) -> None:
    """A unit that did not change costs one bit."""
    units, change = message
    more, longer = Units(np.append(units.sizes, [81, 10])), np.append(change, np.zeros(91, "f4"))
    payload = codec.encode(change, units, np.random.default_rng(1))
    larger = codec.encode(longer, more, np.random.default_rng(1))
    bits = -(-len(more.sizes) // 8) - -(-len(units.sizes) // 8)  # flags, in whole bytes
    extra = len(larger) - len(payload)
    require(extra == bits, f"two units of zeros cost {extra} bytes in place of {bits}")


CHECKS["codec"] = checks_of
