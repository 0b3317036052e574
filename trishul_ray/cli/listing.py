"""Commands that list methods, models, datasets and runs, and show or remove a run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trishul_ray.cli.output import Plugins, Runs, err, print_field, print_line, print_table
from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Clients that the partition of a dataset lists; the others are one row.
MAX_ROWS = 30

Row = Mapping[str, Any]


class Kind(StrEnum):
    """What ``trishul list`` lists."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    runs = "runs"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATASET] [KEY=VALUE ...]",
            help="A dataset and fields: show the rows of each client.",
            show_default=False,
        ),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show the tokens of training row N of the dataset."),
    ] = None,
    runs: Runs = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plugin: Plugins = None,
) -> None:
    """List methods, models, datasets or runs; partition a dataset.

    - `trishul list methods`
    - `trishul list runs --json`
    - `trishul list datasets digits partition.alpha=0.1 federation.clients=10`
    - `trishul list datasets synthetic/instructions --row 0` — tokens and labels of a row
    """
    from trishul_ray.plugins.loading import faults

    if words and kind is not Kind.datasets:
        raise InputError(f"{words[0]!r}: only datasets are shown by name")
    if words:
        experiment = _load(words)
        title, rows = _partition(experiment) if row is None else _tokens(experiment, row)
        if not as_json:
            print_line(title)
    elif kind is Kind.methods:
        rows = _methods()
    elif kind is Kind.models:
        rows = _models()
    elif kind is Kind.datasets:
        rows = _datasets()
    else:
        rows = _runs(runs)
    for fault in faults():
        print_line(f"warning: {fault}", err)
    if as_json:
        print_line(json.dumps([dict(each) for each in rows], indent=2, ensure_ascii=False))
    elif rows:
        print_rows(rows)
    else:
        print_line(f"no {kind} in {runs}")


def print_rows(rows: Sequence[Row]) -> None:
    """Print rows of one kind as a table."""
    from rich.table import Table

    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    print_table(table)


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
    """Return the known backbones, which are not downloaded: size, adapted matrices, source."""
    from trishul_ray.config.fields import SHORT_MODEL_NAMES
    from trishul_ray.models.builtin import BUILTINS
    from trishul_ray.models.find_model import KNOWN, PACKAGED, packaged_folder

    short = {name: alias for alias, name in SHORT_MODEL_NAMES.items()}
    sources = {name: "mirror or hub" for name in KNOWN}
    for name, (_, package, extra) in PACKAGED.items():
        there = packaged_folder(name) is not None
        sources[name] = f"package {package}" + ("" if there else f", extra {extra}")
    sources |= {name: f"built in: {b.description}" for name, b in BUILTINS.items()}
    rows: list[Row] = []
    for name, source in sources.items():
        size = ("", "") if ", extra" in source else _size(name)
        columns = {"short name": short.get(name, ""), "parameters": size[0]}
        rows.append({"name": name, **columns, "adapted by default": size[1], "weights": source})
    return rows


def _size(name: str) -> tuple[str, str]:
    """Return the number of parameters without a classification head, and the adapted matrices."""
    from trishul_ray.adapters.targets import find_layers
    from trishul_ray.config.fields import ModelConfig
    from trishul_ray.config.places import Places
    from trishul_ray.models.backbone import Backbone
    from trishul_ray.tracking.progress import format_count

    # These architectures need neither cache nor mirror.
    model = Backbone(ModelConfig(name=name), Places(Path(), hub=None)).meta_model()
    shapes = Counter(
        f"{spec.name.rpartition('.')[2]} {spec.d_out}x{spec.d_in}" for spec in find_layers(model)
    )
    adapted = "\n".join(f"{times} x {shape}" for shape, times in shapes.items())
    return format_count(sum(p.numel() for p in model.parameters())), adapted


def _datasets() -> list[Row]:
    from trishul_ray.data.prepare import describe_datasets

    return [{"name": name, "what it is": text} for name, text in describe_datasets().items()]


def _runs(place: str) -> list[Row]:
    """Return the runs of a folder, finished ones with their score."""
    from trishul_ray.report.summary import list_runs, run_ids
    from trishul_ray.storage.store import Store

    finished = list_runs(place).reset_index().to_dict("records")
    known = {each["id"]: each for each in finished}
    rows: list[Row] = []
    for id in run_ids(Store.open(place)):
        found = known.get(id, {})
        named = {key: found.get(key) for key in ("method", "dataset", "model", "alpha", "seed")}
        score = f"{found['headline']} {found['final']:.2%}" if found else "not finished"
        rows.append({"id": id, **named, "rounds": found.get("rounds"), "result": score})
    return rows


def _load(words: Sequence[str]) -> "Experiment":
    from trishul_ray.data.prepare import find_source
    from trishul_ray.experiment.loading import load_experiment

    name, *overrides = words
    find_source(name)  # rejects an unknown name
    # Rows are partitioned among clients; the cohort does not matter.
    return load_experiment(None, [f"dataset={name}", "federation.clients_per_round=1", *overrides])


