"""Parts of a report: the outcomes of a sweep's cells, and the tables and figures of them.

A cell is one combination of axis labels, such as ``{"method": "FedIT", "seed": "0"}``. Labels are
those of the paper's records where a table reproduces one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from trishul_ray.config.section import Section
from trishul_ray.errors import CorruptFileError
from trishul_ray.plugins.registry import Registry
from trishul_ray.report.summary import RunSummary, read_arrays, read_metrics
from trishul_ray.storage.durable import Json
from trishul_ray.storage.integrity import from_checked_json
from trishul_ray.storage.store import Store

#: The axis whose labels are repetitions.
SEED = "seed"

#: File of a run's folder with the scores of answers that it generated, by `trishul eval`.
EVALUATION = "eval.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)

#: Profile of a sweep, which says what its numbers may be compared with.
Profile = Literal["paper", "small", "smoke", "custom"]
#: Whether a cell has a result that can be used; see ``CellState``.
CellStatus = Literal["finished", "missing", "stopped", "failed", "stale", "corrupt"]
STATUSES: tuple[CellStatus, ...] = get_args(CellStatus)


def is_name(text: str) -> bool:
    """Return whether a text can be a name: it is printable, in one line, and not empty."""
    return text.isprintable() and text.strip() != ""


def _name(text: str) -> str:
    if not is_name(text):
        raise PydanticCustomError("string_type", "is not printable")
    return text


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} must be letters, digits, '.', '_' and '-', as in a file's name")
    return name


Text = Annotated[str, AfterValidator(_name)]
FileName = Annotated[Text, AfterValidator(_file_name)]


def _as_names(value: Any) -> Any:
    """Return names as a list of text: YAML reads ``20`` as a number, and one stands for a list."""
    names = value if isinstance(value, list | tuple) else [value]
    return [str(x) if isinstance(x, int | float) else x for x in names]


Names = Annotated[tuple[Text, ...], BeforeValidator(_as_names)]
#: Chosen labels, by axis; axes that are missing are not limited.
Labels = dict[str, Names]
Title = Annotated[Text, Field(default_factory=lambda read: read.get("name", ""))]


class Column(Section):
    """The number of each run that a table shows in place of its metric; a kind of tables.

    Subclass it, with the options of a table as its fields, and register the class by the key under
    which a table of a sweep file sets them.
    """

    @property
    def key(self) -> str:
        """The key that it is registered by."""
        return next(name for name, cls in COLUMNS.items.items() if cls is type(self))

    @property
    def needs(self) -> Labels:
        """Labels that the table must show, by axis, such as that of a reference."""
        return {}

    def outcomes(self, cells: "Sequence[CellOutcome]") -> "Sequence[CellOutcome]":
        """Return the cells, each read by another number: see :class:`CellOutcome`."""
        raise NotImplementedError

    def label(self, sweep: "SweepHead") -> str:
        """Return a caption of the numbers, with their unit."""
        raise NotImplementedError

    def caveats(self, cells: "Sequence[CellOutcome]") -> list[str]:
        """Return assumptions that the numbers rest on."""
        return []


#: The columns that plug-ins have registered.
COLUMNS = Registry[type[Column]]("column", "column of a table")


def _column(name: str, options: Any) -> Column:
    try:
        return COLUMNS[name].model_validate(options)
    except ValidationError as error:
        faults = [
            InitErrorDetails(
                type=fault["type"],
                loc=(name, *fault["loc"]),
                input=fault["input"],
                ctx=fault.get("ctx", {}),
            )
            for fault in error.errors()
        ]
        raise ValidationError.from_exception_data(error.title, faults) from None


class TableLayout(Section):
    """Table of cells; axes in neither ``rows`` nor ``columns`` are averaged over."""

    name: FileName = Field(description="identifies the table, also as a file name")
    title: Title = Field(
        description="caption; by default that of the sweep, or the name of several"
    )
    rows: tuple[Text, ...] = Field((), description="axes whose labels name a row")
    columns: tuple[Text, ...] = Field((), description="axes whose labels name a column")
    paper: Text | None = Field(None, description="key of the paper's table, such as tab:vision")
    where: Labels = Field(default_factory=dict, description="labels that are shown")
    average: bool = Field(False, description="whether a last column shows the mean of the columns")
    column: InstanceOf[Column] | None = Field(
        None, description="the number that is shown; by default the metric after the last round"
    )

    @model_validator(mode="before")
    @classmethod
    def _column_by_key(cls, fields: Any) -> Any:
        """Make the column of the key that names one."""
        if not isinstance(fields, Mapping) or not (unknown := fields.keys() - cls.model_fields):
            return fields
        named = [name for name in COLUMNS.names() if name in unknown]
        if len(named) > 1:
            raise ValueError(f"one of {' and '.join(named)} can be shown, not both")
        others = {name: value for name, value in fields.items() if name not in named}
        return others | ({"column": _column(named[0], fields[named[0]])} if named else {})


FigureKind = Literal[
    "accuracy_inconsistency", "alpha_diagnostics", "convergence", "covariance", "heterogeneity",
    "hours", "lambda_accuracy", "lambda_diagnostics", "megabytes", "overhead", "personal",
    "privacy", "spectral_alignment", "spectral_diagnostics", "svt_spectra", "waterfilling",
    "waterfilling_layerwise",
]  # fmt: skip


class FigureLayout(Section):
    """Figure of cells."""

    name: FileName = Field(description="identifies the figure, also as a file name")
    title: Title = Field(description="caption; by default the name")
    kind: FigureKind = Field(description="what is drawn, such as convergence")
    metric: Text | None = Field(
        None, description="column of metrics.parquet; by default the metric of the cells"
    )
    series: Names | None = Field(
        None, description="axes whose labels name a series; by default that of the kind"
    )
    panels: Names | None = Field(
        None, description="axes whose labels name a panel; by default that of the kind"
    )
    where: Labels = Field(default_factory=dict, description="labels that are shown")
    paper: Text | None = Field(None, description="key of the paper's figure, such as fig:lambda")


#: A row of a table in long format, by column.
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class DrawnFigure:
    """A figure: an ``<svg>`` element, the same as PDF, and what it shows as CSV.

    ``timed``: it shows measured seconds, so that a repetition differs.
    """

    svg: str
    pdf: bytes
    csv: str
    timed: bool = False


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of one cell, with the id of its experiment, which other cells may share.

    Attributes:
        reason: One line on a cell that is not finished; empty otherwise.
        metric: Name of the metric that the cell is read by.
        summary: Content of ``result.json``; None unless finished.
        home: Folder of the run.
        copy: A copy of the files with its numbers, if there is one; not of what is added later.
        scored: The rounds whose scores its sweep asks for, ascending; None: all. A run that began
            elsewhere may have more of them than others that it is compared with.
    """

    labels: Mapping[str, str]
    id: str
    status: CellStatus
    reason: str
    metric: str
    summary: RunSummary | None
    home: Store
    copy: Store | None = field(default=None, kw_only=True)
    scored: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def value(self) -> float | None:
        """The metric after the last round, in [0, 1] unless a loss; None if not finished.

        It may be one over clients, such as ``personal_mean``, where clients were scored.
        """
        if self.summary is None:
            return None
        value = (self.summary.final | self.summary.client_metrics).get(self.metric)
        return None if value is None else float(value)

    @property
    def unit(self) -> str:
        """The unit of the value: ``%``, or an amount, which is better if lower."""
        return unit_of(self.metric)

    @property
    def decimals(self) -> int | None:
        """How many the value is shown with; None: as many as make four significant digits."""
        return 2 if self.unit == "%" else 4

    @property
    def result(self) -> RunSummary:
        """The content of ``result.json`` of a finished cell."""
        assert self.summary is not None, f"cell {self.id} is {self.status}"
        return self.summary

    @property
    def method(self) -> str:
        """The method of a finished cell."""
        return str(self.result.config["method"]["name"])

    @property
    def gap(self) -> str:
        """Reason why there is no value, in a word or two."""
        return "not measured" if self.status == "finished" else self.status

    @property
    def bias(self) -> str:
        """Why a value is missing that is not missing at random; empty if it is, or if there is."""
        return f"{self.status} runs" if self.status in ("failed", "stopped") else ""

    @property
    def part(self) -> str:
        """Part of its dataset that the run used, in a line; empty if all, or not finished."""
        data = None if self.summary is None else self.summary.data
        return data.sentence.partition(";")[0] if data is not None and data.part else ""

    def labels_of(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the labels of some axes."""
        return tuple(self.labels[axis] for axis in axes)

    @cached_property
    def records(self) -> list[dict[str, float]]:
        """The rows of ``metrics.parquet``, one per round; a metric not measured is missing.

        So are the scores of rounds that are not ``scored``. Empty if the file was deleted since.
        """
        try:
            rows = read_metrics(self.copy or self.home)
        except FileNotFoundError:
            return []
        if self.scored is None or self.summary is None:
            return rows
        scores = (self.summary.final | self.summary.client_metrics).keys() - {"round"}
        for row in (row for row in rows if row["round"] not in self.scored):
            for name in scores & row.keys():
                del row[name]
        return rows

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of ``diagnostics.npz``; empty for methods without diagnostics."""
        name, files = "diagnostics.npz", self.copy or self.home
        return read_arrays(files, name) if files.exists(name) else {}


#: Scores of generated answers that are shares, and those that are better if lower.
EvalShare = Literal["rouge_l", "exact_match", "ended", "token_accuracy", "acc", "acc_norm"]
EvalAmount = Literal["loss", "perplexity", "bits_per_byte", "repeated"]


#: Fields of an evaluation that decide its scores, beside the model: its rows, the limit of its
#: answers, and the pattern by which they are compared.
_ASKED = ("split", "rows_sha256", "new_tokens", "answer_pattern")


@dataclass(frozen=True)
class EvaluatedOutcome(CellOutcome):
    """A cell that is read by a score of its run's ``eval.json``.

    Attributes:
        evaluation: The content of the file; empty if the run was not evaluated.
        other: Whether it is of other rows, or by another limit, than most of its table.
        fault: Error of a damaged file.
    """

    model: str = "tuned"
    evaluation: Json = field(default_factory=dict)
    other: bool = False
    fault: CorruptFileError | None = None

    @property
    def value(self) -> float | None:
        """The score; None if the run was not evaluated, or not as most of its table.

        Raises:
            CorruptFileError: The file is damaged.
        """
        if self.fault is not None:
            raise self.fault
        value = self.evaluation.get(self.model, {}).get(self.metric)
        return None if value is None or self.other else float(value)

    @property
    def gap(self) -> str:
        """Reason why there is no value: also an evaluation of other rows, or by another limit."""
        return "asked otherwise" if self.other else super().gap

    @property
    def unit(self) -> str:
        """``%``, or an amount, which is better if lower."""
        return "%" if self.metric in get_args(EvalShare) else self.metric


def _data(cell: EvaluatedOutcome) -> str:
    return str(cell.evaluation.get("sources"))  # hashes of rows and tokens


def _question(cell: EvaluatedOutcome) -> Json:
    return {name: cell.evaluation.get(name) for name in _ASKED}


@COLUMNS.register("eval")
class Evaluated(Column):
    """A score of the answers that the command ``eval`` has generated."""

    score: EvalShare | EvalAmount = Field(description="the score")
    model: Literal["tuned", "untuned"] = Field("tuned", description="whose: the run's, or before")

    def outcomes(self, cells: Sequence[CellOutcome]) -> tuple[EvaluatedOutcome, ...]:
        """Return the cells, each read by the score, if it was asked as most on the same data."""
        read = [self._read(cell) for cell in cells]
        asked: dict[str, list[Json]] = defaultdict(list)
        for cell in read:
            if cell.evaluation:
                asked[_data(cell)].append(_question(cell))
        usual = {data: max(asks, key=asks.count) for data, asks in asked.items()}
        return tuple(
            replace(cell, other=_question(cell) != usual[_data(cell)]) if cell.evaluation else cell
            for cell in read
        )

    def _read(self, cell: CellOutcome) -> EvaluatedOutcome:
        known: dict[str, Any] = {f.name: getattr(cell, f.name) for f in fields(CellOutcome)}
        known |= {"metric": self.score, "model": self.model}
        if cell.summary is None or not cell.home.exists(EVALUATION):
            return EvaluatedOutcome(**known)
        try:
            found = from_checked_json(cell.home.read(EVALUATION), cell.home.place(EVALUATION))
        except CorruptFileError as error:
            again = f"trishul eval {cell.home.uri} makes it again"
            return EvaluatedOutcome(**known, fault=CorruptFileError(f"{error}; {again}"))
        if found["state_sha256"] != cell.summary.state_sha256:
            return EvaluatedOutcome(**known)  # of a run that has started over since
        return EvaluatedOutcome(**known, evaluation=found)

    def label(self, sweep: "SweepHead") -> str:
        """Return the score, and whose it is."""
        unit = ", %" * (self.score in get_args(EvalShare))
        return f"{self.score.replace('_', ' ')} of generated answers, {self.model}{unit}"


@dataclass(frozen=True)
class SweepHead:
    """Name of a sweep, and the tables and figures of its cells.

    Attributes:
        name: Identifies the sweep, also as a file name.
        description: Subject that it reproduces, and the expected result.
        axes: Labels of each axis, in order.
        shown: How labels are displayed, by axis and label, where that differs from the label.
        overrides: Fields that the command line set and that can change a number: ``field=value``.
    """

    name: str
    title: str
    profile: Profile
    description: str
    axes: Mapping[str, tuple[str, ...]]
    shown: Mapping[str, Mapping[str, str]]
    tables: tuple[TableLayout, ...]
    figures: tuple[FigureLayout, ...]
    overrides: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def decides(self) -> bool:
        """Whether its numbers say anything about methods: those of the profile smoke do not."""
        return self.profile != "smoke"

    def shown_label(self, axis: str, label: str) -> str:
        """Return how a label is displayed."""
        return self.shown.get(axis, {}).get(label, label)

    def with_outcomes(self, cells: Iterable[CellOutcome]) -> "SweepOutcome":
        """Return the sweep with the outcomes of its cells."""
        head = {each.name: getattr(self, each.name) for each in fields(SweepHead)}
        return SweepOutcome(**head, cells=tuple(cells))


@dataclass(frozen=True)
class SweepOutcome(SweepHead):
    """A sweep with the outcomes of all its cells."""

    cells: tuple[CellOutcome, ...]

    def within(self, where: Mapping[str, tuple[str, ...]]) -> tuple[CellOutcome, ...]:
        """Return the cells with one of these labels on each axis."""
        return tuple(
            cell
            for cell in self.cells
            if all(cell.labels.get(axis) in labels for axis, labels in where.items())
        )

    def in_order(
        self, axes: Sequence[str], found: Iterable[tuple[str, ...]]
    ) -> list[tuple[str, ...]]:
        """Return combinations of labels of some axes in the order of the axes' labels."""
        places = [{label: place for place, label in enumerate(self.axes[axis])} for axis in axes]
        return sorted(
            set(found),
            key=lambda labels: [place[label] for place, label in zip(places, labels, strict=True)],
        )

    def departures(self, cells: Iterable[CellOutcome]) -> tuple[str, ...]:
        """Return how some cells depart from the profile: overrides, and parts of datasets."""
        parts = dict.fromkeys(cell.part for cell in cells if cell.part)
        overridden = f"overridden: {', '.join(self.overrides)}"
        return (*[overridden] * bool(self.overrides), *parts)

    def is_comparable(self, cells: Iterable[CellOutcome]) -> bool:
        """Return whether the numbers of some cells may be compared with the paper's."""
        return self.profile == "paper" and not self.departures(cells)


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss: not a percentage, and better if lower."""
    return metric.endswith("loss")


#: Metrics over clients that are better if lower, or no share: see ``client_metrics``.
_UNEVEN = ("_sd", "_gini", "_hurt")
#: How a score depends on taking part: best at 0, so that no value is the better one.
_UNORDERED = ("participation_gap", "participation_correlation")


def unit_of(metric: str) -> str:
    """Return the unit in which a metric is shown: ``%``, or that of a loss, a fraction."""
    if is_loss(metric):
        return "loss"
    return "fraction" if metric.endswith((*_UNEVEN, *_UNORDERED)) else "%"


def has_order(metric: str) -> bool:
    """Return whether the values of a metric are better or worse than one another."""
    return not metric.endswith(_UNORDERED)
