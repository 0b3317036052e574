"""Load the runs and rounds of a figure into DataFrames, and compute means over them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from trishul_ray.report.frame import rounds_frame
from trishul_ray.report.layouts import FigureLayout
from trishul_ray.report.outcomes import REPETITIONS, SEED, CellOutcome, SweepOutcome
from trishul_ray.report.references import reference_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Fields that can be the x axis; other x axes are columns of the rounds.
FIELDS = ("lam", "alpha", "epsilon", "draw")


@dataclass(frozen=True)
class FigureRuns:
    """The finished runs of one figure.

    Attributes:
        cells: The finished cells.
        runs: One row per cell, indexed by its position in ``cells`` (``cell``): its ``series`` and
            ``panel``, its labels on axes that do not name the series (``setting``), its final
            ``value``, and :data:`FIELDS`.
        rounds: One row per cell and round: the same names, all metrics, and the ``value``.
        names: All series, including series without finished runs, so that colors are stable.
    """

    layout: FigureLayout
    sweep: SweepOutcome
    cells: tuple[CellOutcome, ...]
    runs: "DataFrame"
    rounds: "DataFrame"
    names: tuple[str, ...]

    def last(self, metric: str, rounds: int = 10) -> "Series":
        """Average a metric of each run over the last ``rounds`` rounds that measured it."""
        if metric not in self.rounds:
            return pd.Series(dtype=float)
        known = self.rounds.dropna(subset=[metric]).groupby("cell").tail(rounds)
        return known.groupby("cell")[metric].mean()

    def at(self, **values: "Series") -> "DataFrame":
        """Return ``runs`` with the column ``cell`` and additional columns, such as :meth:`last`."""
        return self.runs.assign(**values).reset_index()

    def means(
        self, frame: "DataFrame", column: str, x: str, paper: str = "", unit: float = 1.0
    ) -> "DataFrame":
        """Compute the mean ± standard deviation and the number of runs per series and ``x``.

        Args:
            frame: Rows with ``series``, ``cell``, ``x`` and ``column``.
            column: Column to average.
            x: Column of the x axis. A cost is also averaged, over the runs of each round.
            paper: Metric of the paper's numbers, which are shown at the last round.
            unit: Divisor of the paper's numbers, such as 100 for percentages.
        """
        by = "round" if x in ("round", "megabytes", "hours") else x
        if column not in frame or x not in frame:
            return pd.DataFrame()
        groups = frame.dropna(subset=[column, x]).groupby(["series", by], observed=True)
        found = groups.agg(value=(column, "mean"), sd=(column, "std"), n=(column, "count"))
        found["x"] = groups[x].mean() if x != by else found.index.get_level_values(by)
        sd = found.pop("sd").fillna(0.0)
        found["low"], found["high"] = found["value"] - sd, found["value"] + sd
        found["paper"] = [self.paper(paper, group["cell"]) / unit for _, group in groups]
        found = found.reset_index("series").reset_index(drop=True)
        if by == "round":
            last = found.groupby("series", observed=True)["x"].transform("max")
            found.loc[found["x"] < last, "paper"] = math.nan
        return found

    def paper(self, metric: str, places: "Series") -> float:
        """Return the paper's number for labels shared by all cells, or NaN if not comparable."""
        key = self.layout.paper
        if not key or not metric or not self.sweep.is_comparable(self.cells):
            return math.nan
        shared = set.intersection(*({*self.cells[n].labels.items()} for n in places.unique()))
        value = reference_of(key).figure_value(key, metric, dict(shared))
        return math.nan if value is None else value

    def note(self, remarks: Sequence[str]) -> list[str]:
        """Build the lines below a figure: profile, seeds, data, missing runs, and remarks."""
        counts = {axis: len({c.labels.get(axis, "") for c in self.cells}) for axis in REPETITIONS}
        repeated = [
            f"{n} {axis}" + "s" * (n > 1) for axis, n in counts.items() if n > 1 or axis == SEED
        ]
        data = (f"{c.result.data.dataset}: {c.result.data.test} test rows" for c in self.cells)
        states = [cell.status for cell in self.sweep.within(self.layout.where)]
        missing = [f"{states.count(s)} runs {s}" for s in dict.fromkeys(states) if s != "finished"]
        first = [f"Profile {self.sweep.profile}", *repeated]
        lines = [" · ".join([*first, *dict.fromkeys(data), *missing]), "; ".join(remarks)]
        return [line for line in lines if line]


def select_runs(
    layout: FigureLayout, sweep: SweepOutcome, series: Sequence[str], panels: Sequence[str]
) -> FigureRuns:
    """Select the finished runs of a figure, and group them by the axes of series and panels."""
    chosen = sweep.within(layout.where)
    cells = tuple(cell for cell in chosen if cell.status == "finished")

    def name(cell_labels: Sequence[str], axes: Sequence[str]) -> str:
        return ", ".join(map(sweep.title_of, axes, cell_labels))

    def named(axes: Sequence[str]) -> Any:
        ordered = sweep.in_order(axes, {cell.labels_of(axes) for cell in chosen})
        names = [name(labels, axes) for labels in ordered]
        return pd.Categorical([name(cell.labels_of(axes), axes) for cell in cells], names)

    columns: dict[str, Any] = {"series": named(series), "panel": named(panels)}
    columns["setting"] = [
        str([label for axis, label in cell.labels.items() if axis not in series]) for cell in cells
    ]
    columns |= {field: [_field(cell, field) for cell in cells] for field in FIELDS}
    columns["value"] = [math.nan if cell.value is None else cell.value for cell in cells]
    runs = pd.DataFrame(columns).rename_axis("cell")
    rounds = rounds_frame(sweep, cells).reset_index(drop=True)
    rounds = rounds.join(runs[["series", "panel", "setting"]], on="cell")
    return FigureRuns(layout, sweep, cells, runs, rounds, tuple(columns["series"].categories))


def _field(cell: CellOutcome, field: str) -> float:
    """Return λ, α (∞ for an IID partition), ε (∞ without noise) or draw, or NaN if undefined."""
    config, value = cell.result.config, None
    if field == "lam":
        value = config["method"].get("lam")
    elif field == "alpha":
        partition = config["partition"]
        value = {"iid": math.inf, "dirichlet": partition.get("alpha")}.get(partition["kind"])
    elif field == "draw":
        value = config.get("draw")  # None uses the seed
        value = config.get("seed") if value is None else value
    else:
        value = config.get("privacy", {}).get("epsilon")
        if value is None and (report := cell.result.reports.get("privacy")) is not None:
            value = report["epsilon"] or math.inf
    return math.nan if value is None or isinstance(value, str) else float(value)
