"""Published numbers, which tables and figures show next to the numbers of runs.

Plug-ins register the numbers of a publication. A table or figure of a sweep sets the key of the
published table or figure that it reproduces (``paper: tab:vision``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trishul_ray.plugins.registry import Registry
from trishul_ray.report.summary import RunSummary


@dataclass(frozen=True)
class Choice:
    """A question that a publication leaves open, and the choices of the runs.

    Attributes:
        question: The question, in a sentence.
        field: The experiment's field that sets the choice, or an empty string.
        answers: Each choice, with its number of runs.
    """

    question: str
    field: str
    answers: tuple[tuple[str, int], ...]


class Reference:
    """The published numbers of a paper, keyed by its tables and figures.

    To add a publication, subclass this class and register the subclass in :data:`REFERENCES`. Keys
    must be unique across references.

    Example:
        ::

            @REFERENCES.register("my_paper")
            class MyPaper(Reference):
                def tables(self):
                    return {"tab:my_results": 2}

                def table_value(self, key, labels):
                    return {"FedIT": 81.3}.get(labels["method"])
    """

    def tables(self) -> Mapping[str, int | None]:
        """Return the keys of tables and their numbers, or None for numbers outside of a table."""
        return {}

    def figures(self) -> Mapping[str, int]:
        """Return the keys of figures and their numbers."""
        return {}

    def table_value(self, key: str, labels: Mapping[str, str]) -> float | None:
        """Return a number of a table.

        Args:
            key: Key of the table.
            labels: Label of the row and column on each axis. A column with the mean of all columns
                has the label ``average`` on each column axis.

        Returns:
            The published number, in percent if it is a fraction, or None if there is none.
        """
        return None

    def figure_value(self, key: str, metric: str, labels: Mapping[str, str]) -> float | None:
        """Return a published number of a figure.

        Args:
            key: Key of the figure.
            metric: Name of the metric.
            labels: Labels that the runs have in common, keyed by axis.

        Returns:
            The published number, in percent if it is a fraction, or None if there is none.
        """
        return None

    def errata(self, key: str) -> Sequence[str]:
        """List contradictions in the publication about a table or figure, as sentences."""
        return ()

    def open_choices(self, runs: Sequence[RunSummary]) -> Sequence[Choice]:
        """List the choices that the publication leaves open, and the choices of the given runs."""
        return ()


#: References registered by plug-ins.
REFERENCES = Registry[type[Reference]]("reference", "reference")


def references() -> list[Reference]:
    """Return an instance of each registered reference."""
    return [reference() for reference in REFERENCES.all().values()]


def table_keys() -> tuple[str, ...]:
    return tuple(key for reference in references() for key in reference.tables())


def figure_keys() -> tuple[str, ...]:
    return tuple(key for reference in references() for key in reference.figures())


def reference_of(key: str | None) -> Reference:
    """Return the reference that defines a table or figure, or an empty reference."""
    found = (each for each in references() if key in {*each.tables(), *each.figures()})
    return next(found, Reference())
