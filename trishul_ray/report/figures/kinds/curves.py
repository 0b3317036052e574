"""Figures of lines: metrics over rounds, over λ, and over α."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from trishul_ray.report.figures.chart import LINES, Axis, Band, Chart, Panel, Row
from trishul_ray.report.figures.kind import BY_DATASET, BY_METHOD, FIGURES, SUBJECTS, FigureKind
from trishul_ray.report.figures.selection import Group, Selection, number_of
from trishul_ray.report.outcomes import CellOutcome, is_loss

SIMILARITY = "principal_angle_similarity"
#: Diagnostics of a run, a panel each.
_DIAGNOSTICS = {
    SIMILARITY: "principal-angle similarity",
    "dominant_similarity": "dominant-vector similarity",
    "inconsistency_index": "inconsistency index",
    "spectral_entropy": "spectral entropy",
    "effective_rank": "effective rank",
    "aggregation_variance": "aggregation variance (equal for both)",
}
ROUNDS = Axis("communication round", "whole")
#: Axes of fields; those of others are called by the field's name.
_FIELDS = {
    "method.lam": Axis("λ", "strength"),
    "partition.alpha": Axis("Dirichlet α (to the right: more skewed)", "skew", infinite="IID"),
}
_ONE_SEED = "with one seed there is no deviation, and the axis starts at 0"
_PAPER = "hollow: the paper's numbers"
_ALPHA, _LATE = {"x": "partition.alpha"}, {"of": tuple(SUBJECTS), "last": 10}
_LAMBDA: dict[str, Any] = {"series": (), "x": "method.lam"}

Points = Iterable[tuple[float, float]]
PointsOf = Callable[[CellOutcome], Points]
ValueOf = Callable[[CellOutcome], float | None]


def metric_of_run(
    rounds: Sequence[int],
    series: Mapping[str, Sequence[float]],
    *,
    references: Mapping[str, float] | None = None,
    metric: str = "accuracy",
    rows: int | None = None,
) -> Chart:
    """Return a metric over rounds, one line for each series, with levels to compare with.

    A loss is shown as it is; any other metric is in [0, 1], NaN if a round was not evaluated, and
    shown in percent. Given the number of test ``rows`` of an accuracy, a band shows its 95 %
    interval, so that noise is not taken for progress.
    """
    percent = not is_loss(metric)
    name = f"test {metric.replace('_', ' ')}" if percent else metric
    lines = [
        row
        for label, values in series.items()
        for row in _of_run(zip(rounds, values, strict=True), rows, series=label, metric=name)
    ]
    y, levels = Axis(name, percent=percent), dict(references or {})
    panel = Panel(tuple(lines), x=ROUNDS, y=y, levels=levels, from_zero=False)
    remarks = () if rows is None else (f"band: 95 % interval for {rows:,} test rows",)
    return Chart((panel,), tuple(series), remarks=remarks)


def _of_run(points: Points, test_rows: int | None = None, **place: str) -> list[Row]:
    """Return the rows of one run, without what is NaN; ``test_rows`` are those of a share."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    bands = [Band.of_share(y, test_rows) if test_rows else Band(y, y, y, 1) for _, y in known]
    return [Row.of(band, x=x, **place) for (x, _), band in zip(known, bands, strict=True)]


