"""Cost of training, in all and until a target: megabytes, hours, energy, privacy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from trishul_ray.edge.devices import DevicesConfig
from trishul_ray.edge.fleet import clock_line
from trishul_ray.report.outcomes import CellOutcome, TargetLayout, is_loss


class Cost(NamedTuple):
    """Cost of training: columns of metrics.parquet, and the display of their amount.

    ``adds``: whether the columns are of each round, not of all rounds so far.
    """

    columns: tuple[str, ...]
    unit: float
    adds: bool
    label: str
    short: str
    simulated: bool = False


#: Costs, by the names of ``outcomes.CostName``.
COSTS = {
    "megabytes": Cost(
        ("uploaded_bytes", "downloaded_bytes"), 1e6, True, "megabytes up and down, all clients",
        "MB",
    ),
    "hours": Cost(("simulated_seconds",), 3600.0, False, "simulated hours", "h", True),
    "kilojoules": Cost(("joules",), 1e3, True, "simulated kilojoules, all clients", "kJ", True),
    "epsilon": Cost(("privacy_epsilon",), 1.0, False, "ε spent for each client", "ε"),
}  # fmt: skip


def assumed(cells: Iterable[CellOutcome], cost: str) -> list[str]:
    """Return what simulated costs rest on: the defaults of our own, for each setting of devices."""
    if not COSTS[cost].simulated:
        return []
    sections = [cell.result.config.get("devices", {}) for cell in cells if cell.summary is not None]
    lines = [clock_line(DevicesConfig.model_validate(section)) for section in sections]
    return list(dict.fromkeys(line for line in lines if line))


def costs_by_round(cell: CellOutcome, cost: str) -> list[tuple[int, float, float]]:
    """Return the scored rounds of a cell that have this cost: round, cost so far, metric."""
    columns, unit, adds = COSTS[cost].columns, COSTS[cost].unit, COSTS[cost].adds
    spent, found, known = 0.0, [], False
    for record in cell.records:
        values = [float(record[name]) for name in columns if name in record]
        # A cost counts as 0 until a round reports it; without its columns it is unknown.
        known |= bool(values)
        spent = math.fsum([spent, *values]) if adds else max([spent, *values])
        if cell.metric in record:
            found.append((int(record["round"]), spent / unit, float(record[cell.metric])))
    return found if known else []


class Targets:
    """Shares of what the reference ends with, seed by seed.

    A loss has to fall to the reference's, divided by the share.

    Args:
        reference: The cells of the reference.
        axes: The axes in which the runs of one target agree, such as the seed.
        cost: A name of :data:`COSTS`.
    """

    def __init__(self, reference: Iterable[CellOutcome], axes: Sequence[str], cost: str) -> None:
        self._axes, self._cost = axes, cost
        self._finals = {
            cell.labels_of(axes): cell.value for cell in reference if cell.value is not None
        }

    def spent(self, cell: CellOutcome, share: float) -> float | None:
        """Return what a run spends to reach a target; infinite if it does not, None if unknown."""
        final = self._finals.get(cell.labels_of(self._axes))
        if final is None or cell.value is None or not (rounds := costs_by_round(cell, self._cost)):
            return None
        if is_loss(cell.metric):
            return next((spent for _, spent, value in rounds if value <= final / share), math.inf)
        return next((spent for _, spent, value in rounds if value >= final * share), math.inf)


@dataclass(frozen=True)
class SpentOutcome(CellOutcome):
    """A cell that is read by what it has spent when it reaches a target.

    Attributes:
        spent: Infinite if it does not reach it, None if unknown.
    """

    spent: float | None

    @property
    def value(self) -> float | None:
        """Amount that was spent; None if the target was not reached."""
        return None if self.spent is None or math.isinf(self.spent) else self.spent

    @property
    def gap(self) -> str:
        """Reason why a finished cell has no value."""
        return super().gap if self.spent is None else "not reached"


def spent_outcomes(cells: Sequence[CellOutcome], target: TargetLayout) -> tuple[SpentOutcome, ...]:
    """Return cells, read by what each has spent when it reaches the target."""
    axes = [name for name in cells[0].labels if name != target.axis] if cells else []
    reference = [cell for cell in cells if cell.labels[target.axis] == target.reference]
    targets = Targets(reference, axes, target.cost)
    return tuple(
        SpentOutcome(
            **{each.name: getattr(cell, each.name) for each in fields(CellOutcome)}
            | {"metric": target.cost, "spent": targets.spent(cell, target.share)}
        )
        for cell in cells
    )
