"""The command ``list``: list methods, models, datasets or runs, or the clients of a dataset."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trishul_ray.cli.output import (
    AsJson,
    Plugins,
    Runs,
    err,
    print_line,
    print_table,
    show_progress,
)
from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Maximum number of clients that the partition of a dataset lists individually.
MAX_ROWS = 30

Row = dict[str, Any]


Kind = Literal["methods", "models", "datasets", "runs"]


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATASET] [KEY=VALUE ...]",
            help="Dataset and overrides: show the rows of each client.",
            show_default=False,
        ),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show the tokens of training row N of the dataset."),
    ] = None,
    runs: Runs = "runs",
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """List methods, models, datasets or runs, or partition a dataset.

    - `trishul list methods`
    - `trishul list runs --json`
    - `trishul list datasets digits partition.alpha=0.1 federation.clients=10`
    - `trishul list datasets synthetic/instructions --row 0` — tokens and labels of a row
    """
    from rich.table import Table

    from trishul_ray.plugins.loading import faults

    if words and kind != "datasets":
        raise InputError(f"{words[0]!r}: only `trishul list datasets` accepts a name")
    if words:
        experiment = _load(words)
        title, rows = _partition(experiment) if row is None else _tokens(experiment, row)
        if not as_json:
            print_line(title)
    else:
        lists = {"methods": _methods, "models": _models, "datasets": _datasets}
        rows = _runs(runs) if kind == "runs" else lists[kind]()
    for fault in faults():
        print_line(f"warning: {fault}", err)
    if as_json:
        print_line(json.dumps(rows, indent=2, ensure_ascii=False))
    elif rows:
        table = Table(*rows[0])
        for each in rows:
            table.add_row(*("" if value is None else str(value) for value in each.values()))
        print_table(table)
    else:
        print_line(f"no {kind} in {runs}")


def _methods() -> list[Row]:
    from trishul_ray.methods.base import method_classes

    return [
        {
            "name": name,
            "what it does": method.summary,
            "communication": method.communication,
            "reference": method.reference,
        }
        for name, method in method_classes().items()
    ]


def _models() -> list[Row]:
    """List the known backbones and the sources of their weights, without downloads."""
    from trishul_ray.config.fields import SHORT_MODEL_NAMES
    from trishul_ray.models.builtin import BUILTINS
    from trishul_ray.models.find_model import KNOWN, PACKAGED

    short = {name: alias for alias, name in SHORT_MODEL_NAMES.items()}
    sources = dict.fromkeys(KNOWN, "mirror or hub")
    for name, (_, package, extra) in PACKAGED.items():
        sources[name] = f"package {package}, extra {extra}"
    sources |= {name: f"built in: {b.description}" for name, b in BUILTINS.items()}
    return [
        {"name": name, "short name": short.get(name, ""), "weights": source}
        for name, source in sources.items()
    ]


def _datasets() -> list[Row]:
    from trishul_ray.data.prepare import describe_datasets

    return [{"name": name, "what it is": text} for name, text in describe_datasets().items()]


def _runs(place: str) -> list[Row]:
    """List the runs in a folder, with the scores of finished runs."""
    from trishul_ray.report.summary import list_runs, run_ids
    from trishul_ray.storage.store import Store
    from trishul_ray.tracking.progress import format_bytes

    finished = list_runs(place).to_dict("index")
    rows = []
    for id in run_ids(Store.open(place)):
        run = finished.get(id, {})
        columns = ("method", "dataset", "model", "alpha", "seed", "rounds")
        score = f"{run['primary_metric']} {run['final']:.2%}" if run else "not finished"
        traffic = [format_bytes(run[f"{way}_bytes"]) for way in ("uploaded", "downloaded") if run]
        rows.append(
            {
                "id": id,
                **{name: run.get(name) for name in columns},
                "result": score,
                "up / down": " / ".join(traffic),
            }
        )
    return rows


def _load(words: Sequence[str]) -> "Experiment":
    from trishul_ray.data.prepare import find_source
    from trishul_ray.experiment.loading import load_experiment

    name, *overrides = words
    find_source(name)  # rejects an unknown name
    # The cohort does not affect the partition, and one client is valid for every partition.
    return load_experiment(None, [f"dataset={name}", "federation.clients_per_round=1", *overrides])


def _partition(experiment: "Experiment") -> tuple[str, list[Row]]:
    """Count the rows and largest classes of the first clients, and of all clients.

    Returns:
        A title and the rows of a table.
    """
    import numpy as np

    from trishul_ray.data.partition import count_labels
    from trishul_ray.federation.prepare import coverage_of, prepare_rows

    with show_progress() as progress:
        prepared = prepare_rows(experiment, progress.task_progress("preparing data"))
    labels = count_labels(prepared.dataset.train, prepared.shards, experiment.partition)
    counts, clients = labels.counts, len(labels.counts)
    listed = {labels.clients[n] if labels.clients else str(n): counts[n] for n in range(clients)}
    parts = dict(list(listed.items())[:MAX_ROWS])
    if clients > MAX_ROWS:
        parts[f"{clients - MAX_ROWS} others"] = counts[MAX_ROWS:].sum(axis=0)
    parts["all"] = counts.sum(axis=0)
    rows: list[Row] = []
    for client, held in parts.items():
        rows.append({"client": client, "rows": int(held.sum())})
        if len(labels.names) > 1:
            largest = [k for k in np.argsort(-held, kind="stable")[:4] if held[k]]
            text = ", ".join(f"{labels.names[k]}: {held[k]}" for k in largest)
            rows[-1][f"largest by {labels.what}"] = text
    alpha, kind = experiment.partition.alpha, experiment.partition.kind
    title = f"Dirichlet({alpha})" if kind == "dirichlet" else kind
    return f"{clients} clients, {title}; {coverage_of(experiment, prepared).sentence}", rows


def _tokens(experiment: "Experiment", row: int) -> tuple[str, list[Row]]:
    """List the tokens of a training row, and whether each is a label.

    Returns:
        A title and the rows of a table.
    """
    from trishul_ray.federation.prepare import prepare_dataset

    with show_progress() as progress:
        dataset, task, _ = prepare_dataset(experiment, progress.task_progress("preparing data"))
    split = dataset.train
    if task.tokens is None or "input_ids" not in split.columns:
        raise InputError(f"--row: dataset {split.info.name} contains no texts")
    if row >= len(split):
        raise InputError(f"--row {row} exceeds the last training row, {len(split) - 1}")
    ids = split.column("input_ids")[row][: split.column("length")[row]].tolist()
    decode = task.tokens.tokenizer.decode
    rows = [{"position": n, "id": id, "token": repr(decode([id]))} for n, id in enumerate(ids)]
    if "spans" in split.columns:
        spans = split.column("spans")[row]
        for n, each in enumerate(rows):
            is_label = any(first <= n < after for first, after in spans)
            each["label"] = "yes" if is_label else ""
    return f"row {row} of {len(split):,}" + "".join(f"; {r}" for r in task.remarks(split)), rows
