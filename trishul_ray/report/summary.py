"""Tables on the terminal: a run's result, and who holds what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from trishul_ray.experiment import Experiment
from trishul_ray.tracking.progress import count, duration

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
            count(sum(summary["parameters"].values())),
            f"{count(up)} / {count(down)}",
            duration(sum(summary["round_seconds"])),
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
