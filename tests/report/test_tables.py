"""Tables of sweeps: means, the paper's numbers, what is bold, and what is decided."""

import dataclasses
import re

import numpy as np
import pytest
from invented_outcomes import (
    initialization,
    invent_run,
    invent_sweep,
    sensitivity,
    vision,
)
from shipped import shipped

from trishul_ray.paper.numbers import PAPER
from trishul_ray.report.formats import to_latex, to_markdown
from trishul_ray.report.outcomes import SweepOutcome, TableLayout
from trishul_ray.report.references import Reference
from trishul_ray.report.table_cells import TableCell
from trishul_ray.report.tables import build_tables, make_slug


def build(*sweeps):
    return build_tables(sweeps)


def cells(table, label, group=0):
    return next(row.cells for row in table.groups[group].rows if row.label == label)


def test_rows_columns_and_headers_have_the_order_of_the_axes():
    (table,) = build(vision())
    assert [group.label for group in table.groups] == ["budget: lower", "budget: higher"]
    lower, higher = ([row.label for row in group.rows] for group in table.groups)
    assert lower[0] == "Full-FT"
    assert lower[1:] == higher
    assert table.header() == [
        [("CIFAR-100", 4), ("SVHN", 4)],
        [("20 clients", 2), ("50 clients", 2)] * 2,
        [("IID", 1), ("Dirichlet(0.3)", 1)] * 4,
    ]
    assert table.unit == "accuracy, %"
    assert table.seeds == 3


def test_a_cell_is_the_mean_over_its_seeds_beside_the_papers_number():
    sweep = vision()
    (table,) = build(sweep)
    cell = cells(table, "RAVAN", group=1)[5]  # SVHN, 20 clients, Dirichlet
    labels = {
        "method": "RAVAN", "budget": "higher", "dataset": "svhn", "clients": "20",
        "partition": "dirichlet(0.3)",
    }  # fmt: skip
    runs = [run for run in sweep.cells if labels.items() <= run.labels.items()]
    assert list(cell.runs) == runs
    assert cell.estimate.mean == pytest.approx(100 * sum(run.value for run in runs) / 3)
    assert cell.paper == 89.41
    assert cell.difference == pytest.approx(cell.estimate.mean - 89.41)
    # Full fine-tuning has no budget in the paper.
    assert cells(table, "Full-FT")[0].paper == 89.89


def test_the_best_of_a_column_in_its_group_but_no_reference_is_bold():
    (table,) = build(vision())
    for group in table.groups:
        for column in range(8):
            best = [row for row in group.rows if row.cells[column].best]
            means = [r.cells[column].estimate.mean for r in group.rows if not r.is_reference]
            assert best[0].cells[column].estimate.mean == max(means)
            assert not best[0].is_reference
    # Equal as displayed: both are bold.
    axes = {"method": ("a", "b", "c"), "seed": ("0",)}
    level = {"a": 80.001, "b": 80.0, "c": 79.9}
    tied = invent_sweep("t", axes, ("method",), (), level=lambda x: level[x["method"]], noise=0)
    assert [row.cells[0].best for row in build(tied)[0].rows] == [True, True, False]
    equal = invent_sweep("t", axes, ("method",), (), level=lambda x: 80.0, noise=0)
    assert not any(row.cells[0].best for row in build(equal)[0].rows)
    # And neither is called the best, or undecided by nothing.
    assert [row.verdict.text for row in build(equal)[0].rows] == ["tied for the best mean"] * 3
    assert [row.verdict.kind for row in build(tied)[0].rows] == ["tied", "tied", "undecided"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (-0.0, "0.00"), (-0.004, "−0.0040"), (1e-12, "0.00"), (-1.5, "−1.50")],
)
def test_differences_have_a_sign(value, text):
    cell = TableCell((), {}, percent=True)
    assert cell.format_difference(value) == text
    assert cell.format_difference(2.345) == "+2.35"


def test_the_average_is_taken_seed_by_seed():
    (table,) = build(sensitivity())
    for row in table.rows:
        *columns, average = row.cells
        means = [sum(cell.seeds[seed] for cell in columns) / 3 for seed in ("0", "1", "2")]
        assert list(average.seeds.values()) == pytest.approx(means)
        assert average.estimate.mean == pytest.approx(sum(means) / 3)
    assert table.columns[-1] == ("average",)


