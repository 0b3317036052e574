"""Lists on the terminal: methods, datasets, models, fields, partitions, one run.

Nothing that takes seconds to import is needed to list methods, datasets and fields.
"""

import textwrap
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import annotated_types
import numpy as np
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.markup import escape
from rich.table import Column, Table

from trishul_ray.config.fields import SHORT_MODEL_NAMES, ModelConfig
from trishul_ray.config.places import Places
from trishul_ray.config.section import Noted
from trishul_ray.errors import InputError
from trishul_ray.methods.base import method_classes, method_names
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.lookup import KNOWN, PACKAGED, packaged_folder
from trishul_ray.plugins.loading import Plugin
from trishul_ray.stages import STAGES
from trishul_ray.tasks.base import task_kinds
from trishul_ray.tracking.progress import format_count, format_duration

if TYPE_CHECKING:
    from trishul_ray.data.dataset import Split
    from trishul_ray.data.partition import LabelCounts
    from trishul_ray.experiment import Experiment
    from trishul_ray.report.summary import RunSummary
    from trishul_ray.tasks.base import Task

#: Clients that :func:`client_sentence` names.
MAX_NAMED = 8
#: With more clients, :func:`partition_table` summarizes the rest in one row.
MAX_ROWS = 30
#: Names of the types of fields.
_TYPES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Plugin: "Python file",
    Noted: "text",
}


def methods_table() -> Table:
    """List every method with its communication and reference."""
    table = Table("name", "what it does", "communication", "reference")
    for name, method in method_classes().items():
        table.add_row(name, method.summary, method.communication, method.reference)
    return table


def datasets_table(described: Mapping[str, str]) -> Table:
    """List every dataset with one line of description."""
    table = Table("name", "what it is")
    for name, text in described.items():
        table.add_row(name, text)
    return table


def models_table() -> Table:
    """List the known backbones, without network: parameters, adapted matrices, weights' source."""
    short = {name: alias for alias, name in SHORT_MODEL_NAMES.items()}
    # Names are copied from the terminal: wrap the other columns instead.
    table = Table(Column("name", no_wrap=True), "parameters", "adapted by default", "weights")
    for name in KNOWN:
        alias = f"\n{short[name]}" if name in short else ""
        table.add_row(name + alias, *_size(name), "mirror or hub")
    for name, (_, package, extra) in PACKAGED.items():
        if packaged_folder(name) is not None:
            table.add_row(name, *_size(name), f"package {package}")
        else:
            table.add_row(name, "", "", f"package {package}, extra {extra}")
    for name, builtin in BUILTINS.items():
        weights = f"built in: {builtin.description.partition(': ')[0]}, `trishul pretrain`"
        table.add_row(name, *_size(name), weights)
    return table


def heads_table(blocks: Mapping[str, tuple[float, tuple[int, ...]]]) -> Table:
    """List blocks: squared norm of the adapted matrices, core heads on each, and their rank."""
    mean = sum(len(ranks) for _, ranks in blocks.values()) / len(blocks)
    table = Table(
        Column("block", no_wrap=True, overflow="fold"),
        Column("squared norm of its adapted matrices", justify="right"),
        Column(f"heads on each (mean {mean:g})", justify="right"),
        Column("rank", justify="right"),
    )
    for name, (norm, ranks) in blocks.items():
        shown = ", ".join(map(str, dict.fromkeys(ranks))) or "0"
        table.add_row(name, f"{norm:.4g}", str(len(ranks)), shown)
    return table


def _size(name: str) -> tuple[str, str]:
    """Return the number of parameters without the task's classification head, and matrices."""
    from trishul_ray.adapters.targets import find_layers
    from trishul_ray.models.backbone import Backbone

    # These architectures need neither cache nor mirror.
    model = Backbone(ModelConfig(name=name), Places(Path(), hub=None)).meta_model()
    shapes = Counter(
        f"{spec.name.rpartition('.')[2]} {spec.d_out}x{spec.d_in}" for spec in find_layers(model)
    )
    adapted = "\n".join(f"{times} x {shape}" for shape, times in shapes.items())
    return format_count(sum(p.numel() for p in model.parameters())), adapted


