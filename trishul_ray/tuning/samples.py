"""The cells of a search: those of a sweep's axes, with sampled values of further fields."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from trishul_ray.report.outcomes import TableLayout
from trishul_ray.tuning.cells import Cell, vary
from trishul_ray.tuning.search import Choice, Search
from trishul_ray.tuning.sweep import Sweep

#: The axis whose labels are the sampled values.
SAMPLE = "sample"


def is_adaptive(sweep: Sweep) -> bool:
    """Return whether a sweep's cells are only known once others have finished."""
    return sweep.search is not None and sweep.search.kind == "optuna"


def with_random_samples(sweep: Sweep) -> Sweep:
    """Return a sweep with the samples of its random search as cells; another one as it is."""
    search = sweep.search
    if search is None or search.kind != "random":
        return sweep
    rng = np.random.RandomState(search.seed)
    space = sampling_space(search)
    samples = [
        spec
        for _ in range(search.samples)
        for _, spec in generate_variants(space, random_state=rng)
    ]
    return with_samples(sweep, [sampled(cell, s) for cell in sweep.cells for s in samples])


def with_samples(sweep: Sweep, cells: Sequence[Cell]) -> Sweep:
    """Return a sweep whose cells are those of :func:`sampled`, and whose table lists them."""
    labels = tuple(dict.fromkeys(cell.labels[SAMPLE] for cell in cells))
    table = TableLayout(
        name=f"{sweep.name}-samples",
        title=f"{sweep.title}: samples",
        rows=(*(axis for axis in sweep.axes if axis != "seed"), SAMPLE),
        columns=(),
    )
    return replace(sweep, axes={**sweep.axes, SAMPLE: labels}, cells=tuple(cells), tables=(table,))


def sampled(cell: Cell, values: Mapping[str, Any]) -> Cell:
    """Return a cell with sampled values of some fields.

    Raises:
        InputError: The values make no valid experiment.
    """
    label = ", ".join(f"{name}={_shown(value)}" for name, value in values.items())
    return replace(vary(cell, values), labels={**cell.labels, SAMPLE: label})


def sampling_space(search: Search) -> dict[str, Any]:
    """Return the space of a search as Ray Tune takes it."""
    space: dict[str, Any] = {}
    for name, domain in search.space.items():
        if isinstance(domain, Choice):
            space[name] = tune.choice(list(domain.values))
        elif domain.scale == "int":
            space[name] = tune.randint(int(domain.low), int(domain.high) + 1)
        else:
            sample = tune.loguniform if domain.scale == "log" else tune.uniform
            space[name] = sample(domain.low, domain.high)
    return space


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
