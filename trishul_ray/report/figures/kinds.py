"""The kinds of figures: each computes the panels of a figure from its runs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from trishul_ray.report.figures.plots import bars, heatmap, lines, scatter, spectra
from trishul_ray.report.figures.runs import FigureRuns
from trishul_ray.report.frame import COSTS
from trishul_ray.report.layouts import FigureKind
from trishul_ray.report.outcomes import is_loss

if TYPE_CHECKING:
    from pandas import DataFrame

#: What diagnostics are computed of, by the prefix of their metrics.
SUBJECTS = {"delta_": "updates (uploads − broadcast)", "": "uploaded cores s·H"}
SIMILARITY = "principal_angle_similarity"
#: Labels of x axes, by column.
X_LABELS: Mapping[str, str] = {
    "round": "communication round",
    "lam": "λ",
    "alpha": "Dirichlet α (∞: IID)",
    "epsilon": "ε for each client (∞: no noise)",
    **{name: cost.label for name, cost in COSTS.items() if name != "epsilon"},
}
_SPREAD = "lines: mean ± standard deviation over runs"
_LATE = "diagnostics: mean of the last 10 rounds that have them"
_BLOCKS = "block, from input to output"


@dataclass(frozen=True)
class Panel:
    """Numbers, and how they are drawn: ``draw(ax, points, looks)``.

    ``metric`` names the numbers and labels the y axis, unless points have names of their own.
    """

    title: str
    x: str
    metric: str
    points: "DataFrame"
    draw: Callable[..., None]
    looks: tuple[str, ...] = ()
    second: "DataFrame | None" = None


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
        panels: Returns the panels of runs, and remarks on them.
        series: Axes of the sweep, the first of which that it has names the series by default.
        by: The same for panels.
        columns: Panels next to each other.
        timed: Whether it shows measured seconds, which differ in a repetition.
    """

    panels: Callable[[FigureRuns], tuple[list[Panel], list[str]]]
    series: tuple[str, ...] = ("method",)
    by: tuple[str, ...] = ()
    columns: int = 2
    timed: bool = False


Drawn = tuple[list[Panel], list[str]]


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
) -> list[Panel]:
    """Return a panel of lines over ``x``; none without values."""
    points = runs.means(frame, column, x, paper, 100.0 if percent else 1.0)
    ranked = x in ("lam", "alpha", "epsilon")
    draw = partial(lines, ranked=ranked, percent=percent, level=level)
    return [Panel(title, X_LABELS[x], metric, points, draw)] if len(points) else []


def _metric(runs: FigureRuns) -> tuple[str, str, bool]:
    """Return the metric, its label, and whether it is a fraction."""
    names = [runs.layout.metric] if runs.layout.metric else [cell.metric for cell in runs.cells]
    names = [*dict.fromkeys(names)]
    shown = " or ".join(name.replace("_", " ") for name in names)
    label = shown if runs.layout.metric or "validation" in shown else f"test {shown}"
    return names[0] if len(names) == 1 else "", label, not any(map(is_loss, names))


def scores(runs: FigureRuns, x: str) -> Drawn:
    """Return the metric over ``x``, a column of rounds or a field, in a panel for each label."""
    name, label, percent = _metric(runs)
    column = runs.layout.metric or "value"
    frame = runs.rounds
    if x not in frame or x in ("lam", "alpha", "epsilon"):
        frame = runs.at(**({column: runs.last(column, 1)} if runs.layout.metric else {}))
    panels = [
        panel
        for title, rows in frame.groupby("panel", observed=True)
        for panel in _line(runs, title, label, rows, column, x, percent=percent, paper=name)
    ]
    return panels, [_SPREAD]


