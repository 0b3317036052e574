"""Cells that a search samples: values of some fields, drawn at random or proposed by Optuna."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trishul_ray.report.outcomes import TableLayout
from trishul_ray.runtime.lazy import ray
from trishul_ray.sweeps.cells import CHOSEN_ON_TEST, Cell, Sweep, vary
from trishul_ray.sweeps.search import Search

#: The axis whose labels are the values that a search has sampled.
SAMPLE = "sample"


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
        for _, spec in ray.tune.search.variant_generator.generate_variants(space, random_state=rng)
    ]
    return with_samples(sweep, [(cell, values) for cell in sweep.cells for values in samples])


def with_samples(sweep: Sweep, samples: Sequence[tuple[Cell, Mapping[str, Any]]]) -> Sweep:
    """Return a sweep with samples of its cells (:func:`sampled`), and a table that lists them.

    Numbers are displayed with four digits, unless another sample would look the same.
    """
    search = sweep.search
    assert search is not None
    short = {_label(values): _label(values, digits=4) for _, values in samples}
    times = Counter(short.values())
    chosen = CHOSEN_ON_TEST if search.on == "test" else "by their validation rows"
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
    """Return a cell with sampled values of some fields, read by the metric of the search.

    Raises:
        InputError: The values make no valid experiment.
    """
    labels = {**cell.labels, SAMPLE: _label(values)}
    metric = search.metric or cell.metric
    return replace(vary(cell, values), labels=labels, metric=metric, rows=search.on)


def sampling_space(search: Search) -> dict[str, Any]:
    """Return the space of a search as Ray Tune takes it."""
    tune = ray.tune
    space: dict[str, Any] = {}
    for name, domain in search.space.items():
        if domain.kind == "choice":
            space[name] = tune.choice(list(domain.values))
        elif domain.kind == "int":
            low, high = domain.values
            space[name] = tune.randint(low, high + 1)
        else:
            sample = tune.loguniform if domain.kind == "log" else tune.uniform
            space[name] = sample(*domain.values)
    return space


def _label(values: Mapping[str, Any], digits: int | None = None) -> str:
    """Return names and values in one line, floats with all digits unless limited."""
    return ", ".join(
        f"{name}={value:.{digits}g}" if digits and isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
