"""Printed numbers of publications, which tables and figures show next to numbers of runs.

A plug-in registers the numbers of a publication. A table or figure of a sweep names the one that it
reproduces by a key (``paper: tab:vision``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trishul_ray.plugins.registry import Registry
from trishul_ray.report.summary import RunSummary


@dataclass(frozen=True)
class Choice:
    """A question that a publication leaves open, and how many runs answer it in which way.

    ``field`` is the field of an experiment that decides it; empty if none does.
    """

    question: str
    field: str
    answers: tuple[tuple[str, int], ...]


class Reference:
    """The printed numbers of a publication, by keys of its tables and figures.

    Subclass it, and register the class by a name. Keys of two references must differ.
    """

    def tables(self) -> Mapping[str, int | None]:
        """Return the keys of tables, each with its number; None if it is not printed as a table."""
        return {}

    def figures(self) -> Mapping[str, int]:
        """Return the keys of figures, each with its number."""
        return {}

    def table_value(self, key: str, labels: Mapping[str, str]) -> float | None:
        """Return the number that a table prints at the labels of a position; None if none.

        Shares are in percent. A column of means over all others has the label ``average`` on each
        axis of columns.
        """
        return None

    def figure_value(self, key: str, metric: str, labels: Mapping[str, str]) -> float | None:
        """Return the number that is printed of a figure; None if none. Shares are in percent."""
        return None

    def slips(self, key: str) -> Sequence[str]:
        """Return where the publication contradicts itself on a table or figure, in sentences."""
        return ()

    def open_choices(self, runs: Sequence[RunSummary]) -> Sequence[Choice]:
        """Return what the publication leaves open, and how runs decide it."""
        return ()


#: The references that plug-ins have registered.
REFERENCES = Registry[type[Reference]]("reference", "reference")


def references() -> list[Reference]:
    """Return all references."""
    return [reference() for reference in REFERENCES.all().values()]


def table_keys() -> tuple[str, ...]:
    """Return the keys of all tables that a sweep may name."""
    return tuple(key for reference in references() for key in reference.tables())


def figure_keys() -> tuple[str, ...]:
    """Return the keys of all figures that a sweep may name."""
    return tuple(key for reference in references() for key in reference.figures())


def reference_of(key: str | None) -> Reference:
    """Return the reference that has a table or figure; one without numbers if none has."""
    found = (each for each in references() if key in {*each.tables(), *each.figures()})
    return next(found, Reference())
