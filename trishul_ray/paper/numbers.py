"""The numbers that the TRISHUL paper prints, as records by table and figure.

A record of a figure names the line of the paper's source that prints it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from trishul_ray.paper.open_choices import open_choices
from trishul_ray.report.references import REFERENCES, Choice, Reference
from trishul_ray.report.summary import RunSummary
from trishul_ray.storage.durable import Json

#: Keys of a record that say nothing about the position of its value in the table.
_NO_LABEL = ("metric", "value", "budget_rank", "line")


@cache
def records() -> Json:
    """Return the content of ``paper.json``."""
    file = resources.files("trishul_ray.paper") / "paper.json"
    content: Json = json.loads(file.read_text(encoding="utf-8"))
    return content


@REFERENCES.register("trishul")
class Paper(Reference):
    """The printed numbers, by keys such as ``tab:vision`` and ``fig:lambda``.

    A record matches labels if it has the same one for every axis that both have. No number is
    returned if no record matches, or several.
    """

    def tables(self) -> dict[str, int | None]:
        """Return the keys of tables, and of ``fig:overhead``, whose times stand in its text."""
        return {key: records()["table_numbers"].get(key) for key in records()["tables"]}

    def figures(self) -> dict[str, int]:
        """Return the keys of figures, each with its number."""
        return {key: figure["number"] for key, figure in records()["figures"].items()}

    def table_value(self, key: str, labels: Mapping[str, str]) -> float | None:
        """Return a number of a table; accuracy and F1 are in percent.

        The average column of ``tab:glue`` has the label ``average`` on the axis ``task``.
        """
        return _only(records()["tables"].get(key, ()), labels)

    def figure_value(self, key: str, metric: str, labels: Mapping[str, str]) -> float | None:
        """Return a number that the paper prints for a figure, in its text or in a table."""
        figure, tables = records()["figures"][key], records()["tables"]
        found = [*figure["records"], *tables.get(figure["values_of"], ())]
        return _only([record for record in found if record["metric"] == metric], labels)

    def slips(self, key: str) -> tuple[str, ...]:
        """Return where the paper contradicts itself on a table or figure."""
        return tuple(slip["text"] for slip in records()["slips"] if slip["of"] == key)

    def open_choices(self, runs: Sequence[RunSummary]) -> list[Choice]:
        """Return the choices that the paper leaves open, and how runs decide them."""
        return open_choices(runs)


#: The one instance that tests use.
PAPER = Paper()


def _only(records: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> float | None:
    """Return the value of the only record that shares an axis with these labels and fits all."""
    found = []
    for record in records:
        shared = record.keys() & labels.keys() - set(_NO_LABEL)
        # A label of None, such as the budget of full fine-tuning, stands for any.
        if shared and all(record[axis] in (None, labels[axis]) for axis in shared):
            found.append(float(record["value"]))
    return found[0] if len(found) == 1 else None
