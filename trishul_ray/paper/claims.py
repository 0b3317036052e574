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
from rich.table import Table
from rich.text import Text as RichText

from trishul_ray.config import Section
from trishul_ray.errors import first_line, typed_line
from trishul_ray.paper.numbers import figure_numbers, table_number
from trishul_ray.report.formats import csv_text
from trishul_ray.report.outcomes import (
    SEED,
    CellOutcome,
    FileName,
    Labels,
    SweepOutcome,
    Text,
    is_loss,
)
from trishul_ray.report.statistics import complete_block, decimals_for, estimate, with_sign

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
#: Measured by round: how the rounds of a run become one number. Others are means over rounds.
_OVER_ROUNDS: dict[str, Callable[[Sequence[float]], float]] = {
    "aggregation_error": lambda errors: float(np.max(errors)),  # NaN if one is
    "client_seconds": lambda seconds: float(np.median(seconds[1:] or seconds)),  # one warms up
}
#: Compared by their ratio: the scale is that of the machine, or of the learning rate.
RATIOS = frozenset({"delta_aggregation_variance", "client_seconds"})
#: Differences below this are rounding errors of the subtraction.
_DECIMALS = 9
#: Displayed names of measures that differ from their names.
_SHOWN = {"delta_aggregation_variance": "variance", "client_seconds": "seconds of local steps"}


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
            return f"Figure {figure_numbers()[self.paper]}, line {self.line}"
        return f"Table {table_number(self.paper)}, line {self.line}"


