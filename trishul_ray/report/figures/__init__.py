"""Figures of sweeps and of single runs.

A figure of a sweep has a ``kind``, one of :data:`KINDS`, with options. A file of this folder has a
kind or several: it collects a small object of data, whose rows are the figure's CSV file, and draws
it. Whatever cells are finished are shown; a note below says what is missing. A single run draws the
same data (``runs/artifacts.py``).

This module knows the kinds without matplotlib; :mod:`.drawing` draws them.
"""

from collections.abc import Mapping
from typing import Any

from trishul_ray.errors import InputError
from trishul_ray.report.costs import COSTS
from trishul_ray.report.outcomes import FigureLayout

#: Subjects of diagnostics (option ``of``): prefix of their metrics, and displayed name.
SUBJECTS = {
    "updates": ("delta_", "updates (uploads − broadcast)"),
    "uploads": ("", "uploaded cores s·H"),
}
#: Matrices of two clients each (option ``matrix``), with their titles.
MATRICES = {
    "cosine": "cosine of updates",
    "inner_products": "inner products of updates",
    "principal_angle_similarity": "principal-angle similarity of updates",
}

#: Options whose values are axes: one, several or none. The default is the first of those in
#: :data:`KINDS` that the sweep has.
AXES = frozenset({"series", "panels", "groups"})

_BOTH = tuple(SUBJECTS)
_LAMBDA, _ALPHA = {"x": "method.lam"}, {"x": "partition.alpha"}
_LATE = {"of": _BOTH, "last": 10}
_BY_METHOD, _BY_DATASET = {"series": ("method",)}, {"panels": ("dataset",)}
_COST = _BY_METHOD | _BY_DATASET | {"cost": "megabytes"}
_ONE_SERIES: dict[str, Any] = {"series": ()}
_BY_ALLOCATION = {"series": ("allocation", "method")}

#: The options of each kind of figure, with their defaults.
KINDS: dict[str, Mapping[str, Any]] = {
    "convergence": _BY_METHOD | _BY_DATASET,
    "overhead": _BY_METHOD | {"groups": ("model", "dataset")},
    "svt_spectra": _BY_METHOD,
    "spectral_alignment": _BY_METHOD | {"of": _BOTH},
    "spectral_diagnostics": _BY_METHOD | {"of": _BOTH},
    "lambda_accuracy": _ONE_SERIES | _BY_DATASET | _LAMBDA,
    "lambda_diagnostics": _ONE_SERIES | _LAMBDA | _LATE,
    "heterogeneity": _BY_METHOD | _BY_DATASET | _ALPHA,
    "accuracy_inconsistency": _BY_METHOD | _ALPHA | _LATE,
    "alpha_diagnostics": _BY_METHOD | _ALPHA | _LATE,
    "waterfilling": _BY_ALLOCATION,
    "waterfilling_layerwise": _BY_ALLOCATION,
    "heads": _BY_ALLOCATION,
    "cost": _COST,
    "cost_to_target": _COST | {"reference": None, "shares": (0.9, 0.95, 0.99)},
    "privacy": _BY_METHOD | _BY_DATASET | {"x": "privacy.epsilon"},
    "personal": _BY_METHOD | _BY_DATASET,
    "covariance": _BY_METHOD | {"matrix": "cosine"},
}


def check_figure(figure: FigureLayout, axes: tuple[str, ...]) -> None:
    """Check kind and options of a figure, for a sweep with these axes.

    Raises:
        InputError: The kind is unknown, or an option is unknown or has a value that is not allowed.
    """
    where = f"figure {figure.name!r}"
    if figure.kind not in KINDS:
        raise InputError(f"{where}: kind {figure.kind!r} is none of {', '.join(KINDS)}")
    known = KINDS[figure.kind]
    for name, value in figure.options.items():
        if name not in known:
            raise InputError(
                f"{where}: option {name!r} is none of those of {figure.kind}: {', '.join(known)}"
            )
        if problem := _problem(name, value, axes):
            raise InputError(f"{where}: option {name}={value!r} {problem}")


def _problem(name: str, value: Any, axes: tuple[str, ...]) -> str | None:
    """Return what is wrong with the value of an option; None if nothing is."""
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
    if name == "cost":
        return None if value in COSTS else f"must be one of {', '.join(COSTS)}"
    if name == "reference":
        return None if value is None or isinstance(value, str) else "must be a label of the series"
    if name == "shares":
        fits = isinstance(value, list | tuple) and len(value) > 0
        fits = fits and all(isinstance(v, int | float) and 0 < v <= 1 for v in value)
        return None if fits else "must be a list of shares, above 0 and at most 1"
    if name == "matrix":
        return None if value in MATRICES else f"must be one of {', '.join(MATRICES)}"
    return None if isinstance(value, str) else "must be text"
