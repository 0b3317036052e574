"""What can be run, as tables on the terminal: methods, datasets, backbones."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table
from torch import nn

from trishul_ray.adapters.targets import find_layers
from trishul_ray.config import SHORT_MODEL_NAMES, ModelConfig
from trishul_ray.data.prepare import describe_datasets
from trishul_ray.experiment import Experiment
from trishul_ray.methods.base import method_class, method_names
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.lookup import KNOWN, PACKAGED, packaged_folder
from trishul_ray.storage import Places
from trishul_ray.tracking.progress import format_count, format_duration


def methods_table() -> Table:
    """Every method: what it does, what it sends, where it comes from."""
    table = Table("name", "what it does", "communication", "reference")
    for name in method_names():
        method = method_class(name)
        table.add_row(name, method.summary, method.communication, method.reference)
    return table


def datasets_table() -> Table:
    """Every dataset in a line."""
    table = Table("name", "what it is")
    for name, text in describe_datasets().items():
        table.add_row(name, escape(text))
    return table


def models_table() -> Table:
    """Backbones known by name: their size, what is adapted, where their weights come from.

    Needs no network and no weights.
    """
    short = {name: alias for alias, name in SHORT_MODEL_NAMES.items()}
    # A name is there to be copied: it is the other columns that give way.
    name_column = Column("name", no_wrap=True)
    table = Table(name_column, "parameters", "adapted by default", "weights")
    for name in KNOWN:
        alias = f"\n{short[name]}" if name in short else ""
        table.add_row(name + alias, *_size(name), "mirror or hub")
    for name, (_, package, extra) in PACKAGED.items():
        there = packaged_folder(name) is not None
        size = _size(name) if there else ("", "")
        table.add_row(name, *size, f"package {package}" + ("" if there else f", extra {extra}"))
    for name, builtin in BUILTINS.items():
        weights = f"built in: {builtin.description.partition(': ')[0]}, `trishul pretrain`"
        table.add_row(name, *_size(name), weights)
    return table


def _size(name: str) -> tuple[str, str]:
    """Parameters without a classification head of the task's, and the matrices by shape."""
    # Built-in, packaged and well-known architectures are read from neither cache nor mirror.
    model = Backbone(ModelConfig(name=name), Places(Path(), hub=None)).meta_model()
    return format_count(sum(p.numel() for p in model.parameters())), _adapted(model)


def _adapted(model: nn.Module) -> str:
    found = Counter(
        (spec.name.rpartition(".")[2], spec.d_out, spec.d_in) for spec in find_layers(model)
    )
    return "\n".join(
        f"{times} x {name} {rows}x{columns}" for (name, rows, columns), times in found.items()
    )


#: More clients than this are summed up in one line.
MOST_CLIENTS = 30


def describe(experiment: Experiment) -> str:
    """A run in one line: what, where, how far, and its id."""
    fed = experiment.federation
    strength = getattr(experiment.method, "lam", None)
    method = experiment.method.name + ("" if strength is None else f" (λ={strength:g})")
    return (
        f"{method} on {experiment.data.name}, {experiment.model.name}, "
        f"{fed.clients_per_round} of {fed.clients} clients a round, {fed.rounds} rounds, "
        f"id {experiment.id}"
    )


def data_word(summary: dict[str, Any]) -> str:
    """Return ``part`` for a score of other than the whole dataset, and nothing for the whole.

    ``unknown`` marks a result of an older version, which did not record it.
    """
    data = summary.get("data")
    if data is None:
        return "unknown"
    return "part" if data["part"] else ""


def data_sentence(summary: dict[str, Any]) -> str:
    """Return what a result's scores are scores of: dataset, rows, source, revision."""
    data = summary.get("data")
    if data is None:
        return f"{summary['config']['data']['name']}: how many of its rows was not recorded"
    return str(data["sentence"])


def summary_table(results: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """The final metric of each run beside that of the untouched backbone, with cost.

    Args:
        results: a label and the content of result.json, for each run.
    """
    headline = results[0][1]["headline"]
    words = [data_word(summary) for _, summary in results]
    column = ("data",) if any(words) else ()
    table = Table("", *column, headline, "loss", "trained", "up / down", "time")
    first = results[0][1]["untouched"]
    cells = (f"{first[headline]:.2%}", f"{first['loss']:.4f}")
    table.add_row("untouched backbone", *words[: len(column)], *cells)
    for word, (label, summary) in zip(words, results, strict=True):
        final = summary["final"]
        up, down = summary["uploaded_parameters"], summary["downloaded_parameters"]
        table.add_row(
            f"{label} {summary['config']['method']['name']}",
            *([word] if column else []),
            f"{final[headline]:.2%}",
            f"{final['loss']:.4f}",
            format_count(sum(summary["parameters"].values())),
            f"{format_count(up)} / {format_count(down)}",
            format_duration(sum(summary["round_seconds"])),
        )
    table.caption = f"after the last round, {results[0][1]['final']['round']}"
    return table


@dataclass(frozen=True)
class Holdings:
    """Who holds what.

    Attributes:
        counts: rows of each kind at each client, [clients, kinds].
        names: of the kinds.
        what: what a kind is, e.g. class.
    """

    counts: np.ndarray
    names: tuple[str, ...]
    what: str


def describe_partition(held: Holdings, experiment: Experiment) -> str:
    """A partition in one line."""
    options, counts = experiment.partition, held.counts
    kind = "iid" if options.kind == "iid" else "by natural clients"
    if options.kind == "dirichlet":
        kind = f"Dirichlet({options.alpha}) over {_plural(held.what)}, {options.variant}"
    return f"{experiment.data.name}, {kind}, {len(counts)} clients, {counts.sum()} rows"


def partition_table(held: Holdings) -> Table:
    """Who holds what, one client a line; the first :data:`MOST_CLIENTS`, and all together."""
    counts = held.counts
    sizes = counts.sum(axis=1)
    several = len(held.names) > 1
    kinds = _plural(held.what)
    columns = (f"{kinds} held", f"largest {kinds}") if several else ()
    table = Table("client", "rows", *columns)
    shown = min(len(counts), MOST_CLIENTS)

    def cells(rows: np.ndarray) -> tuple[str, ...]:
        order = np.argsort(-rows, kind="stable")[:4]
        largest = ", ".join(f"{escape(held.names[k])}: {rows[k]}" for k in order if rows[k])
        return (str(int((rows > 0).sum())), largest) if several else ()

    for client in range(shown):
        table.add_row(str(client), str(sizes[client]), *cells(counts[client]))
    if shown < len(counts):
        more = ("", f"{len(counts) - shown} more") if several else ()
        table.add_row("...", f"{sizes.min()} to {sizes.max()}", *more)
    table.add_section()
    table.add_row("all", str(sizes.sum()), *cells(counts.sum(axis=0)))
    return table


def _plural(what: str) -> str:
    return f"{what}es" if what.endswith("s") and what != "rows" else f"{what}s"