def spectral_alignment(runs: FigureRuns) -> Drawn:
    """Return the similarity of the clients' subspaces and dominant directions in each round."""
    level, remarks = _chance(runs)
    panels = []
    for metric, shown, at in (
        (SIMILARITY, "principal-angle similarity", level),
        ("dominant_similarity", "dominant-vector similarity", math.nan),
    ):
        for prefix, title in SUBJECTS.items():
            panels += _line(runs, title, shown, runs.rounds, prefix + metric, level=at)
    return panels, [_SPREAD, *remarks]


def _chance(runs: FigureRuns) -> tuple[float, list[str]]:
    """Return the similarity k/r of unrelated subspaces; NaN if k or r differ between cores."""
    found = {
        min(1.0, cell.result.config["evaluation"]["top_k"] / rank)
        for cell in runs.cells
        if "spectrum_uploaded" in cell.arrays
        for rank in np.unique(np.isfinite(cell.arrays["spectrum_uploaded"]).sum(axis=1))
    }
    if len(found) != 1:
        return math.nan, []
    chance = float(found.pop())
    return chance, [f"dotted: similarity {chance:.2g} of unrelated subspaces of this size"]


def spectral_diagnostics(runs: FigureRuns) -> Drawn:
    """Return entropy, effective rank, variance between clients, and thresholds in each round.

    The variance is shown relative to that of RAVAN in round 1 of the same setting, as in the
    paper, and relative to the squared norm of the mean update.
    """
    rounds, panels = runs.rounds, list[Panel]()
    for metric in ("spectral_entropy", "effective_rank"):
        for prefix, title in SUBJECTS.items():
            panels += _line(runs, title, metric.replace("_", " "), rounds, prefix + metric)
    title, unit = "variance between clients", "absolute (no RAVAN)"
    if "aggregation_variance" in rounds:
        ravan = [place for place, cell in enumerate(runs.cells) if cell.method == "ravan"]
        first = rounds[rounds["cell"].isin(ravan) & (rounds["round"] == 1)]
        levels = first.groupby("setting")["aggregation_variance"].first()
        variance = rounds["aggregation_variance"]
        if (levels > 0).any():
            unit = "relative to RAVAN in round 1"
            variance = variance / rounds["setting"].map(levels[levels > 0])
        panels += _line(runs, title, unit, rounds.assign(variance=variance), "variance")
    relative = "relative to |mean update|²"
    panels += _line(runs, title, relative, rounds, "delta_relative_variance")
    panels += _line(runs, "threshold of singular values", "mean τ", rounds, "svt_threshold")
    zeroed = "singular values"
    panels += _line(runs, "set to zero by the prox", zeroed, rounds, "svt_zeroed", percent=True)
    return panels, [_SPREAD]


def lambda_diagnostics(runs: FigureRuns) -> Drawn:
    """Return the metric, the late spectral entropy and the zeroed singular values over λ."""
    name, label, percent = _metric(runs)
    title = "after the last round"
    panels = _line(runs, title, label, runs.at(), "value", "lam", percent=percent, paper=name)
    for prefix, title in SUBJECTS.items():
        frame = runs.at(entropy=runs.last(f"{prefix}spectral_entropy"))
        panels += _line(runs, title, "spectral entropy", frame, "entropy", "lam")
    title, frame = "set to zero by the last prox of a round", runs.at(zero=runs.last("svt_zeroed"))
    panels += _line(runs, title, "singular values", frame, "zero", "lam", percent=True)
    return panels, [_SPREAD, _LATE]


def alpha_diagnostics(runs: FigureRuns) -> Drawn:
    """Return the late similarity of subspaces and spectral entropy over α."""
    level, remarks = _chance(runs)
    panels = []
    for prefix, title in SUBJECTS.items():
        frame = runs.at(near=runs.last(prefix + SIMILARITY))
        # The paper's numbers are of "client update subspaces".
        paper, name = SIMILARITY if prefix else "", "principal-angle similarity"
        panels += _line(runs, title, name, frame, "near", "alpha", level=level, paper=paper)
    for prefix, title in SUBJECTS.items():
        frame = runs.at(entropy=runs.last(f"{prefix}spectral_entropy"))
        panels += _line(runs, title, "spectral entropy", frame, "entropy", "alpha")
    return panels, [_SPREAD, _LATE, *remarks]


