"""Kinds of figures. Each kind computes the panels of a figure from its runs."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from trishul_ray.report.figures.plots import bars, heatmap, lines, scatter, spectra
from trishul_ray.report.figures.runs import FIELDS, FigureRuns
from trishul_ray.report.frame import COSTS
from trishul_ray.report.layouts import FigureKind
from trishul_ray.report.outcomes import is_loss

if TYPE_CHECKING:
    from pandas import DataFrame

#: Matrices that diagnostics describe, keyed by the prefix of their metrics.
SUBJECTS = {"delta_": "updates (uploads − broadcast)", "": "uploaded cores s·H"}
SIMILARITY = "principal_angle_similarity"
#: Labels of x axes, keyed by column.
X_LABELS: Mapping[str, str] = {
    "round": "communication round",
    "lam": "λ",
    "alpha": "Dirichlet α (∞: IID)",
    **{name: cost.label for name, cost in COSTS.items()},
    "epsilon": "ε per client (∞: no noise)",
    "draw": "draw",
}
_SPREAD = "lines: mean ± standard deviation over runs"
_LATE = "diagnostics: mean of the last 10 rounds with diagnostics"
_CHANCE = "dotted: similarity of unrelated subspaces of this size"


@dataclass(frozen=True)
class Panel:
    """A panel of a figure: numbers, and the function that draws them.

    Attributes:
        title: Title of the panel.
        x: Label of the x axis.
        metric: Label of the y axis; also the ``metric`` of ``points`` without such a column.
        points: Numbers, in the format of :mod:`trishul_ray.report.figures.plots`.
        draw: Called as ``draw(ax, points, looks)``.
        looks: Names of the lines, if they are not the series.
    """

    title: str
    x: str
    metric: str
    points: "DataFrame"
    draw: Callable[..., None]
    looks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
        panels: Yields the panels, given the runs.
        note: Remarks below the figure.
        series: Candidate axes; the first axis that the sweep has names the series by default.
        by: Candidate axes for panels, like ``series``.
        columns: Number of panels per row.
    """

    panels: Callable[[FigureRuns], Iterator[Panel]]
    note: tuple[str, ...] = ()
    series: tuple[str, ...] = ("method",)
    by: tuple[str, ...] = ()
    columns: int = 2


def _line(
    runs: FigureRuns,
    title: str,
    metric: str,
    frame: "DataFrame",
    column: str,
    x: str = "round",
    *,
    percent: bool = False,
    level: float = math.nan,
    paper: str = "",
) -> Iterator[Panel]:
    """Yield a panel of lines over ``x`` if there are values."""
    points = runs.means(frame, column, x, paper, 100.0 if percent else 1.0)
    draw = partial(lines, ranked=x in FIELDS, percent=percent, level=level)
    if len(points):
        yield Panel(title, X_LABELS[x], metric, points, draw)


def _metric(runs: FigureRuns) -> tuple[str, str, bool]:
    """Return the metric (empty if cells differ), its label, and whether it is a fraction."""
    names = [runs.layout.metric] if runs.layout.metric else [cell.metric for cell in runs.cells]
    names = [*dict.fromkeys(names)]
    shown = " or ".join(name.replace("_", " ") for name in names)
    label = shown if runs.layout.metric or "validation" in shown else f"test {shown}"
    return names[0] if len(names) == 1 else "", label, not any(map(is_loss, names))


def scores(runs: FigureRuns, x: str) -> Iterator[Panel]:
    """Yield the metric over ``x``, a column of rounds or a field, in one panel per label."""
    name, label, percent = _metric(runs)
    column, frame = runs.layout.metric or "value", runs.rounds
    if x in FIELDS:
        frame = runs.at(**({column: runs.last(column, 1)} if runs.layout.metric else {}))
    for title, rows in frame.groupby("panel", observed=True):
        yield from _line(runs, str(title), label, rows, column, x, percent=percent, paper=name)


