"""Cells and rounds as DataFrames, and the cost until a score."""

import dataclasses
import math

import numpy as np
import pytest
from fake_cells import ROUNDS, SEEDS, accuracy, by_method

from trishul_ray.report.frame import cells_frame, rounds_frame
from trishul_ray.report.layouts import TableLayout
from trishul_ray.report.tables import build_tables


def test_rounds_follow_the_order_of_axes(tmp_path):
    sweep = by_method(tmp_path)
    rounds = rounds_frame(sweep, sweep.cells)
    assert len(rounds) == len(sweep.cells) * (ROUNDS + 1)
    last = rounds[rounds["round"] == ROUNDS].groupby(level="method", observed=True)["value"].mean()
    assert [*last.index] == [*sweep.axes["method"]]
    labels = [
        {"method": "RAVAN", "dataset": d, "seed": s} for d in sweep.axes["dataset"] for s in SEEDS
    ]
    assert last["RAVAN"] == pytest.approx(np.mean([accuracy(each) for each in labels]))
    # 1, 2 and 3 MB up per seed, 2 MB down, in each round except round 0.
    spent = rounds[rounds["round"] == ROUNDS].groupby(level="seed", observed=True)["megabytes"]
    assert [*spent.mean()] == [ROUNDS * (3.0 + int(seed)) for seed in SEEDS]
    assert rounds["epsilon"].isna().all() and rounds["hours"].max() == ROUNDS / 2


def test_unfinished_cells_have_a_row_and_no_rounds(tmp_path):
    sweep = by_method(tmp_path, lambda labels: "failed" if labels["seed"] == "1" else None)
    cells, _ = cells_frame(sweep, sweep.cells, TableLayout(name="all"))
    assert len(cells) == len(sweep.cells)
    assert cells.xs("1", level="seed")["value"].isna().all()
    assert "1" not in rounds_frame(sweep, sweep.cells).index.get_level_values("seed")
    assert rounds_frame(sweep, []).empty


@pytest.mark.parametrize(("cost", "a_round"), [("megabytes", None), ("hours", 0.5)])
def test_table_shows_cost_until_a_score(tmp_path, cost, a_round):
    target = {"cost": cost, "axis": "method", "reference": "RAVAN", "share": 0.95}
    where = {"dataset": "cifar100"}
    layout = TableLayout(name="costs", rows=["method"], where=where, target=target)
    sweep = dataclasses.replace(by_method(tmp_path), tables=(layout,), profile="small")
    (table,) = build_tables([sweep])
    assert table.unit.endswith("until 95% of RAVAN's final score")
    losses = [dataclasses.replace(cell, metric="loss") for cell in sweep.cells]
    (loss,) = build_tables([dataclasses.replace(sweep, cells=tuple(losses))])
    assert loss.unit.endswith("until within 5.26% of RAVAN's final loss")
    for row in table.rows:
        spent = []
        for seed in SEEDS:
            labels = {"dataset": "cifar100", "method": row.label, "seed": seed}
            goal = 0.95 * accuracy(labels | {"method": "RAVAN"})
            first = next((n for n in range(ROUNDS + 1) if accuracy(labels, n) >= goal), math.nan)
            spent.append(first * (a_round or 3.0 + int(seed)))
        (number,) = row.numbers
        if any(map(math.isnan, spent)):
            assert number.gap == "not reached" and row.verdict.kind == "biased"
        else:
            assert [*number.values] == pytest.approx(spent)