def accuracy_inconsistency(runs: FigureRuns) -> Drawn:
    """Return the final metric over 1 minus the late similarity, joined in the order of α."""
    name, label, percent = _metric(runs)
    across, panels = "inconsistency index", []
    for prefix, title in SUBJECTS.items():
        similarity = runs.last(prefix + SIMILARITY)
        frame = runs.at(index=1.0 - similarity).dropna(subset=["index", "value", "alpha"])
        index = runs.means(frame, "index", "alpha")
        score = runs.means(frame, "value", "alpha", name, 100.0 if percent else 1.0)
        if len(index):
            both = [index.assign(metric=across), score.assign(metric=label)]
            points = pd.concat(both).sort_values(["series", "x"], kind="stable")
            draw = partial(scatter, across=across, percent=percent)
            panels.append(Panel(title, "spectral inconsistency index", label, points, draw))
    remarks = ["next to each point: α", f"{across}: 1 − principal-angle similarity"]
    return panels, [*remarks, "bars: mean ± standard deviation over runs", _LATE]


def svt_spectra(runs: FigureRuns) -> Drawn:
    """Return the singular values of all cores of one client, before and after the prox.

    They are those of the last diagnosed round; uploads have a panel, too.
    """
    panels, removed, uploads, tails = list[Panel](), [], [], []
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
            panels.append(Panel(title, x, value, points, draw, (*both,)))
            units = np.where(threshold > 0, threshold, np.nan)[:, None]
            removed.append(_quantiles((before - after) / units, name))
        if len(sent := _cores(arrays, "spectrum_uploaded")):
            uploads.append(_quantiles(sent, name))
            energy = np.nan_to_num(sent[:, ::-1] ** 2).cumsum(axis=1)[:, ::-1]
            total = np.where(energy[:, :1] > 0, energy[:, :1], 1.0)
            tail = np.where(np.isfinite(sent), energy / total, np.nan)
            tails.append(_quantiles(tail, name))
    flat, logs = partial(spectra, log_y=False, level=1.0), partial(spectra)
    for title, metric, parts, draw in (
        ("removed by the prox: before − after", "removed, in τ", removed, flat),
        ("cores s·H as uploaded", "uploaded", uploads, logs),
        ("share of the energy from here on", "energy in the tail", tails, logs),
    ):
        if parts:
            panels.append(Panel(title, x, metric, pd.concat(parts), draw))
    return panels, ["lines: median and 10–90 % of the cores of one client, last round"]


def _cores(arrays: list[Any], name: str) -> np.ndarray:
    """Return the spectra [n, r] of several runs, padded with NaN to one rank."""
    found = [each[name] for each in arrays if name in each]
    width = max((each.shape[1] for each in found), default=0)
    pads = [((0, 0), (0, width - each.shape[1])) for each in found]
    padded = [np.pad(e, pad, constant_values=np.nan) for e, pad in zip(found, pads, strict=True)]
    return np.concatenate(padded) if padded else np.empty((0, 0))


def _quantiles(values: np.ndarray, name: Any) -> "DataFrame":
    """Summarize the singular values [n, r] of n cores, NaN beyond the rank of one, by index."""
    low, median, high = np.nanquantile(values, [0.1, 0.5, 0.9], axis=0)
    index = np.arange(1, values.shape[1] + 1)
    columns = {"series": name, "x": index, "value": median, "low": low, "high": high}
    return pd.DataFrame({**columns, "n": len(values)})