def test_a_mean_that_lacks_seeds_is_not_the_best():
    axes = {"method": ("a", "b", "c"), "seed": ("0", "1")}
    level = {"a": {"0": 90.0, "1": 80.0}, "b": {"0": 89.0, "1": 79.0}, "c": {"0": 89.5, "1": 79.5}}
    (table,) = build(
        invent_sweep(
            "t", axes, ("method",), (), noise=0,
            level=lambda x: level[x["method"]][x["seed"]],
            status=lambda x: ("missing" if x["method"] + x["seed"] == "c1" else "finished", ""),
        )
    )  # fmt: skip
    rows = list(table.rows)
    assert rows[2].cells[0].estimate.mean == 89.5
    assert [row.cells[0].best for row in rows] == [True, False, False]
    assert [row.verdict.kind for row in rows] == ["best", "undecided", "undecided"]


def test_an_average_over_fewer_columns_is_not_the_best(monkeypatch):
    axes = {"method": ("a", "b", "c"), "dataset": ("easy", "hard"), "seed": ("0", "1", "2")}
    level = {"easy": {"a": 90.0, "b": 80.0, "c": 60.0}, "hard": {"a": 50.0, "b": 0.0, "c": 40.0}}
    sweep = invent_sweep(
        "t", axes, ("method",), ("dataset",), noise=0.1, average=True, paper="tab:invented",
        level=lambda x: level[x["dataset"]][x["method"]],
        left_out=lambda x: x["method"] == "b" and x["dataset"] == "hard",
    )  # fmt: skip
    reference = Reference()
    reference.table_value = lambda key, labels: 75.0
    monkeypatch.setattr("trishul_ray.report.tables.of_table", lambda key: reference)
    (table,) = build(sweep)
    averages = [row.cells[-1] for row in table.rows]
    assert [round(cell.estimate.mean) for cell in averages] == [70, 80, 50]
    assert [cell.best for cell in averages] == [True, False, False]
    assert [cell.lacks for cell in averages] == ["", "1 column left out", ""]
    # The paper's average is over all columns.
    assert [cell.difference is None for cell in averages] == [False, True, False]
    assert [row.verdict.kind for row in table.rows] == ["best", "worse", "worse"]
    assert table.groups[0].rows[1].verdict.comparison.columns == 1


def test_the_papers_average():
    tasks = ("mnli_mismatched", "mnli_matched", "qnli", "qqp", "sst2", "rte")
    axes = {"method": ("RAVAN", "TRISHUL"), "task": tasks, "seed": ("0",)}
    sweep = invent_sweep("glue", axes, ("method",), ("task",), paper="tab:glue", average=True)
    (table,) = build(sweep)
    assert [row.cells[-1].paper for row in table.rows] == [83.9, 84.66]


def test_a_loss_is_better_if_lower():
    axes = {"method": ("a", "b"), "seed": tuple(map(str, range(8)))}
    sweep = invent_sweep(
        "losses", axes, ("method",), (), level=lambda x: 90.0 if x["method"] == "a" else 50.0
    )
    losses = [dataclasses.replace(cell, metric="loss") for cell in sweep.cells]
    (table,) = build(dataclasses.replace(sweep, cells=tuple(losses)))
    assert table.unit == "loss"
    first, second = table.rows
    assert first.cells[0].best
    assert first.verdict.kind == "best"
    assert second.verdict.kind == "worse"
    assert second.verdict.comparison.difference == pytest.approx(0.4, abs=0.05)
    assert first.cells[0].estimate.mean == pytest.approx(0.6, abs=0.05)
    # Rows are not compared over columns in different units.
    both = {"measure": ("accuracy", "loss"), **axes}
    mixed = invent_sweep("mixed", both, ("method",), ("measure",), average=True)
    runs = [dataclasses.replace(cell, metric=cell.labels["measure"]) for cell in mixed.cells]
    (table,) = build(dataclasses.replace(mixed, cells=tuple(runs)))
    assert {row.verdict.kind for row in table.rows} == {"none"}
    assert not table.groups[0].rows[0].cells[-1].planned


