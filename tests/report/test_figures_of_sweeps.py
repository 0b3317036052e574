"""Figures of sweeps, from cells that never ran and from real runs."""

import dataclasses
import io
import itertools
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
from fake_cells import (
    CASES,
    CLIENTS,
    LAMBDAS,
    ROUNDS,
    SEEDS,
    accuracy,
    by_allocation,
    by_alpha,
    by_client,
    by_epsilon,
    by_lambda,
    by_method,
    figure_of,
    similarity,
)
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_run import TINY

from trishul_ray.data.prepare import RowCounts
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.figures.chart import Band
from trishul_ray.report.figures.drawing import draw
from trishul_ray.report.figures.kind import FIGURES, check_figure, select
from trishul_ray.report.figures.kinds.spectra import AFTER, BEFORE, REMOVED, TAIL, UPLOADED
from trishul_ray.report.figures.marks import draw_chart, log_positions
from trishul_ray.report.figures.style import spread_out, styles_of
from trishul_ray.report.outcomes import CellOutcome, SweepOutcome
from trishul_ray.runs.runner import run_experiment
from trishul_ray.tracking.progress import RunProgress

KINDS = FIGURES.names()
CIFAR = {"dataset": ("cifar100",)}
THREE = {**CIFAR, "method": ("RAVAN", "TRISHUL", "FedIT")}


def data_of(figure, sweep):
    """The chart that a figure shows."""
    return FIGURES[figure.kind]().chart(select(figure, sweep))


def lines_of(chart, panel=0):
    """The rows of a panel by series."""
    return chart.panels[panel].series


def bands(rows):
    """The numbers of rows, each with its interval and how many it is made of."""
    return [Band(row.value, row.low, row.high, row.n) for row in rows]


def values(rows, **place):
    """The numbers of the rows at a place."""
    return [r.value for r in rows if all(getattr(r, k) == v for k, v in place.items())]


def of_seeds(function, **labels):
    """Text that a figure shows of a formula."""
    return Band.of_runs([function(labels | {"seed": seed}) for seed in SEEDS])


def half(labels):
    """Seed 0 is finished, seed 1 failed, seed 2 is missing; of TRISHUL seed 1 is finished, too."""
    if labels["seed"] == "2":
        return "missing"
    return "failed" if labels["seed"] == "1" and labels.get("method") != "TRISHUL" else None


def nothing(labels):
    return "missing"


