"""Tables of sweeps: means, the paper's numbers, the best in bold, and verdicts."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from invented_outcomes import initialization, invent_run, invent_sweep, sensitivity, vision

from trishul_ray.report.layouts import TableLayout
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.tables import Number, build_tables, make_slug
from trishul_ray.runtime.stack import Stack


def build(*sweeps):
    return build_tables(sweeps)


def numbers(table, label, group=0):
    return next(row.numbers for row in table.groups[group].rows if row.label == label)


def kinds(table):
    return [row.verdict.kind for row in table.rows]


def best(table, column=0):
    return [column in row.best for row in table.rows]


def test_rows_and_columns_follow_the_axes():
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


def test_a_number_is_the_mean_over_seeds():
    sweep = vision()
    (table,) = build(sweep)
    number = numbers(table, "RAVAN", group=1)[5]  # SVHN, 20 clients, Dirichlet
    labels = {
        "method": "RAVAN", "budget": "higher", "dataset": "svhn", "clients": "20",
        "partition": "dirichlet(0.3)",
    }  # fmt: skip
    values = [100 * run.value for run in sweep.cells if labels.items() <= run.labels.items()]
    assert number.mean == pytest.approx(np.mean(values))
    assert number.deviation == pytest.approx(np.std(values, ddof=1))
    half = 4.302653 * number.deviation / 3**0.5  # Student's 97.5% quantile of two degrees
    assert number.within == ("within" if abs(number.mean - 89.41) <= half else "outside")
    assert (number.paper, number.difference) == (89.41, pytest.approx(number.mean - 89.41))
    # Full fine-tuning has no budget in the paper.
    assert numbers(table, "Full-FT")[0].paper == 89.89


@pytest.mark.parametrize(("profile", "printed"), [("small", True), ("custom", False)])
def test_only_profile_paper_has_paper_comparison(profile, printed):
    (table,) = build(vision(seeds=2, profile=profile))
    found = [number for row in table.rows for number in row.numbers if number is not None]
    assert {number.paper is not None for number in found} == {printed}
    assert {number.difference for number in found} == {None}
    assert bool(table.note) == printed


def test_the_best_of_a_column_is_bold():
    (table,) = build(vision())
    for group in table.groups:
        others = [row for row in group.rows if row.label != "Full-FT"]
        for column in range(8):
            means = [row.numbers[column].mean for row in others]
            bold = [column in row.best for row in others]
            assert bold[int(np.argmax(means))]
        assert not any(row.best for row in group.rows if row not in others)
    # Equal as displayed: both are bold, and both are decided.
    axes = {"method": ("a", "b", "c"), "seed": ("0",)}
    level = {"a": 80.001, "b": 80.0, "c": 79.9}
    tied = invent_sweep("t", axes, ("method",), (), level=lambda x: level[x["method"]], noise=0)
    assert best(build(tied)[0]) == [True, True, False]
    assert kinds(build(tied)[0]) == ["tied", "tied", "undecided"]
    equal = invent_sweep("t", axes, ("method",), (), level=lambda x: 80.0, noise=0)
    assert not any(best(build(equal)[0]))


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("%", 0.0, "0.00"),
        ("%", -0.004, "0.00"),
        ("%", -1.5, "−1.50"),
        ("loss", 0.2, "+0.2000"),
        ("megabytes", 12345.6, "+12346"),
        ("megabytes", 0.0123456, "+0.01235"),
    ],
)
def test_differences_have_sign_and_unit_digits(unit, value, text):
    assert Number(pd.Series([1.0]), "", unit).format(value, "+") == text


def test_the_average_is_taken_seed_by_seed():
    (table,) = build(sensitivity())
    for row in table.rows:
        *columns, average = row.numbers
        means = np.mean([number.values for number in columns], axis=0)
        assert list(average.values) == pytest.approx(list(means))
    assert table.columns[-1] == ("average",)


def test_rows_with_fewer_columns_have_an_empty_average():
    axes = {"method": ("a", "b"), "dataset": ("easy", "hard"), "seed": ("0", "1", "2")}
    sweep = invent_sweep(
        "t", axes, ("method",), ("dataset",), average=True,
        left_out=lambda x: x["method"] == "b" and x["dataset"] == "hard",
    )  # fmt: skip
    (table,) = build(sweep)
    assert [row.numbers[-1] is None for row in table.rows] == [False, True]


def test_a_loss_is_better_if_lower():
    axes = {"method": ("a", "b"), "seed": tuple(map(str, range(8)))}
    sweep = invent_sweep(
        "losses", axes, ("method",), (), level=lambda x: 90.0 if x["method"] == "a" else 50.0
    )
    losses = [dataclasses.replace(cell, metric="loss") for cell in sweep.cells]
    (table,) = build(dataclasses.replace(sweep, cells=tuple(losses)))
    assert (table.unit, best(table), kinds(table)) == ("loss", [True, False], ["best", "worse"])
    assert numbers(table, "a")[0].mean == pytest.approx(0.6, abs=0.05)
    # Rows are not compared over columns in different units.
    both = {"measure": ("accuracy", "loss"), **axes}
    mixed = invent_sweep("mixed", both, ("method",), ("measure",), average=True)
    runs = [dataclasses.replace(cell, metric=cell.labels["measure"]) for cell in mixed.cells]
    (table,) = build(dataclasses.replace(mixed, cells=tuple(runs)))
    assert set(kinds(table)) == {"none"} and numbers(table, "a")[-1] is None
    assert table.unit == "accuracy (%) and loss"


def test_several_measures_of_runs_are_not_compared():
    axes = {"method": ("a", "b"), "measure": ("accuracy", "f1"), "seed": ("0", "1", "2")}
    made = invent_sweep("measures", axes, ("method",), ("measure",))
    runs = [
        dataclasses.replace(cell, metric=cell.labels["measure"], id=cell.labels["seed"])
        for cell in made.cells
    ]
    (judged,), (table,) = build(made), build(dataclasses.replace(made, cells=tuple(runs)))
    assert judged.judged and set(kinds(judged)) != {"none"}
    assert table.unit == "accuracy and f1, %"
    assert not table.judged and set(kinds(table)) == {"none"}


def test_verdicts():
    vision_table, sensitivity_table, initialization_table = build(
        vision(seeds=5), sensitivity(), initialization(seeds=5)
    )
    rows = {row.label: row.verdict for row in vision_table.groups[0].rows}
    assert rows["Full-FT"].text == "reference"
    assert rows["TRISHUL"].text == "best mean"
    worse = rows["FFA-LoRA"]
    assert worse.kind == "worse" and worse.difference.endswith("against TRISHUL")
    assert worse.text.startswith("worse, decided: p ")
    assert rows["RAVAN"].kind == "undecided" and rows["RAVAN"].p_value.startswith("p = ")
    assert kinds(initialization_table) == ["worse", "best", "worse", "worse"]
    pairs = [t.pairs for t in (vision_table, sensitivity_table, initialization_table)]
    assert pairs == [42, 10, 6]


def test_a_smoke_table_is_not_judged():
    (table,) = build(sensitivity(profile="smoke"))
    assert not table.judged and set(kinds(table)) == {"none"} and not any(best(table))


@pytest.mark.parametrize(("seeds", "why"), [(1, "one seed"), (3, "no spread between seeds")])
def test_no_spread_decides_nothing(seeds, why):
    axes = {"method": ("a", "b"), "seed": tuple("012"[:seeds])}
    level = {"a": 80.0, "b": 50.0}
    sweep = invent_sweep("t", axes, ("method",), (), level=lambda x: level[x["method"]], noise=0)
    (table,) = build(sweep)
    assert [row.verdict.text for row in table.rows] == ["best mean", f"undecided: {why}"]


def test_gaps_are_named():
    sweep = initialization(seeds=1)
    without = [dataclasses.replace(cell, metric="accuracy_matched") for cell in sweep.cells]
    (table,) = build(dataclasses.replace(sweep, cells=tuple(without)))
    assert {number.gap for row in table.rows for number in row.numbers} == {"not measured"}
    axes = {"method": ("a", "b"), "clients": ("20", "50"), "seed": ("0", "1")}
    sweep = invent_sweep(
        "part", axes, ("method",), ("clients",),
        left_out=lambda x: x["method"] == "a" and x["clients"] == "50",
    )  # fmt: skip
    (table,) = build(sweep)
    found = [number is None for row in table.rows for number in row.numbers]
    assert found == [False, True, False, False]


def test_other_axes_are_averaged_within_a_seed():
    axes = {"method": ("a", "b"), "clients": ("20", "50"), "seed": ("0", "1", "2")}
    (table,) = build(invent_sweep("mean", axes, ("method",), ()))
    assert numbers(table, "a")[0].count == 3
    # A seed counts only if all of its runs have finished.
    incomplete = invent_sweep(
        "mean", axes, ("method",), (),
        status=lambda x: ("missing" if x["seed"] + x["clients"] == "150" else "finished", ""),
    )  # fmt: skip
    number = numbers(build(incomplete)[0], "a")[0]
    assert (number.count, number.missing, number.gap) == (2, "2 of 3 seeds", "missing")


def test_where_selects_cells():
    sweep = vision()
    layout = TableLayout(
        name="part",
        rows=("method",),
        columns=("dataset", "partition"),
        paper="tab:vision",
        where={"clients": ("20",), "budget": ("lower",)},
    )
    (table,) = build(dataclasses.replace(sweep, tables=(layout,)))
    assert len(table.columns) == 4
    # The paper's number is found by labels that are displayed nowhere else.
    assert numbers(table, "TRISHUL")[3].paper == 91.38


def test_a_slug_fits_file_names_and_ids():
    assert make_slug("paper", "../../etc/passwd", "λ <b>") == "paper-etc-passwd-b"
    assert make_slug("λ") == "x"


def test_numeric_column_heads_name_their_axis():
    axes = {"method": ("TRISHUL", "RAVAN"), "partition.alpha": ("0.1", "1e-2"), "rounds": ("5",)}
    titles = {"partition.alpha": {"0.1": "skewed"}}
    columns = ("partition.alpha", "rounds")
    sweep = invent_sweep("own", axes, ("method",), columns, profile="custom", titles=titles)
    (table,) = build(sweep)
    assert table.columns == (("skewed", "rounds = 5"), ("α = 1e-2", "rounds = 5"))


def single_table(values, metric="accuracy", **layout):
    """Create a table of {row: {(column, seed): percent or reason}}."""
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


def test_mean_with_missing_seeds_is_not_best():
    first = {("c", "0"): 90.0, ("c", "1"): 80.0, ("c", "2"): "missing"}
    second = {("c", "0"): "missing", ("c", "1"): 81.0, ("c", "2"): 70.0}
    assert not any(best(single_table({"A": first, "B": second})))
    third = {("c", seed): value for seed, value in zip("012", (89.0, 79.0, 69.0), strict=True)}
    table = single_table({"A": first, "B": second, "C": third})
    assert kinds(table)[2] == "best"  # the only row with all seeds


def test_unevenness_has_four_decimals_and_no_best():
    made = {"A": -90.0, "B": 2.0, "C": 1.9}
    made = {row: {("c", seed): v + 0.1 * int(seed) for seed in "012"} for row, v in made.items()}
    table = single_table(made, metric="participation_correlation")
    assert set(kinds(table)) == {"none"} and not any(best(table))
    table = single_table(made, metric="personal_gini")
    assert best(table) == [True, False, False]
    shown = [row.numbers[0] for row in table.rows]
    assert [number.format(number.mean) for number in shown[1:]] == ["0.0210", "0.0200"]


@pytest.mark.parametrize("group", ["weight_loss", "very_sd", "participation_gap"])
def test_row_group_keeps_the_kind_of_metric(group):
    made = {row: {("c", seed): v + 0.1 * int(seed) for seed in "012"} for row, v in
            (("A", 90.0), ("B", 80.0))}  # fmt: skip
    table = single_table(made, metric=f"accuracy_{group}")
    assert best(table) == [True, False]
    assert numbers(table, "A")[0].mean == pytest.approx(90.1)


@pytest.mark.parametrize(
    ("why", "verdicts"),
    [
        # Failed runs may be worse than the others; missing runs have not run yet.
        ("failed", ["none", "biased"]),
        ("missing", ["best", "undecided"]),
    ],
)
def test_a_row_with_failed_runs_is_not_compared(why, verdicts):
    first = {("c", seed): 70.0 + 0.1 * int(seed) for seed in "01234"}
    second = {("c", seed): 72.0 - 0.1 * int(seed) if seed in "012" else why for seed in "01234"}
    assert kinds(single_table({"A": first, "B": second})) == verdicts


@pytest.mark.parametrize("mixed", [False, True])
def test_runs_of_a_rarer_stack_are_left_out(mixed):
    usual = Stack("2.13.0", "2.4", "5.30", "NVIDIA L4")
    sweep = vision()

    def computed(cell, stack):
        summary = dataclasses.replace(cell.summary, stacks=[stack])
        return dataclasses.replace(cell, summary=summary)

    cells = [
        computed(cell, dataclasses.replace(usual, torch="2.12.0") if place in (0, 7) else usual)
        for place, cell in enumerate(sweep.cells)
        if cell.status == "finished"
    ]
    (table,) = build(dataclasses.replace(sweep, cells=tuple(cells), mixed_stacks=mixed))
    left_out = table.runs["gap"] == "other stack"
    assert [*left_out.to_numpy().nonzero()[0]] == ([] if mixed else [0, 7])
    assert table.runs["value"][left_out].isna().all()
    said = f"2 of {len(cells)} runs are left out: their stack differs from most (torch 2.12.0 and"
    assert any(said in text for text in table.caveats) != mixed