def test_several_measures_of_the_same_runs_have_no_common_verdict():
    axes = {"method": ("a", "b"), "measure": ("accuracy", "f1"), "seed": ("0", "1", "2")}

    def table_of(same_runs):
        made = invent_sweep("measures", axes, ("method",), ("measure",))
        runs = [
            dataclasses.replace(
                cell,
                metric=cell.labels["measure"],
                id=f"{cell.labels['method']}-{cell.labels['seed']}" if same_runs else cell.id,
            )
            for cell in made.cells
        ]
        (table,) = build(dataclasses.replace(made, cells=tuple(runs)))
        return table

    judged, table = table_of(same_runs=False), table_of(same_runs=True)
    assert judged.judged and {row.verdict.kind for row in judged.rows} != {"none"}
    assert not table.judged and {row.verdict.kind for row in table.rows} == {"none"}
    for shown in (to_markdown, to_latex):
        assert "against the best" in shown(judged) and "against the best" not in shown(table)
    (row,) = (line for line in to_markdown(table).splitlines() if line.startswith("| a |"))
    assert row.count("|") == 4


def test_verdicts():
    tables = build(vision(), sensitivity(), initialization())
    by_row = {
        (table.layout.name, group.label, row.label): row.verdict
        for table in tables
        for group in table.groups
        for row in group.rows
    }
    lower = "budget: lower"
    assert by_row["vision", lower, "Full-FT"].text == "reference"
    assert by_row["vision", lower, "TRISHUL"].text == "best mean"
    worse = by_row["vision", lower, "FFA-LoRA"]
    assert worse.kind == "worse"
    assert worse.best == "TRISHUL"
    assert re.fullmatch(r"worse, decided: p (= 0\.0\d+|< 0\.0001)", worse.text)
    near = by_row["vision", lower, "RAVAN"]
    assert near.kind == "undecided"
    assert re.fullmatch(r"undecided: p = [\d.]+, \d+ to \d+ seeds needed", near.text)
    # Three seeds of one column decide a difference that is clear.
    clear = by_row["initialization", "", "Constant"]
    assert clear.kind == "worse"
    assert clear.comparison.difference < -20
    assert [table.pairs for table in tables] == [42, 10, 6]
    assert not any(table.undecidable for table in tables)
    assert re.fullmatch(
        r"The level of 5 % is for the 6 pairs of rows of this table together; with the spread of "
        r"its seeds it cannot decide a difference below \d\.\d\d points\.",
        tables[2].power,
    )


def test_most_of_the_papers_comparisons_are_decided_with_three_seeds():
    """The paper's numbers are the truth, with a spread of 0.3 points between seeds."""
    rng, decided, compared, pages = np.random.default_rng(0), 0, 0, 2
    with_tables = [sweep for sweep in shipped("paper").values() if sweep.tables]
    for _ in range(pages):
        sweeps = [
            SweepOutcome(
                sweep.name, sweep.title, "paper", "", sweep.axes, sweep.shown, sweep.tables, (),
                tuple(
                    invent_run(dict(cell.labels), value + 0.3 * rng.normal())
                    for cell in sweep.cells
                    if (value := _papers(sweep, cell.labels)) is not None
                ),
            )
            for sweep in with_tables
        ]  # fmt: skip
        for row in (row for table in build(*sweeps) for row in table.rows):
            compared += row.verdict.comparison is not None
            decided += row.verdict.kind == "worse"
    assert compared == pages * 55
    assert decided >= pages * 40


def _papers(sweep, labels):
    """The paper's number of a cell; RAVAN's with other bases is taken to be the same."""
    values = (PAPER.table_value(table.paper, labels) for table in sweep.tables if table.paper)
    known = next((value for value in values if value is not None), None)
    if known is None and labels.get("initialization", "").startswith("RAVAN"):
        ravan = dict(labels, method="RAVAN", clients="20", budget="lower")
        ravan["partition"] = "dirichlet(0.3)"
        return PAPER.table_value("tab:vision", ravan) or PAPER.table_value("tab:language", ravan)
    return known


def test_one_seed_has_no_spread_and_decides_nothing():
    (table,) = build(vision(seeds=1))
    assert {row.verdict.kind for row in table.rows} == {"best", "undecided", "reference"}
    assert {row.verdict.text for row in table.rows if row.verdict.comparison} == {
        "undecided: one seed"
    }
    assert table.undecidable
    assert table.power == (
        "This table cannot decide any row, at the level of 5 % for its 42 pairs of rows: one seed "
        "shows no spread."
    )
    assert all(cell.estimate.deviation is None for row in table.rows for cell in row.cells)


