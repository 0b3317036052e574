"""Create cells from the samples of a search, which are random or suggested by Optuna."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trishul_ray.report.layouts import TableLayout
from trishul_ray.report.outcomes import REPETITIONS
from trishul_ray.runtime.lazy import ray
from trishul_ray.sweeps.cells import Cell, Sweep
from trishul_ray.sweeps.search import Search

#: Name of the axis whose labels are the sampled values.
SAMPLE = "sample"


def with_random_samples(sweep: Sweep, search: Search) -> Sweep:
    """Replace the cells of a sweep by the samples of a random search."""
    rng, space = np.random.RandomState(search.seed), search.domains()
    samples = [
        spec
        for _ in range(search.samples)
        for _, spec in ray.tune.search.variant_generator.generate_variants(space, random_state=rng)
    ]
    return with_samples(sweep, search, [(c, values) for c in sweep.cells for values in samples])


def with_samples(
    sweep: Sweep, search: Search, samples: Sequence[tuple[Cell, Mapping[str, Any]]]
) -> Sweep:
    """Replace the cells of a sweep by samples, and its tables by one that lists them."""
    cells = tuple(sample_of(cell, values, search) for cell, values in samples)
    chosen = "chosen on the test rows" if search.rows == "test" else "by their validation rows"
    table = TableLayout(
        name=f"{sweep.name}-samples",
        title=f"{sweep.title}: samples, {chosen}",
        rows=(*(axis for axis in sweep.axes if axis not in REPETITIONS), SAMPLE),
    )
    axis = tuple(dict.fromkeys(cell.labels[SAMPLE] for cell in cells))
    axes = {**sweep.axes, SAMPLE: axis}
    return replace(sweep, axes=axes, cells=cells, tables=(table,), search=None)


def sample_of(cell: Cell, values: Mapping[str, Any], search: Search) -> Cell:
    """Apply sampled values and the metric of the search to a cell.

    Raises:
        InputError: The experiment with these values is invalid.
    """
    label = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
    metric = search.metric or cell.metric
    labels = {**cell.labels, SAMPLE: label}
    return replace(cell.varied(values), labels=labels, metric=metric, rows=search.rows)
