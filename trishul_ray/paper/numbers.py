"""The numbers printed in the TRISHUL paper, and the choices that it leaves open.

``paper.json`` contains records per table and figure. A record of a figure cites the line of the
paper's source that prints it. ``open_choices.json`` contains a question for each field that decides
a choice.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from trishul_ray.report.references import REFERENCES, Choice, Reference
from trishul_ray.report.summary import RunSummary, flatten

#: Keys of a record that are not labels of the value's position in the table.
_NO_LABEL = ("metric", "value", "budget_rank", "line")


@cache
def read_json(name: str) -> Any:
    """Load a file of this folder."""
    file = resources.files("trishul_ray.paper") / name
    return json.loads(file.read_text(encoding="utf-8"))


def records() -> dict[str, Any]:
    return dict(read_json("paper.json"))


@REFERENCES.register("trishul")
class Paper(Reference):
    """The printed numbers, with keys such as ``tab:vision`` and ``fig:lambda``.

    A record matches labels if both agree on every axis that they share. A number is returned only
    if exactly one record matches.
    """

    def tables(self) -> dict[str, int | None]:
        """Return the keys of tables, and of ``fig:overhead``, whose times are in its text."""
        return {key: records()["table_numbers"].get(key) for key in records()["tables"]}

    def figures(self) -> dict[str, int]:
        """Return the numbers of figures, keyed by figure."""
        return {key: figure["number"] for key, figure in records()["figures"].items()}

    def table_value(self, key: str, labels: Mapping[str, str]) -> float | None:
        """Look up a number of a table; accuracy and F1 are in percent.

        The average column of ``tab:glue`` has the label ``average`` on the axis ``task``.
        """
        return _only(records()["tables"].get(key, ()), labels)

    def figure_value(self, key: str, metric: str, labels: Mapping[str, str]) -> float | None:
        """Look up a number that the paper prints for a figure, in its text or in a table."""
        figure, tables = records()["figures"][key], records()["tables"]
        found = [*figure["records"], *tables.get(figure["values_of"], ())]
        return _only([record for record in found if record["metric"] == metric], labels)

    def errata(self, key: str) -> tuple[str, ...]:
        """Return the paper's errata for a table or figure."""
        return tuple(erratum["text"] for erratum in records()["errata"] if erratum["of"] == key)

    def open_choices(self, runs: Sequence[RunSummary]) -> list[Choice]:
        """Count the values with which runs decide the choices that the paper leaves open.

        Fields that a run's method or task does not read are not counted.
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


#: The instance for tests.
PAPER = Paper()


def _only(records: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> float | None:
    """Return the value of the only record that shares an axis with the labels and matches them."""
    found = []
    for record in records:
        shared = record.keys() & labels.keys() - set(_NO_LABEL)
        # A label None, such as the budget of full fine-tuning, matches any value.
        if shared and all(record[axis] in (None, labels[axis]) for axis in shared):
            found.append(float(record["value"]))
    return found[0] if len(found) == 1 else None