def test_seeds_that_do_not_differ_decide_nothing():
    axes = {"method": ("a", "b"), "seed": ("0", "1", "2")}
    level = {"a": 80.0, "b": 50.0}
    sweep = invent_sweep("t", axes, ("method",), (), level=lambda x: level[x["method"]], noise=0)
    (table,) = build(sweep)
    assert [row.verdict.text for row in table.rows] == [
        "best mean",
        "undecided: no spread between seeds",
    ]
    assert table.power.endswith("for its one pair of rows: its seeds do not differ.")


def test_a_finished_run_may_lack_the_metric():
    sweep = initialization(seeds=1)
    lacking = [dataclasses.replace(cell, metric="accuracy_matched") for cell in sweep.cells]
    (table,) = build(dataclasses.replace(sweep, cells=tuple(lacking)))
    assert {cell.gap for row in table.rows for cell in row.cells} == {"not measured"}


def test_combinations_that_the_sweep_leaves_out_are_no_gaps():
    axes = {"method": ("a", "b"), "clients": ("20", "50"), "seed": ("0", "1")}
    sweep = invent_sweep(
        "part", axes, ("method",), ("clients",),
        left_out=lambda x: x["method"] == "a" and x["clients"] == "50",
    )  # fmt: skip
    (table,) = build(sweep)
    assert [cell.planned for row in table.rows for cell in row.cells] == [True, False, True, True]


def test_other_axes_than_the_seed_are_averaged_within_a_seed():
    axes = {"method": ("a", "b"), "clients": ("20", "50"), "seed": ("0", "1", "2")}
    (table,) = build(invent_sweep("mean", axes, ("method",), ()))
    cell = table.groups[0].rows[0].cells[0]
    assert len(cell.runs) == 6
    assert cell.estimate.count == 3
    # A seed counts only if all of it is there.
    incomplete = invent_sweep(
        "mean", axes, ("method",), (),
        status=lambda x: ("missing" if x["seed"] + x["clients"] == "150" else "finished", ""),
    )  # fmt: skip
    cell = build(incomplete)[0].groups[0].rows[0].cells[0]
    assert (cell.estimate.count, cell.partial) == (2, True)


def test_where_limits_what_is_shown():
    sweep = vision()
    where = {"clients": ("20",), "budget": ("lower",)}
    layout = TableLayout(
        name="part",
        rows=("method",),
        columns=("dataset", "partition"),
        paper="tab:vision",
        where=where,
    )
    (table,) = build(dataclasses.replace(sweep, tables=(layout,)))
    assert len(table.columns) == 4
    # The paper's number is found by the labels that are shown nowhere else.
    assert cells(table, "TRISHUL")[3].paper == 91.38


def test_a_slug_fits_file_names_and_ids():
    assert make_slug("paper", "../../etc/passwd", "λ <b>") == "paper-etc-passwd-b"
    assert make_slug("λ") == "x"


def test_numbers_in_the_head_of_a_column_have_their_axis():
    axes = {"method": ("TRISHUL", "RAVAN"), "partition.alpha": ("0.1", "1e-2"), "rounds": ("5",)}
    sweep = invent_sweep("own", axes, ("method",), ("partition.alpha", "rounds"), profile="custom")
    (table,) = build_tables([sweep])
    assert table.columns == (("α = 0.1", "rounds = 5"), ("α = 1e-2", "rounds = 5"))
    shown = {"partition.alpha": {"0.1": "skewed"}}
    sweep = invent_sweep("own", axes, (), ("partition.alpha",), profile="custom", shown=shown)
    (table,) = build_tables([sweep])
    assert table.columns == (("skewed",), ("α = 1e-2",))


def test_a_cell_may_be_read_by_the_mean_over_clients():
    made = invent_run({"method": "FedIT", "seed": "0"}, 60)
    scores = {"per_client": {"ann": 0.5, "bob": 0.7}, "personal": {"ann": 0.8, "bob": 1.0}}
    scored = dataclasses.replace(made.summary, **scores)
    for metric, value in (("per_client_mean", 0.6), ("personal_mean", 0.9), ("accuracy", 0.6)):
        for summary, expected in ((scored, value), (made.summary, made.summary.final.get(metric))):
            found = dataclasses.replace(made, metric=metric, summary=summary).value
            assert found == (None if expected is None else pytest.approx(expected))


