"""The figure of singular values: before and after the prox, and of the uploads by series."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from numpy.typing import NDArray

from trishul_ray.report.figures import COLOURS, GREY
from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.report.paper_figures.selection import Selection
from trishul_ray.report.paper_figures.style import (
    Style,
    label_ends,
    new_panels,
    set_labels,
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
    """The content of the figure.

    Attributes:
        prox: The series that ``before`` and ``after`` are of, their difference ``removed`` in units
            of the ``threshold``, and the share ``zeroed``; None if no series has a prox.
        uploaded: Singular values of the uploaded cores by series.
        tails: Shares of a core's squared singular values from each index on, by series.
        names: All series, with those that are missing.
        remarks: Lines for the note.
    """

    prox: str | None
    before: Spectrum | None
    after: Spectrum | None
    removed: Spectrum | None
    threshold: float
    zeroed: float
    uploaded: tuple[tuple[str, Spectrum], ...]
    tails: tuple[tuple[str, Spectrum], ...]
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

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each singular value of each spectrum."""
        prox = (("before the prox", self.before), ("after the prox", self.after))
        drawn = [(what, self.prox, s) for what, s in (*prox, ("removed, in λη", self.removed)) if s]
        drawn += [("uploaded", name, s) for name, s in self.uploaded]
        drawn += [("energy in the tail", name, s) for name, s in self.tails]
        return [
            {"metric": what, "series": name, "x": index, "value": median, "low": low, "high": high}
            | {"n": spectrum.cores}
            for what, name, spectrum in drawn
            for index, (median, low, high) in enumerate(
                zip(spectrum.median, spectrum.low, spectrum.high, strict=True), 1
            )
        ]


def svt_spectra(selection: Selection) -> SpectraData | None:
    """Collect the spectra of the last diagnosed round, of all core heads of one client per run."""
    series = selection.axes("series")
    groups = selection.groups(series)
    uploaded = tuple(
        (group.name, Spectrum.of(values))
        for group in groups
        if (values := _stacked(group.cells, "spectrum_uploaded")) is not None
    )
    tails = tuple(
        (group.name, Spectrum.of(_tails(values)))
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
            None, None, None, None, math.nan, math.nan, uploaded, tails, names, tuple(remarks)
        )
    cells = with_prox[0].cells
    before, after = _stacked(cells, "spectrum_before"), _stacked(cells, "spectrum_after")
    assert before is not None and after is not None
    thresholds = [c.arrays["spectrum_threshold"] for c in cells if "spectrum_threshold" in c.arrays]
    threshold = float(np.mean(thresholds))
    return SpectraData(
        with_prox[0].name,
        Spectrum.of(before),
        Spectrum.of(after),
        Spectrum.of((before - after) / threshold),
        threshold,
        float((after[np.isfinite(after)] <= 0).mean()),
        uploaded,
        tails,
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


def _tails(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the squared singular values [n, r] from each index on; 1 at the first."""
    squares = np.nan_to_num(values) ** 2
    energy = squares[:, ::-1].cumsum(axis=1)[:, ::-1]
    total = energy[:, :1]
    shares = np.divide(energy, total, out=np.zeros_like(energy), where=total > 0)
    return np.where(np.isfinite(values), shares, np.nan)


def draw_spectra(data: SpectraData, note: Sequence[str]) -> Figure:
    """Draw the spectra on log axes, what the prox removed, and the energy in the tails."""
    count = (2 if data.prox is not None else 0) + (2 if data.uploaded else 0)
    figure, panels = new_panels(count, note)
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {}
    if data.before and data.after and data.removed:
        left, right, *panels = panels
        floor = min(_floor([data.before]), data.threshold / 2 or math.inf)
        drawn = (("before", data.before, _BEFORE), ("after", data.after, _AFTER))
        ends[left] = [_draw(left, s, style, floor, name) for name, s, style in drawn]
        ends[left].append(("threshold λη", len(data.before.median) + 0.5, data.threshold, GREY))
        _finish(left, data.before, f"{data.prox}: {data.zeroed:.1%} zero after the prox")
        _draw(right, data.removed, _AFTER, -math.inf, "")
        _finish(
            right,
            data.removed,
            "removed by the prox",
            f"before − after, in λη = {data.threshold:.2g}",
        )
        right.set_yscale("linear")
        right.set_ylim(0, 1.15)
        for axes, level in ((left, data.threshold), (right, 1.0)):
            axes.axhline(level, color=GREY, linestyle=":", linewidth=1.3)
    if data.uploaded:
        styles, several = styles_of(data.names), len(data.names) > 1
        left, right = panels
        for axes, spectra in ((left, data.uploaded), (right, data.tails)):
            floor = _floor([spectrum for _, spectrum in spectra])
            found = [_draw(axes, s, styles[name], floor, name) for name, s in spectra]
            ends |= {axes: found} if several else {}
        _finish(left, data.uploaded[0][1], "cores s·H as uploaded")
        _finish(right, data.tails[0][1], "energy in the tail of a core", "share from here on")
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


def _finish(axes: Axes, spectrum: Spectrum, title: str, y_label: str = "singular value") -> None:
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.5, len(spectrum.median) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    set_labels(axes, title, "index of the singular value", y_label)
