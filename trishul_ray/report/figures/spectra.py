"""The figure of singular values by series: before and after the prox, and of the uploads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from trishul_ray.report.figures.selection import Band, Selection
from trishul_ray.report.figures.style import (
    COLOURS,
    GREY,
    Style,
    label_ends,
    new_panels,
    set_labels,
    styles_of,
)
from trishul_ray.report.outcomes import Row

#: Arrays of ``diagnostics.npz`` by name.
Arrays = Mapping[str, Any]

_REMARK = (
    "line and band: median and 10–90 % of the core heads of one client (before and after: of the "
    "mean, if the server shrinks it), last round"
)
#: Singular values below this share of the largest are rounding of float32 cores: drawn as zero.
_ROUNDING = 1e-6
#: Digits and sign of an exponent.
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_BEFORE = Style(COLOURS[1], (0, (5, 2)), "s", "")
_AFTER = Style(COLOURS[0], "solid", "o", "")


#: Singular values by index: the median over cores, and 10 % and 90 % quantiles.
Spectrum = tuple[Band, ...]


def _spectrum(values: NDArray[np.float64]) -> Spectrum:
    """Summarize the singular values [n, r] of n cores, NaN beyond the rank of one."""
    low, median, high = np.nanquantile(values, [0.1, 0.5, 0.9], axis=0).tolist()
    return tuple(Band(m, a, b, len(values)) for a, m, b in zip(low, median, high, strict=True))


@dataclass(frozen=True)
class Prox:
    """Singular values of a series' cores before and after the prox with a threshold τ.

    By the rule ``fixed``, τ is λη. ``removed`` is their difference in units of the threshold,
    ``zeroed`` the share of zeros after.
    """

    series: str
    before: Spectrum
    after: Spectrum
    removed: Spectrum
    threshold: float
    zeroed: float


@dataclass(frozen=True)
class Uploaded:
    """Singular values of the uploaded cores of a series.

    ``tail`` is the share of a core's squared singular values from each index on.
    """

    series: str
    values: Spectrum
    tail: Spectrum


@dataclass(frozen=True)
class SpectraData:
    """The content of the figure; ``names`` also has the series that are missing."""

    proxes: tuple[Prox, ...]
    uploaded: tuple[Uploaded, ...]
    names: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return each threshold, the share of zeros, and the size of each tail in words."""
        parts = [
            f"{prox.series}: threshold {prox.threshold:.3g}, {prox.zeroed:.1%} of singular values "
            "zero after the prox"
            for prox in self.proxes
        ]
        parts += [
            f"{each.series}: median of the largest singular value {each.values[0].centre:.3g}, of "
            f"the middle one {each.values[len(each.values) // 2].centre:.3g}"
            for each in self.uploaded
        ]
        return f"{'; '.join(parts)}."

    def rows(self) -> list[Row]:
        """Return one row for each singular value of each spectrum."""
        drawn: list[tuple[str, str, Spectrum]] = []
        for prox in self.proxes:
            spectra = {"before the prox": prox.before, "after the prox": prox.after}
            spectra |= {"removed, in τ": prox.removed}
            drawn += [(what, prox.series, spectrum) for what, spectrum in spectra.items()]
        drawn += [("uploaded", each.series, each.values) for each in self.uploaded]
        drawn += [("energy in the tail", each.series, each.tail) for each in self.uploaded]
        return [
            {"metric": what, "series": name, "x": index} | band.row()
            for what, name, spectrum in drawn
            for index, band in enumerate(spectrum, 1)
        ]


def svt_spectra(selection: Selection) -> SpectraData | None:
    """Collect the spectra of the last diagnosed round, of all core heads of one client per run."""
    groups = selection.groups(selection.axes("series"))
    arrays = {group.name: [cell.arrays for cell in group.cells] for group in groups}
    proxes = [each for name, runs in arrays.items() if (each := _prox(name, runs))]
    uploaded = [found for name, runs in arrays.items() if (found := _uploaded(name, runs))]
    if not uploaded and not proxes:
        return None
    remarks = [_REMARK, *selection.pooled([group.cells for group in groups])]
    empty = [cell for cell in selection.finished if "spectrum_uploaded" not in cell.arrays]
    if empty:
        remarks.append(f"without cores: {'; '.join(selection.names(empty))}")
    return SpectraData(tuple(proxes), tuple(uploaded), tuple(arrays), tuple(remarks))


def spectra_of_run(name: str, arrays: Arrays) -> SpectraData:
    """Return the spectra of one run, from arrays as a finished cell has them."""
    proxes = [each] if (each := _prox(name, [arrays])) else []
    uploaded = [found] if (found := _uploaded(name, [arrays])) else []
    return SpectraData(tuple(proxes), tuple(uploaded), (name,), (_REMARK,))


