"""Promises of every registered codec, picked up by itself, and of each of them."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from newcomers import unloaded_after
from pydantic import ValidationError

from trishul_ray.lab.codecs.base import (
    CodecFields,
    Units,
    build_codec,
    codec_class,
    codec_names,
    register_codec,
)
from trishul_ray.lab.codecs.checks import (
    repeats_bytes,
    sends_no_unchanged_unit,
    stays_within_bound,
    variants,
)
from trishul_ray.lab.codecs.integers import largest, pack_integers, unpack_integers
from trishul_ray.plugins.loading import load_plugin

FOLDER = Path(__file__).parent / "newcomers"
CODECS = [*codec_names(), *sorted(file.stem for file in FOLDER.glob("*.py"))]


@pytest.fixture(scope="module", autouse=True)
def newcomers():
    """The codecs of ``newcomers/`` are known to these tests."""
    with unloaded_after():
        for file in sorted(FOLDER.glob("*.py")):
            load_plugin(file)
        yield


def codec_of(name, **fields):
    return build_codec(CodecFields(codec=name, **fields))


def one_unit(size):
    """The units of a vector that is one tensor."""
    return Units(np.array([size]))


def stream(seed=0):
    return np.random.default_rng(seed)


@st.composite
def messages(draw):
    """Units and a change of them: some units zero, sparse or equal, of any scale."""
    rng, changes = stream(draw(st.integers(0, 2**20))), []
    for size in draw(st.lists(st.integers(0, 150), max_size=6)):
        values = rng.standard_normal(size)
        kind = draw(st.sampled_from(["as it is", "zero", "sparse", "equal"]))
        if kind == "zero":
            values = np.zeros(size)
        elif kind == "sparse":
            values = values * (rng.random(size) < 0.1)
        elif kind == "equal":
            values = np.sign(values)
        changes.append(values * draw(st.sampled_from([1.0, 1e-30, 1e-6, 1e9])))
    change = np.concatenate([np.zeros(0), *changes]).astype(np.float32)
    change.flags.writeable = False  # as it comes from the object store
    return Units(np.array([len(each) for each in changes], dtype=np.int64)), change


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("check", [stays_within_bound, repeats_bytes], ids=lambda c: c.__name__)
@given(message=messages())
def test_every_variant_keeps_a_promise_of_the_contract(name, check, message):
    for codec in variants(name):
        check(codec, message)


@pytest.mark.parametrize("name", CODECS)
@given(message=messages())
def test_a_unit_without_a_change_costs_one_bit(name, message):
    units, change = message
    codec, zero = codec_of(name), np.zeros_like(change)
    assert len(codec.encode(zero, units, stream())) == -(-len(units.sizes) // 8)
    sends_no_unchanged_unit(codec, message)


@pytest.mark.parametrize("name", CODECS)
def test_an_unbiased_codec_is_right_on_average(name):
    units = Units(np.array([16, 70, 5]))
    change = stream(1).standard_normal(units.length).astype(np.float32)
    times, chance = 4000, 1e-9
    for codec in variants(name):
        if not codec.unbiased:
            continue
        rng = stream(2)
        read = [codec.decode(codec.encode(change, units, rng), units) for _ in range(times)]
        assert len({one.tobytes() for one in read}) > times / 2
        bound = codec.bound(change, units)
        # Hoeffding: the mean of numbers in [x - b, x + b] leaves this interval by chance alone.
        width = bound * math.sqrt(2 * math.log(2 * len(change) / chance) / times)
        assert (np.abs(np.mean(read, axis=0, dtype=np.float64) - change) <= width).all()


def test_there_are_unbiased_ones():
    assert codec_of("int8", rounding="stochastic").unbiased
    assert not codec_of("int8").unbiased and not codec_of("topk").unbiased


# Integers.


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 1000), count=st.integers(0, 40))
def test_integers_survive_packing(bits, seed, count):
    limit = largest(bits)
    numbers = stream(seed).integers(-limit, limit + 1, count).astype(np.float32)
    packed = pack_integers(numbers, bits)
    assert len(packed) == -(-count * bits // 8)
    np.testing.assert_array_equal(unpack_integers(packed, bits, count), numbers)


@pytest.mark.parametrize(("name", "bits", "block"), [("int8", 8, 10**9), ("int4", 4, 64)])
@pytest.mark.parametrize("way", ["nearest", "stochastic"])
def test_integers_cost_and_err_as_written(name, bits, block, way):
    """Evenly spread remainders have a mean square of 1/12 steps; rounded at random, 1/6."""
    sizes = np.array([110 * 110, 1000])
    units = Units(sizes)
    change = stream(0).standard_normal(units.length).astype(np.float32)
    codec = codec_of(name, rounding=way)
    payload = codec.encode(change, units, stream(1))
    scales = sum(-(-int(size) // block) for size in sizes)
    assert len(payload) == 1 + 4 * scales + units.length * bits // 8
    error = codec.decode(payload, units).astype(np.float64) - change
    steps = codec.bound(change, units) * (2 if way == "nearest" else 1)
    assert np.mean((error / steps) ** 2) == pytest.approx(
        1 / 12 if way == "nearest" else 1 / 6, rel=0.05
    )
    np.testing.assert_allclose(np.abs(change).max(), np.abs(codec.decode(payload, units)).max())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_numbers_on_the_grid_are_read_as_they_are(name):
    limit = largest(int(name[3:]))
    grid = (np.arange(64) % (2 * limit + 1) - limit).astype(np.float32) * 0.25
    units = one_unit(64)
    np.testing.assert_array_equal(
        codec_of(name).decode(codec_of(name).encode(grid, units, stream()), units), grid
    )


# The largest entries.


@given(message=messages(), density=st.floats(0.01, 1))
def test_topk_sends_the_largest_as_they_are(message, density):
    units, change = message
    codec = codec_of("topk", density=density)
    payload = codec.encode(change, units, stream())
    read = codec.decode(payload, units)
    sent = read != 0
    np.testing.assert_array_equal(read[sent], change[sent])
    n = int(units.sizes[units.changed(change)].sum())
    count = min(math.ceil(density * n), int((change != 0).sum()))
    assert sent.sum() == count
    left = np.abs(change[~sent]).max(initial=0)
    assert np.abs(change[sent]).min(initial=np.inf) >= left
    places = min(4 * count, -(-n // 8))
    assert len(payload) == -(-len(units.sizes) // 8) + 4 * count + places


def test_topk_takes_the_first_of_equal_ones():
    change = np.array([1, -1, 0, 2, 1, -1], dtype=np.float32)
    codec = codec_of("topk", density=0.5)
    read = codec.decode(codec.encode(change, one_unit(6), stream()), one_unit(6))
    assert read.tolist() == [1, -1, 0, 2, 0, 0]


def test_compression_pays_where_a_spectrum_was_cut():
    units = one_unit(4096)
    change = np.where(stream(0).random(4096) < 0.05, 1.0, 1e-6).astype(np.float32)
    plain, packed = codec_of("int8"), codec_of("int8", deflate=True)
    small = packed.encode(change, units, stream())
    assert len(small) < len(plain.encode(change, units, stream())) / 2
    read = plain.decode(plain.encode(change, units, stream()), units)
    np.testing.assert_array_equal(packed.decode(small, units), read)


# Fields and names.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "int9"}, r"unknown codec 'int9'; known: .*; did you mean 'int8'\?"),
        ({"density": 0.5}, r"density=0\.5 has no effect with codec='none'"),
        ({"codec": "topk", "rounding": "stochastic"}, r"rounding='stochastic' has no effect with"),
        ({"codec": "none", "deflate": True}, r"deflate=True has no effect with codec='none'"),
        ({"codec": "topk", "density": 0}, "greater than 0"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        CodecFields(**fields)


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_reads_known_fields_and_says_what_it_does(name):
    assert codec_class(name).fields_read <= CodecFields.model_fields.keys()
    assert codec_class(name).__doc__.strip()


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="'int8' is taken"):

        @register_codec("int8")
        class Mine(codec_class("topk")):
            __module__ = codec_class("topk").__module__

    with pytest.raises(ValueError, match="'none' is taken"):
        register_codec("none")(codec_class("topk"))
