"""The paper's numbers, found by the labels of a table's position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.paper.numbers import PAPER, records

POSITION = {
    "method": "TRISHUL",
    "budget": "lower",
    "dataset": "cifar100",
    "clients": "20",
    "partition": "dirichlet(0.3)",
}


def test_numbers_of_the_paper():
    assert PAPER.table_value("tab:vision", POSITION) == 79.41
    assert PAPER.table_value("tab:glue", {"method": "TRISHUL", "task": "average"}) == 84.66
    where = {"lambda": "1.0", "dataset": "svhn"}
    assert PAPER.table_value("tab:lambda_sensitivity", where) == 88.63
    assert PAPER.table_value("fig:overhead", {"method": "RAVAN", "model": "ViT-B/16"}) == 18.4


def test_axes_without_labels_in_the_paper_are_ignored():
    assert PAPER.table_value("tab:vision", POSITION | {"seed": "0", "device": "cpu"}) == 79.41


def test_full_fine_tuning_has_no_budget():
    position = POSITION | {"method": "Full-FT"}
    assert PAPER.table_value("tab:vision", position) == 86.86
    assert PAPER.table_value("tab:vision", position | {"budget": "higher"}) == 86.86


@pytest.mark.parametrize(
    ("key", "labels"),
    [
        ("tab:none", POSITION),
        ("tab:vision", POSITION | {"method": "FLoRA"}),
        ("tab:vision", POSITION | {"dataset": "CIFAR100"}),
        ("tab:vision", {name: POSITION[name] for name in ("method", "budget", "dataset")}),
        ("tab:vision", {}),
        ("tab:vision", {"seed": "0"}),
    ],
)
def test_nothing_is_guessed(key, labels):
    assert PAPER.table_value(key, labels) is None


@given(st.data())
def test_only_its_own_labels_find_a_record(data):
    key = data.draw(st.sampled_from(list(PAPER.tables())))
    record = data.draw(st.sampled_from(records()["tables"][key]))
    labels = {
        axis: label
        for axis, label in record.items()
        if axis not in ("metric", "value", "budget_rank") and label is not None
    }
    assert PAPER.table_value(key, labels) == record["value"]
    axis = data.draw(st.sampled_from(sorted(labels)))
    assert PAPER.table_value(key, labels | {axis: "another"}) is None


def test_tables_have_the_numbers_of_the_paper():
    numbers = [PAPER.tables()[key] for key in PAPER.tables() if key.startswith("tab:")]
    assert sorted(numbers) == list(range(2, 12))  # The first positions differ.
    assert PAPER.tables()["fig:overhead"] is None


def test_slips_agree_with_the_numbers_of_the_paper():
    tasks = ("mnli_mismatched", "mnli_matched", "qnli", "qqp", "sst2", "rte")
    row = [PAPER.table_value("tab:glue", {"method": "TRISHUL", "task": task}) for task in tasks]
    assert f"{sum(row) / 6:.2f}" == "84.50"
    assert "its six columns average 84.50" in PAPER.errata("tab:glue")[0]
    position = {"budget": "higher", "dataset": "svhn", "clients": "50"}
    position["partition"] = "dirichlet(0.3)"
    for method, value in (("TRISHUL", 87.11), ("SCAFFOLD+LoRA", 87.23)):
        assert PAPER.table_value("tab:vision", position | {"method": method}) == value
        assert f"{method}'s {value}" in PAPER.errata("tab:vision")[0]
    assert PAPER.errata("tab:lambda_sensitivity") == ()