def field_list(experiment: "Experiment", width: int = 100) -> str:
    """Return a paragraph for each field: its value in ``experiment``, what it allows and means.

    Fields of the method are those of the experiment's method.
    """
    registered = {"method.name": method_names(), "task.kind": task_kinds()}
    fields = [each for each in _fields(experiment) if each[0] != "stages"]
    for name, stage in STAGES.all().items():
        registered |= {f"{name}.{f}": each.choices() for f, each in stage.registries.items()}
        fields += _fields(experiment.stages.get(name) or stage.Config(), f"{name}.")
    blocks = []
    for name, field, value in fields:
        notes = [" | ".join(registered[name]) if name in registered else allowed(field)]
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") in (False, "default"):
            notes.append("not in the id")
        shown = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
        shown = shown.strip().removesuffix("...").strip()  # of a document with one plain value
        head = f"{name}={shown}  ({'; '.join(notes)})"
        text = textwrap.indent(textwrap.fill(field.description or "", max(40, width - 4)), "    ")
        blocks.append(f"{head}\n{text}" if text else head)
    return "\n".join(blocks)


def allowed(field: FieldInfo) -> str:
    """Return what a field allows, e.g. ``integer >= 1 or auto``."""
    return _describe(field.annotation, field.metadata)


def _fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        value = str(value) if isinstance(value, Noted) else value
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, list(value) if isinstance(value, tuple) else value


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe(arguments[0], list(arguments[1:]))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        options = [each for each in arguments if each is not types.NoneType]
        text = " or ".join(_describe(each, metadata) for each in options)
        return text + (" or null" if types.NoneType in arguments else "")
    if origin is tuple:
        count = "" if Ellipsis in arguments else f"{len(arguments)} "
        return f"list of {count}{_describe(arguments[0], [])}s"
    if origin is dict:
        return "names with values, {a: b}"
    limits = []
    for each in _flat(metadata):
        for kind, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (bound := getattr(each, kind, None)) is not None:
                limits.append(f"{sign} {bound}")
        if isinstance(each, annotated_types.MaxLen):
            limits.append(f"of at most {each.max_length} characters")
    return " ".join([_TYPES.get(annotation, str(annotation)), ", ".join(limits)]).strip()


def _flat(metadata: list[Any]) -> Iterator[Any]:
    """Yield constraints, also those inside a field's own information."""
    for each in metadata:
        yield from _flat(each.metadata) if isinstance(each, FieldInfo) else [each]


def client_sentence(summary: "RunSummary") -> str:
    """Return the scores of the clients of a result in one line, the worst first; empty if none.

    If clients have models of their own, those of both models.
    """
    headline = summary.headline
    line = _scores_line(f"mean {headline}", summary.per_client)
    if own := summary.personal:
        line = f"global model: {line}; own models: {_scores_line(f'mean {headline}', own)}"
        found = summary.client_metrics
        if "personal_gain" in found:
            line += (
                f"; personal minus global of those who took part: {found['personal_gain']:+.2%}, "
                f"negative for {found['personal_hurt']:.0%}"
            )
    return line


def _scores_line(what: str, scores: dict[str, float]) -> str:
    if not scores:
        return ""
    ordered = sorted(scores.items(), key=lambda item: item[1])
    named = ", ".join(f"{name} {score:.2%}" for name, score in ordered[:MAX_NAMED])
    more = f", and {len(ordered) - MAX_NAMED} better ones" if len(ordered) > MAX_NAMED else ""
    mean = sum(scores.values()) / len(scores)
    return f"{what} of {len(scores)}: {mean:.2%}; {named}{more}"


