"""The figure of singular values by series: before and after the prox, and of the uploads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trishul_ray.report.figures.chart import Axis, Band, Chart, Panel, Row
from trishul_ray.report.figures.kind import FIGURES, FigureKind
from trishul_ray.report.figures.selection import Selection

#: Content of ``diagnostics.npz`` by name.
Arrays = Mapping[str, Any]

_REMARK = (
    "line and band: median and 10–90 % of the core heads of one client (before and after: of the "
    "mean, if the server shrinks it), last round"
)
BEFORE, AFTER, REMOVED = "before the prox", "after the prox", "removed, in τ"
UPLOADED, TAIL = "uploaded", "energy in the tail"
_COLUMNS = {name: name for name in ("metric", "series", "x", "value", "low", "high", "n")}
_X, _VALUE = Axis("index of the singular value", "log"), Axis("singular value", "log")


@FIGURES.register("svt_spectra")
class Spectra(FigureKind):
    """The spectra of the last diagnosed round, of all core heads of one client per run."""

    def chart(self, selection: Selection) -> Chart | None:
        """Return the spectra of each prox, what it has removed, and those of the uploads."""
        groups = selection.groups(selection.axes("series"))
        arrays = {group.name: [cell.arrays for cell in group.cells] for group in groups}
        remarks = [_REMARK, *selection.pooled([group.cells for group in groups])]
        empty = [cell for cell in selection.finished if "spectrum_uploaded" not in cell.arrays]
        if empty:
            remarks.append(f"without cores: {'; '.join(selection.names(empty))}")
        return _chart([*_prox_panels(arrays), *_uploaded_panels(arrays)], arrays, remarks)


def prox_of_run(name: str, arrays: Arrays) -> Chart | None:
    """Return the spectra of one run before and after its prox; None if it removed nothing."""
    return _chart(_prox_panels({name: [arrays]}), [name], [_REMARK])


def uploaded_of_run(name: str, arrays: Arrays) -> Chart | None:
    """Return the spectra of the uploads of one run; None for a method without cores."""
    return _chart(_uploaded_panels({name: [arrays]}), [name], [_REMARK])


def _chart(
    panels: Sequence[Panel], names: Sequence[str] | Mapping[str, Any], remarks: Sequence[str]
) -> Chart | None:
    if not panels:
        return None
    several = sum(panel.by == "metric" for panel in panels) > 1
    # Before, after and removed by series, then uploads and tails.
    rows = [row for panel in panels for row in panel.rows]
    series = list(names)
    ours = [row for row in rows if row.metric in (BEFORE, AFTER, REMOVED)]
    listed = sorted(ours, key=lambda row: series.index(row.series))
    listed += [row for row in rows if row.metric in (UPLOADED, TAIL)]
    height = 2.7 if several else 3.2
    return Chart(
        tuple(panels), tuple(names), _COLUMNS, tuple(remarks), tuple(listed), height=height
    )


def _prox_panels(arrays: Mapping[str, Sequence[Arrays]]) -> list[Panel]:
    """Return a panel of each series with its threshold τ (λη by the rule ``fixed``), and one more.

    The last shows what the prox has removed in units of the threshold.
    """
    panels: list[Panel] = []
    removed: list[Row] = []
    thresholds = []
    for name, runs in arrays.items():
        before, after = (_stacked(runs, f"spectrum_{when}") for when in ("before", "after"))
        if before is None or after is None:
            continue
        # One threshold of all cores of a run, or one of each.
        found = [
            np.broadcast_to(each["spectrum_threshold"], len(each["spectrum_before"]))
            for each in runs
            if "spectrum_threshold" in each
        ]
        each = np.concatenate(found)
        if not each.any():  # nothing was removed
            continue
        thresholds.append(float(np.mean(each)))
        zeroed = float((after[np.isfinite(after)] <= 0).mean())
        rows = [*_rows(BEFORE, name, before), *_rows(AFTER, name, after)]
        units = np.where(each > 0, each, np.nan)[:, None]
        removed += _rows(REMOVED, name, (before - after) / units)
        levels = {"threshold τ": thresholds[-1]}
        title = f"{name}: {zeroed:.1%} zero after the prox"
        panels.append(Panel(tuple(rows), "line", title, _X, _VALUE, levels=levels, by="metric"))
    if panels:
        unit = "in τ" if len(panels) > 1 else f"in τ = {thresholds[0]:.2g}"
        y, one = Axis(f"before − after, {unit}"), {"": 1.0}
        panels.append(Panel(tuple(removed), "line", "removed by the prox", _X, y, levels=one))
    return panels


def _uploaded_panels(arrays: Mapping[str, Sequence[Arrays]]) -> list[Panel]:
    """Return a panel of singular values, and one of the energy in their tails."""
    values: list[Row] = []
    tails: list[Row] = []
    for name, runs in arrays.items():
        if (found := _stacked(runs, "spectrum_uploaded")) is not None:
            values += _rows(UPLOADED, name, found)
            tails += _rows(TAIL, name, _tails(found))
    if not values:
        return []
    share = Axis("share from here on", "log")
    return [
        Panel(tuple(values), "line", "cores s·H as uploaded", _X, _VALUE),
        Panel(tuple(tails), "line", "energy in the tail of a core", _X, share),
    ]


def _rows(metric: str, series: str, values: NDArray[np.float64]) -> list[Row]:
    """Summarize the singular values [n, r] of n cores, NaN beyond the rank of one, by index."""
    low, median, high = np.nanquantile(values, [0.1, 0.5, 0.9], axis=0).tolist()
    return [
        Row.of(Band(m, a, b, len(values)), metric=metric, series=series, x=index)
        for index, (m, a, b) in enumerate(zip(median, low, high, strict=True), 1)
    ]


def _stacked(runs: Sequence[Arrays], name: str) -> NDArray[np.float64] | None:
    """Return the spectra [n, r] of several runs, padded with NaN to one rank."""
    found = [arrays[name] for arrays in runs if name in arrays]
    if not found:
        return None
    width = max(values.shape[1] for values in found)
    pads = [((0, 0), (0, width - values.shape[1])) for values in found]
    padded = [np.pad(v, pad, constant_values=np.nan) for v, pad in zip(found, pads, strict=True)]
    return np.concatenate(padded)


def _tails(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the squared singular values [n, r] from each index on; 1 at the first."""
    squares = np.nan_to_num(values) ** 2
    energy = squares[:, ::-1].cumsum(axis=1)[:, ::-1]
    total = energy[:, :1]
    shares = np.divide(energy, total, out=np.zeros_like(energy), where=total > 0)
    return np.where(np.isfinite(values), shares, np.nan)
