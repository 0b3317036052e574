"""The numbers that the TRISHUL paper prints, as records by table and figure.

A record of a figure names the line of the paper's source that prints it.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from trishul_ray.files import Json

#: Keys of a record that say nothing about the position of its value in the table.
_NO_LABEL = ("metric", "value", "budget_rank", "line")


@cache
def _paper() -> Json:
    file = resources.files("trishul_ray") / "paper" / "paper.json"
    content: Json = json.loads(file.read_text(encoding="utf-8"))
    return content


def table_number(key: str) -> int | None:
    """Return the number of a table of the paper, by key; None if it has none."""
    number: int | None = _paper()["table_numbers"].get(key)
    return number


def slips(key: str) -> tuple[str, ...]:
    """Return where the paper contradicts itself on a table or figure, a sentence or two each."""
    return tuple(slip["text"] for slip in _paper()["slips"] if slip["of"] == key)


def paper_keys() -> tuple[str, ...]:
    """Return the keys of the paper's tables, such as ``tab:vision``, in the paper's order."""
    return tuple(_paper()["tables"])


def paper_value(key: str, labels: Mapping[str, str]) -> float | None:
    """Return the number that the paper prints at a position of a table, by its key.

    A record matches if it has the same label for every axis that both have. The average column of
    ``tab:glue`` has the label ``average`` on the axis ``task``. Accuracy and F1 are in percent;
    None if no record matches, or several.
    """
    return _only(_paper()["tables"].get(key, ()), labels)


def figure_numbers() -> dict[str, int]:
    """Return the paper's numbers of its figures by key, such as ``fig:lambda``, in its order."""
    return {key: figure["number"] for key, figure in _paper()["figures"].items()}


def figure_value(key: str, metric: str, labels: Mapping[str, str]) -> float | None:
    """Return a number that the paper prints for a figure, in its text or in a table.

    A metric is ``accuracy``, ``seconds_per_round``, ``overhead``, ``principal_angle_similarity``,
    ``fewest_heads`` or ``most_heads``; accuracy and overhead are in percent. None if no record
    matches, or several.
    """
    figure, tables = _paper()["figures"][key], _paper()["tables"]
    records = [*figure["records"], *tables.get(figure["values_of"], ())]
    return _only([record for record in records if record["metric"] == metric], labels)


def _only(records: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> float | None:
    """Return the value of the only record that shares an axis with these labels and fits all."""
    found = []
    for record in records:
        shared = record.keys() & labels.keys() - set(_NO_LABEL)
        # A label of None, such as the budget of full fine-tuning, stands for any.
        if shared and all(record[axis] in (None, labels[axis]) for axis in shared):
            found.append(float(record["value"]))
    return found[0] if len(found) == 1 else None