def summary_table(results: Sequence[tuple[str, "RunSummary"]]) -> Table:
    """Compare final metrics and cost of runs (label, summary) with the untouched backbone."""
    headline = results[0][1].headline
    coverage = ["part" if summary.data.part else "" for _, summary in results]
    column = ("data",) if any(coverage) else ()
    table = Table("", *column, headline, "loss", "trained", "up / down", "time")
    first = results[0][1].untouched
    cells = (f"{first[headline]:.2%}", f"{first['loss']:.4f}")
    table.add_row("untouched backbone", *coverage[: len(column)], *cells)
    for part, (label, summary) in zip(coverage, results, strict=True):
        final = summary.final
        up, down = summary.uploaded_parameters, summary.downloaded_parameters
        table.add_row(
            f"{label} {summary.config['method']['name']}",
            *([part] if column else []),
            f"{final[headline]:.2%}",
            f"{final['loss']:.4f}",
            format_count(sum(summary.parameters.values())),
            f"{format_count(up)} / {format_count(down)}",
            format_duration(summary.seconds),
        )
    table.caption = f"after the last round, {results[0][1].final['round']}"
    return table


def tokens_table(split: "Split", task: "Task", row: int) -> Table:
    """List the tokens of a stored row, and which of them are labels.

    Raises:
        InputError: There is no such row, or the rows hold no tokens.
    """
    if task.tokens is None or "input_ids" not in split.columns:
        raise InputError(f"--row: dataset {split.info.name} holds no texts")
    if row >= len(split):
        raise InputError(f"--row {row}: there are {len(split):,} training rows, counted from 0")
    labels = {
        position
        for first, after in (split.column("spans")[row] if "spans" in split.columns else ())
        for position in range(first, after)
    }
    columns = ("label",) if "spans" in split.columns else ()
    table = Table("position", "id", "token", *columns)
    ids = split.column("input_ids")[row][: split.column("length")[row]].tolist()
    for position, number in enumerate(ids):
        text = repr(task.tokens.tokenizer.decode([number]))
        mark = ("yes" if position in labels else "",) * len(columns)
        table.add_row(str(position), str(number), escape(text), *mark)
    return table


def describe_partition(labels: "LabelCounts", experiment: "Experiment") -> str:
    """Return dataset, kind, clients and rows of a partition in one line."""
    options, counts = experiment.partition, labels.counts
    kind = "iid" if options.kind == "iid" else "by natural clients"
    if options.kind == "dirichlet":
        kind = f"Dirichlet({options.alpha}) over {_plural(labels.what)}, {options.variant}"
    return f"{experiment.data.name}, {kind}, {len(counts)} clients, {counts.sum()} rows"


def partition_table(labels: "LabelCounts") -> Table:
    """List rows and largest classes of the first :data:`MAX_ROWS` clients and of all."""
    counts = labels.counts
    sizes = counts.sum(axis=1)
    several = len(labels.names) > 1
    classes = _plural(labels.what)
    columns = (f"{classes} held", f"largest {classes}") if several else ()
    table = Table("client", "rows", *columns)
    shown = min(len(counts), MAX_ROWS)

    def cells(rows: np.ndarray) -> tuple[str, ...]:
        order = np.argsort(-rows, kind="stable")[:4]
        largest = ", ".join(f"{labels.names[k]}: {rows[k]}" for k in order if rows[k])
        return (str(int((rows > 0).sum())), largest) if several else ()

    for client in range(shown):
        name = labels.clients[client] if labels.clients else str(client)
        table.add_row(name, str(sizes[client]), *cells(counts[client]))
    if shown < len(counts):
        more = ("", f"{len(counts) - shown} more") if several else ()
        table.add_row("...", f"{sizes.min()} to {sizes.max()}", *more)
    table.add_section()
    table.add_row("all", str(sizes.sum()), *cells(counts.sum(axis=0)))
    return table


def _plural(what: str) -> str:
    return f"{what}es" if what.endswith("s") and what != "rows" else f"{what}s"
