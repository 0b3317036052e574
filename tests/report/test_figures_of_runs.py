"""Figures of a single run: what they show, and the PNG files that they become."""

import math

import matplotlib
import numpy as np
import pytest

from trishul_ray.data.partition import LabelCounts
from trishul_ray.report.figures.chart import Band
from trishul_ray.report.figures.drawing import save_png
from trishul_ray.report.figures.kinds.clients import (
    MAX_COLUMNS,
    group_clients,
    rows_of_clients,
    scores_by_name,
)
from trishul_ray.report.figures.kinds.curves import diagnostics_of_run, metric_of_run
from trishul_ray.report.figures.kinds.heads import heads_of_run, rounds_of_run, strip_common_parts
from trishul_ray.report.figures.kinds.matrices import matrices_of_run, mean_over_rounds
from trishul_ray.report.figures.kinds.spectra import REMOVED, prox_of_run, uploaded_of_run
from trishul_ray.report.figures.marks import draw_chart
from trishul_ray.report.figures.style import figure_style
from trishul_ray.runtime.random_streams import numpy_rng


def rows_of(counts, names=None, what="class"):
    counts = np.asarray(counts)
    return rows_of_clients(
        LabelCounts(counts, names or tuple(map(str, range(counts.shape[-1]))), what)
    )


def drawn_texts(figure):
    """The texts of a figure that is placed."""
    figure.draw_without_rendering()
    return [text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())]


def test_a_metric_has_every_line_and_reference(tmp_path, pixels, has_colour):
    rounds = list(range(1, 21))
    series = {
        "trishul": [1 - math.exp(-i / 5) for i in rounds],
        "ravan": [math.nan if i % 2 else 0.9 - math.exp(-i / 4) for i in rounds],
    }
    data = metric_of_run(rounds, series, references={"untouched": 0.1})
    x = {name: [row.x for row in rows] for name, rows in data.panels[0].series.items()}
    assert x == {"trishul": rounds, "ravan": rounds[1::2]}
    path = save_png(data, tmp_path / "deep" / "a.png", "all of it")
    assert path == tmp_path / "deep" / "a.png"
    picture = pixels(path)
    assert has_colour(picture, "#0072B2") and has_colour(picture, "#D55E00")
    names = [text.get_text() for text in drawn_texts(draw_chart(data, []))]
    assert {"trishul", "ravan", "untouched"} <= {*names}


@pytest.mark.parametrize("name", ["RAVAN", "a method of thirty letters"])
@pytest.mark.parametrize("count", [2, 14])
def test_the_names_of_lines_stay_within_the_figure(tmp_path, pixels, count, name):
    series = {f"{n} {name}": [0.1, 0.5 + n / 50] for n in range(count)}
    picture = pixels(save_png(metric_of_run([0, 1], series), tmp_path / "a.png"))
    edges = np.concatenate([picture[:, :2].reshape(-1, 3), picture[:, -2:].reshape(-1, 3)])
    assert (edges > 250).all()


def test_a_loss_may_exceed_one_and_lack_its_first_round():
    series = {"test": [4.6, 4.5, 4.4], "training": [math.nan, 4.55, 4.45]}
    (axes,) = draw_chart(metric_of_run([0, 1, 2], series, metric="loss"), []).axes
    assert 4.3 < axes.get_ylim()[0] < 4.4  # the loss, and not zero
    assert axes.get_ylabel() == "loss"


def test_an_accuracy_has_the_interval_of_its_test_rows():
    bands = [Band.of_share(share, 100) for share in (0.0, 0.5, 1.0)]
    # R: prop.test(c(0, 50, 100), 100, correct=FALSE), one at a time
    low, high = [0.0, 0.4038315, 0.9630065], [0.0369935, 0.5961685, 1.0]
    np.testing.assert_allclose([band.low for band in bands], low, atol=1e-6)
    np.testing.assert_allclose([band.high for band in bands], high, atol=1e-6)
    for rounds in ([0, 1], [1]):
        data = metric_of_run(rounds, {"trishul": [0.5, 0.52][: len(rounds)]}, rows=100)
        assert data.remarks == ("band: 95 % interval for 100 test rows",)
        (axes,) = draw_chart(data, []).axes
        bottom, top = axes.get_ylim()
        assert bottom < 0.404 and top > 0.596  # the axis does not zoom on noise
        assert axes.collections