def heads(runs: FigureRuns, *, dots: bool) -> Drawn:
    """Return the core heads and squared norms of each block, in a panel for each backbone."""
    rows = [
        (place, cell.result.config["model"]["name"], number, count, norms[block])
        for place, cell in enumerate(runs.cells)
        for norms in [cell.result.block_squared_norms]
        for number, (block, count) in enumerate(cell.result.heads.items())
    ]
    frame = pd.DataFrame(rows, columns=["cell", "model", "block", "heads", "norm"])
    frame = frame.join(runs.runs["series"], on="cell")
    panels, remarks = list[Panel](), ["heads on each adapted matrix of a block; mean over runs"]
    for model, part in frame.groupby("model", sort=False):
        norms = part.groupby("block")["norm"].mean().rename_axis("x").reset_index(name="value")
        norms = norms.assign(series="", metric="squared norm")
        points, draw = runs.means(part, "heads", "block"), partial(bars, dots=dots)
        panels.append(Panel(str(model), _BLOCKS, "heads", points, draw, second=norms))
    for name, part in runs.runs.groupby("series", observed=True):
        cells = [runs.cells[place] for place in part.index]
        span = [runs.paper(each, cells) for each in ("fewest_heads", "most_heads")]
        if all(map(math.isfinite, span)):
            remarks.append(f"the paper has {span[0]:g} to {span[1]:g} heads with {name}")
    return panels, remarks


def overhead(runs: FigureRuns) -> Drawn:
    """Return the seconds of a client's local steps, and the overhead over RAVAN.

    The first round of a run warms up. The overhead is the paper's: a ratio of medians.
    """
    if "client_seconds" not in runs.rounds:
        return [], []
    timed = runs.rounds.dropna(subset=["client_seconds"])
    first = timed.groupby("cell")["round"].transform("min")
    many = timed.groupby("cell")["round"].transform("size") > 1
    timed = timed[(timed["round"] > first) | ~many]
    ravan = timed[[runs.cells[place].method == "ravan" for place in timed["cell"]]]
    seconds, ratios = list[Any](), list[Any]()
    for (group, name), part in timed.groupby(["panel", "series"], observed=True):
        cells = [runs.cells[place] for place in part["cell"].unique()]
        own = part["client_seconds"]
        paper = runs.paper("seconds_per_round", cells)
        seconds.append((name, group, *own.quantile([0.5, 0.1, 0.9]), len(own), paper))
        pair = part.merge(ravan, on=["setting", "round"], suffixes=("", "_ravan"))
        if len(pair) and cells[0].method != "ravan":
            ours, theirs = pair["client_seconds"], pair["client_seconds_ravan"]
            ends = (ours / theirs - 1).quantile([0.1, 0.9])
            paper = runs.paper("overhead", cells) / 100
            overhead = ours.median() / theirs.median() - 1
            ratios.append((name, group, overhead, *ends, len(pair), paper))
    columns = ["series", "x", "value", "low", "high", "n", "paper"]
    panels = []
    dots = partial(bars, dots=True, percent=True)
    for title, metric, rows, shown, draw in (
        ("local steps of a client in a round", "seconds of local steps", seconds, "{:.2g} s",
         partial(bars)),
        ("overhead over RAVAN", "overhead", ratios, "{:+.1%}", dots),
    ):  # fmt: skip
        if rows:
            points = pd.DataFrame(rows, columns=columns)
            points["text"] = points["value"].map(shown.format)
            panels.append(Panel(title, "", metric, points, draw))
    hardware = {
        ", ".join(h.gpus) or f"{h.processor}, {h.cpus} CPUs": None
        for h in (cell.result.hardware for cell in runs.cells)
    }
    ends = "median of all rounds but each run's first, and 10–90 % of them"
    return panels, [ends, f"measured on {'; '.join(hardware)}"]


