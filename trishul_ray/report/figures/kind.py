"""Kinds of figures of sweeps, their options, and the check of a figure that names one."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trishul_ray.errors import InputError
from trishul_ray.plugins.loading import faults
from trishul_ray.plugins.registry import Registry
from trishul_ray.report.figures.chart import Chart
from trishul_ray.report.figures.selection import Selection
from trishul_ray.report.outcomes import FigureLayout, SweepOutcome

#: What diagnostics are computed of (option ``of``): prefix of their metrics, and how it is called.
SUBJECTS = {
    "updates": ("delta_", "updates (uploads − broadcast)"),
    "uploads": ("", "uploaded cores s·H"),
}
#: Options whose values are axes: one, several or none. The default is the first of those in
#: :attr:`FigureKind.options` that the sweep has.
AXES = frozenset({"series", "panels", "groups"})
#: Common options with their defaults.
BY_METHOD, BY_DATASET = {"series": ("method",)}, {"panels": ("dataset",)}


class FigureKind:
    """A kind of figure of a sweep.

    Subclass it, and register the class by the name that sweeps use. The same cells must give the
    same chart.

    Attributes:
        options: Options with their defaults. An axis or several are named by ``series``,
            ``panels`` and ``groups``; ``of``, ``last`` and ``x`` are as in the built-in kinds.
        timed: Whether it shows measured seconds, so that a repetition differs.
    """

    options: ClassVar[Mapping[str, Any]] = BY_METHOD
    timed: ClassVar[bool] = False

    def problem(self, option: str, value: Any) -> str | None:
        """Return how the value of an option of its own is wrong; None if it is not."""
        return None if isinstance(value, str) else "must be text"

    def chart(self, selection: Selection) -> Chart | None:
        """Return the chart of the finished cells; None if none of them has what it shows."""
        raise NotImplementedError


#: The kinds of figures by name.
FIGURES = Registry[type[FigureKind]]("figure", "kind of figure", "trishul_ray.report.figures.kinds")


def check_figure(figure: FigureLayout, axes: tuple[str, ...]) -> None:
    """Check kind and options of a figure, for a sweep with these axes.

    Raises:
        InputError: The kind is unknown, or an option is unknown or has a value that is not allowed.
    """
    where, names = f"figure {figure.name!r}", FIGURES.names()
    if figure.kind not in names:
        known = "; ".join([", ".join(names), *faults()])
        raise InputError(f"{where}: kind {figure.kind!r} is none of {known}")
    kind = FIGURES[figure.kind]()
    for name, value in figure.options.items():
        if name not in kind.options:
            known = ", ".join(kind.options)
            raise InputError(f"{where}: option {name!r} is none of those of {figure.kind}: {known}")
        if problem := _problem(kind, name, value, axes):
            raise InputError(f"{where}: option {name}={value!r} {problem}")


def _problem(kind: FigureKind, name: str, value: Any, axes: tuple[str, ...]) -> str | None:
    """Return how the value of an option is wrong; None if it is not."""
    if name in AXES:
        named = [value] if isinstance(value, str) else value
        fits = named is None or (isinstance(named, list | tuple) and {*named} <= {*axes})
        return None if fits else f"must be null, an axis or a list of axes: {', '.join(axes)}"
    if name == "of":
        fits = isinstance(value, list | tuple) and len(value) > 0 and {*value} <= {*SUBJECTS}
        return None if fits else f"must be a list of {' and '.join(SUBJECTS)}"
    if name == "last":
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if fits else "must be a number of rounds, at least 1"
    return kind.problem(name, value)


def select(figure: FigureLayout, sweep: SweepOutcome) -> Selection:
    """Return the cells and options of a figure. Raises as :func:`check_figure`."""
    check_figure(figure, tuple(sweep.axes))
    options = dict(FIGURES[figure.kind].options)
    for name in options.keys() & AXES:
        options[name] = next((axis for axis in options[name] if axis in sweep.axes), None)
    return Selection(figure, sweep, options | dict(figure.options))