def single_table(values, metric="accuracy", **layout):
    """A table of {row: {(column, seed): percent or why there is none}}; no entry is not planned."""
    runs = [
        invent_run(
            {"method": row, "dataset": column, "seed": seed},
            value if isinstance(value, float) else 0.0,
            status="finished" if isinstance(value, float) else value,
            metric=metric,
        )
        for row, found in values.items()
        for (column, seed), value in found.items()
    ]
    axes = {
        "method": tuple(values),
        "dataset": tuple(dict.fromkeys(run.labels["dataset"] for run in runs)),
        "seed": tuple(dict.fromkeys(run.labels["seed"] for run in runs)),
    }
    shown = TableLayout(name="t", rows=["method"], columns=["dataset"], **layout)
    sweep = SweepOutcome("t", "T", "small", "", axes, {}, (shown,), (), tuple(runs))
    (table,) = build(sweep)
    return table


def test_means_of_other_seeds_or_columns_are_not_compared():
    first = {("c", "0"): 90.0, ("c", "1"): 80.0, ("c", "2"): "missing"}
    second = {("c", "0"): "missing", ("c", "1"): 81.0, ("c", "2"): 70.0}
    table = single_table({"A": first, "B": second})
    assert not any(row.cells[0].best for row in table.rows)
    # Two columns each, of which one is the other's difficult one.
    first = {("c1", seed): 90.0 for seed in "012"} | {("c2", seed): 85.0 for seed in "012"}
    second = {("c1", seed): 90.5 for seed in "012"} | {("c3", seed): 55.6 for seed in "012"}
    rows = single_table({"A": first, "B": second}, average=True).groups[0].rows
    assert [row.cells[-1].lacks for row in rows] == ["1 column left out"] * 2
    assert not any(row.cells[-1].best for row in rows)
    assert [row.cells[0].best for row in rows] == [False, True]


def test_rows_are_tied_only_by_the_means_that_are_displayed():
    three = {("c", "0"): 90.0, ("c", "1"): 80.0, ("c", "2"): 70.0}
    one = three | {("c", "1"): "missing", ("c", "2"): "missing"}
    assert "tied" not in {row.verdict.kind for row in single_table({"A": three, "B": one}).rows}
    assert {row.verdict.kind for row in single_table({"A": three, "B": three}).rows} == {"tied"}


def test_what_is_best_at_0_has_no_best_row_and_unevenness_has_four_decimals():
    made = {"A": -90.0, "B": 2.0, "C": 1.9}
    made = {row: {("c", seed): v + 0.1 * int(seed) for seed in "012"} for row, v in made.items()}
    table = single_table(made, metric="participation_correlation")
    assert {row.verdict.kind for row in table.rows} == {"none"}
    assert not any(row.cells[0].best for row in table.rows)
    shown = [row.cells[0] for row in single_table(made, metric="personal_gini").rows]
    assert [cell.best for cell in shown] == [True, False, False]
    assert [cell.format(cell.estimate.mean) for cell in shown[1:]] == ["0.0210", "0.0200"]


def test_losses_and_fractions_have_no_common_mean():
    made = {row: {(c, s): 50.0 for c in "xy" for s in "01"} for row in "AB"}
    table = single_table(made, average=True)
    units = {"x": "loss", "y": "personal_sd"}
    cells = (dataclasses.replace(run, metric=units[run.labels["dataset"]]) for run in table.cells)
    (mixed,) = build(dataclasses.replace(table.sweep, cells=tuple(cells)))
    for each, common in ((table, True), (mixed, False)):
        assert each.judged == common
        assert {row.cells[-1].planned for row in each.rows} == {common}


@pytest.mark.parametrize(
    ("why", "verdicts"),
    [
        # Runs that fail may be those that would be worse; those that are missing are not there yet.
        ("failed", {"A": "none", "B": "biased"}),
        ("stopped", {"A": "none", "B": "biased"}),  # because they lagged behind
        ("missing", {"A": "worse", "B": "best"}),
    ],
)
def test_a_row_with_failed_or_stopped_runs_is_not_compared(why, verdicts):
    first = {("c", seed): 70.0 + 0.1 * int(seed) for seed in "01234"}
    second = {("c", seed): 72.0 - 0.1 * int(seed) if seed in "012" else why for seed in "01234"}
    rows = single_table({"A": first, "B": second}).rows
    assert {row.label: row.verdict.kind for row in rows} == verdicts
