"""The default learning rate of an experiment, and tuned rates from files.

Published and tuned defaults are in ``learning_rates.yaml``.
"""

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

#: α of the Dirichlet partitions for which the rates were published.
PUBLISHED_ALPHA = 0.3


def with_learning_rate(experiment: Experiment) -> Experiment:
    """Set the rate from the file ``optimizer.rates`` or, if no rate is set, from the table.

    A file of tuned rates also replaces a rate that the user set. If neither contains a matching
    rate, the rate is unchanged.

    Raises:
        InputError: The file of tuned rates cannot be read.
    """
    optimizer = experiment.optimizer
    found = _tuned_rate(experiment)
    if found is None and "lr" not in optimizer.model_fields_set:
        found = default_learning_rate(experiment)
    # ``lr_source`` records the file. The field ``rates`` is cleared, since the run depends only on
    # the rate.
    read: dict[str, object] = {"rates": None}
    if found is not None:
        read |= {"lr": found[0], "lr_source": found[1]}
    return experiment.model_copy(update={"optimizer": optimizer.model_copy(update=read)})


def default_learning_rate(experiment: Experiment) -> tuple[float, str] | None:
    """Look up the rate of ``learning_rates.yaml`` or of the method, and describe its source.

    A row may apply to a dataset with a backbone. ``glue/rte`` uses the rates of ``glue``. A budget
    of rank 32 or less counts as the lower one. The source names every setting in which the
    experiment differs from the settings of the rate.

    Returns:
        The rate and its source, or None.
    """
    dataset, table, lenders = experiment.data.name, _table(), _lenders(experiment.method.name)
    iid, is_higher = experiment.partition.kind == "iid", experiment.lora_rank > 32
    own = {name: vars(method_class(name)).get("rates", {}) for name in lenders}
    for row in (
        f"{dataset} {experiment.model.name}",
        dataset,
        dataset.partition("/")[0],
        "default",
    ):
        if row not in table:
            continue
        content = {name: rates[row] for name, rates in own.items() if row in rates} | table[row]
        if (lender := next(filter(content.__contains__, lenders), None)) is None:
            continue
        rate, source = content[lender], content["source"]
        settings = {"method": lender, "optimizer": "adam"}
        if "model" in content:  # published
            settings |= {"model": content["model"], "rank": 64 if is_higher else 32}
            settings["partition"] = content.get("partition", "iid" if iid else "dirichlet")
            settings["α ="] = PUBLISHED_ALPHA
        else:
            source += f" {dataset}"
        if isinstance(rate, list):
            rate = rate[2 * (not iid) + is_higher]
        return float(rate), source + _borrowed(_differences(settings, experiment))
    return None


def _lenders(method: str) -> list[str]:
    """Return the fallback chain of methods for learning rates, starting with ``method``."""
    found = [method]
    while (like := method_class(found[-1]).rates_like) is not None and like not in found:
        found.append(like)
    return found


def _differences(settings: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """Describe every setting of a rate that differs from the experiment's setting."""
    partition = experiment.partition
    both_dirichlet = partition.kind == settings.get("partition") == "dirichlet"
    ours = {
        "method": experiment.method.name,
        "rank": experiment.lora_rank,
        "partition": partition.kind,
        "α =": partition.alpha if both_dirichlet else None,
        "model": experiment.model.name,
        "optimizer": experiment.optimizer.name,
    }
    return [
        f"{name} {settings[name]}, for {value}"
        for name, value in ours.items()
        if value is not None and settings.get(name, value) != value
    ]


def _borrowed(differences: list[str]) -> str:
    return f"; borrowed from {'; '.join(differences)}" if differences else ""


class TunedRate(Section):
    """A learning rate that was chosen on validation rows, and the settings of the search."""

    dataset: str
    method: str
    rank: int = Field(description="LoRA rank of the budget")
    partition: str
    alpha: float | None = Field(description="Dirichlet concentration; None for other partitions")
    model: str
    optimizer: str
    rate: float
    metric: str = Field(description="compared metric, after the last round")
    score: float = Field(description="mean over the seeds")
    edge: Literal["lowest", "highest"] | None = Field(
        description="end of the grid at which the rate is, if any: a better rate may be outside"
    )
    grid: dict[float, float | None] = Field(description="score per rate; None if a run failed")
    runs: tuple[str, ...] = Field(description="ids of the runs with this rate")


class TunedRates(Section):
    """The content of a file of tuned rates."""

    rates: tuple[TunedRate, ...]


def _tuned_rate(experiment: Experiment) -> tuple[float, str] | None:
    """Look up the rate of the file ``optimizer.rates`` for an experiment, and its source.

    The dataset, the budget and the kind of partition must match, and the method must be the
    experiment's or one that it borrows rates from. The source names all other differences.
    """
    if experiment.optimizer.rates is None:
        return None
    file, lenders = Path(experiment.optimizer.rates).expanduser(), _lenders(experiment.method.name)
    is_iid = experiment.partition.kind == "iid"
    found: list[tuple[int, list[str], TunedRate]] = []
    for rate in _read_tuned_rates(file, file.stat().st_mtime_ns if file.exists() else 0):
        same = rate.dataset == experiment.data.name and rate.rank == experiment.lora_rank
        if same and (rate.partition == "iid") == is_iid and rate.method in lenders:
            settings = {"α =" if name == "alpha" else name: value for name, value in rate}
            found.append((lenders.index(rate.method), _differences(settings, experiment), rate))
    if not found:
        return None
    # Prefer a rate tuned for this method over closer settings of another method.
    _, differences, best = min(found, key=lambda each: (each[0], len(each[1])))
    edge = f", the {best.edge}" if best.edge else ""
    source = f"{file.name}: best of {len(best.grid)} rates{edge}, {best.metric} {best.score:.4g}"
    return best.rate, source + _borrowed(differences)


@lru_cache
def _read_tuned_rates(file: Path, changed: int) -> tuple[TunedRate, ...]:
    try:
        return TunedRates.model_validate(read_yaml(file)).rates
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"optimizer.rates={str(file)!r} is not a file of tuned rates: {where}: {first['msg']}"
        ) from error


@cache
def _table() -> Mapping[str, Any]:
    file = resources.files("trishul_ray.experiment") / "learning_rates.yaml"
    table: Mapping[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return table
