"""The learning rate of an experiment that sets none, and tuned rates from files."""

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from trishul_ray.config.section import Section
from trishul_ray.errors import InputError
from trishul_ray.experiment.experiment import Experiment
from trishul_ray.experiment.yaml_files import read_yaml
from trishul_ray.methods.base import method_class

#: α of the Dirichlet partitions that rates were published for.
PUBLISHED_ALPHA = 0.3
_PARTITION_NAMES = {"iid": "IID", "dirichlet": "Dirichlet", "natural": "natural clients"}


def with_learning_rate(experiment: Experiment) -> Experiment:
    """Return an experiment with the rate of ``optimizer.rates`` or, if it sets none, of the table.

    A file of tuned rates also replaces a rate that is set. Where neither has one, the rate stays.

    Raises:
        InputError: The file of tuned rates cannot be read.
    """
    optimizer = experiment.optimizer
    found = _tuned_rate(experiment)
    if found is None and "lr" not in optimizer.model_fields_set:
        found = default_learning_rate(experiment)
    # The rate's source names the file: the run depends on the rate alone.
    read: dict[str, object] = {"rates": None}
    if found is not None:
        read |= {"lr": found[0], "lr_source": found[1]}
    return experiment.model_copy(update={"optimizer": optimizer.model_copy(update=read)})


def default_learning_rate(experiment: Experiment) -> tuple[float, str] | None:
    """Return the rate of ``learning_rates.yaml`` or the method, and its source; None without one.

    A row may be for a dataset with a backbone. ``glue/rte`` has the rates of ``glue``. A budget of
    rank 32 or less counts as the lower one. The source names every setting in which the experiment
    differs from what the rate was published for.
    """
    dataset, method = experiment.data.name, experiment.method.name
    partition, rank = experiment.partition, experiment.lora_rank
    iid = partition.kind == "iid"
    table = _table()
    names = f"{dataset} {experiment.model.name}", dataset, dataset.partition("/")[0], "default"
    lenders, unpublished = _lenders(method), table["unpublished"]
    own = {name: vars(method_class(name)).get("rates", {}) for name in lenders}
    for row in (name for name in names if name in table):
        rows = {name: rates[row] for name, rates in own.items() if row in rates} | table[row]
        known = next((m for m in lenders if m in rows or m in unpublished), None)
        if known is not None:
            break
    else:
        return None
    borrowed = [] if known == method else [f"from {known}, for {method}"]
    if known in unpublished:
        rate, source = unpublished[known], f"our choice: no source names a rate for {known}"
    else:
        cells = rows[known]
        column = (0 if iid else 2) + (0 if rank <= 32 else 1)
        rate, source = cells[column] if isinstance(cells, list) else cells, str(rows["source"])
        if experiment.optimizer.name != "adam":
            borrowed.append(f"from Adam, for {experiment.optimizer.name.upper()}")
        if "model" not in rows:  # not published
            source += f" {dataset}"
        else:
            if rank not in (32, 64):
                borrowed.append(f"from the budgets of LoRA rank 32 and 64, for {rank}")
            published_for = "iid" if iid or "partition" in rows else "dirichlet"
            if partition.kind != published_for:
                article = "an" if published_for == "iid" else "a"
                published, used = _PARTITION_NAMES[published_for], _PARTITION_NAMES[partition.kind]
                borrowed.append(f"from {article} {published} partition, for {used}")
            elif partition.kind == "dirichlet" and partition.alpha != PUBLISHED_ALPHA:
                borrowed.append(f"from α = {PUBLISHED_ALPHA}, for {partition.alpha:g}")
            if experiment.model.name != rows["model"]:
                borrowed.append(f"from {rows['model']}, for {experiment.model.name}")
    return float(rate), f"{source}; borrowed {'; '.join(borrowed)}" if borrowed else source


def _lenders(method: str) -> list[str]:
    """Return the method, the one whose rates it uses if it has none, the one of that, and so on."""
    found = [method]
    while (like := method_class(found[-1]).rates_like) is not None and like not in found:
        found.append(like)
    return found


class TunedRate(Section):
    """A learning rate that was chosen on validation rows, and what it was chosen for."""

    dataset: str
    method: str
    rank: int = Field(description="LoRA rank of the budget")
    partition: str
    alpha: float | None = Field(description="Dirichlet concentration; None for other partitions")
    model: str
    optimizer: str
    rate: float
    metric: str = Field(description="metric that was compared, after the last round")
    score: float = Field(description="mean over the seeds")
    edge: Literal["lowest", "highest"] | None = Field(
        description="whether it is at an end of the grid, beyond which a better one may be"
    )
    grid: dict[float, float | None] = Field(description="score by rate; None: a run failed")
    runs: tuple[str, ...] = Field(description="ids of the runs with this rate")


class TunedRates(Section):
    """The content of a file of tuned rates."""

    rates: tuple[TunedRate, ...]


def _tuned_rate(experiment: Experiment) -> tuple[float, str] | None:
    """Return the rate that ``optimizer.rates`` has for an experiment, and its source.

    It has one if it was tuned for the dataset, the budget and the kind of partition, and for the
    method or the one that it borrows rates from. The source names what else differs.
    """
    optimizer, partition = experiment.optimizer, experiment.partition
    if optimizer.rates is None:
        return None
    file, method = Path(optimizer.rates).expanduser(), experiment.method.name
    lenders = _lenders(method)
    alpha = partition.alpha if partition.kind == "dirichlet" else None
    meant = (experiment.data.name, experiment.lora_rank, partition.kind == "iid")
    found: list[tuple[int, str, TunedRate]] = []
    for tuned in _read_tuned_rates(file):
        if (tuned.dataset, tuned.rank, tuned.partition == "iid") != meant:
            continue
        if tuned.method not in lenders:
            continue
        differences = [
            f"{name} {theirs}, for {ours}"
            for name, theirs, ours in (
                ("method", tuned.method, method),
                ("partition", tuned.partition, partition.kind),
                ("α =", tuned.alpha, alpha),
                ("model", tuned.model, experiment.model.name),
                ("optimizer", tuned.optimizer, optimizer.name),
            )
            if theirs != ours
        ]
        borrowed = f"; borrowed from {'; '.join(differences)}" if differences else ""
        # Prefer a rate tuned for this method to a closer setting of another.
        found.append((10 * lenders.index(tuned.method) + len(differences), borrowed, tuned))
    if not found:
        return None
    _, borrowed, best = min(found, key=lambda each: each[0])
    edge = f", the {best.edge}" if best.edge else ""
    source = f"{file.name}: best of {len(best.grid)} rates{edge}, {best.metric} {best.score:.4g}"
    return best.rate, source + borrowed


def _read_tuned_rates(file: Path) -> tuple[TunedRate, ...]:
    try:
        changed = file.stat().st_mtime_ns
    except OSError as error:
        raise InputError(
            f"optimizer.rates={str(file)!r} does not exist; `trishul sweep --rates FILE` writes it"
        ) from error
    return _parse_tuned_rates(file, changed)


@lru_cache
def _parse_tuned_rates(file: Path, changed: int) -> tuple[TunedRate, ...]:
    try:
        return TunedRates.model_validate(read_yaml(file)).rates
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"optimizer.rates={str(file)!r} is no file of tuned rates: {where}: {first['msg']}"
        ) from error


@cache
def _table() -> Mapping[str, Any]:
    file = resources.files("trishul_ray.experiment") / "learning_rates.yaml"
    table: Mapping[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return table