def _prox(name: str, runs: Sequence[Arrays]) -> Prox | None:
    before, after = (_stacked(runs, f"spectrum_{when}") for when in ("before", "after"))
    if before is None or after is None:
        return None
    # One threshold of all cores of a run, or one of each.
    found = [
        np.broadcast_to(arrays["spectrum_threshold"], len(arrays["spectrum_before"]))
        for arrays in runs
        if "spectrum_threshold" in arrays
    ]
    each = np.concatenate(found)
    if not each.any():  # nothing was removed
        return None
    units = np.where(each > 0, each, np.nan)[:, None]
    return Prox(
        name,
        _spectrum(before),
        _spectrum(after),
        _spectrum((before - after) / units),
        float(np.mean(each)),
        float((after[np.isfinite(after)] <= 0).mean()),
    )


def _uploaded(name: str, runs: Sequence[Arrays]) -> Uploaded | None:
    values = _stacked(runs, "spectrum_uploaded")
    if values is None:
        return None
    return Uploaded(name, _spectrum(values), _spectrum(_tails(values)))


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


def draw_spectra(data: SpectraData, note: Sequence[str]) -> Figure:
    """Draw each prox's spectra on log axes, what they removed, and the energy in the tails."""
    proxes, styles = data.proxes, styles_of(data.names)
    count = len(proxes) + bool(proxes) + 2 * bool(data.uploaded)
    figure, panels = new_panels(count, note, height=2.7 if len(proxes) > 1 else 3.2)
    ends: dict[Axes, list[tuple[str, float, float, str]]] = {}
    for prox in proxes:
        axes, *panels = panels
        floor = min(_floor([prox.before]), prox.threshold / 2)
        drawn = (("before", prox.before, _BEFORE), ("after", prox.after, _AFTER))
        ends[axes] = [_draw(axes, s, style, floor, name) for name, s, style in drawn]
        ends[axes].append(("threshold τ", len(prox.before) + 0.5, prox.threshold, GREY))
        _finish(axes, prox.before, f"{prox.series}: {prox.zeroed:.1%} zero after the prox")
        axes.axhline(prox.threshold, color=GREY, linestyle=":", linewidth=1.3)
    if proxes:
        axes, *panels = panels
        several = len(proxes) > 1
        looks = styles if several else {proxes[0].series: _AFTER}
        found = [_draw(axes, p.removed, looks[p.series], -math.inf, p.series) for p in proxes]
        ends |= {axes: found} if several else {}
        unit = "in τ" if several else f"in τ = {proxes[0].threshold:.2g}"
        longest = max((p.removed for p in proxes), key=len)
        _finish(axes, longest, "removed by the prox", f"before − after, {unit}")
        axes.set_yscale("linear")
        axes.set_ylim(0, 1.15)
        axes.axhline(1.0, color=GREY, linestyle=":", linewidth=1.3)
    if data.uploaded:
        several = len(data.names) > 1
        left, right = panels
        values = [(each.series, each.values) for each in data.uploaded]
        tails = [(each.series, each.tail) for each in data.uploaded]
        for axes, spectra in ((left, values), (right, tails)):
            floor = _floor([spectrum for _, spectrum in spectra])
            found = [_draw(axes, s, styles[name], floor, name) for name, s in spectra]
            ends |= {axes: found} if several else {}
        _finish(left, values[0][1], "cores s·H as uploaded")
        _finish(right, tails[0][1], "energy in the tail of a core", "share from here on")
    label_ends(figure, ends)
    return figure


def _floor(spectra: list[Spectrum]) -> float:
    """Return what is drawn as zero: the size of rounding errors."""
    return _ROUNDING * max(spectrum[0].high for spectrum in spectra)


def _draw(
    axes: Axes, spectrum: Spectrum, style: Style, floor: float, name: str
) -> tuple[str, float, float, str]:
    """Draw one spectrum down to ``floor``; return its name, its end and its colour."""
    low, median, high = (
        np.where(np.asarray(values) > floor, values, np.nan)
        for values in zip(*((band.low, band.centre, band.high) for band in spectrum), strict=True)
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


def _power_of_ten(value: float) -> str:
    """Return a tick of a log axis, such as ``10⁻³``: Matplotlib's own is math, which is off."""
    return f"10{str(round(math.log10(value))).translate(_RAISED)}" if value > 0 else ""


def _finish(axes: Axes, spectrum: Spectrum, title: str, y_label: str = "singular value") -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.5, len(spectrum) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    set_labels(axes, title, "index of the singular value", y_label)