@cache
def claims() -> tuple[Claim, ...]:
    """Return the paper's claims, in its order of subjects."""
    file = resources.files("trishul_ray") / "paper" / "claims.yaml"
    return tuple(Claim(**each) for each in yaml.safe_load(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Part:
    """A comparison that a claim rests on.

    Attributes:
        text: Subject of the comparison.
        measure: Name of the measured quantity.
        side: On which side of 0 the claim puts the number.
        number: Mean over seeds, in points, as a share (:data:`RATIOS`) or in units of the measure;
            None where runs are missing.
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
        if self.measure in RATIOS:
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


def why_unreadable(error: Exception) -> str:
    """Return in a line why files of runs cannot be used; a missing column has no sentence."""
    return first_line(error) if isinstance(error, OSError | ValueError) else typed_line(error)


def judge(sweeps: Sequence[SweepOutcome]) -> tuple[Finding, ...]:
    """Decide the claims whose sweeps are given, in the order of the claims.

    Sweeps of a user's own decide nothing, and neither do labels that a sweep leaves out.
    """
    return tuple(
        finding
        for claim in claims()
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


def _compare(
    sweep: SweepOutcome,
    cells: Sequence[CellOutcome],
    measured: tuple[str, Side],
    signed: Signed,
    parts: int,
) -> Part:
    """Return a part: the sum of signed cells by seed, averaged over complete columns."""
    measure, side = measured
    apart = {SEED, *signed[0][0]}
    sums: dict[tuple[str, ...], dict[str, list[float]]] = {}
    metric = measure
    states: dict[tuple[tuple[str, ...], str], set[str]] = {}
    for cell in cells:
        sign = next((sign for labels, sign in signed if _has(cell, labels)), None)
        if sign is not None:
            column = cell.labels_of([axis for axis in cell.labels if axis not in apart])
            terms = sums.setdefault(column, {}).setdefault(cell.labels.get(SEED, ""), [])
            terms.append(sign * _measured(cell, measure))
            if cell.status == "finished":
                run = (column, cell.labels.get(SEED, ""))
                states.setdefault(run, set()).add(cell.result.state_sha256)
            metric = cell.metric if measure == SCORE else measure
    seeds = sweep.axes.get(SEED, ("",))
    # A column of which the sweep leaves a cell out has too few terms, and compares nothing.
    values = np.array(
        [
            [
                math.fsum(t) if len(t := found.get(seed, [])) == len(signed) else math.nan
                for seed in seeds
            ]
            for found in sums.values()
        ]
    ).T  # [seeds, columns]
    if measure == SCORE and is_loss(metric):
        side = "lower" if side == "higher" else "higher"
    name = _SHOWN.get(metric, metric.removeprefix("delta_").replace("_", " "))
    percent = measure == SCORE and not is_loss(metric)
    part = Part(f"{name}: {_text(sweep, signed)}", metric, side, percent)
    place = complete_block(np.isfinite(values))
    found = (
        estimate(np.round(values[np.ix_(*place)].mean(axis=1), _DECIMALS))
        if place[1].size
        else None
    )
    if found is None:
        return part
    # Equal numbers of all seeds show no spread; where the runs are the same, there is none.
    same = found.mean == 0 and all(len(each) == 1 for each in states.values())
    spread = same or (found.deviation or 0.0) > 10.0**-_DECIMALS
    by_run = (terms for column in sums.values() for terms in column.values())
    planned = sum(len(terms) == len(signed) for terms in by_run)

    def ends(interval: Interval | None) -> Interval | None:
        if interval is None or measure not in RATIOS:
            return interval
        return math.expm1(interval[0]), math.expm1(interval[1])

    return replace(
        part,
        number=math.expm1(found.mean) if measure in RATIOS else found.mean,
        interval=ends(found.interval()) if spread else None,
        strict=ends(found.interval(parts)) if spread else None,
        seeds=found.count,
        columns=len(place[1]),
        values=found.count * len(place[1]),
        planned=planned,
    )


def _text(sweep: SweepOutcome, signed: Signed) -> str:
    """Return what is subtracted from what, such as ``TRISHUL − RAVAN``."""
    parts = [
        " at ".join(sweep.shown_label(axis, label) for axis, label in labels.items())
        for labels, _ in signed
    ]
    text = " − ".join(parts[:2])
    return text if len(parts) == 2 else f"({text}) − ({' − '.join(parts[2:])})"


def _measured(cell: CellOutcome, measure: str) -> float:
    """Return what is measured of a run, its logarithm for a ratio; NaN if it is not known."""
    if cell.status != "finished":
        return math.nan
    if measure == SCORE:
        value = math.nan if cell.value is None else cell.value
        return value if is_loss(cell.metric) else 100 * value
    found = [float(row[measure]) for row in cell.records if measure in row]
    if not found:
        return math.nan
    over = _OVER_ROUNDS.get(measure)
    value = math.fsum(found) / len(found) if over is None else over(found)
    if measure in RATIOS:
        return math.log(value) if value > 0 else math.nan
    return value


def claims_table(findings: Sequence[Finding]) -> Table:
    """Return the claims for the terminal, with the number of the decisive part of each."""
    table = Table("claim", "paper", "on", "number", "verdict")
    last = None
    for finding in findings:
        claim = finding.claim
        head = ("", "") if claim is last else (claim.title, claim.place)
        row = (*head, finding.label, finding.summary, finding.told)
        table.add_row(*map(RichText, row))
        last = claim
    return table


def claims_csv(findings: Sequence[Finding]) -> str:
    """Return the claims as CSV: a row for each part."""
    head = ("claim", "says", "paper", "line", "profile", "sweep", "on", "verdict", "part")
    rows: list[list[object]] = []
    rows.append([*head, "part_verdict", "number", "low", "high", "seeds", "columns", "differs"])
    for finding in findings:
        claim = finding.claim
        first = [claim.name, claim.says, claim.paper or "", claim.line, finding.profile]
        first += [claim.sweep, finding.label, finding.told]
        for part, verdict in zip(finding.parts, finding.told_parts, strict=True):
            number = "" if part.number is None else repr(part.number)
            low, high = map(repr, part.interval) if part.interval else ("", "")
            last = (part.seeds, part.columns, finding.differs)
            rows.append([*first, part.text, verdict, number, low, high, *last])
    return csv_text(rows)
