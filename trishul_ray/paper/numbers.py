"""The numbers that the TRISHUL paper prints, and the choices that it leaves open.

``paper.json`` has records by table and figure; a record of a figure names the line of the paper's
source that prints it. ``open_choices.json`` has a question for each field that decides a choice.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from trishul_ray.report.references import REFERENCES, Choice, Reference
from trishul_ray.report.summary import RunSummary, flatten

#: Keys of a record that are not labels of the position of its value in the table.
_NO_LABEL = ("metric", "value", "budget_rank", "line")


@cache
def read_json(name: str) -> Any:
    """Return the content of a file of this folder."""
    file = resources.files("trishul_ray.paper") / name
    return json.loads(file.read_text(encoding="utf-8"))


def records() -> dict[str, Any]:
    """Return the content of ``paper.json``."""
    return dict(read_json("paper.json"))


@REFERENCES.register("trishul")
class Paper(Reference):
    """The printed numbers, by keys such as ``tab:vision`` and ``fig:lambda``.

    A record matches labels if it has the same label for every axis that both have. No number is
    returned if no record matches, or several.
    """

    def tables(self) -> dict[str, int | None]:
        """Return the keys of tables, and of ``fig:overhead``, whose times are in its text."""
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
        """Return the contradictions of the paper in a table or figure."""
        return tuple(slip["text"] for slip in records()["slips"] if slip["of"] == key)

    def open_choices(self, runs: Sequence[RunSummary]) -> list[Choice]:
        """Return the choices that the paper leaves open, and how many runs decide them each way.

        Fields that a run's method or task does not read do not count.
        """
        known = [(flatten(run.config), {*run.unread_fields}) for run in runs]
        found = []
        for choice in read_json("open_choices.json"):
            field, only_if = choice["field"], choice.get("only_if", {})
            counts = Counter(
                "default" if fields[field] is None else str(fields[field])
                for fields, unread in known
                if field in fields and field not in unread and only_if.items() <= fields.items()
            )
            if counts:
                found.append(Choice(choice["question"], field, tuple(counts.most_common())))
        return found


#: The instance that tests use.
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
