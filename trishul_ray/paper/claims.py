"""The paper's claims, each beside the numbers of finished runs that decide it, and the verdict.

A claim is data (``claims.yaml``): a sentence of the paper and its place, the cells that decide it,
what is measured of them, and the smallest effect that would count. None of it depends on a result.

A claim is decided for each dataset of a sweep by its *parts*: paired differences between two cells,
or between two such differences. A part has one number for each seed, the mean over the columns that
all seeds have, and Student's 95 % interval of their mean. Parts of a claim stand or fall together:

==========  ====================================================================================
seen        The interval of every part lies on the paper's side of 0.
reversed    The interval of every part lies on the other side of 0.
not seen    A part lies on the other side, or below the smallest effect that counts (`least`).
undecided   These runs do not tell.
no runs     A part lacks runs.
==========  ====================================================================================

That all parts are seen needs no correction for their number. That one of several fails does: those
intervals are of the level 5 % over the number of parts.
"""

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Literal, get_args

import numpy as np
import yaml
from pydantic import Field

from trishul_ray.config.section import Section
from trishul_ray.errors import why_unreadable
from trishul_ray.paper.numbers import PAPER
from trishul_ray.report.outcomes import (
    SEED,
    CellOutcome,
    FileName,
    Labels,
    SweepOutcome,
    Text,
    is_loss,
)
from trishul_ray.report.statistics import Array, complete_block, decimals_for, estimate, with_sign

VerdictName = Literal["seen", "not seen", "reversed", "undecided", "no runs"]
VERDICTS: tuple[VerdictName, ...] = get_args(VerdictName)
#: The verdict of a profile whose numbers say nothing about methods.
NOT_JUDGED = "not judged"
Side = Literal["higher", "lower"]
Interval = tuple[float, float]
#: Labels of the cells that are compared, each with its sign.
Signed = list[tuple[dict[str, str], float]]

#: The metric that a cell is read by; a loss counts as lower where a claim says higher.
SCORE = "score"
#: Differences below this are rounding errors of the subtraction.
_DECIMALS = 9


@dataclass(frozen=True)
class Measure:
    """Reduction of a column of ``metrics.parquet`` to one number of a run.

    Attributes:
        shown: How it is called; None: by its name.
        ratio: Whether runs are compared by their ratio: the scale is that of the machine, or of the
            learning rate.
        over_rounds: Makes the values of the rounds one.
    """

    shown: str | None = None
    ratio: bool = False
    over_rounds: Callable[[Sequence[float]], float] = lambda found: math.fsum(found) / len(found)


#: Measures that are read in another way than the mean over rounds.
MEASURES = {
    "aggregation_error": Measure(over_rounds=lambda found: float(np.max(found))),  # NaN if one is
    "delta_aggregation_variance": Measure("variance", ratio=True),
    "client_seconds": Measure(
        "seconds of local steps",
        ratio=True,
        over_rounds=lambda found: float(np.median(found[1:] or found)),  # the first warms up
    ),
}


def measure_of(name: str) -> Measure:
    """Return how a column is read and shown."""
    return MEASURES.get(name, Measure())


class Gain(Section):
    """The difference between two cells is larger at each label of ``axis`` than at the next."""

    axis: Text
    chain: tuple[Text, ...] = Field(min_length=2)


