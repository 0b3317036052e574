"""Cells that a search samples: values of some fields, drawn at random or suggested by Optuna."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trishul_ray.report.layouts import TableLayout
from trishul_ray.runtime.lazy import ray
from trishul_ray.sweeps.cells import Cell, Sweep
from trishul_ray.sweeps.search import Search

#: The axis whose labels are the values that a search has sampled.
SAMPLE = "sample"


def with_random_samples(sweep: Sweep) -> Sweep:
    """Return a sweep with the samples of its random search as cells; other sweeps unchanged."""
    search = sweep.search
    if search is None or search.kind != "random":
        return sweep
    rng, space = np.random.RandomState(search.seed), search.domains()
    samples = [
        spec
        for _ in range(search.samples)
        for _, spec in ray.tune.search.variant_generator.generate_variants(space, random_state=rng)
    ]
    return with_samples(sweep, [(cell, values) for cell in sweep.cells for values in samples])


def with_samples(sweep: Sweep, samples: Sequence[tuple[Cell, Mapping[str, Any]]]) -> Sweep:
    """Return a sweep with samples of its cells, and a table that lists them.

    Numbers are displayed with four digits, unless another sample would look the same.
    """
    search = sweep.search
    assert search is not None
    short = {_label(values): _label(values, digits=4) for _, values in samples}
    times = Counter(short.values())
    chosen = "chosen on the test rows" if search.rows == "test" else "by their validation rows"
    table = TableLayout(
        name=f"{sweep.name}-samples",
        title=f"{sweep.title}: samples, {chosen}",
        rows=(*(axis for axis in sweep.axes if axis != "seed"), SAMPLE),
        columns=(),
    )
    return replace(
        sweep,
        axes={**sweep.axes, SAMPLE: tuple(short)},
        shown={**sweep.shown, SAMPLE: {k: s for k, s in short.items() if times[s] == 1}},
        cells=tuple(sampled(cell, values, search) for cell, values in samples),
        tables=(table,),
    )


def sampled(cell: Cell, values: Mapping[str, Any], search: Search) -> Cell:
    """Return a cell with sampled values of some fields, and the metric of the search.

    Raises:
        InputError: The values make no valid experiment.
    """
    labels = {**cell.labels, SAMPLE: _label(values)}
    metric = search.metric or cell.metric
    return replace(cell.varied(values), labels=labels, metric=metric, rows=search.rows)


def _label(values: Mapping[str, Any], digits: int | None = None) -> str:
    return ", ".join(
        f"{name}={value:.{digits}g}" if digits and isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