def test_the_same_numbers_give_the_same_bytes_and_no_global_state_is_touched(tmp_path):
    before = dict(matplotlib.rcParams)
    data = metric_of_run([1, 2], {"a": [0.5, 0.6]})
    other = metric_of_run([1, 2], {"a": [0.5, 0.7]})
    first, second = (save_png(data, tmp_path / f"{n}.png") for n in "ab")
    third = save_png(other, tmp_path / "c.png")
    assert first.read_bytes() == second.read_bytes() != third.read_bytes()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("blocks", [1, 12, 100])
def test_heads_and_squared_norms_of_each_block(tmp_path, blocks, pixels, has_colour):
    heads = {f"vit.encoder.layer.{i}": 1 + i % 5 for i in range(blocks)}
    norms = dict.fromkeys(heads, 2.0)
    data = heads_of_run("vit", "trishul", heads, norms)
    assert [row.value for row in data.rows] == [*heads.values(), *norms.values()]
    picture = pixels(save_png(data, tmp_path / "h.png"))
    assert has_colour(picture, "#0072B2")
    assert (picture < 30).all(axis=2).sum() > 100  # the norms are black


@pytest.mark.parametrize("blocks", [1, 12, 100])
def test_heads_of_each_block_in_each_round(tmp_path, blocks, pixels):
    heads = {f"vit.encoder.layer.{i}": 4 for i in range(blocks)}
    records = [{"round": number} for number in range(6)]
    for record in records[4:]:
        record["heads/vit.encoder.layer.0"] = 6
    data = rounds_of_run("trishul", heads, records)
    assert [row.value for row in data.rows] == [4, 4, 4, 6, 6, *[4] * 5 * (blocks - 1)]
    assert [row.x for row in data.rows[:5]] == [1, 2, 3, 4, 5]
    assert "4 to 6" in data.describe()
    pixels(save_png(data, tmp_path / "h.png"))


def test_short_names_keep_what_differs():
    assert strip_common_parts(["vit.layer.0.attn", "vit.layer.1.attn"]) == ["0", "1"]
    assert strip_common_parts(["enc.0", "dec.0"]) == ["enc", "dec"]
    assert strip_common_parts(["only.one"]) == ["one"]
    assert strip_common_parts(["a.b", "a.b"]) == ["b", "b"]


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (20, 100), (10_000, 100)])
def test_rows_of_clients(tmp_path, clients, classes, pixels):
    rng = numpy_rng(0, "figure")
    counts = rng.multinomial(50, rng.dirichlet([0.3] * classes), size=clients)
    picture = pixels(save_png(rows_of(counts), tmp_path / "l.png"))
    assert picture.shape[1] <= 1600  # stays a page wide, however many clients


def test_a_client_may_be_empty_and_long_names_end_with_an_ellipsis():
    names = ("a name of eighteen", "a name of nineteen!")
    shown = {
        text.get_text() for text in drawn_texts(draw_chart(rows_of([[3, 0], [0, 0]], names), []))
    }
    assert {"a name of eighteen", "a name of ninetee…"} <= shown


def test_groups_hold_every_client_once_and_follow_the_most_common_class():
    shares = numpy_rng(0, "figure").dirichlet([0.3] * 7, size=1234)
    groups = group_clients(shares)
    assert len(groups) == MAX_COLUMNS
    assert sorted(np.concatenate(groups).tolist()) == list(range(1234))
    order = shares.argmax(axis=1)[np.concatenate(groups)]
    assert (np.diff(order) >= 0).all()


@pytest.mark.parametrize("count", [1, 10, 100])
def test_scores_by_name(tmp_path, pixels, count):
    scores = {f"client {n}": 1 - n / count for n in range(count)} | {"without rows": None}
    data = scores_by_name(scores, "client", "test accuracy of the client")
    assert len(data.rows) == count and data.rows[-1].value == 1.0
    pixels(save_png(data, tmp_path / "s.png"))


@pytest.mark.parametrize("name", ["$10_$20", "$cash_$app", r"$\frac$", "_private", "a{b}^_$"])
def test_no_name_is_math_or_left_out(tmp_path, pixels, name):
    scores = scores_by_name({name: 0.5, "other": 0.25}, name, name)
    pixels(save_png(scores, tmp_path / "scores.png", name))
    heads = heads_of_run("vit", name, {"a.0": 1, "a.1": 2}, {"a.0": 1.0, "a.1": 2.0})
    with figure_style():
        (legend,) = draw_chart(heads, [name]).legends
    assert name in [text.get_text() for text in legend.get_texts()]


