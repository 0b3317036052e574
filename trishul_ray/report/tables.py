"""Tables and lines for the terminal: results and partitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from trishul_ray.experiment import Experiment
from trishul_ray.tracking.progress import format_count, format_duration

#: Clients that :func:`client_sentence` names.
MAX_NAMED = 8

#: With more clients, :func:`partition_table` summarizes the rest in one row.
MAX_ROWS = 30


def describe(experiment: Experiment) -> str:
    """Return method, dataset, backbone, cohort, rounds and id of a run in one line."""
    fed = experiment.federation
    lam = getattr(experiment.method, "lam", None)
    method = experiment.method.name + ("" if lam is None else f" (λ={lam:g})")
    return (
        f"{method} on {experiment.data.name}, {experiment.model.name}, "
        f"{fed.clients_per_round} of {fed.clients} clients a round, {fed.rounds} rounds, "
        f"id {experiment.id}"
    )


def _coverage(summary: dict[str, Any]) -> str:
    if summary.get("data") is None:  # a result of an older version
        return "unknown"
    return "part" if summary["data"]["part"] else ""


def data_sentence(summary: dict[str, Any]) -> str:
    """Return dataset, rows, source and revision of a result in one line."""
    data = summary.get("data")
    if data is None:
        return f"{summary['config']['data']['name']}: the number of rows was not recorded"
    return str(data["sentence"])


def client_sentence(summary: dict[str, Any]) -> str:
    """Return the scores of the clients of a result in one line, the worst first; empty if none.

    If clients have models of their own, those of both models.
    """
    headline = summary["headline"]
    line = _scores_line(f"mean {headline}", summary.get("per_client") or {})
    if own := summary.get("personal"):
        line = f"global model: {line}; own models: {_scores_line(f'mean {headline}', own)}"
    return line


def _scores_line(what: str, scores: dict[str, float]) -> str:
    if not scores:
        return ""
    ordered = sorted(scores.items(), key=lambda item: item[1])
    named = ", ".join(f"{name} {score:.2%}" for name, score in ordered[:MAX_NAMED])
    more = f", and {len(ordered) - MAX_NAMED} better ones" if len(ordered) > MAX_NAMED else ""
    mean = sum(scores.values()) / len(scores)
    return f"{what} of {len(scores)}: {mean:.2%}; {named}{more}"


def summary_table(results: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Compare final metrics and cost of runs (label, result.json) with the untouched backbone."""
    headline = results[0][1]["headline"]
    coverage = [_coverage(summary) for _, summary in results]
    column = ("data",) if any(coverage) else ()
    table = Table("", *column, headline, "loss", "trained", "up / down", "time")
    first = results[0][1]["untouched"]
    cells = (f"{first[headline]:.2%}", f"{first['loss']:.4f}")
    table.add_row("untouched backbone", *coverage[: len(column)], *cells)
    for part, (label, summary) in zip(coverage, results, strict=True):
        final = summary["final"]
        up, down = summary["uploaded_parameters"], summary["downloaded_parameters"]
        table.add_row(
            f"{label} {summary['config']['method']['name']}",
            *([part] if column else []),
            f"{final[headline]:.2%}",
            f"{final['loss']:.4f}",
            format_count(sum(summary["parameters"].values())),
            f"{format_count(up)} / {format_count(down)}",
            format_duration(sum(summary["round_seconds"])),
        )
    table.caption = f"after the last round, {results[0][1]['final']['round']}"
    return table


@dataclass(frozen=True)
class LabelCounts:
    """The number of rows of each class, or sub-dataset, at each client."""

    counts: np.ndarray  # [clients, classes]
    names: tuple[str, ...]  # of the classes
    what: str  # what a class is called: ``class``, ``sub-dataset``
    clients: tuple[str, ...] = ()  # names of the clients, if they have any


def describe_partition(labels: LabelCounts, experiment: Experiment) -> str:
    """Return dataset, kind, clients and rows of a partition in one line."""
    options, counts = experiment.partition, labels.counts
    kind = "iid" if options.kind == "iid" else "by natural clients"
    if options.kind == "dirichlet":
        kind = f"Dirichlet({options.alpha}) over {_plural(labels.what)}, {options.variant}"
    return f"{experiment.data.name}, {kind}, {len(counts)} clients, {counts.sum()} rows"


def partition_table(labels: LabelCounts) -> Table:
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
        largest = ", ".join(f"{escape(labels.names[k])}: {rows[k]}" for k in order if rows[k])
        return (str(int((rows > 0).sum())), largest) if several else ()

    for client in range(shown):
        name = escape(labels.clients[client]) if labels.clients else str(client)
        table.add_row(name, str(sizes[client]), *cells(counts[client]))
    if shown < len(counts):
        more = ("", f"{len(counts) - shown} more") if several else ()
        table.add_row("...", f"{sizes.min()} to {sizes.max()}", *more)
    table.add_section()
    table.add_row("all", str(sizes.sum()), *cells(counts.sum(axis=0)))
    return table


def _plural(what: str) -> str:
    return f"{what}es" if what.endswith("s") and what != "rows" else f"{what}s"