def _diagnostic(
    runs: FigureRuns, metric: str, shown: str, x: str = "round", **options: Any
) -> Iterator[Panel]:
    """Yield a diagnostic of updates and cores per round, or its late mean if ``x`` is a field."""
    for prefix, title in SUBJECTS.items():
        late = runs.at(late=runs.last(prefix + metric)) if x in FIELDS else None
        frame, column = (runs.rounds, prefix + metric) if late is None else (late, "late")
        # The paper's numbers refer to the updates.
        paper = metric if prefix and late is not None and metric == SIMILARITY else ""
        yield from _line(runs, title, shown, frame, column, x, paper=paper, **options)


def spectral_alignment(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the similarity of the clients' subspaces and dominant directions per round."""
    level = _chance(runs)
    yield from _diagnostic(runs, SIMILARITY, "principal-angle similarity", level=level)
    yield from _diagnostic(runs, "dominant_similarity", "dominant-vector similarity")


def _chance(runs: FigureRuns) -> float:
    """Return the similarity k/r of unrelated subspaces, or NaN if k or r differ between cores."""
    found = {
        min(1.0, cell.result.config["evaluation"]["top_k"] / rank)
        for cell in runs.cells
        if "spectrum_uploaded" in cell.arrays
        for rank in np.unique(np.isfinite(cell.arrays["spectrum_uploaded"]).sum(axis=1))
    }
    return float(found.pop()) if len(found) == 1 else math.nan


def spectral_diagnostics(runs: FigureRuns) -> Iterator[Panel]:
    """Yield entropy, effective rank, variance between clients, and thresholds per round.

    As in the paper, one panel shows the variance relative to RAVAN in round 1 of the same setting.
    Another panel shows it relative to the squared norm of the mean update.
    """
    rounds = runs.rounds
    yield from _diagnostic(runs, "spectral_entropy", "spectral entropy")
    yield from _diagnostic(runs, "effective_rank", "effective rank")
    title, unit = "variance between clients", "absolute (no RAVAN)"
    if "aggregation_variance" in rounds:
        ravan = [place for place, cell in enumerate(runs.cells) if cell.method == "ravan"]
        first = rounds[rounds["cell"].isin(ravan) & (rounds["round"] == 1)]
        levels = first.groupby("setting")["aggregation_variance"].first()
        variance = rounds["aggregation_variance"]
        if (levels > 0).any():
            unit = "relative to RAVAN in round 1"
            variance = variance / rounds["setting"].map(levels[levels > 0])
        yield from _line(runs, title, unit, rounds.assign(variance=variance), "variance")
    relative = "relative to |mean update|²"
    yield from _line(runs, title, relative, rounds, "delta_relative_variance")
    yield from _line(runs, "threshold of singular values", "mean τ", rounds, "svt_threshold")
    title, shown = "set to zero by the prox", "singular values"
    yield from _line(runs, title, shown, rounds, "svt_zeroed", percent=True)


def lambda_diagnostics(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the metric, late spectral entropy and fraction of zeroed singular values over λ."""
    name, label, percent = _metric(runs)
    title = "after the last round"
    yield from _line(runs, title, label, runs.at(), "value", "lam", percent=percent, paper=name)
    yield from _diagnostic(runs, "spectral_entropy", "spectral entropy", "lam")
    title, frame = "set to zero by the last prox of a round", runs.at(zero=runs.last("svt_zeroed"))
    yield from _line(runs, title, "singular values", frame, "zero", "lam", percent=True)


def alpha_diagnostics(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the late similarity of subspaces and spectral entropy over α."""
    level = _chance(runs)
    yield from _diagnostic(runs, SIMILARITY, "principal-angle similarity", "alpha", level=level)
    yield from _diagnostic(runs, "spectral_entropy", "spectral entropy", "alpha")


def accuracy_inconsistency(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the final metric over 1 minus the late similarity, connected in the order of α."""
    name, label, percent = _metric(runs)
    across = "inconsistency index"
    for prefix, title in SUBJECTS.items():
        similarity = runs.last(prefix + SIMILARITY)
        frame = runs.at(index=1.0 - similarity).dropna(subset=["index", "value", "alpha"])
        index = runs.means(frame, "index", "alpha")
        score = runs.means(frame, "value", "alpha", name, 100.0 if percent else 1.0)
        if len(index):
            both = [index.assign(metric=across), score.assign(metric=label)]
            points = pd.concat(both).sort_values(["series", "x"], kind="stable")
            draw = partial(scatter, across=across, percent=percent)
            yield Panel(title, "spectral inconsistency index", label, points, draw)


def svt_spectra(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the singular values of all cores of one client in the last diagnosed round.

    Each series has a panel with the values before and after the prox. Three panels compare the
    series: removed values, uploaded values, and energy in the tail.
    """
    removed, uploads, tails = list[Any](), list[Any](), list[Any]()
    x, value = "index of the singular value", "singular value"
    for name, part in runs.runs.groupby("series", observed=True):
        arrays = [runs.cells[place].arrays for place in part.index]
        before, after = _cores(arrays, "spectrum_before"), _cores(arrays, "spectrum_after")
        each = [
            np.broadcast_to(a["spectrum_threshold"], len(a["spectrum_before"]))
            for a in arrays
            if "spectrum_threshold" in a
        ]
        if len(before) and each and (threshold := np.concatenate(each)).any():
            both = {"before the prox": before, "after the prox": after}
            points = pd.concat(
                _quantiles(values, name).assign(metric=when) for when, values in both.items()
            )
            zeroed = (after[np.isfinite(after)] <= 0).mean()
            draw = partial(spectra, by="metric", level=float(threshold.mean()))
            title = f"{name}: {zeroed:.1%} zero after the prox (dotted: threshold τ)"
            yield Panel(title, x, value, points, draw, (*both,))
            units = np.where(threshold > 0, threshold, np.nan)[:, None]
            removed.append(_quantiles((before - after) / units, name))
        if len(sent := _cores(arrays, "spectrum_uploaded")):
            uploads.append(_quantiles(sent, name))
            energy = np.nan_to_num(sent[:, ::-1] ** 2).cumsum(axis=1)[:, ::-1]
            total = np.where(energy[:, :1] > 0, energy[:, :1], 1.0)
            tails.append(_quantiles(np.where(np.isfinite(sent), energy / total, np.nan), name))
    flat, logs = partial(spectra, log_y=False, level=1.0), partial(spectra)
    for title, metric, parts, draw in (
        ("removed by the prox: before − after", "removed, in τ", removed, flat),
        ("cores s·H as uploaded", "uploaded", uploads, logs),
        ("fraction of the energy from here on", "energy in the tail", tails, logs),
    ):
        if parts:
            yield Panel(title, x, metric, pd.concat(parts), draw)


def _cores(arrays: list[Any], name: str) -> np.ndarray:
    """Concatenate the spectra [n, r] of several runs, padding ranks with NaN."""
    found = [pd.DataFrame(each[name]) for each in arrays if name in each]
    return pd.concat(found).to_numpy() if found else np.empty((0, 0))


def _quantiles(values: np.ndarray, name: Any) -> "DataFrame":
    """Summarize the singular values [n, r] of n cores per index; NaN pads cores of lower rank."""
    low, median, high = np.nanquantile(values, [0.1, 0.5, 0.9], axis=0)
    index = np.arange(1, values.shape[1] + 1)
    columns = {"series": name, "x": index, "value": median, "low": low, "high": high}
    return pd.DataFrame({**columns, "n": len(values)})


def heads(runs: FigureRuns, *, dots: bool) -> Iterator[Panel]:
    """Yield the core heads and the squared norms per block, in two panels per backbone."""
    rows = [
        (place, cell.result.config["model"]["name"], number, count, norms[block])
        for place, cell in enumerate(runs.cells)
        for norms in [cell.result.block_squared_norms]
        for number, (block, count) in enumerate(cell.result.heads.items())
    ]
    frame = pd.DataFrame(rows, columns=["cell", "model", "block", "heads", "norm"])
    frame, x = frame.join(runs.runs["series"], on="cell"), "block, from input to output"
    for model, part in frame.groupby("model", sort=False):
        draw = partial(bars, dots=dots)
        yield Panel(str(model), x, "heads", runs.means(part, "heads", "block"), draw)
        metric = "squared norm"
        norms = part.groupby("block")["norm"].mean().rename_axis("x").reset_index(name="value")
        norms = norms.assign(series=metric, low=norms["value"], high=norms["value"])
        yield Panel(f"{model}: weights", x, metric, norms, partial(bars, dots=True), (metric,))


def overhead(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the duration of a client's local steps, and the overhead over RAVAN.

    The first round of each run is excluded as a warm-up. As in the paper, the overhead is a ratio
    of medians.
    """
    if "client_seconds" not in runs.rounds:
        return
    timed = runs.rounds.dropna(subset=["client_seconds"])
    first = timed.groupby("cell")["round"].transform("min")
    many = timed.groupby("cell")["round"].transform("size") > 1
    timed = timed[(timed["round"] > first) | ~many]
    ravan = timed[[runs.cells[place].method == "ravan" for place in timed["cell"]]]
    seconds, ratios = list[Any](), list[Any]()
    for (group, name), part in timed.groupby(["panel", "series"], observed=True):
        own, paper = part["client_seconds"], runs.paper("seconds_per_round", part["cell"])
        seconds.append((name, group, *own.quantile([0.5, 0.1, 0.9]), len(own), paper))
        pair = part.merge(ravan, on=["setting", "round"], suffixes=("", "_ravan"))
        if len(pair) and runs.cells[part["cell"].iloc[0]].method != "ravan":
            ours, theirs = pair["client_seconds"], pair["client_seconds_ravan"]
            ends = (ours / theirs - 1).quantile([0.1, 0.9])
            paper = runs.paper("overhead", part["cell"]) / 100
            ratio = ours.median() / theirs.median() - 1
            ratios.append((name, group, ratio, *ends, len(pair), paper))
    columns = ["series", "x", "value", "low", "high", "n", "paper"]
    hardware = (cell.result.hardware for cell in runs.cells)
    machines = {", ".join(h.gpus) or f"{h.processor}, {h.cpus} CPUs": None for h in hardware}
    title, metric = f"local steps of a client in a round, {'; '.join(machines)}", "seconds"
    if seconds:
        points = pd.DataFrame(seconds, columns=columns)
        points["text"] = points["value"].map("{:.2g} s".format)
        yield Panel(title, "", f"{metric} of local steps", points, bars)
    if ratios:
        points = pd.DataFrame(ratios, columns=columns)
        points["text"] = points["value"].map("{:+.1%}".format)
        draw = partial(bars, dots=True, percent=True)
        yield Panel("overhead over RAVAN", "", "overhead", points, draw)


def covariance(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the similarity matrix of all clients' updates after the last round, per series.

    Only the setting that most series have finished is shown, because clients have other data with
    another seed. The paper calls the matrix a covariance, but it is not centered.
    """
    matrix = runs.layout.metric or "cosine"
    has = [place for place, cell in enumerate(runs.cells) if f"everyone_{matrix}" in cell.arrays]
    found = runs.runs.loc[has]
    if not len(found):
        return
    one = found.groupby("setting", sort=False)["series"].size().idxmax()
    parts, rests = {}, {}
    for place, row in found[found["setting"] == one].iterrows():
        cell = runs.cells[int(str(place))]
        clients, values = cell.arrays["everyone_clients"], cell.arrays[f"everyone_{matrix}"]
        other, this = np.meshgrid(clients, clients)
        name = f"{row['series']}, seed {cell.labels.get('seed', '')}"
        columns = {"series": row["series"], "y": this.ravel(), "x": other.ravel()}
        parts[name] = pd.DataFrame({**columns, "value": values.ravel()})
        rests[name] = parts[name].loc[parts[name]["x"] != parts[name]["y"], "value"]
    limit = max(float(rest.abs().max()) for rest in rests.values()) or 1.0
    label = f"{matrix.replace('_', ' ')} of updates"
    draw = partial(heatmap, limit=limit, label=label)
    for name, points in parts.items():
        mean, low, high = rests[name].mean(), rests[name].min(), rests[name].max()
        title = f"{name}: mean {mean:.2g} off the diagonal, {low:.2g} to {high:.2g}"
        yield Panel(title, "client", "client", points.assign(metric=label), draw)


def personal(runs: FigureRuns) -> Iterator[Panel]:
    """Yield the gain of each client's personalized model over the global model, sorted."""
    rows = [
        (place, (rank + 0.5) / len(gains), gain)
        for place, cell in enumerate(runs.cells)
        for own, shared in [(cell.result.personal, cell.result.per_client)]
        for gains in [sorted(100 * (own[client] - shared[client]) for client in own)]
        for rank, gain in enumerate(gains)
    ]
    gains = pd.DataFrame(rows, columns=["cell", "clients", "gain"])
    frame, x = gains.join(runs.runs, on="cell"), "fraction of clients, sorted by gain"
    metric = " or ".join(dict.fromkeys(cell.result.headline for cell in runs.cells))
    draw, metric = partial(lines, level=0.0), f"{metric}: personalized − global, points"
    for title, part in frame.groupby("panel", observed=True):
        yield Panel(str(title), x, metric, runs.means(part, "gain", "clients"), draw)


_SCORES = partial(Kind, note=(_SPREAD,), by=("dataset",))
_HEADS = partial(
    Kind, note=("heads per adapted matrix of a block; mean over runs",),
    series=("allocation", "method"),
)  # fmt: skip
#: Kinds of figures, keyed by name.
KINDS: Mapping[FigureKind, Kind] = {
    "convergence": _SCORES(partial(scores, x="round")),
    "megabytes": _SCORES(partial(scores, x="megabytes")),
    "hours": _SCORES(partial(scores, x="hours")),
    "lambda_accuracy": _SCORES(partial(scores, x="lam"), series=()),
    "heterogeneity": _SCORES(partial(scores, x="alpha")),
    "privacy": _SCORES(partial(scores, x="epsilon")),
    "draws": _SCORES(partial(scores, x="draw")),
    "personal": _SCORES(
        personal, note=(_SPREAD, "a client that never participated has the global model: 0")
    ),
    "spectral_alignment": Kind(spectral_alignment, (_SPREAD, _CHANCE)),
    "spectral_diagnostics": Kind(spectral_diagnostics, (_SPREAD,)),
    "lambda_diagnostics": Kind(lambda_diagnostics, (_SPREAD, _LATE), series=()),
    "alpha_diagnostics": Kind(alpha_diagnostics, (_SPREAD, _LATE, _CHANCE)),
    "accuracy_inconsistency": Kind(
        accuracy_inconsistency,
        ("next to each point: α", "bars: mean ± standard deviation over runs", _LATE),
    ),
    "svt_spectra": Kind(
        svt_spectra, ("lines: median and 10–90% of the cores of one client, last round",)
    ),
    "waterfilling": _HEADS(partial(heads, dots=False)),
    "waterfilling_layerwise": _HEADS(partial(heads, dots=True)),
    "overhead": Kind(
        overhead, ("median and 10–90% of all rounds except each run's first",),
        by=("model", "dataset"), columns=1,
    ),
    "covariance": Kind(
        covariance, ("all clients, each trained once after the last round",)
    ),
}  # fmt: skip