def test_settings_of_a_user_change_no_figure(tmp_path):
    data = metric_of_run([0, 1], {"a": [0.1, 0.5]})
    plain = save_png(data, tmp_path / "a.png").read_bytes()
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30, "axes.facecolor": "red"}):
        assert save_png(data, tmp_path / "b.png").read_bytes() == plain


def test_a_note_is_below_the_figure(tmp_path, pixels):
    note = "part of cifar100: 10,000 of 50,000 training rows, 500 of 10,000 test rows scored; " * 3
    data = metric_of_run([0, 1], {"a": [0.1, 0.2]})
    plain = pixels(save_png(data, tmp_path / "a.png"))
    noted = pixels(save_png(data, tmp_path / "b.png", note))
    assert len(noted) > len(plain)
    assert (noted[:, -2:] > 250).all()  # wrapped, not cut


def test_matrices_are_averaged_by_pair_of_clients():
    clients = [[4, 1], [1, 7], [4, 1], [9, -1]]
    two = np.array([[1.0, 2.0], [2.0, 3.0]])
    alone = np.array([[5.0, np.nan], [np.nan, np.nan]])
    known, mean = mean_over_rounds(clients, [two, 10 * two, 3 * two, alone])
    assert known.tolist() == [1, 4, 7, 9]
    nan = np.nan
    expected = [
        [(3 + 10 + 9) / 3, (2 + 6) / 2, 20, nan],
        [(2 + 6) / 2, (1 + 3) / 2, nan, nan],
        [20, nan, 30, nan],
        [nan, nan, nan, 5],
    ]
    np.testing.assert_allclose(mean, expected)


@pytest.mark.parametrize("value", [0.0, 0.5, math.nan])
def test_two_matrices_have_a_colour_scale_each(tmp_path, pixels, value):
    cosine = np.full((1, 2, 2), value)
    found = {"clients": [[0, 1]], "cosine": cosine, "principal_angle_similarity": 0.5 * cosine}
    data = matrices_of_run("trishul", found)
    assert len(draw_chart(data, []).axes) == 4
    assert "mean over the rounds that two clients were both in" in data.remarks
    pixels(save_png(data, tmp_path / "m.png"))


def test_diagnostics_leave_out_what_was_not_measured():
    records = [
        {"round": n, "spectral_entropy": 1 / n, "delta_spectral_entropy": math.nan}
        for n in range(1, 31)
    ]
    data = diagnostics_of_run(records)
    assert [panel.title for panel in data.panels] == ["spectral entropy"]
    assert [row.series for row in data.rows] == ["uploaded cores s·H"] * 30
    (axes,) = draw_chart(data, []).axes
    assert axes.get_ylim()[0] == 0


def read(of_run, **spectra):
    return of_run("trishul", {f"spectrum_{name}": array for name, array in spectra.items()})


@pytest.mark.parametrize("threshold", [1e-6, 0.3])
def test_spectra_show_what_the_prox_took_away(threshold):
    """Also where it is a millionth of the singular values, and lines lie upon each other."""
    before = -np.sort(-numpy_rng(0, "figure").random((8, 16)), axis=1)
    after = np.maximum(before - threshold, 0)
    found = {"before": before, "after": after, "threshold": np.array([threshold])}
    data = read(prox_of_run, **found)
    removed = [row.value for row in data.rows if row.metric == REMOVED]
    assert removed[0] == pytest.approx(1.0, rel=1e-6)
    above, below = draw_chart(data, []).axes
    assert above.get_yscale() == "log" and below.get_ylim()[1] > 1
    ticks = [text.get_text() for text in drawn_texts(above.figure)]
    assert "10⁰" in ticks and not any("$" in text for text in ticks)


@pytest.mark.parametrize("shape", [(1, 1), (48, 32)])
def test_spectra_of_several_ranks(tmp_path, pixels, shape):
    values = -np.sort(-numpy_rng(0, "figure").random(shape), axis=1)
    values[0, shape[1] // 2 + 1 :] = np.nan
    after = np.maximum(values - 0.3, 0)
    found = {"before": values, "after": after, "threshold": np.array([0.3]), "uploaded": values}
    for of_run in (prox_of_run, uploaded_of_run):
        pixels(save_png(read(of_run, **found), tmp_path / "s.png"))
