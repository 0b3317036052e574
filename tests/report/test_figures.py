import math

import matplotlib
import numpy as np
import pytest

from trishul_ray.errors import InputError
from trishul_ray.report.figures import _short, heads_per_layer, metric_curve, spectra
from trishul_ray.rng import numpy_rng


def has_colour(array, hexadecimal):
    wanted = [int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((np.abs(array.astype(int) - wanted).max(axis=2) <= 8).any())


def test_metric_curve_draws_every_line_and_reference(tmp_path, pixels):
    rounds = list(range(1, 21))
    series = {
        "trishul": [1 - math.exp(-i / 5) for i in rounds],
        "ravan": [math.nan if i % 2 else 0.9 - math.exp(-i / 4) for i in rounds],
    }
    path = metric_curve(rounds, series, tmp_path / "deep" / "a.png", {"untouched": 0.1})
    picture = pixels(path)
    assert has_colour(picture, "#0072B2") and has_colour(picture, "#D55E00")
    assert path == tmp_path / "deep" / "a.png"


@pytest.mark.parametrize("count", [2, 7, 14])
@pytest.mark.parametrize("length", [5, 30])
def test_a_legend_stays_within_the_figure(tmp_path, pixels, count, length):
    series = {f"{n}{'W' * (length - 2)}"[:length]: [0.1, 0.5 + n / 50] for n in range(count)}
    picture = pixels(metric_curve([0, 1], series, tmp_path / "a.png"))
    edges = np.concatenate([picture[:, :2].reshape(-1, 3), picture[:, -2:].reshape(-1, 3)])
    assert (edges > 250).all()


def test_metric_curve_of_one_round(tmp_path, pixels):
    pixels(metric_curve([1], {"a": [0.5]}, tmp_path / "a.png"))


def test_a_loss_may_exceed_one_and_lack_its_first_round(tmp_path, pixels):
    series = {"test": [4.6, 3.0, 2.5], "training": [math.nan, 3.5, 2.6]}
    picture = pixels(metric_curve([0, 1, 2], series, tmp_path / "l.png", metric="loss"))
    assert has_colour(picture, "#0072B2") and has_colour(picture, "#D55E00")


def test_the_same_numbers_give_the_same_bytes_and_no_global_state_is_touched(tmp_path):
    before = dict(matplotlib.rcParams)
    first = metric_curve([1, 2], {"a": [0.5, 0.6]}, tmp_path / "a.png")
    second = metric_curve([1, 2], {"a": [0.5, 0.6]}, tmp_path / "b.png")
    other = metric_curve([1, 2], {"a": [0.5, 0.7]}, tmp_path / "c.png")
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("shape", [(48, 32), (1, 1), (2, 110)])
def test_spectra(tmp_path, shape, pixels):
    before = -np.sort(-numpy_rng(0, "figure").random(shape), axis=1)
    picture = pixels(spectra(before, np.maximum(before - 0.3, 0), 0.3, tmp_path / "s.png"))
    assert has_colour(picture, "#0072B2") or shape[1] == 1


@pytest.mark.parametrize("blocks", [1, 12, 100])
def test_heads_per_layer(tmp_path, blocks, pixels):
    names = [f"vit.encoder.layer.{i}" for i in range(blocks)]
    heads = [1 + i % 5 for i in range(blocks)]
    assert has_colour(pixels(heads_per_layer(names, heads, tmp_path / "h.png")), "#0072B2")


def test_short_names_keep_what_differs():
    assert _short(["vit.layer.0.attn", "vit.layer.1.attn"]) == ["0", "1"]
    assert _short(["enc.0", "dec.0"]) == ["enc", "dec"]
    assert _short(["only.one"]) == ["one"]
    assert _short(["a.b", "a.b"]) == ["b", "b"]


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda p: metric_curve([1], {}, p), "series is empty"),
        (lambda p: metric_curve([1, 2], {"a": [0.5]}, p), "'a' has 1 values for 2 rounds"),
        (lambda p: spectra(np.ones((2, 3)), np.ones((2, 4)), 0.1, p), r"\(2, 3\).*\(2, 4\)"),
        (lambda p: spectra(np.ones((0, 3)), np.ones((0, 3)), 0.1, p), r"\(0, 3\)"),
        (lambda p: heads_per_layer(["a"], [1, 2], p), "1 blocks, 2 numbers"),
        (lambda p: heads_per_layer([], [], p), "0 blocks"),
    ],
)
def test_wrong_input_is_named_and_nothing_written(tmp_path, draw, says):
    with pytest.raises(InputError, match=says):
        draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
