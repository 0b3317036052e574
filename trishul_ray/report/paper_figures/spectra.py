"""The figure of singular values: before and after the prox, and of the uploads by series."""

import math
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from trishul_ray.report.figures import COLOURS, GREY
from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Selection
from trishul_ray.report.paper_figures.style import (
    Style,
    label_ends,
    new_panels,
    set_title,
    styles_of,
)

#: Singular values below this share of the largest are rounding of float32 cores: drawn as zero.
_ROUNDING = 1e-6
_BEFORE = Style(COLOURS[1], (0, (5, 2)), "s", "")
_AFTER = Style(COLOURS[0], "solid", "o", "")


@dataclass(frozen=True)
class Spectrum:
    """Singular values by index over cores: median, and 10 % and 90 % quantiles."""

    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    cores: int

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Spectrum":
        """Summarize [n, r], NaN beyond the rank of a core."""
        low, median, high = np.nanquantile(values, [0.1, 0.5, 0.9], axis=0).tolist()
        return cls(tuple(median), tuple(low), tuple(high), len(values))


@dataclass(frozen=True)
class SpectraData:
    """The content of the figure. ``prox`` is the series that ``before`` and ``after`` are of."""

    prox: str | None
    before: Spectrum | None
    after: Spectrum | None
    removed: Spectrum | None
    threshold: float
    zeroed: float
    uploaded: tuple[tuple[str, Spectrum], ...]
    names: tuple[str, ...]
    remarks: tuple[str, ...]

    def describe(self) -> str:
        """Return the threshold, the share of zeros, and the size of each tail in words."""
        parts = []
        if self.prox is not None:
            parts.append(
                f"{self.prox}: threshold {self.threshold:.3g}, {self.zeroed:.1%} of singular "
                "values zero after the prox"
            )
        parts += [
            f"{name}: median of the largest singular value {s.median[0]:.3g}, of the middle one "
            f"{s.median[len(s.median) // 2]:.3g}"
            for name, s in self.uploaded
        ]
        return f"{'; '.join(parts)}."


def svt_spectra(selection: Selection) -> SpectraData | None:
    """Collect the spectra of the last diagnosed round, of all core heads of one client per run."""
    series = selection.axes("series")
    groups = selection.groups(series)
    uploaded = tuple(
        (group.name, Spectrum.of(values))
        for group in groups
        if (values := _stacked(group.cells, "spectrum_uploaded")) is not None
    )
    wanted = selection.options["prox"]
    with_prox = [
        group
        for group in groups
        if (wanted is None or group.name == wanted)
        and _stacked(group.cells, "spectrum_before") is not None
    ]
    if not uploaded and not with_prox:
        return None
    remarks = ["line and band: median and 10–90 % of the core heads of one client, last round"]
    remarks += selection.pooled([group.cells for group in groups])
    empty = [cell for cell in selection.finished if "spectrum_uploaded" not in cell.arrays]
    if empty:
        remarks.append(f"without cores: {'; '.join(selection.names(empty))}")
    names = tuple(group.name for group in groups)
    if not with_prox:
        return SpectraData(
            None, None, None, None, math.nan, math.nan, uploaded, names, tuple(remarks)
        )
    cells = with_prox[0].cells
    before, after = _stacked(cells, "spectrum_before"), _stacked(cells, "spectrum_after")
    assert before is not None and after is not None
    thresholds = [c.arrays["spectrum_threshold"] for c in cells if "spectrum_threshold" in c.arrays]
    return SpectraData(
        with_prox[0].name,
        Spectrum.of(before),
        Spectrum.of(after),
        Spectrum.of(before - after),
        float(np.mean(thresholds)),
        float((after[np.isfinite(after)] <= 0).mean()),
        uploaded,
        names,
        tuple(remarks),
    )


def _stacked(cells: tuple[CellOutcome, ...], name: str) -> NDArray[np.float64] | None:
    """Return the spectra [n, r] of several cells, padded with NaN to one rank."""
    found = [cell.arrays[name] for cell in cells if name in cell.arrays]
    if not found:
        return None
    width = max(values.shape[1] for values in found)
    return np.concatenate(
        [
            np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=np.nan)
            for values in found
        ]
    )


def draw_spectra(data: SpectraData) -> Figure:
    """Draw the spectra on log axes, and what the prox removed from each singular value."""
    count = (2 if data.prox is not None else 0) + bool(data.uploaded)
    figure, panels = new_panels(count, 3, width=4.2, height=3.2)
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {}
    if data.before and data.after and data.removed:
        left, middle, *panels = panels
        floor = min(_floor([data.before]), data.threshold / 2 or math.inf)
        drawn = (("before", data.before, _BEFORE), ("after", data.after, _AFTER))
        ends[left] = [_draw(left, s, style, floor, name) for name, s, style in drawn]
        left.axhline(data.threshold, color=GREY, linestyle=":", linewidth=1.3)
        ends[left].append(("threshold λη", 1, data.threshold, GREY))
        _finish(left, data.before, f"{data.prox}: {data.zeroed:.1%} zero after the prox")
        _draw(middle, data.removed, _AFTER, -math.inf, "")
        middle.axhline(data.threshold, color=GREY, linestyle=":", linewidth=1.3)
        _finish(middle, data.removed, "removed by the prox: at most the threshold (dotted)")
        middle.set_yscale("linear")
        middle.set_ylim(0, 1.25 * max(data.threshold, *data.removed.high))
        middle.set_ylabel("before minus after", fontsize=9)
    if data.uploaded:
        styles = styles_of(data.names)
        floor = _floor([spectrum for _, spectrum in data.uploaded])
        right = panels[0]
        ends[right] = [_draw(right, s, styles[name], floor, name) for name, s in data.uploaded]
        _finish(right, data.uploaded[0][1], "cores s·H as uploaded")
        if len(data.names) == 1:
            del ends[right]
    label_ends(figure, ends)
    return figure


def _floor(spectra: list[Spectrum]) -> float:
    """Return what is drawn as zero: the size of rounding errors."""
    return _ROUNDING * max(spectrum.high[0] for spectrum in spectra)


def _draw(
    axes: Axes, spectrum: Spectrum, style: Style, floor: float, name: str
) -> tuple[str, float, float, str]:
    """Draw one spectrum down to ``floor``; return its name, its end and its colour."""
    low, median, high = (
        np.where(np.asarray(values) > floor, values, np.nan)
        for values in (spectrum.low, spectrum.median, spectrum.high)
    )
    index = np.arange(1, len(median) + 1)
    bottom = np.where(np.isfinite(low), low, floor)
    axes.fill_between(index, bottom, high, color=style.colour, alpha=0.15, linewidth=0)
    axes.plot(
        index, median, color=style.colour, linestyle=style.dash, linewidth=1.5,
        marker=style.marker, markersize=3.5, markevery=max(1, len(index) // 12),
    )  # fmt: skip
    known = np.flatnonzero(np.isfinite(median))
    last = int(known[-1]) if known.size else 0
    return name, float(index[last]), float(np.nan_to_num(median[last], nan=floor)), style.colour


def _finish(axes: Axes, spectrum: Spectrum, title: str) -> None:
    axes.set_yscale("log")
    axes.set_xlim(0.5, len(spectrum.median) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.set_xlabel("index of the singular value", fontsize=9)
    axes.set_ylabel("singular value", fontsize=9)
    set_title(axes, title)