def _partition(experiment: "Experiment") -> tuple[str, list[Row]]:
    """Return rows and largest classes of the first clients of a dataset, and of all."""
    import numpy as np

    from trishul_ray.cli.output import show_progress
    from trishul_ray.data.partition import count_labels
    from trishul_ray.federation.prepare import coverage_of, prepare_rows

    with show_progress() as progress:
        prepared = prepare_rows(experiment, progress.task_progress("preparing data"))
    held = count_labels(prepared.dataset.train, prepared.shards, experiment.partition)
    counts, options = held.counts, experiment.partition
    kind = f"Dirichlet({options.alpha})" if options.kind == "dirichlet" else options.kind

    def row_of(client: str, rows: np.ndarray) -> Row:
        order = np.argsort(-rows, kind="stable")[:4]
        largest = ", ".join(f"{held.names[k]}: {rows[k]}" for k in order if rows[k])
        classes = {f"largest by {held.what}": largest} if len(held.names) > 1 else {}
        return {"client": client, "rows": int(rows.sum()), **classes}

    names = held.clients or [str(number) for number in range(len(counts))]
    rows = [row_of(names[client], counts[client]) for client in range(min(len(counts), MAX_ROWS))]
    if len(counts) > MAX_ROWS:
        rows.append(row_of(f"{len(counts) - MAX_ROWS} others", counts[MAX_ROWS:].sum(axis=0)))
    rows.append(row_of("all", counts.sum(axis=0)))
    coverage = coverage_of(experiment, prepared).sentence
    return f"{len(counts)} clients, {kind}; {coverage}", rows


def _tokens(experiment: "Experiment", row: int) -> tuple[str, list[Row]]:
    """Return the tokens of a training row, and which of them are labels."""
    from trishul_ray.cli.output import show_progress
    from trishul_ray.federation.prepare import encoded_rows

    with show_progress() as progress:
        dataset, task = encoded_rows(experiment, progress.task_progress("preparing data"))
    split = dataset.train
    if task.tokens is None or "input_ids" not in split.columns:
        raise InputError(f"--row: dataset {split.info.name} contains no texts")
    if row >= len(split):
        raise InputError(f"--row {row}: there are {len(split):,} training rows, counted from 0")
    spans = split.column("spans")[row] if "spans" in split.columns else None
    labels = {
        place for first, after in (() if spans is None else spans) for place in range(first, after)
    }
    ids = split.column("input_ids")[row][: split.column("length")[row]].tolist()
    rows: list[Row] = []
    for position, number in enumerate(ids):
        token = repr(task.tokens.tokenizer.decode([number]))
        label = {} if spans is None else {"label": "yes" if position in labels else ""}
        rows.append({"position": position, "id": number, "token": token, **label})
    return f"row {row} of {len(split):,}" + "".join(f"; {r}" for r in task.remarks(split)), rows


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    runs: Runs = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json.")] = False,
    plugin: Plugins = None,
) -> None:
    """Show a run: its settings, scores, cost and files."""
    from trishul_ray.cli.run import print_result
    from trishul_ray.federation.checkpoint import open_checkpoints
    from trishul_ray.report.summary import RunSummary
    from trishul_ray.runs.folder import open_run
    from trishul_ray.runs.mlflow_log import describe

    home, experiment = open_run(run, runs)
    try:
        summary = RunSummary.read(home)
    except FileNotFoundError:
        checkpoint = open_checkpoints(experiment).newest()
        done = 0 if checkpoint is None else checkpoint.round
        print_line(describe(experiment))
        print_field("rounds", f"{done} of {experiment.federation.rounds}; the run has not finished")
        print_field("continue", f"trishul run {home.place('config.yaml')}")
        return
    if as_json:
        print_line(json.dumps(summary.to_dict(), indent=2, ensure_ascii=False))
    else:
        print_line(describe(experiment))
        print_result([("", summary)], home)


def rm(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    runs: Runs = "runs",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    plugin: Plugins = None,
) -> None:
    """Remove a run: its folder, and its run in MLflow."""
    from trishul_ray.runs.folder import RunFolder, open_run
    from trishul_ray.runs.mlflow_log import describe, mark_replaced

    home, experiment = open_run(run, runs)
    if not yes:
        typer.confirm(f"Remove {home.uri}: {describe(experiment)}?", abort=True)
    folder = RunFolder.of(experiment)
    with folder.locked(read_only=False):
        attempt = folder.attempt
        folder.remove_result()
        for refused in mark_replaced(experiment, attempt, by="trishul rm"):
            print_line(f"not removed from MLflow: {refused}", err)
        home.remove_all()
    print_line(f"removed {home.uri}")
