"""Tables on the terminal: a run's result, and who holds what."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from trishul_ray.experiment import Experiment
from trishul_ray.tracking.progress import count, duration


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


def summary_table(results: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Final accuracy of each run beside that of the untouched backbone, with cost.

    Args:
        results: a label and the content of result.json, for each run.
    """
    table = Table("", "accuracy", "loss", "trained", "up / down", "time")
    first = results[0][1]["untouched"]
    table.add_row("untouched backbone", f"{first['accuracy']:.2%}", f"{first['loss']:.4f}")
    for label, summary in results:
        final = summary["final"]
        up, down = summary["uploaded_parameters"], summary["downloaded_parameters"]
        table.add_row(
            f"{label} {summary['config']['method']['name']}",
            f"{final['accuracy']:.2%}",
            f"{final['loss']:.4f}",
            count(sum(summary["parameters"].values())),
            f"{count(up)} / {count(down)}",
            duration(sum(summary["round_seconds"])),
        )
    table.caption = f"after the last round, {results[0][1]['final']['round']}"
    return table


def partition_table(counts: np.ndarray, experiment: Experiment) -> Table:
    """Who holds what.

    Args:
        counts: rows of each label at each client, [clients, classes].
        experiment: names the partition.
    """
    options = experiment.partition
    kind = "iid" if options.kind == "iid" else f"Dirichlet({options.alpha}) {options.variant}"
    sizes = counts.sum(axis=1)
    table = Table(
        "client",
        "rows",
        "classes held",
        "largest classes",
        title=f"{experiment.data.name}, {kind}, {len(counts)} clients, {sizes.sum()} rows",
    )
    shown = min(len(counts), 30)
    for client in range(shown):
        order = np.argsort(-counts[client], kind="stable")[:4]
        largest = ", ".join(f"{c}: {counts[client, c]}" for c in order if counts[client, c])
        table.add_row(
            str(client), str(sizes[client]), str(int((counts[client] > 0).sum())), largest
        )
    if shown < len(counts):
        table.add_row("...", f"{sizes.min()} to {sizes.max()}", "", f"{len(counts) - shown} more")
    return table
