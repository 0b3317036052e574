"""Schema of the tables and figures in a sweep file."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trishul_ray.config.section import Section

#: Profile of a sweep, which determines the numbers that its results may be compared with.
Profile = Literal["paper", "small", "smoke", "custom"]


def _name(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise PydanticCustomError("string_type", "is not printable")
    return text


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise ValueError(f"{name!r} must consist of letters, digits, '.', '_' and '-'")
    return name


Text = Annotated[str, AfterValidator(_name)]
FileName = Annotated[Text, AfterValidator(_file_name)]


def _as_names(value: Any) -> Any:
    """Convert a name or a list of names to strings, since YAML loads ``20`` as a number."""
    names = value if isinstance(value, list | tuple) else [value]
    return [str(x) if isinstance(x, int | float) else x for x in names]


Names = Annotated[tuple[Text, ...], BeforeValidator(_as_names)]
Label = Annotated[Text, BeforeValidator(lambda x: _as_names(x)[0])]
#: Selected labels, keyed by axis; all labels of other axes are selected.
Labels = dict[str, Names]
Title = Annotated[Text, Field(default_factory=lambda read: read.get("name", ""))]

#: Scores of generated answers: fractions, and scores for which lower is better.
EvalShare = Literal["rouge_l", "exact_match", "ended", "token_accuracy", "acc", "acc_norm"]
EvalAmount = Literal["loss", "perplexity", "bits_per_byte", "repeated"]
CostName = Literal["megabytes", "hours", "epsilon"]


class Evaluated(Section):
    """A score of generated answers, computed by the command ``eval``."""

    score: EvalShare | EvalAmount = Field(description="the score")
    model: Literal["tuned", "untuned"] = Field(
        "tuned", description="the evaluated model: tuned or untuned"
    )


class Target(Section):
    """The training cost until a run reaches a fraction of the last score of a reference."""

    cost: CostName = Field(description="the cost: megabytes, hours or epsilon")
    axis: Text = Field(description="the axis with the reference")
    reference: Label = Field(description="the label of the reference; its last score is 100%")
    share: float = Field(0.95, gt=0, le=1, description="the fraction to reach")


class TableLayout(Section):
    """A table of cells, averaged over all axes that are neither ``rows`` nor ``columns``."""

    name: FileName = Field(description="name of the table and of its files")
    title: Title = Field(description="caption; by default the name")
    rows: tuple[Text, ...] = Field((), description="axes whose labels name a row")
    columns: tuple[Text, ...] = Field((), description="axes whose labels name a column")
    paper: Text | None = Field(None, description="key of the paper's table, such as tab:vision")
    where: Labels = Field(default_factory=dict, description="show only these labels, keyed by axis")
    average: bool = Field(False, description="append a column with the mean of all columns")
    eval: Evaluated | None = Field(None, description="show a score of generated answers")
    target: Target | None = Field(None, description="show the cost until a run reaches a score")


FigureKind = Literal[
    "accuracy_inconsistency", "alpha_diagnostics", "convergence", "covariance", "draws",
    "heterogeneity", "hours", "lambda_accuracy", "lambda_diagnostics", "megabytes", "overhead",
    "personal", "privacy", "spectral_alignment", "spectral_diagnostics", "svt_spectra",
    "waterfilling", "waterfilling_layerwise",
]  # fmt: skip


class FigureLayout(Section):
    """A figure of cells."""

    name: FileName = Field(description="name of the figure and of its files")
    title: Title = Field(description="caption; by default the name")
    kind: FigureKind = Field(description="kind of figure, such as convergence")
    metric: Text | None = Field(
        None, description="column of metrics.parquet; by default the metric of the cells"
    )
    series: Names | None = Field(
        None, description="axes whose labels name a series; the default depends on the kind"
    )
    panels: Names | None = Field(
        None, description="axes whose labels name a panel; the default depends on the kind"
    )
    where: Labels = Field(default_factory=dict, description="show only these labels, keyed by axis")
    paper: Text | None = Field(None, description="key of the paper's figure, such as fig:lambda")