def test_every_kind_is_tried():
    assert {*CASES} == {*KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_cells_make_a_figure_that_names_the_others(kind, tmp_path):
    make, where = CASES[kind]
    sweep = make(tmp_path, half)
    drawn = draw(figure_of(kind, where), sweep)
    svg, root = drawn.svg, ET.fromstring(drawn.svg)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    note = " ".join(texts)
    assert drawn.pdf.startswith(b"%PDF-")
    assert drawn.csv == data_of(figure_of(kind, where), sweep).csv("smoke")
    assert "Profile smoke" in note and "200 of 497 test rows" in note
    assert "missing: seed 2 of all" in note
    assert re.search(r"failed: (seed 1 of all|\S.*, seed 1)", note)
    assert root.get("role") == "img"
    assert root.get("data-timed") == ("true" if kind == "overhead" else None)
    title, description = root[0], root[1]
    assert title.text == "A <title> & more"
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    # Vectors alone; ids that do not clash with those of another figure on the page.
    assert "<image" not in svg and "base64" not in svg
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len({*ids}) == len(ids) and all(f"{i}-".startswith(f"smoke-fake-a-{kind}-") for i in ids)
    assert f'<style type="text/css">#{root.get("id")} *' in svg
    for reference in re.findall(r'(?:url\(|href=")#([^")]+)', svg):
        assert reference in ids


@pytest.mark.parametrize("kind", KINDS)
def test_without_finished_cells_there_is_no_figure(kind, tmp_path):
    make, where = CASES[kind]
    assert draw(figure_of(kind, where), make(tmp_path, nothing)) is None


@pytest.mark.parametrize(
    "kind", ["svt_spectra", "spectral_alignment", "waterfilling", "covariance"]
)
def test_methods_without_cores_have_no_spectral_figure(kind, tmp_path):
    where = {"method": ("FedIT", "SCAFFOLD+LoRA"), "dataset": ("cifar100",)}
    assert draw(figure_of(kind, where), by_method(tmp_path)) is None


@pytest.mark.parametrize("kind", ["convergence", "covariance"])
def test_the_same_outcomes_give_the_same_text(kind, tmp_path):
    make, where = CASES[kind]
    first = draw(figure_of(kind, where), make(tmp_path / "a"))
    assert first == draw(figure_of(kind, where), make(tmp_path / "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_read_from_the_csv(kind, tmp_path):
    make, where = CASES[kind]
    sweep = make(tmp_path)
    chart = data_of(figure_of(kind, where), sweep)
    table = pd.read_csv(io.StringIO(chart.csv(sweep.profile)))
    assert {"profile", "metric", "value"} <= {*table.columns} and (table.profile == "smoke").all()
    assert table.value.dtype == float and table.value.notna().any()
    assert len(table) == len(chart.rows)
    np.testing.assert_allclose(table.value, [row.value for row in chart.rows])


def test_what_was_sent_is_summed_over_rounds_and_averaged_over_seeds(tmp_path):
    sweep = by_method(tmp_path)
    costs = {
        cost: data_of(figure_of("cost", cost=cost), sweep)
        for cost in ("megabytes", "hours", "kilojoules", "epsilon")
    }
    line = lines_of(costs["megabytes"])["TRISHUL"]
    assert bands(line)[-1] == of_seeds(accuracy, dataset="cifar100", method="TRISHUL")
    spent = {
        "megabytes": [row.x for row in line],
        "hours": [row.x for row in lines_of(costs["hours"])["FedIT"]],
        "kilojoules": [row.x for row in lines_of(costs["kilojoules"])["FedIT"]],
    }
    # 1, 2 and 3 MB up by seed, 2 MB down.
    for cost, a_round in {"megabytes": 4.0, "hours": 0.5, "kilojoules": 0.5}.items():
        np.testing.assert_allclose(spent[cost], a_round * np.arange(ROUNDS + 1))
    assert any("devices.{speed=1e+12," in remark for remark in costs["kilojoules"].remarks)
    assert costs["epsilon"] is None


def test_the_cost_of_a_target_is_that_of_the_first_round_that_reaches_it(tmp_path):
    options = {"reference": "RAVAN", "shares": [0.9, 1]}
    data = data_of(figure_of("cost_to_target", THREE, **options), by_method(tmp_path))
    found = {(row.series, row.x): row for row in data.rows}
    for (series, share), row in found.items():
        spent = []
        for seed in SEEDS:
            labels = {"dataset": "cifar100", "method": series, "seed": seed}
            target = share * accuracy(labels | {"method": "RAVAN"})
            rounds = range(ROUNDS + 1)
            first = next((n for n in rounds if accuracy(labels, n) >= target), None)
            spent += [] if first is None else [first * (3.0 + int(seed))]
        assert (row.runs, row.n) == (len(SEEDS), len(spent))
        if not spent:
            assert math.isnan(row.value) and row.text == "not reached"
        else:
            assert row.value == pytest.approx(np.mean(spent))
    assert found["FedIT", 1].n == 0 < found["TRISHUL", 1].n


def test_runs_without_noise_lie_beyond_every_epsilon_and_those_that_are_not_private_nowhere(
    tmp_path,
):
    sweep = by_epsilon(tmp_path)
    line = lines_of(data_of(figure_of("privacy"), sweep))["RAVAN"]
    assert [row.x for row in line] == [2.0, 8.0, math.inf]
    assert {row.n for row in line} == {len(SEEDS)}
    assert ">∞</" in draw(figure_of("privacy"), sweep).svg


def test_convergence_shows_means_and_deviations_over_seeds(tmp_path):
    data = data_of(figure_of("convergence"), by_method(tmp_path))
    assert [panel.title for panel in data.panels] == ["digits (for CIFAR-100)", "20newsgroups"]
    name, line = [*lines_of(data, 1).items()][-1]
    labels = {"dataset": "20newsgroups", "method": "TRISHUL"}
    expected = [of_seeds(lambda c, n=n: accuracy(c, n), **labels) for n in range(ROUNDS + 1)]
    assert name == "TRISHUL" and [row.x for row in line] == [*range(ROUNDS + 1)]
    assert bands(line) == expected
    assert f"TRISHUL {expected[-1].centre:.1%} at {ROUNDS}" in data.describe()
    assert data.panels[0].y.percent and data.panels[0].y.label == "test accuracy"


@pytest.mark.parametrize("kind", ["convergence", "cost", "cost_to_target"])
def test_what_is_averaged_besides_seeds_is_named(kind, tmp_path):
    sweep = by_method(tmp_path)
    whole = data_of(figure_of(kind, panels=[]), sweep)
    one = data_of(figure_of(kind, CIFAR, panels=[]), sweep)
    assert "averaged over dataset: digits (for CIFAR-100), 20newsgroups" in whole.remarks
    assert not any("averaged" in remark for remark in one.remarks)
    if kind == "convergence":
        assert (whole.rows[0].n, one.rows[0].n) == (6, 3)
        assert not any("averaged" in r for r in data_of(figure_of(kind), sweep).remarks)


def test_several_axes_may_form_the_series(tmp_path):
    figure = figure_of("convergence", series=["dataset", "method"], panels=None)
    data = data_of(figure, by_method(tmp_path))
    assert data.names[0] == "digits (for CIFAR-100), FedIT" and len(data.names) == 10


def test_missing_series_keep_their_colours(tmp_path):
    without = by_method(tmp_path / "b", lambda c: "missing" if c["method"] == "FedIT" else None)
    full = data_of(figure_of("convergence"), by_method(tmp_path / "a"))
    part = data_of(figure_of("convergence"), without)
    assert len(lines_of(part)) == len(lines_of(full)) - 1
    assert styles_of(part.names) == styles_of(full.names)


def test_finished_cells_without_diagnostics_are_named(tmp_path):
    figure = figure_of("spectral_alignment", CIFAR)
    data = data_of(figure, by_method(tmp_path))
    assert "without these metrics: FedIT; SCAFFOLD+LoRA" in data.remarks
    assert [panel.title.split()[0] for panel in data.panels] == ["updates", "uploaded"] * 2
    first = data.panels[0]
    assert [*first.series] == ["RAVAN", "TRISHUL (λ=0)", "TRISHUL"]
    labels = {"dataset": "cifar100", "method": "RAVAN"}
    assert bands(first.series["RAVAN"])[-1] == of_seeds(similarity, **labels)
    assert first.levels == {"": pytest.approx(2 / 6)}  # top_k of the rank
    figure = figure_of("spectral_alignment", CIFAR, of=["uploads"])
    assert len(data_of(figure, by_method(tmp_path)).panels) == 2


def test_variance_is_relative_to_the_first_round_of_ravan_with_the_same_seed(tmp_path):
    kind, where = "spectral_diagnostics", CASES["spectral_diagnostics"][1]
    variance = data_of(figure_of(kind, where), by_method(tmp_path / "a")).panels[4]
    assert variance.y.label == "relative to RAVAN in round 1"
    assert next(iter(variance.series)) == "RAVAN"
    # Seeds differ by factors of ten, which no mean over seeds removes.
    assert bands(variance.series["RAVAN"])[0] == Band(*map(pytest.approx, (1.0, 1.0, 1.0)), 3)
    assert variance.series["TRISHUL"][0].high < 1
    one = by_method(
        tmp_path / "c", lambda c: "missing" if c["seed"] != "0" and c["method"] == "RAVAN" else None
    )
    data = data_of(figure_of(kind, where), one)
    assert [rows[0].n for rows in lines_of(data, 4).values()] == [1, 1, 1]
    assert any("without these metrics: TRISHUL (λ=0), seeds 1, 2" in r for r in data.remarks)
    without = by_method(tmp_path / "b", lambda c: "failed" if c["method"] == "RAVAN" else None)
    alone = data_of(figure_of(kind, where), without).panels[4]
    assert alone.y.label == "absolute (no RAVAN)"
    labels = {"dataset": "cifar100", "method": "TRISHUL"}
    expected = of_seeds(lambda c: (2 - similarity(c, 1)) * 1.1 * 10 ** int(c["seed"]), **labels)
    assert alone.series["TRISHUL"][0].value == pytest.approx(expected.centre)


def test_accuracy_over_lambda(tmp_path):
    data = data_of(figure_of("lambda_accuracy"), by_lambda(tmp_path))
    rows = data.panels[1].rows
    assert [row.x for row in rows] == [0.0, 0.001, 0.01, 1.0]
    assert data.panels[1].x.scale == "strength"
    assert bands(rows)[3] == of_seeds(accuracy, **{"dataset": "20newsgroups", "lambda": "1"})


def test_late_rounds_are_averaged(tmp_path):
    _, where = CASES["lambda_diagnostics"]
    data = data_of(figure_of("lambda_diagnostics", where, last=2), by_lambda(tmp_path))
    assert [panel.y.label for panel in data.panels] == ["test accuracy", *["spectral entropy"] * 2]
    expected = of_seeds(
        lambda c: 1.8 - np.mean([similarity(c, n) for n in (ROUNDS - 1, ROUNDS)]),
        **{"dataset": "cifar100", "lambda": "1"},
    )
    assert data.panels[1].rows[-1].value == pytest.approx(expected.centre)


def test_heterogeneity_and_inconsistency_over_alpha(tmp_path):
    sweep = by_alpha(tmp_path)
    lines = data_of(figure_of("heterogeneity"), sweep)
    labels = {"method": "RAVAN", "partition": "dirichlet(0.05)"}
    line = lines_of(lines)["RAVAN"]
    assert lines.panels[0].x.scale == "skew" and [row.x for row in line] == [0.05, 0.1, 0.3]
    assert bands(line)[0] == of_seeds(accuracy, **labels)
    points = data_of(figure_of("accuracy_inconsistency", last=1), sweep)
    index, point = points.rows[:2]
    expected = of_seeds(lambda c: 1 - similarity(c), **labels)
    assert {(row.series, row.x) for row in (index, point)} == {("RAVAN", 0.05)}
    assert bands([point]) == [of_seeds(accuracy, **labels)]
    assert index.value == pytest.approx(expected.centre)


def printed(figure, sweep, key):
    """The figure of a sweep whose numbers may be compared with the paper's, and of one not."""
    figure = figure.model_copy(update={"paper": key})

    def complete(cell):
        if cell.summary is None:
            return cell
        data = dataclasses.replace(cell.summary.data, test=RowCounts(497, 497, 497))
        return dataclasses.replace(cell, summary=dataclasses.replace(cell.summary, data=data))

    sweep = dataclasses.replace(sweep, cells=tuple(map(complete, sweep.cells)))
    return (
        data_of(figure, dataclasses.replace(sweep, profile=profile))
        for profile in ("paper", "smoke")
    )


def test_the_papers_numbers_stand_in_its_figures_where_they_may_be_compared(tmp_path):
    figure = figure_of("heterogeneity")
    ours, smoke = printed(figure, by_alpha(tmp_path), "fig:heterogeneity")
    paper = {name: [row.paper for row in rows] for name, rows in lines_of(ours).items()}
    assert paper["TRISHUL"] == pytest.approx([0.6853, 0.7386, 0.7941])
    assert paper["RAVAN"][0] == pytest.approx(0.6381)
    assert np.isnan(paper["TRISHUL (λ=0)"]).all()
    assert "at 0.05 (paper 68.5%)" in ours.describe() and "paper" not in smoke.describe()
    assert all(math.isnan(row.paper) for row in smoke.rows)
    assert "hollow: the paper's numbers" in ours.remarks
    assert not any("paper" in remark for remark in smoke.remarks)
    table = pd.read_csv(io.StringIO(ours.csv("paper")))
    assert table[(table.series == "TRISHUL") & (table.x == 0.05)].paper.item() == 0.6853


def test_words_name_the_similarity_at_the_alpha_that_the_paper_names(tmp_path):
    sweep = by_alpha(tmp_path)
    ours, _ = printed(figure_of("alpha_diagnostics", last=1), sweep, "fig:alpha_diagnostics")
    labels = {"method": "TRISHUL", "partition": "dirichlet(0.05)"}
    mean = of_seeds(similarity, **labels).centre
    assert f"TRISHUL {mean:.4g} at 0.05 (paper 0.35)" in ours.describe()
    # The printed number is of updates, and of no other x.
    first, *others = lines_of(ours)["TRISHUL"]
    assert first.paper == 0.35
    assert all(math.isnan(row.paper) for row in (*others, *ours.panels[1].rows))


def test_overhead_has_the_papers_seconds_and_percentages(tmp_path):
    figure = figure_of("overhead", CASES["overhead"][1], groups="dataset")
    sweep = by_method(tmp_path)
    models = {"cifar100": "ViT-B/16", "20newsgroups": "T5-Base"}
    for cell in sweep.cells:
        cell.labels["model"] = models[cell.labels["dataset"]]
    sweep = dataclasses.replace(sweep, axes={**sweep.axes, "model": tuple(models.values())})
    ours, smoke = printed(figure, sweep, "fig:overhead")
    seconds, overheads = (panel.rows for panel in ours.panels)
    assert [row.paper for row in seconds] == [18.4, 18.6, 31.2, 31.5]
    assert [row.paper for row in overheads] == pytest.approx([0.0109, 0.0096])
    assert "+10.0%, n = 12, paper +1.09%" in ours.describe()
    assert all(math.isnan(row.paper) for row in smoke.rows)


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_an_axis_neither_magnifies_what_is_rounded_nor_is_negative_for_zeros(level, tmp_path):
    sweep = by_lambda(tmp_path)
    for number, cell in enumerate(sweep.cells):
        cell.summary.final["accuracy"] = level + (number * 2**-52 if level else 0)
    for axes in draw_chart(data_of(figure_of("lambda_accuracy"), sweep), []).axes:
        low, high = axes.get_ylim()
        assert high - low > 0.01 and (level or low == 0)


def test_values_of_the_field_are_not_written_over_each_other(tmp_path):
    data = data_of(figure_of("accuracy_inconsistency"), by_alpha(tmp_path))
    figure = draw_chart(data, [])
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 9
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_one_run_does_not_hide_the_points_in_a_corner(tmp_path):
    sweep = by_alpha(tmp_path, lambda labels: "missing" if labels["seed"] != "0" else None)
    data = data_of(figure_of("accuracy_inconsistency"), sweep)
    axes = draw_chart(data, []).axes[0]
    indices = [row.value for row in data.panels[0].second]
    assert max(indices) - min(indices) > 0.5 * np.ptp(axes.get_xlim())


def test_labels_of_models_are_not_written_over_each_other(tmp_path):
    sweep = by_method(tmp_path)
    long = ("vit-digits (for ViT-B/16)", "llama-tiny (for LLaMA-3.2-1B)")
    shown = dict(zip(("cifar100", "20newsgroups"), long, strict=True))
    sweep = dataclasses.replace(sweep, shown={"dataset": shown})
    data = data_of(figure_of("overhead", CASES["overhead"][1]), sweep)
    figure = draw_chart(data, [])
    figure.draw_without_rendering()
    for axes in figure.axes:
        first, second = (label.get_window_extent() for label in axes.get_xticklabels())
        assert not first.overlaps(second)


def test_an_iid_partition_lies_beyond_every_alpha(tmp_path):
    sweep = by_alpha(tmp_path)
    for cell in sweep.cells:
        if cell.labels["partition"] == "dirichlet(0.3)":
            cell.summary.config["partition"] = {"kind": "iid", "alpha": 0.3}
    data = data_of(figure_of("heterogeneity"), sweep)
    assert [row.x for row in lines_of(data)["RAVAN"]] == [0.05, 0.1, math.inf]
    assert "IID" in draw(figure_of("heterogeneity"), sweep).svg


def test_overhead_compares_the_same_rounds(tmp_path):
    kind, where = "overhead", CASES["overhead"][1]
    data = data_of(figure_of(kind, where), by_method(tmp_path / "a"))
    assert data.panels[1].title == "overhead over RAVAN"
    seconds, over = (panel.rows[-1] for panel in data.panels)
    place = ("20newsgroups", "TRISHUL")
    assert (seconds.x, seconds.series) == (over.x, over.series) == place
    # The local steps alone, of which evaluation is no part: their ratio is not diluted.
    assert over.value == pytest.approx(0.1)
    # The first round, of 9 seconds, is left out.
    assert seconds.n == over.n == 3 * (ROUNDS - 1)
    assert seconds.value == pytest.approx(1.1 * 1.15)
    assert any(f"median of {3 * (ROUNDS - 1)} rounds, without the first" in r for r in data.remarks)
    # No common run: seconds, but no overhead.
    done = {("RAVAN", "0"), ("TRISHUL", "1")}
    sweep = by_method(
        tmp_path / "b", lambda c: None if (c["method"], c["seed"]) in done else "missing"
    )
    apart = data_of(figure_of(kind, where), sweep)
    assert [len(panel.rows) for panel in apart.panels] == [4]


def test_spectra_before_and_after_the_prox(tmp_path):
    kind, where = "svt_spectra", CASES["svt_spectra"][1]
    sweep = by_method(tmp_path)
    data = data_of(figure_of(kind, where), sweep)
    prox, removed, uploaded, tails = data.panels  # nothing is removed with λ=0
    assert prox.levels == {"threshold τ": pytest.approx(0.0005)}
    cells = [c for c in sweep.cells if c.labels["method"] == "TRISHUL"][: len(SEEDS)]
    after = np.concatenate([cell.arrays["spectrum_after"] for cell in cells])
    assert values(prox.rows, metric=AFTER) == pytest.approx(np.median(after, axis=0))
    assert {row.n for row in prox.rows} == {30} and {row.series for row in prox.rows} == {"TRISHUL"}
    assert prox.title == f"TRISHUL: {(after == 0).mean():.1%} zero after the prox"
    # The prox subtracts the threshold, or what there is.
    assert max(row.high for row in removed.rows) == pytest.approx(1.0)
    assert min(row.low for row in removed.rows) > 0
    assert [*uploaded.series] == ["RAVAN", "TRISHUL (λ=0)", "TRISHUL"]
    assert tails.series["RAVAN"][0].value == 1.0
    assert tails.series["TRISHUL"][-1].value < tails.series["RAVAN"][-1].value
    metrics = [*dict.fromkeys(row.metric for row in data.rows)]
    assert metrics == [BEFORE, AFTER, REMOVED, UPLOADED, TAIL]


def test_spectra_of_every_series_with_a_prox(tmp_path):
    figure = figure_of("svt_spectra", CIFAR, series="lambda")
    data = data_of(figure, by_lambda(tmp_path))
    labels = [*LAMBDAS][1:]
    titles = [panel.title for panel in data.panels if panel.by == "metric"]
    assert [title.partition(":")[0] for title in titles] == labels
    after = {name: values(data.rows, series=name, metric=AFTER) for name in labels}
    assert after[labels[0]] > after[labels[-1]]  # a larger λ takes more away
    assert [*dict.fromkeys(r.series for r in data.rows if r.metric == AFTER)] == labels
    *each, removed, uploaded, tail = draw_chart(data, []).axes
    assert [axes.get_title() for axes in each] == titles
    drawn = [[*{str(line.get_label()) for line in axes.lines} & {*data.names}] for axes in
             (removed, uploaded, tail)]  # fmt: skip
    assert [len(names) for names in drawn] == [len(labels), len(data.names), len(data.names)]


def test_spectra_of_methods_without_a_prox(tmp_path):
    where = {"method": ("RAVAN",), "dataset": ("cifar100",)}
    data = data_of(figure_of("svt_spectra", where), by_method(tmp_path))
    assert {row.metric for row in data.rows} == {UPLOADED, TAIL}


def test_heads_by_allocation(tmp_path):
    (panel,) = data_of(figure_of("waterfilling"), by_allocation(tmp_path)).panels
    assert panel.title == "vit-digits"
    assert [(row.x, row.value) for row in panel.second] == [*zip("0123", (1, 2, 3, 2), strict=True)]
    heads = {name: [row.value for row in rows] for name, rows in panel.series.items()}
    assert heads == {"uniform": [4, 4, 4, 4], "water-filling": [2, 4, 6, 4]}


def test_covariance_is_of_one_run_that_both_have(tmp_path):
    kind, where = "covariance", CASES["covariance"][1]
    unfinished = {("RAVAN", "0"), ("TRISHUL", "2")}
    sweep = by_method(
        tmp_path, lambda c: "missing" if (c["method"], c["seed"]) in unfinished else None
    )
    data = data_of(figure_of(kind, where), sweep)
    assert [panel.title.partition(":")[0] for panel in data.panels] == ["RAVAN", "TRISHUL"]
    assert [len(panel.rows) for panel in data.panels] == [CLIENTS**2] * 2
    assert "seed 1 alone" in data.remarks
    # The share that two updates have in common: a half, and 0.8.
    off = [[row.value for row in panel.rows if row.x != row.y] for panel in data.panels]
    assert [np.mean(each) for each in off] == pytest.approx([0.5, 0.8], abs=0.1)
    words = data.describe()
    assert re.search(r"RAVAN: mean 0\.[45]\d* off the diagonal", words), words


def test_without_a_comparison_of_all_clients_rounds_are_averaged_by_pair(tmp_path):
    kind, where = "covariance", CASES["covariance"][1]
    sweep = by_method(tmp_path)
    for cell in sweep.cells:
        cell.arrays.pop("everyone_cosine", None)
    data = data_of(figure_of(kind, where), sweep)
    assert "mean over the rounds that two clients were both in" in data.remarks
    off = [row.value for row in data.panels[0].rows if row.x != row.y]
    assert np.nanmean(off) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("convergance", {}, "kind 'convergance' is none of accuracy_inconsistency, alpha"),
        ("convergence", {"serie": "method"}, "option 'serie' is none of those of convergence"),
        ("convergence", {"series": "lamda"}, "series='lamda' must be null, an axis or a list"),
        ("convergence", {"panels": ["dataset", "x"]}, "must be null, an axis or a list"),
        ("alpha_diagnostics", {"last": 0}, "last=0 must be a number of rounds"),
        ("alpha_diagnostics", {"of": ["update"]}, "must be a list of updates and uploads"),
        ("covariance", {"matrix": "corelation"}, "must be one of cosine, inner_products"),
        ("lambda_accuracy", {"x": 3}, "x=3 must be text"),
        ("cost", {"cost": "gigabytes"}, "must be one of megabytes, hours, kilojoules, epsilon"),
        ("cost_to_target", {"shares": [0.9, 1.2]}, "must be a list of shares, above 0"),
        ("cost_to_target", {"reference": 3}, "must be a label of the series"),
    ],
)
def test_wrong_kinds_and_options_are_refused(kind, options, message):
    with pytest.raises(InputError, match="figure 'a-") as error:
        check_figure(figure_of(kind, **options), ("method", "dataset", "seed"))
    assert message in str(error.value)


@given(st.lists(st.floats(-50, 250), max_size=12), st.floats(1, 15))
def test_labels_are_moved_apart_within_the_panel(wanted, step):
    height = 200.0
    placed = spread_out(wanted, step, height)
    ordered = sorted(placed)
    assert all(b - a >= step - 1e-6 for a, b in itertools.pairwise(ordered))
    assert all(-1e-6 <= y <= height + 1e-6 for y in placed)
    # Their order stays.
    pairs = sorted(zip(wanted, placed, strict=True))
    assert all(a[1] <= b[1] + 1e-6 for a, b in itertools.pairwise(pairs) if a[0] < b[0])


def test_zero_and_infinity_lie_one_step_beyond_a_log_axis():
    assert log_positions([0.0, 0.01, 0.1, 1.0, math.inf]) == pytest.approx(
        {0.0: -3, 0.01: -2, 0.1: -1, 1.0: 0, math.inf: 1}
    )
    assert log_positions([0.0]) == {0.0: -1.0}


def test_styles_differ_without_colour():
    names = [*"abcdefghij", "TRISHUL", "RAVAN"]
    styles = styles_of(names)
    assert len({(style.dash, style.marker) for style in styles.values()}) == len(names)
    assert styles_of(["RAVAN (s=1)"])["RAVAN (s=1)"] == styles["RAVAN"]
    both = styles_of(["TRISHUL (λ=0)", "TRISHUL"])
    assert both["TRISHUL"] == styles["TRISHUL"] != both["TRISHUL (λ=0)"]


@pytest.fixture(scope="module")
def real_sweep(tmp_path_factory):
    """Two real runs of two rounds: RAVAN and TRISHUL, with a private head, clipped, on digits."""
    own = ["evaluation.per_client=true"]
    runs = str(tmp_path_factory.mktemp("runs"))
    cells = []
    for label, fields in (
        ("RAVAN", ["method=ravan"]),
        ("TRISHUL", ["method=trishul-private", "method.lam=1.0", *own]),
    ):
        words = [*TINY, *fields, "privacy.noise=0", f"storage.runs={runs}"]
        experiment = load_experiment(None, words)
        with RunProgress(2, Console(quiet=True)) as progress:
            done = run_experiment(experiment, progress)
        labels = {"dataset": "cifar100", "method": label, "seed": "0"}
        finished = (done.summary.headline, done.summary, done.home)
        cells.append(CellOutcome(labels, experiment.id, "finished", "", *finished))
    axes = {"dataset": ("cifar100",), "method": ("RAVAN", "TRISHUL"), "seed": ("0",)}
    return SweepOutcome("real", "Real", "smoke", "", axes, {}, (), (), tuple(cells))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_from_real_runs(kind, real_sweep):
    where = {"method": ("TRISHUL",)} if kind.startswith("lambda") else {}
    svg = draw(figure_of(kind, where), real_sweep).svg
    assert "Profile smoke" in svg and "1 seed" in svg and "32 of 497 test rows" in svg
    assert "without these" not in svg and "averaged over" not in svg


def test_what_own_models_gain_is_sorted_and_averaged_by_place(tmp_path):
    (panel,) = data_of(figure_of("personal"), by_client(tmp_path)).panels
    ((name, line),) = panel.series.items()  # RAVAN's clients have no model of their own
    assert (name, panel.y.percent, panel.levels) == ("TRISHUL", False, {"": 0.0})
    assert tuple(row.x for row in line) == pytest.approx((0.1, 0.3, 0.5, 0.7, 0.9))
    gains = [sorted([-10.0, 0.0, 20.0, 10.0, 5.0 * int(seed)]) for seed in SEEDS]
    assert [row.value for row in line] == pytest.approx(np.mean(gains, axis=0).tolist())
    assert {row.n for row in line} == {len(SEEDS)}
