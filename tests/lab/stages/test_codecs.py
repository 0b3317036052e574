"""The contract of every registered codec, and the format of each codec of the package."""

import math
from pathlib import Path

import numpy as np
import pytest
from example_plugins import unloaded_after
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trishul_ray.lab.codecs.base import CODECS, CodecFields, build_codec, changed_units
from trishul_ray.lab.codecs.checks import (
    repeats_bytes,
    sends_no_unchanged_unit,
    stays_within_bound,
    variants,
)
from trishul_ray.plugins.loading import load_plugin

FOLDER = Path(__file__).parent / "example_plugins"
NAMES = [*CODECS.names(), *sorted(file.stem for file in FOLDER.glob("*.py"))]


@pytest.fixture(scope="module", autouse=True)
def example_codecs():
    """Register the codecs of ``example_plugins/`` for these tests."""
    with unloaded_after():
        for file in sorted(FOLDER.glob("*.py")):
            load_plugin(file)
        yield


def codec_of(name, **fields):
    return build_codec(CodecFields(codec=name, **fields))


def stream(seed=0):
    return np.random.default_rng(seed)


def decoded(codec, change, sizes, rng=None):
    return codec.decode(codec.encode(change, sizes, rng or stream()), sizes)


@st.composite
def messages(draw):
    """Draw sizes of units, and a change: some units zero, sparse or equal, of any scale."""
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
    change.flags.writeable = False  # like an array from the object store
    return np.array([len(each) for each in changes], dtype=np.int64), change


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "check", [stays_within_bound, repeats_bytes, sends_no_unchanged_unit], ids=lambda c: c.__name__
)
@given(message=messages())
def test_every_variant_passes_the_contract(name, check, message):
    for codec in variants(name):
        check(codec, message)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_stochastic_rounding_is_right_on_average(name):
    sizes, codec = np.array([16, 70, 5]), codec_of(name, rounding="stochastic")
    change = stream(1).standard_normal(sizes.sum()).astype(np.float32)
    times, chance, rng = 4000, 1e-9, stream(2)
    read = [decoded(codec, change, sizes, rng) for _ in range(times)]
    assert len({one.tobytes() for one in read}) > times / 2
    # Hoeffding: the mean of numbers in [x - b, x + b] leaves this interval only by chance.
    width = codec.bound(change, sizes) * math.sqrt(2 * math.log(2 * len(change) / chance) / times)
    assert (np.abs(np.mean(read, axis=0, dtype=np.float64) - change) <= width).all()


@pytest.mark.parametrize(("name", "bits", "block"), [("int8", 8, 10**9), ("int4", 4, 64)])
@pytest.mark.parametrize("way", ["nearest", "stochastic"])
def test_integers_have_their_size_and_error(name, bits, block, way):
    """Uniform remainders have a mean square of 1/12 steps; rounded at random, 1/6."""
    sizes = np.array([110 * 110, 1000])
    change = stream(0).standard_normal(sizes.sum()).astype(np.float32)
    codec = codec_of(name, rounding=way)
    payload = codec.encode(change, sizes, stream(1))
    scales = sum(-(-int(size) // block) for size in sizes)
    assert len(payload) == 1 + 4 * scales + sizes.sum() * bits // 8
    error = codec.decode(payload, sizes).astype(np.float64) - change
    steps = codec.bound(change, sizes) * (2 if way == "nearest" else 1)
    assert np.mean((error / steps) ** 2) == pytest.approx(
        1 / 12 if way == "nearest" else 1 / 6, rel=0.05
    )
    np.testing.assert_allclose(np.abs(change).max(), np.abs(codec.decode(payload, sizes)).max())


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("count", [63, 64])
def test_numbers_on_the_grid_are_exact(name, count):
    limit = 2 ** (int(name[3:]) - 1) - 1
    grid = (np.arange(count) % (2 * limit + 1) - limit).astype(np.float32) * 0.25
    np.testing.assert_array_equal(decoded(codec_of(name), grid, np.array([count])), grid)


@given(message=messages(), density=st.floats(0.01, 1))
def test_topk_sends_the_largest_entries_exactly(message, density):
    sizes, change = message
    payload = codec_of("topk", density=density).encode(change, sizes, stream())
    read = codec_of("topk", density=density).decode(payload, sizes)
    sent = read != 0
    np.testing.assert_array_equal(read[sent], change[sent])
    n = int(sizes[changed_units(change, sizes)].sum())
    count = min(math.ceil(density * n), int((change != 0).sum()))
    assert sent.sum() == count
    left = np.abs(change[~sent]).max(initial=0)
    assert np.abs(change[sent]).min(initial=np.inf) >= left
    positions = min(4 * count, -(-n // 8))
    assert len(payload) == -(-len(sizes) // 8) + 4 * count + positions


def test_topk_sends_the_first_of_equal_entries():
    change = np.array([1, -1, 0, 2, 1, -1], dtype=np.float32)
    read = decoded(codec_of("topk", density=0.5), change, np.array([6]))
    assert read.tolist() == [1, -1, 0, 2, 0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "int9"}, r"unknown codec 'int9'; known: .*; did you mean 'int8'\?"),
        ({"density": 0.5}, r"density=0\.5 has no effect with codec='none'"),
        ({"codec": "topk", "rounding": "stochastic"}, r"rounding='stochastic' has no effect with"),
        ({"codec": "topk", "density": 0}, "greater than 0"),
    ],
)
def test_wrong_fields_are_rejected(fields, message):
    with pytest.raises(ValidationError, match=message):
        CodecFields(**fields)