def covariance(runs: FigureRuns) -> Drawn:
    """Return the matrix between the updates of all clients after the last round, by series.

    It is that of the one setting that most series have finished: clients of another seed have
    other data. The paper calls it a covariance; the matrix is not centered.
    """
    matrix = runs.layout.metric or "cosine"
    has = [place for place, cell in enumerate(runs.cells) if f"everyone_{matrix}" in cell.arrays]
    found = runs.runs.loc[has]
    if not len(found):
        return [], []
    one = found.groupby("setting", sort=False)["series"].size().idxmax()
    parts = {}
    for place, row in found[found["setting"] == one].iterrows():
        arrays = runs.cells[int(str(place))].arrays
        clients, values = arrays["everyone_clients"], arrays[f"everyone_{matrix}"]
        other, this = np.meshgrid(clients, clients)
        places = {"series": row["series"], "y": this.ravel(), "x": other.ravel()}
        parts[row["series"]] = pd.DataFrame({**places, "value": values.ravel()})
    rests = {name: p.loc[p["x"] != p["y"], "value"] for name, p in parts.items()}
    limit = max(float(rest.abs().max()) for rest in rests.values()) or 1.0
    label = f"{matrix.replace('_', ' ')} of updates"
    draw = partial(heatmap, limit=limit, label=label)
    panels = [
        Panel(
            f"{name}: mean {rests[name].mean():.2g} off the diagonal, "
            f"{rests[name].min():.2g} to {rests[name].max():.2g}",
            "client", "client", points.assign(metric=label), draw,
        )
        for name, points in parts.items()
    ]  # fmt: skip
    seed = runs.cells[int(str(has[0]))].labels.get("seed", "")
    return panels, ["all clients, each trained once after the last round", f"seed {seed}"]


def personal(runs: FigureRuns) -> Drawn:
    """Return the score of each client's own model minus that of the global one, sorted."""
    rows = [
        (place, (rank + 0.5) / len(gains), gain)
        for place, cell in enumerate(runs.cells)
        for own, shared in [(cell.result.personal, cell.result.per_client)]
        for gains in [sorted(100 * (own[client] - shared[client]) for client in own)]
        for rank, gain in enumerate(gains)
    ]
    gains = pd.DataFrame(rows, columns=["cell", "clients", "gain"])
    frame, x = gains.join(runs.runs, on="cell"), "fraction of clients, sorted by gain"
    headline = " or ".join(dict.fromkeys(cell.result.headline for cell in runs.cells))
    draw, metric = partial(lines, level=0.0), f"{headline}: own − global, points"
    panels = [
        Panel(str(title), x, metric, runs.means(part, "gain", "clients"), draw)
        for title, part in frame.groupby("panel", observed=True)
    ]
    return panels, [_SPREAD, "a client that has never taken part has the global model: 0"]


_BY_DATASET, _ALLOCATION = ("dataset",), ("allocation", "method")
#: The kinds of figures by name.
KINDS: Mapping[FigureKind, Kind] = {
    "convergence": Kind(partial(scores, x="round"), by=_BY_DATASET),
    "megabytes": Kind(partial(scores, x="megabytes"), by=_BY_DATASET),
    "hours": Kind(partial(scores, x="hours"), by=_BY_DATASET),
    "lambda_accuracy": Kind(partial(scores, x="lam"), (), _BY_DATASET),
    "heterogeneity": Kind(partial(scores, x="alpha"), by=_BY_DATASET),
    "privacy": Kind(partial(scores, x="epsilon"), by=_BY_DATASET),
    "overhead": Kind(overhead, by=("model", "dataset"), timed=True),
    "svt_spectra": Kind(svt_spectra),
    "spectral_alignment": Kind(spectral_alignment),
    "spectral_diagnostics": Kind(spectral_diagnostics),
    "lambda_diagnostics": Kind(lambda_diagnostics, ()),
    "accuracy_inconsistency": Kind(accuracy_inconsistency),
    "alpha_diagnostics": Kind(alpha_diagnostics),
    "waterfilling": Kind(partial(heads, dots=False), _ALLOCATION, columns=1),
    "waterfilling_layerwise": Kind(partial(heads, dots=True), _ALLOCATION, columns=1),
    "covariance": Kind(covariance),
    "personal": Kind(personal, by=_BY_DATASET),
}
