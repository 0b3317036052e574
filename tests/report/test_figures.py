import math

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from trishul_ray.errors import InputError
from trishul_ray.report.figures import (
    MAX_COLUMNS,
    _group_clients,
    heads_per_layer,
    label_distribution,
    metric_curve,
    share_interval,
    strip_common_parts,
)
from trishul_ray.rng import numpy_rng


def test_metric_curve_draws_every_line_and_reference(tmp_path, pixels, has_colour):
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


def test_a_loss_may_exceed_one_and_lack_its_first_round(tmp_path, pixels, has_colour):
    series = {"test": [4.6, 3.0, 2.5], "training": [math.nan, 3.5, 2.6]}
    picture = pixels(metric_curve([0, 1, 2], series, tmp_path / "l.png", metric="loss"))
    assert has_colour(picture, "#0072B2") and has_colour(picture, "#D55E00")


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the figures that are saved."""
    axes, save = [], Figure.savefig

    def record(figure, *args, **kwargs):
        axes.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", record)
    return axes


def test_a_loss_axis_shows_the_loss_not_zero(tmp_path, drawn):
    metric_curve([0, 1, 2], {"test": [4.6, 4.5, 4.4]}, tmp_path / "l.png", metric="loss")
    assert 4.3 < drawn[0].get_ylim()[0] < 4.4


def test_an_accuracy_has_the_interval_of_its_test_rows(tmp_path, drawn):
    low, high = share_interval([0.0, 0.5, 1.0], 100)
    # R: prop.test(c(0, 50, 100), 100, correct=FALSE), one at a time
    np.testing.assert_allclose(low, [0.0, 0.4038315, 0.9630065], atol=1e-6)
    np.testing.assert_allclose(high, [0.0369935, 0.5961685, 1.0], atol=1e-6)
    metric_curve([0, 1], {"trishul": [0.5, 0.52]}, tmp_path / "a.png", rows=100)
    bottom, top = drawn[0].get_ylim()
    assert bottom < 0.404 and top > 0.6  # the axis does not zoom on noise
    assert "interval for 100 test rows" in drawn[0].get_ylabel()


def test_long_names_end_with_an_ellipsis(tmp_path, drawn):
    names = ["a name of eighteen", "a name of nineteen!"]
    label_distribution([[1, 2]], tmp_path / "l.png", classes=names)
    shown = [text.get_text() for axes in drawn for text in axes.get_yticklabels()]
    assert "a name of eighteen" in shown and "a name of ninetee…" in shown


def test_the_same_numbers_give_the_same_bytes_and_no_global_state_is_touched(tmp_path):
    before = dict(matplotlib.rcParams)
    first = metric_curve([1, 2], {"a": [0.5, 0.6]}, tmp_path / "a.png")
    second = metric_curve([1, 2], {"a": [0.5, 0.6]}, tmp_path / "b.png")
    other = metric_curve([1, 2], {"a": [0.5, 0.7]}, tmp_path / "c.png")
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("blocks", [1, 12, 100])
def test_heads_per_layer(tmp_path, blocks, pixels, has_colour):
    names = [f"vit.encoder.layer.{i}" for i in range(blocks)]
    heads = [1 + i % 5 for i in range(blocks)]
    assert has_colour(pixels(heads_per_layer(names, heads, tmp_path / "h.png")), "#0072B2")


def test_short_names_keep_what_differs():
    assert strip_common_parts(["vit.layer.0.attn", "vit.layer.1.attn"]) == ["0", "1"]
    assert strip_common_parts(["enc.0", "dec.0"]) == ["enc", "dec"]
    assert strip_common_parts(["only.one"]) == ["one"]
    assert strip_common_parts(["a.b", "a.b"]) == ["b", "b"]


def test_squared_norms_beside_the_heads(tmp_path, pixels):
    names, heads = ["a", "b", "c"], [2, 6, 4]
    plain = pixels(heads_per_layer(names, heads, tmp_path / "a.png"))
    both = pixels(heads_per_layer(names, heads, tmp_path / "b.png", [1e3, 4e3, 2e3]))
    assert (plain < 30).all(axis=2).sum() < (both < 30).all(axis=2).sum()  # a black line more


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (20, 100), (10_000, 100)])
def test_label_distribution(tmp_path, clients, classes, pixels):
    rng = numpy_rng(0, "figure")
    counts = rng.multinomial(50, rng.dirichlet([0.3] * classes), size=clients)
    picture = pixels(label_distribution(counts, tmp_path / "l.png"))
    assert picture.shape[1] <= 1600  # stays a page wide, however many clients


def test_label_distribution_takes_an_empty_client_and_names(tmp_path, pixels):
    counts = np.array([[3, 0], [0, 0]])
    pixels(label_distribution(counts, tmp_path / "l.png", classes=["cat", "dog"]))


def test_groups_hold_every_client_once_and_follow_the_most_common_class():
    shares = numpy_rng(0, "figure").dirichlet([0.3] * 7, size=1234)
    groups = _group_clients(shares)
    assert len(groups) == MAX_COLUMNS
    assert sorted(np.concatenate(groups).tolist()) == list(range(1234))
    order = shares.argmax(axis=1)[np.concatenate(groups)]
    assert (np.diff(order) >= 0).all()


def test_a_note_is_above_the_figure(tmp_path, pixels):
    note = "part of cifar100: 10,000 of 50,000 training rows, 500 of 10,000 test rows scored"
    names = ["a", "b"]
    plain = pixels(heads_per_layer(names, [1, 2], tmp_path / "a.png"))
    noted = pixels(heads_per_layer(names, [1, 2], tmp_path / "b.png", note=note))
    corner = np.s_[:40, 8:40]  # left of the axis, above its label
    assert (plain[corner] > 250).all() and not (noted[corner] > 250).all()
    assert (noted[:, -2:] > 250).all()  # wrapped, not cut


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda p: metric_curve([1], {}, p), "series is empty"),
        (lambda p: metric_curve([1, 2], {"a": [0.5]}, p), "'a' has 1 values for 2 rounds"),
        (lambda p: heads_per_layer(["a"], [1], p, [1.0, 2.0]), "1 blocks, 2 norms"),
        (lambda p: label_distribution(np.ones(3), p), r"\(3,\) must be"),
        (lambda p: label_distribution([[1, -1]], p), ">= 0"),
        (lambda p: label_distribution([[1, 1]], p, ["a"]), "1 class names for 2 classes"),
        (lambda p: heads_per_layer(["a"], [1, 2], p), "1 blocks, 2 numbers"),
        (lambda p: heads_per_layer([], [], p), "0 blocks"),
    ],
)
def test_wrong_input_is_named_and_writes_nothing(tmp_path, draw, expected):
    with pytest.raises(InputError, match=expected):
        draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