def diagnostics_of_run(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the diagnostics of updates and uploads over the rounds that have them."""
    panels = []
    for metric, title in _DIAGNOSTICS.items():
        found = [
            row
            for prefix, name in SUBJECTS.values()
            for row in _of_run(
                [(r["round"], r.get(prefix + metric, math.nan)) for r in records],
                series=name,
                panel=title,
            )
        ]
        if found:
            panels.append(Panel(tuple(found), title=title, x=ROUNDS))
    return Chart(tuple(panels), tuple(name for _, name in SUBJECTS.values()))


class Curves:
    """Collects the panels of one figure of lines, and what there is to say about them."""

    def __init__(self, selection: Selection, x: Axis) -> None:
        self.selection, self.x = selection, x
        self.series = selection.axes("series")
        self.panels: list[Panel] = []
        self.empty: dict[int, CellOutcome] = {}
        self.points: list[list[CellOutcome]] = []

    def add(
        self,
        title: str,
        y_label: str,
        points_of: PointsOf,
        *,
        within: Group | None = None,
        percent: bool = False,
        expected: float = math.nan,
        optional: bool = False,
        paper: str | None = None,
    ) -> None:
        """Add a panel with a line for each series, unless there is no value for any.

        Cells without a value are named below the figure, unless that is ``optional``. ``expected``
        is a level without any effect. ``paper`` is the metric of printed numbers, which are of the
        last round.
        """
        rows: list[Row] = []
        for group in self.selection.groups(self.series, within):
            found: dict[float, list[tuple[float, CellOutcome]]] = {}
            for cell in group.cells:
                points = [(x, y) for x, y in points_of(cell) if math.isfinite(y)]
                if not points and not optional:
                    self.empty[id(cell)] = cell
                for x, y in points:
                    found.setdefault(x, []).append((y, cell))
            for x in sorted(found):
                values, cells = zip(*found[x], strict=True)
                self.points.append(list(cells))
                is_last = self.x.scale != "whole" or x == max(found)
                printed = self.selection.paper(paper, cells) if paper and is_last else math.nan
                place = {"panel": title, "metric": y_label, "series": group.name, "x": x}
                printed /= 100.0 if percent else 1.0
                rows.append(Row.of(Band.of_runs(values), **place, paper=printed))
        if rows:
            levels = {"": expected} if math.isfinite(expected) else {}
            axis = Axis(y_label, percent=percent)
            self.panels.append(Panel(tuple(rows), title=title, x=self.x, y=axis, levels=levels))

    def add_headline(self, points_of: PointsOf) -> None:
        """Add the metric that cells are read by, a panel for each of the option ``panels``."""
        for panel in self.selection.groups(self.selection.axes("panels")):
            metric, percent = metric_of(panel.cells)
            headline = _metric_name(panel.cells)
            self.add(panel.name, metric, points_of, within=panel, percent=percent, paper=headline)

    def chart(self, *remarks: str) -> Chart | None:
        """Return what was collected; None if there is nothing to draw."""
        if not self.panels:
            return None
        rows = [row for panel in self.panels for row in panel.rows]
        seeds = [row.n or 0 for row in rows]
        pooled = self.selection.pooled(self.points)
        lined = self.x.scale in ("whole", "amount")
        spread = spread_remark("line and band" if lined else "point and bar", pooled)
        notes = [spread] * (max(seeds) > 1) + [_ONE_SEED] * (min(seeds) == 1)
        notes += [_PAPER] * any(math.isfinite(row.paper) for row in rows)
        notes += [*remarks, *pooled]
        if self.empty:
            missing = self.selection.names(list(self.empty.values()))
            notes.append(f"without these metrics: {'; '.join(missing)}")
        names = tuple(group.name for group in self.selection.groups(self.series))
        return Chart(tuple(self.panels), names, LINES, tuple(notes))


def spread_remark(shown: str, pooled: Sequence[str]) -> str:
    """Say what is drawn as a mean and its spread; ``pooled`` names other axes than the seed."""
    return f"{shown}: mean ± standard deviation over {'runs' if pooled else 'seeds'}"


def metric_of(cells: Sequence[CellOutcome]) -> tuple[str, bool]:
    """Return the name of the cells' metric for an axis, and whether it is a share."""
    names = dict.fromkeys(cell.metric for cell in cells)
    shown = " or ".join(name.replace("_", " ") for name in names)
    rows = "" if shown.startswith("validation ") else "test "
    return f"{rows}{shown}", not any("loss" in name for name in names)


def _metric_name(cells: Sequence[CellOutcome]) -> str | None:
    """Return the one metric of the cells; None if there are several."""
    names = {cell.metric for cell in cells}
    return names.pop() if len(names) == 1 else None


def subjects(selection: Selection) -> list[tuple[str, str]]:
    """Return prefix and name of what diagnostics are shown of."""
    return [SUBJECTS[subject] for subject in selection.options["of"]]


def _by_round(metric: str) -> PointsOf:
    return lambda cell: [(r["round"], r[metric]) for r in cell.records if metric in r]


def late(metric: str, last: int) -> ValueOf:
    """Return a function that averages a cell's metric over its last measured rounds."""

    def mean(cell: CellOutcome) -> float | None:
        values = [record[metric] for record in cell.records if metric in record][-last:]
        return float(np.mean(values)) if values else None

    return mean


def late_remark(selection: Selection) -> str:
    """Say which rounds :func:`late` averages over."""
    last = selection.options["last"]
    some = f"mean of the last {last} that were taken, or all if fewer"
    return f"diagnostics: {'the last round' if last == 1 else some}"


def _chance(selection: Selection) -> tuple[float, list[str]]:
    """Return the similarity k/r of unrelated subspaces, and a remark; NaN if k or r differ."""
    found = set()
    for cell in selection.finished:
        sigma = cell.arrays.get("spectrum_uploaded")
        if sigma is not None:
            # Cores of smaller rank are padded.
            ranks = np.isfinite(sigma).sum(axis=1)
            top_k = cell.result.config["evaluation"]["top_k"]
            found |= {min(1.0, top_k / rank) for rank in np.unique(ranks)}
    if len(found) != 1:
        return math.nan, []
    chance = float(found.pop())
    return chance, [f"dotted: similarity {chance:.2g} of unrelated subspaces of this size"]


@FIGURES.register("convergence")
class Convergence(FigureKind):
    """The metric after each round: a panel for each of ``panels``, a line for each series."""

    options = BY_METHOD | BY_DATASET

    def chart(self, selection: Selection) -> Chart | None:
        """Return the lines."""
        found = Curves(selection, ROUNDS)
        found.add_headline(lambda cell: _by_round(cell.metric)(cell))
        return found.chart()


@FIGURES.register("spectral_alignment")
class SpectralAlignment(FigureKind):
    """The similarity of the clients' subspaces and dominant directions in each round."""

    options = BY_METHOD | {"of": tuple(SUBJECTS)}

    def chart(self, selection: Selection) -> Chart | None:
        """Return a panel for each similarity of updates and uploads."""
        found, (chance, remark) = Curves(selection, ROUNDS), _chance(selection)
        for prefix, title in subjects(selection):
            similarity = _by_round(prefix + SIMILARITY)
            found.add(title, "principal-angle similarity", similarity, expected=chance)
        for prefix, title in subjects(selection):
            dominant = _by_round(f"{prefix}dominant_similarity")
            found.add(title, "dominant-vector similarity", dominant)
        return found.chart(*remark)


@FIGURES.register("spectral_diagnostics")
class SpectralDiagnostics(FigureKind):
    """Spectral entropy, effective rank and variance between clients in each round.

    The variance, which is the same of updates and uploads, is shown twice: divided by that of
    RAVAN in round 1 of the same seed, as in the paper, and by the squared norm of the mean update.
    Thresholds are shown where they are recorded (``svt_threshold``).
    """

    options = BY_METHOD | {"of": tuple(SUBJECTS)}

    def chart(self, selection: Selection) -> Chart | None:
        """Return a panel for each diagnostic of updates and uploads."""
        found = Curves(selection, ROUNDS)
        for metric in ("spectral_entropy", "effective_rank"):
            for prefix, title in subjects(selection):
                found.add(title, metric.replace("_", " "), _by_round(prefix + metric))
        variance, unit = _variance_by_round(selection, found.series)
        found.add("variance between clients", unit, variance)
        relative = _by_round("delta_relative_variance")
        found.add("variance between clients", "relative to |mean update|²", relative)
        if any("svt_threshold" in r for cell in selection.finished for r in cell.records):
            found.add("threshold of singular values", "mean τ", _by_round("svt_threshold"))
            zeroed = _by_round("svt_zeroed")
            found.add("set to zero by it", "singular values", zeroed, percent=True)
        return found.chart()


def _variance_by_round(selection: Selection, series: Sequence[str]) -> tuple[PointsOf, str]:
    """Return the variance over that of RAVAN's round 1 with the same seed, and its unit.

    A run without such a run of RAVAN has no points; without any, the variance is absolute.
    """
    absolute, axes = _by_round("aggregation_variance"), selection.run_axes(series)
    levels: dict[tuple[str, ...], float] = {}
    for cell in selection.finished:
        if cell.method == "ravan":
            first = dict(absolute(cell)).get(1, 0.0)
            if first > 0:
                levels.setdefault(cell.labels_of(axes), first)
    if not levels:
        return absolute, "absolute (no RAVAN)"

    def relative(cell: CellOutcome) -> Points:
        level = levels.get(cell.labels_of(axes))
        return [] if level is None else [(x, y / level) for x, y in absolute(cell)]

    return relative, "relative to RAVAN in round 1"


class OverField(FigureKind):
    """The final metric over the field ``x``, a panel for each of ``panels``.

    Attributes:
        fields: Axes of fields that are called in another way than by their name.
    """

    fields: ClassVar[Mapping[str, Axis]] = _FIELDS

    def place(self, cell: CellOutcome, field: str) -> float | None:
        """Return the value of the field in a cell's experiment; None without one."""
        return number_of(cell, field)

    def begin(self, selection: Selection) -> tuple[Curves, Callable[[ValueOf], PointsOf]]:
        """Return a collector of lines, and a function that places values of cells at the field."""
        x = selection.options["x"]

        def at_field(value: ValueOf) -> PointsOf:
            def points(cell: CellOutcome) -> Points:
                position, found = self.place(cell, x), value(cell)
                return [] if position is None or found is None else [(position, found)]

            return points

        return Curves(selection, self.fields.get(x, Axis(x, "strength"))), at_field

    def chart(self, selection: Selection) -> Chart | None:
        """Return the lines."""
        found, at_field = self.begin(selection)
        found.add_headline(at_field(lambda cell: cell.value))
        return found.chart()


@FIGURES.register("lambda_accuracy")
class LambdaAccuracy(OverField):
    """The final metric over λ."""

    options = _LAMBDA | BY_DATASET


@FIGURES.register("heterogeneity")
class Heterogeneity(OverField):
    """The final metric over α."""

    options = BY_METHOD | BY_DATASET | _ALPHA


@FIGURES.register("lambda_diagnostics")
class LambdaDiagnostics(OverField):
    """The final metric and the late spectral entropy over λ."""

    options = _LAMBDA | _LATE

    def chart(self, selection: Selection) -> Chart | None:
        """Return the metric, entropies, and the share of singular values that are set to zero."""
        (found, at_field), last = self.begin(selection), selection.options["last"]
        metric, percent = metric_of(selection.finished)
        score, headline = at_field(lambda c: c.value), _metric_name(selection.finished)
        found.add("after the last round", metric, score, percent=percent, paper=headline)
        for prefix, title in subjects(selection):
            entropy = at_field(late(f"{prefix}spectral_entropy", last))
            found.add(title, "spectral entropy", entropy)
        zeroed, title = late("svt_zeroed", last), "set to zero by the last prox of a round"
        found.add(title, "singular values", at_field(zeroed), percent=True, optional=True)
        return found.chart(late_remark(selection))


@FIGURES.register("alpha_diagnostics")
class AlphaDiagnostics(OverField):
    """The late similarity of subspaces and spectral entropy over α."""

    options = BY_METHOD | _ALPHA | _LATE

    def chart(self, selection: Selection) -> Chart | None:
        """Return similarities and entropies of updates and uploads."""
        (found, at_field), last = self.begin(selection), selection.options["last"]
        chance, remark = _chance(selection)
        for prefix, title in subjects(selection):
            near = at_field(late(prefix + SIMILARITY, last))
            # The printed ones are of "client update subspaces".
            printed = SIMILARITY if prefix else None
            found.add(title, "principal-angle similarity", near, expected=chance, paper=printed)
        for prefix, title in subjects(selection):
            entropy = at_field(late(f"{prefix}spectral_entropy", last))
            found.add(title, "spectral entropy", entropy)
        return found.chart(late_remark(selection), *remark)


@FIGURES.register("accuracy_inconsistency")
class AccuracyInconsistency(FigureKind):
    """The final metric against 1 minus the principal-angle similarity of late rounds."""

    options = BY_METHOD | _ALPHA | _LATE

    def chart(self, selection: Selection) -> Chart | None:
        """Return the points of each series, joined in the order of the field ``x``."""
        field, series = selection.options["x"], selection.axes("series")
        metric, percent = metric_of(selection.finished)
        panels: list[Panel] = []
        listed: list[Row] = []
        pooled: list[tuple[CellOutcome, ...]] = []
        for prefix, title in subjects(selection):
            similarity = late(prefix + SIMILARITY, selection.options["last"])
            points: list[tuple[Row, Row]] = []
            for group in selection.groups(series):
                found: dict[float, list[tuple[float, float, CellOutcome]]] = {}
                for cell in group.cells:
                    value, aligned, score = number_of(cell, field), similarity(cell), cell.value
                    if value is not None and aligned is not None and score is not None:
                        found.setdefault(value, []).append((1.0 - aligned, score, cell))
                for value, runs in sorted(found.items()):
                    indices, scores, cells = zip(*runs, strict=True)
                    place = {"panel": title, "series": group.name, "x": value}
                    printed = selection.paper(cells[0].metric, cells) / (100.0 if percent else 1.0)
                    text = "IID" if math.isinf(value) else f"{value:g}"
                    index = Row.of(Band.of_runs(indices), metric="inconsistency index", **place)
                    y = Row.of(
                        Band.of_runs(scores), metric=metric, paper=printed, text=text, **place
                    )
                    points.append((index, y))
                    pooled.append(cells)
            if points:
                across, up = zip(*points, strict=True)
                x, y_axis = Axis("spectral inconsistency index"), Axis(metric, percent=percent)
                panels.append(Panel(up, "scatter", title, x, y_axis, across))
                listed += [row for point in points for row in point]
        if not panels:
            return None
        symbol = {"partition.alpha": "α", "method.lam": "λ"}.get(field, field)
        averaged = selection.pooled(pooled)
        remarks = [
            f"beside each point: {symbol}",
            "inconsistency index: 1 − principal-angle similarity",
            late_remark(selection),
            spread_remark("point and bars", averaged),
            *averaged,
        ]
        names = tuple(group.name for group in selection.groups(series))
        columns = {name: name for name in ("panel", "series", "x", "metric")} | LINES
        rows = tuple(listed)
        return Chart(tuple(panels), names, columns, tuple(remarks), rows, legend=True, height=3.8)


@FIGURES.register("personal")
class Personal(FigureKind):
    """The score of each client's own model less that of the global one, the least first."""

    options = BY_METHOD | BY_DATASET

    def chart(self, selection: Selection) -> Chart | None:
        """Return a panel for each of ``panels``; a method without own models has no line."""
        found = Curves(selection, Axis("share of clients, sorted by gain"))

        def gains(cell: CellOutcome) -> Points:
            own, of_global = cell.result.personal, cell.result.per_client
            ordered = sorted(100 * (score - of_global[client]) for client, score in own.items())
            return [((place + 0.5) / len(ordered), gain) for place, gain in enumerate(ordered)]

        for panel in selection.groups(selection.axes("panels")):
            headline = " or ".join(dict.fromkeys(cell.result.headline for cell in panel.cells))
            title = f"{headline}: own − global, points"
            found.add(panel.name, title, gains, within=panel, expected=0.0, optional=True)
        return found.chart("a client that has never taken part has the global model: 0")
