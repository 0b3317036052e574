"""Costs of training by round, and the cost until a score is reached."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from trishul_ray.lab.clock.devices import DevicesConfig
from trishul_ray.lab.clock.stage import clock_line
from trishul_ray.report.outcomes import CellOutcome, is_loss

CostName = Literal["megabytes", "hours", "kilojoules", "epsilon"]


class Cost(NamedTuple):
    """A cost of training: columns of metrics.parquet, and how their amount is displayed.

    ``adds``: whether the columns are of each round, not of all rounds so far.
    """

    columns: tuple[str, ...]
    unit: float
    adds: bool
    label: str
    short: str
    simulated: bool = False


COSTS: dict[CostName, Cost] = {
    "megabytes": Cost(
        ("uploaded_bytes", "downloaded_bytes"), 1e6, True, "megabytes up and down, all clients",
        "MB",
    ),
    "hours": Cost(("simulated_seconds",), 3600.0, False, "simulated hours", "h", True),
    "kilojoules": Cost(("joules",), 1e3, True, "simulated kilojoules, all clients", "kJ", True),
    "epsilon": Cost(("privacy_epsilon",), 1.0, False, "ε spent for each client", "ε"),
}  # fmt: skip


def assumed(cells: Iterable[CellOutcome], cost: CostName) -> list[str]:
    """Return the defaults of ours that simulated costs rest on, for each setting of devices."""
    if not COSTS[cost].simulated:
        return []
    sections = [cell.result.config.get("devices", {}) for cell in cells if cell.summary is not None]
    lines = [clock_line(DevicesConfig.model_validate(section)) for section in sections]
    return list(dict.fromkeys(line for line in lines if line))


def costs_by_round(cell: CellOutcome, cost: CostName) -> list[tuple[int, float, float]]:
    """Return the scored rounds of a cell that have this cost: round, cost so far, metric."""
    columns, unit, adds = COSTS[cost].columns, COSTS[cost].unit, COSTS[cost].adds
    spent, found, known = 0.0, [], False
    for record in cell.records:
        values = [float(record[name]) for name in columns if name in record]
        # A cost is 0 until a round reports it; a run without its columns has no such cost.
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

    def __init__(
        self, reference: Iterable[CellOutcome], axes: Sequence[str], cost: CostName
    ) -> None:
        self._axes, self._cost = axes, cost
        self._finals = {
            cell.labels_of(axes): cell.value for cell in reference if cell.value is not None
        }

    def spent(self, cell: CellOutcome, share: float) -> float | None:
        """Return the cost of a run until a target; infinite if it is missed, None if unknown."""
        final = self._finals.get(cell.labels_of(self._axes))
        if final is None or cell.value is None or not (rounds := costs_by_round(cell, self._cost)):
            return None
        if is_loss(cell.metric):
            return next((spent for _, spent, value in rounds if value <= final / share), math.inf)
        return next((spent for _, spent, value in rounds if value >= final * share), math.inf)
