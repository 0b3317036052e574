"""Figures of sweeps: numbers of each kind compared with formulas."""

import io
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fake_cells import CASES, EPSILONS, ROUNDS, SEEDS, accuracy, by_method, figure_of, similarity

from trishul_ray.report.figures.draw import draw
from trishul_ray.report.figures.kinds import KINDS
from trishul_ray.report.figures.plots import looks_of
from trishul_ray.report.outcomes import CellOutcome


def numbers(drawn):
    """Return the CSV of a figure."""
    return pd.read_csv(io.StringIO(drawn.csv), keep_default_na=False, na_values=[""])


def drawn_of(kind, folder, **fields):
    make, where = CASES[kind]
    return draw(figure_of(kind, where, **fields), make(folder))


def over_seeds(value, **labels):
    """Compute mean and standard deviation of a formula over the seeds."""
    values = [value({**labels, "seed": seed}) for seed in SEEDS]
    return np.mean(values), np.std(values, ddof=1)


def test_every_kind_has_a_case():
    assert CASES.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", CASES)
def test_kind_is_drawn_with_its_numbers(kind, tmp_path):
    drawn = drawn_of(kind, tmp_path)
    assert ET.fromstring(drawn.svg).tag.endswith("svg") and drawn.pdf.startswith(b"%PDF")
    found = numbers(drawn)
    assert {"profile", "panel", "metric", "value"} <= {*found.columns}
    assert {*found["profile"]} == {"smoke"} and found["value"].notna().any()


def test_same_results_give_same_bytes(tmp_path):
    first, second = (drawn_of("convergence", tmp_path) for _ in range(2))
    assert first == second


@pytest.mark.filterwarnings("error")
def test_letters_without_glyph_are_noted_once(tmp_path):
    sweep = by_method(tmp_path)
    titles = {**sweep.titles, "method": {"RAVAN": "物理 😀"}}
    drawn = draw(figure_of("convergence", {}), replace(sweep, titles=titles))
    assert "物理 😀".encode() in drawn.svg
    assert drawn.note.endswith("The PDF font lacks the characters 物理; the SVG shows them.")


def test_convergence_has_means_and_deviations_by_round(tmp_path):
    found = numbers(drawn_of("convergence", tmp_path))
    assert [*found["panel"].unique()] == ["digits (for CIFAR-100)", "20newsgroups"]
    row = found.query("panel == '20newsgroups' and series == 'RAVAN' and x == 3").iloc[0]
    mean, sd = over_seeds(lambda each: accuracy(each, 3), dataset="20newsgroups", method="RAVAN")
    shown = row[["value", "low", "high", "n"]].astype(float)
    assert np.allclose(shown, [mean, mean - sd, mean + sd, 3])


def test_metric_replaces_that_of_the_cells(tmp_path):
    found = numbers(drawn_of("convergence", tmp_path, metric="effective_rank", panels="dataset"))
    assert {*found["metric"]} == {"effective rank"} and found["x"].min() == 1


def test_megabytes_are_summed_over_rounds(tmp_path):
    found = numbers(drawn_of("megabytes", tmp_path)).query("series == 'FedIT'")
    assert np.allclose(found["x"].iloc[: ROUNDS + 1], [4.0 * n for n in range(ROUNDS + 1)])


def test_late_rounds_are_averaged(tmp_path):
    found = numbers(drawn_of("alpha_diagnostics", tmp_path))
    labels = {"method": "RAVAN", "partition": "dirichlet(0.1)"}
    late = [over_seeds(lambda each, n=n: similarity(each, n), **labels)[0] for n in range(1, 6)]
    row = found.query("series == 'RAVAN' and x == 0.1 and metric == 'principal-angle similarity'")
    assert np.isclose(row["value"].iloc[0], np.mean(late))


def test_variance_is_relative_to_ravan(tmp_path):
    found = numbers(drawn_of("spectral_diagnostics", tmp_path))
    first = found.query("metric == 'relative to RAVAN in round 1' and x == 1")
    assert np.isclose(first.set_index("series")["value"]["RAVAN"], 1.0) and len(first) == 3


def test_overhead_is_a_ratio_of_medians(tmp_path):
    found = numbers(drawn_of("overhead", tmp_path)).query("metric == 'overhead'")
    assert [*found["series"].unique()] == ["TRISHUL"] and np.allclose(found["value"], 0.1)
    assert {*found["n"]} == {(ROUNDS - 1) * len(SEEDS)}  # without the first round of each run


def test_draws_show_means_over_seeds(tmp_path):
    found = numbers(drawn_of("draws", tmp_path))
    assert {*found["x"]} == {7, 8} and {*found["n"]} == {len(SEEDS)}


def test_runs_without_noise_have_an_infinite_epsilon(tmp_path):
    found = numbers(drawn_of("privacy", tmp_path))
    assert {*found["x"]} == {2.0, 8.0, math.inf} and len(EPSILONS) == 4  # "none" is not private.


def test_matrix_is_of_all_clients_of_one_seed(tmp_path):
    found = numbers(drawn_of("covariance", tmp_path))
    assert len(found) == 2 * 6 * 6 and np.allclose(found.query("x == y")["value"], 1.0)


def test_missing_runs_are_counted_and_keep_the_colors(tmp_path):
    sweep = by_method(tmp_path, lambda labels: "failed" * (labels["method"] == "FedIT"))
    drawn = draw(figure_of("convergence"), sweep)
    assert "6 runs failed" in drawn.note
    assert "FedIT" not in drawn.csv
    nothing = by_method(tmp_path / "none", lambda labels: "missing")
    assert draw(figure_of("convergence"), nothing) is None


def test_paper_numbers_need_the_whole_protocol(tmp_path, monkeypatch):
    monkeypatch.setattr(CellOutcome, "part", "")
    sweep = replace(by_method(tmp_path), profile="paper")
    figure = figure_of("convergence", paper="fig:convergence")
    found = numbers(draw(figure, sweep))
    printed = found.dropna(subset=["paper"]).set_index(["panel", "series"])["paper"]
    assert np.isclose(printed["20newsgroups", "RAVAN"], 0.6573) and {*found.dropna()["x"]} == {
        ROUNDS
    }
    changed = replace(sweep, overrides=("federation.rounds=5",))
    assert numbers(draw(figure, changed))["paper"].isna().all()


def test_looks_differ_and_methods_keep_theirs():
    looks = looks_of(["b", "RAVAN", "a", "TRISHUL (λ = 0.01)", "TRISHUL"])
    assert len({(each["color"], each["marker"]) for each in looks.values()}) == 5
    assert looks["RAVAN"] == looks_of(["RAVAN"])["RAVAN"]