class Claim(Section):
    """A sentence of the paper, and the cells that decide it.

    Either ``chain``, ``above`` or ``at_most`` names labels of ``axis``.
    """

    name: FileName
    title: Text = Field(description="the claim, in a few words")
    says: Text = Field(description="the paper's words")
    paper: Text | None = Field(None, description="key of its table or figure, such as tab:vision")
    line: int = Field(description="line of the paper's source")
    sweep: Text = Field(description="sweep with the cells that decide it")
    by: Text = Field("dataset", description="axis; the claim is decided for each of its labels")
    where: Labels = Field(default_factory=dict, description="other labels that the cells have")
    axis: Text = Field(description="axis of the labels that are compared")
    chain: tuple[Text, ...] = Field((), description="labels, each above the next")
    above: dict[Text, tuple[Text, ...]] = Field(
        default_factory=dict, description="labels that are above others"
    )
    gain: Gain | None = None
    measures: dict[Text, Side] = Field(
        {SCORE: "higher"},
        description="subject of the comparison, and side of the first of two labels",
    )
    least: float | None = Field(
        None, gt=0, description="smallest effect that counts: points, a ratio - 1, or as measured"
    )
    within: tuple[float, float] | None = Field(
        None, description="range of a ratio - 1, where a claim is no inequality"
    )
    at_most: float | None = Field(None, description="bound of the measure in every run")
    labels: tuple[Text, ...] = Field((), description="labels to which at_most applies")
    differs: str = Field("", description="differences of our setting from the paper's")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Labels that are compared, the first of which the claim puts above."""
        found = [*itertools.pairwise(self.chain)]
        return found + [(one, other) for one, others in self.above.items() for other in others]

    @property
    def comparisons(self) -> list[Signed]:
        """Subject of the comparison: differences, or differences between them (``gain``)."""
        ends = [[({self.axis: one}, 1.0), ({self.axis: other}, -1.0)] for one, other in self.pairs]
        if self.gain is None:
            return ends
        axis, steps = self.gain.axis, [*itertools.pairwise(self.gain.chain)]
        return [
            [({**labels, axis: first}, sign) for labels, sign in pair]
            + [({**labels, axis: second}, -sign) for labels, sign in pair]
            for pair in ends
            for first, second in steps
        ]

    @property
    def place(self) -> str:
        """Place of the claim in the paper."""
        if self.paper is None:
            return f"line {self.line}"
        if self.paper.startswith("fig:"):
            return f"Figure {PAPER.figures()[self.paper]}, line {self.line}"
        return f"Table {PAPER.tables()[self.paper]}, line {self.line}"


@cache
def all_claims() -> tuple[Claim, ...]:
    """Return the paper's claims, in its order of subjects."""
    file = resources.files("trishul_ray.paper") / "claims.yaml"
    return tuple(Claim(**each) for each in yaml.safe_load(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Part:
    """A comparison that a claim rests on.

    Attributes:
        text: Subject of the comparison.
        measure: Name of the measured quantity.
        side: On which side of 0 the claim puts the number.
        number: Mean over seeds, in points, as a share (:attr:`Measure.ratio`) or in units of the
            measure; None where runs are missing.
        interval: 95 % interval of the number; None for one seed.
        strict: The same at a level of 5 % over the number of parts of the claim.
        values: How many values the number is made of: runs, or differences between some.
        planned: How many the sweep has.
    """

    text: str
    measure: str
    side: Side
    percent: bool
    number: float | None = None
    interval: Interval | None = None
    strict: Interval | None = None
    seeds: int = 0
    columns: int = 0
    values: int = 0
    planned: int = 0

    def verdict(self, claim: Claim) -> VerdictName:
        """Return what the part says alone."""
        if self.number is None:
            return "no runs"
        if claim.at_most is not None:
            if not self.number <= claim.at_most:
                return "not seen"
            return "seen" if self.values == self.planned else "undecided"
        if self.interval is None or self.strict is None:
            return "undecided"
        low, high = self.interval
        if claim.within is not None:
            inside = claim.within[0] <= low and high <= claim.within[1]
            apart = self.strict[1] < claim.within[0] or self.strict[0] > claim.within[1]
            return "seen" if inside else "not seen" if apart else "undecided"
        sign = 1.0 if self.side == "higher" else -1.0
        most = max(sign * end for end in self.strict)
        if most < 0:
            return "reversed"
        if claim.least is not None and not self.measure.endswith("loss") and most < claim.least:
            return "not seen"
        return "seen" if min(sign * low, sign * high) > 0 else "undecided"

    def format(self, value: float) -> str:
        """Return a number as text, with its sign but for a bound on all runs."""
        if self.measure == "aggregation_error":
            return f"{value:.2g}"
        numbers = [number for number in (self.number, *(self.interval or ())) if number is not None]
        if measure_of(self.measure).ratio:
            return f"{with_sign(100 * value, decimals_for([100 * n for n in numbers], 1))} %"
        return with_sign(value, decimals_for(numbers, 2 if self.percent else 4))

    @property
    def shown(self) -> str:
        """The number with its interval, and how many of its values it lacks."""
        if self.number is None:
            return "no runs"
        text = self.format(self.number)
        if self.interval is None:
            text += {0: "", 1: " (one seed)"}.get(self.seeds, " (no spread between seeds)")
        else:
            text += " ({} to {})".format(*map(self.format, self.interval))
        return text + f", {self.values} of {self.planned}" * (self.values < self.planned)


@dataclass(frozen=True)
class Finding:
    """A claim, decided on a dataset of a sweep.

    Attributes:
        label: The dataset, or the label of another axis, as it is displayed.
        left_out: Labels that are not compared, because the sweep leaves them out.
        command: Command that would run the missing cells; empty if none is missing.
        problem: Reason why files of runs could not be read; empty if they could.
    """

    claim: Claim
    profile: str
    label: str
    parts: tuple[Part, ...]
    command: str = ""
    problem: str = ""
    departures: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[VerdictName]:
        """Verdict of each part alone."""
        return [part.verdict(self.claim) for part in self.parts]

    @property
    def verdict(self) -> VerdictName:
        """Verdict of all parts together."""
        found = set(self.verdicts)
        if "no runs" in found or not found:
            return "no runs"
        if len(found) == 1:
            return found.pop()
        return "not seen" if found & {"not seen", "reversed"} else "undecided"

    @property
    def timed(self) -> bool:
        """Whether it is about measured seconds, so that a repetition differs."""
        return "client_seconds" in self.claim.measures

    @property
    def decisive(self) -> Part:
        """The first part that makes the verdict what it is."""
        order: tuple[VerdictName, ...] = ("no runs", "reversed", "not seen", "undecided", "seen")
        ranks = [order.index(verdict) for verdict in self.verdicts]
        return self.parts[ranks.index(min(ranks))]

    @property
    def summary(self) -> str:
        """The number of the decisive part, and how many parts are seen."""
        if self.problem:
            return f"unreadable: {self.problem}"
        if self.verdict == "no runs":
            return self.command
        part = self.decisive
        text = f"{part.text}: {part.shown}"
        if len(self.parts) == 1:
            return text
        if not self.decides:
            return f"{text}; one of {len(self.parts)} comparisons"
        return f"{text}; {self.verdicts.count('seen')} of {len(self.parts)} seen"

    @property
    def decides(self) -> bool:
        """Whether its numbers say anything about methods."""
        return self.profile != "smoke"

    @property
    def told(self) -> str:
        """The verdict as it is displayed, which needs numbers that say something of methods."""
        return self.verdict if self.decides or self.verdict == "no runs" else NOT_JUDGED

    @property
    def told_parts(self) -> list[str]:
        """Verdict of each part alone, as it is displayed."""
        return [v if self.decides or v == "no runs" else NOT_JUDGED for v in self.verdicts]

    @property
    def setting(self) -> str:
        """Differences of the sweep's setting, in sentences."""
        lacks = f"Not in the sweep: {', '.join(self.left_out)}." if self.left_out else ""
        return " ".join(filter(None, (self.claim.differs, lacks)))

    @property
    def differs(self) -> str:
        """Differences of our setting, in sentences, with the departures of its runs."""
        departs = f"Departures: {'; '.join(self.departures)}." if self.departures else ""
        return " ".join(filter(None, (self.setting, departs)))


def judge(sweeps: Sequence[SweepOutcome]) -> tuple[Finding, ...]:
    """Decide the claims whose sweeps are given, in the order of the claims.

    Sweeps of a user's own decide nothing, and neither do labels that a sweep leaves out.
    """
    return tuple(
        finding
        for claim in all_claims()
        for sweep in sweeps
        if sweep.name == claim.sweep and sweep.profile != "custom"
        for finding in _findings(claim, sweep)
    )


def _findings(claim: Claim, sweep: SweepOutcome) -> Iterator[Finding]:
    allowed = claim.where.get(claim.by)
    for label in sweep.axes.get(claim.by, ()):
        if allowed is not None and label not in allowed:
            continue
        cells = sweep.within({**claim.where, claim.by: (label,)})
        problem = ""
        try:
            parts = tuple(_parts(claim, sweep, cells))
        # One file of a run that is unreadable, or has other columns, must not cost the whole page.
        except (OSError, ValueError, LookupError, TypeError) as error:
            parts, problem = (
                (Part(claim.title, SCORE, "higher", percent=True),),
                why_unreadable(error),
            )
        if not parts:
            continue
        missing = any(part.number is None for part in parts)
        words = ["trishul", "table", sweep.name, "--profile", sweep.profile, *sweep.overrides]
        shown = sweep.shown_label(claim.by, label)
        command = shlex.join(words) if missing and not problem else ""
        departures = sweep.departures(cells)
        named = [*claim.labels, *itertools.chain(*claim.pairs)]
        known = {cell.labels.get(claim.axis) for cell in cells}
        left_out = tuple(dict.fromkeys(name for name in named if name not in known))
        yield Finding(claim, sweep.profile, shown, parts, command, problem, departures, left_out)


def _parts(claim: Claim, sweep: SweepOutcome, cells: Sequence[CellOutcome]) -> Iterator[Part]:
    if claim.at_most is not None:
        (measure,) = claim.measures
        for label in claim.labels:
            runs = [cell for cell in cells if cell.labels.get(claim.axis) == label]
            if runs:
                values = [_measured(run, measure) for run in runs if run.status == "finished"]
                found = [value for value in values if not math.isnan(value)]
                text = f"{sweep.shown_label(claim.axis, label)}, the largest of {len(found)} runs"
                yield Part(
                    text,
                    measure,
                    "lower",
                    percent=False,
                    number=max(found, default=None),
                    values=len(found),
                    planned=len(runs),
                )
        return
    # Labels that the sweep leaves out are no part of the claim here.
    planned = [
        (measured, signed)
        for measured in claim.measures.items()
        for signed in claim.comparisons
        if all(any(_has(cell, labels) for cell in cells) for labels, _ in signed)
    ]
    for measured, signed in planned:
        yield _compare(sweep, cells, measured, signed, len(planned))


def _has(cell: CellOutcome, labels: Mapping[str, str]) -> bool:
    return all(cell.labels.get(axis) == label for axis, label in labels.items())


#: Cells of each column and seed that a part compares, each with its sign.
Compared = dict[tuple[tuple[str, ...], str], list[tuple[float, CellOutcome]]]


def _compared(cells: Sequence[CellOutcome], signed: Signed) -> Compared:
    """Return the cells of a comparison by column and seed, where the sweep leaves none out."""
    apart = {SEED, *signed[0][0]}
    found: Compared = {}
    for cell in cells:
        for labels, sign in signed:
            if _has(cell, labels):
                column = cell.labels_of([axis for axis in cell.labels if axis not in apart])
                place = column, cell.labels.get(SEED, "")
                found.setdefault(place, []).append((sign, cell))
    return {place: terms for place, terms in found.items() if len(terms) == len(signed)}


def _compare(
    sweep: SweepOutcome,
    cells: Sequence[CellOutcome],
    measured: tuple[str, Side],
    signed: Signed,
    parts: int,
) -> Part:
    """Return a part: the sum of signed cells by seed, averaged over complete columns."""
    measure, side = measured
    compared = _compared(cells, signed)
    metric = (
        next((t[-1][1].metric for t in compared.values()), SCORE) if measure == SCORE else measure
    )
    part = _empty_part(sweep, measure, metric, side, signed)
    values = _values(compared, measure, sweep.axes.get(SEED, ("",)))  # [seeds, columns]
    seeds, columns = complete_block(np.isfinite(values))
    means = values[np.ix_(seeds, columns)].mean(axis=1) if columns.size else []
    if (found := estimate(np.round(means, _DECIMALS))) is None:
        return part
    # Equal numbers of all seeds show no spread; where the runs are the same, there is none.
    same = found.mean == 0 and all(map(_are_one_run, compared.values()))
    spread = same or (found.deviation or 0.0) > 10.0**-_DECIMALS
    scale = math.expm1 if measure_of(measure).ratio else float

    def ends(count: int) -> Interval | None:
        interval = found.interval(count) if spread else None
        return None if interval is None else (scale(interval[0]), scale(interval[1]))

    return replace(
        part,
        number=scale(found.mean),
        interval=ends(1),
        strict=ends(parts),
        seeds=found.count,
        columns=len(columns),
        values=found.count * len(columns),
        planned=len(compared),
    )


def _empty_part(sweep: SweepOutcome, measure: str, metric: str, side: Side, signed: Signed) -> Part:
    """Return a part without a number; of a loss, the other side is better."""
    loss = measure == SCORE and is_loss(metric)
    if loss:
        side = "lower" if side == "higher" else "higher"
    name = measure_of(metric).shown or metric.removeprefix("delta_").replace("_", " ")
    percent = measure == SCORE and not loss
    return Part(f"{name}: {_text(sweep, signed)}", metric, side, percent)


def _values(compared: Compared, measure: str, seeds: Sequence[str]) -> Array:
    """Return the signed sums [seeds, columns] of what is measured; NaN where a run is missing."""
    columns = list(dict.fromkeys(column for column, _ in compared))
    values = np.full((len(seeds), len(columns)), math.nan)
    for (column, seed), terms in compared.items():
        place = seeds.index(seed), columns.index(column)
        values[place] = math.fsum(sign * _measured(cell, measure) for sign, cell in terms)
    return values


def _are_one_run(terms: Sequence[tuple[float, CellOutcome]]) -> bool:
    """Return whether all finished cells have ended in the same state."""
    states = {cell.result.state_sha256 for _, cell in terms if cell.status == "finished"}
    return len(states) <= 1


def _text(sweep: SweepOutcome, signed: Signed) -> str:
    """Return what is subtracted from what, such as ``TRISHUL − RAVAN``."""
    parts = [
        " at ".join(sweep.shown_label(axis, label) for axis, label in labels.items())
        for labels, _ in signed
    ]
    text = " − ".join(parts[:2])
    return text if len(parts) == 2 else f"({text}) − ({' − '.join(parts[2:])})"


def _measured(cell: CellOutcome, name: str) -> float:
    """Return what is measured of a run, its logarithm for a ratio; NaN if it is not known."""
    if cell.status != "finished":
        return math.nan
    if name == SCORE:
        value = math.nan if cell.value is None else cell.value
        return value if is_loss(cell.metric) else 100 * value
    measure = measure_of(name)
    found = [float(row[name]) for row in cell.records if name in row]
    value = measure.over_rounds(found) if found else math.nan
    if measure.ratio:
        return math.log(value) if value > 0 else math.nan
    return value
