"""Select learning rates on validation rows, for the option ``--rates`` of ``trishul sweep``.

The sweep must have an axis ``optimizer.lr`` and report a validation metric. The best rate of each
setting is written to a file for ``optimizer.rates``.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.table import Table

from trishul_ray.data.dataset import score_name
from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.learning_rates import TunedRate, TunedRates
from trishul_ray.report.outcomes import REPETITIONS, CellOutcome, SweepOutcome, is_loss
from trishul_ray.storage.durable import write_file
from trishul_ray.sweeps.cells import RATE, Sweep


def check_rates(sweep: Sweep) -> None:
    """Raise InputError unless the sweep compares learning rates on validation rows."""
    place = sweep.file or sweep.name
    if RATE not in sweep.axes:
        raise InputError(f"{place}: --rates requires an axis {RATE!r}; add it")
    for cell in sweep.cells:
        if not (cell.metric or "").startswith(score_name("", "validation")):
            raise InputError(
                f"{place}: --rates requires a validation metric, got {cell.metric}; set one for "
                f"all labels, such as {{metric: {score_name('accuracy', 'validation')}}}"
            )
        if cell.experiment.data.validation_share == 0:
            raise InputError(f"{place}: data.validation_share=0 must exceed 0 for --rates")


def choose_rates(outcome: SweepOutcome) -> TunedRates:
    """Select the best learning rate of each setting, by its mean over repetitions.

    A setting consists of the cells that differ only in rate, seed and draw. Rates with a failed run
    are never selected. Ties are resolved in favor of the lowest rate.

    Raises:
        RunError: All rates of a setting failed, or cells have not been run.
    """
    settings: dict[tuple[tuple[str, str], ...], list[CellOutcome]] = {}
    for cell in outcome.cells:
        if cell.status not in ("finished", "failed"):
            raise RunError(f"run {cell.id} is {cell.status}; run all cells to select rates")
        labels = tuple((k, v) for k, v in cell.labels.items() if k not in (RATE, *REPETITIONS))
        settings.setdefault(labels, []).append(cell)
    return TunedRates(rates=tuple(_best(dict(k), cells) for k, cells in settings.items()))


def _best(labels: dict[str, str], cells: Sequence[CellOutcome]) -> TunedRate:
    by_rate: dict[float, list[CellOutcome]] = {}
    for cell in cells:
        by_rate.setdefault(float(cell.labels[RATE]), []).append(cell)
    grid = {rate: _mean([cell.value for cell in by_rate[rate]]) for rate in sorted(by_rate)}
    scores = {rate: score for rate, score in grid.items() if score is not None}
    if not scores:
        raise RunError(
            f"all learning rates failed for {', '.join(labels.values())}; add lower rates"
        )
    metric = cells[0].metric
    rate = (min if is_loss(metric) else max)(scores, key=lambda each: scores[each])
    edges: dict[float, Literal["lowest", "highest"]] = {min(grid): "lowest", max(grid): "highest"}
    experiment = Experiment.model_validate(by_rate[rate][0].result.config)
    partition = experiment.partition
    return TunedRate(
        dataset=experiment.data.name,
        method=experiment.method.name,
        rank=experiment.lora_rank,
        partition=partition.kind,
        alpha=partition.alpha if partition.kind == "dirichlet" else None,
        model=experiment.model.name,
        optimizer=experiment.optimizer.name,
        rate=rate,
        metric=metric,
        score=scores[rate],
        edge=edges.get(rate) if len(grid) > 1 else None,
        grid=grid,
        runs=tuple(cell.id for cell in by_rate[rate]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if len(known) == len(values) else None


def write_rates(rates: TunedRates, profile: str, file: Path) -> None:
    """Write tuned rates as a YAML file for ``optimizer.rates``.

    Raises:
        InputError: The file cannot be written.
    """
    head = (
        f"# Rates of the profile {profile}, selected on validation rows by `trishul sweep`.\n"
        "# To use them, set `optimizer.rates` to this file:\n"
        f"#   trishul sweep all --profile {profile} optimizer.rates={file}\n"
    )
    plain: Any = json.loads(rates.model_dump_json())
    for each, rate in zip(plain["rates"], rates.rates, strict=True):
        each["grid"] = dict(rate.grid)  # keys in JSON are strings
    try:
        write_file(file, (head + yaml.safe_dump(plain, sort_keys=False)).encode())
    except OSError as error:
        raise InputError(f"--rates {file}: cannot be written: {error.strerror}") from error


def rates_table(rates: TunedRates) -> Table:
    table = Table("dataset", "method", "rank", "partition", "rate", "score", box=None)
    for each in rates.rates:
        partition = each.partition if each.alpha is None else f"{each.partition}({each.alpha:g})"
        edge = f", {each.edge} of the grid" if each.edge else ""
        score = f"{each.score:.4f} {each.metric}{edge}"
        table.add_row(
            *(each.dataset, each.method, str(each.rank), partition, f"{each.rate:g}", score)
        )
    return table
