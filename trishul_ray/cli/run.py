"""Commands on one experiment: run it, compare it with another, and export its adapter."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trishul_ray.cli.output import (
    Plugins,
    as_typed,
    err,
    out,
    print_field,
    print_line,
    print_table,
    resumable,
    show_progress,
    typed,
)
from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import import_ahead

if TYPE_CHECKING:
    from trishul_ray.experiment.experiment import Experiment
    from trishul_ray.federation.on_ray.driver import Workers
    from trishul_ray.runs.runner import FinishedRun
    from trishul_ray.storage.durable import Json
    from trishul_ray.tracking.progress import RunProgress

Runs = Annotated[
    str, typer.Option(help="Folder or URI where runs are stored.", envvar="TRISHUL_RUNS")
]


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="CONFIG.yaml (optional), then key=value overrides, e.g. method=ravan "
            "partition.alpha=0.1 federation.rounds=20",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: delete an earlier run with the same id.")
    ] = False,
    central: Annotated[
        bool,
        typer.Option(
            "--central", help="Also train the same adapter centrally and show both side by side."
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Print the resolved configuration and its id; run nothing."),
    ] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="List all fields: values, what they allow and mean.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Run one federated experiment, or continue it where it stopped.

    Without arguments: TRISHUL on the embedded handwritten digits, in under two minutes.

    - `trishul run method=ravan seed=1` — another method on the same task
    - `trishul run cifar.yaml budget=8 federation.clients=50` — your file, two fields changed
    - `trishul run dataset=cifar100 model=trishul/vit-cifar10-128x6 budget=8` — a dataset's preset

    Repeat the command to continue a stopped run or to show a finished one. Changing a field that
    can change a result makes a different run, with a different id.
    """
    from trishul_ray.cli.listing import field_list
    from trishul_ray.data.own import CUSTOM
    from trishul_ray.experiment.identity import check_found
    from trishul_ray.experiment.rows import check_rows

    experiment = load_arguments(arguments)
    if fields:
        print_line(field_list(experiment, out.width))
        return
    # Refuse what needs no data to see before anything imports torch.
    check_found(experiment)
    if show:
        if experiment.data.name in CUSTOM:
            check_rows(experiment)
        from trishul_ray.experiment.fit import check_layers  # imports torch

        if why := check_layers(experiment):
            print_line(f"not checked: whether the adapters fit the model: {why}", err)
        print_line(f"# id: {experiment.id}\n{experiment.to_yaml().decode().rstrip()}")
        return
    _run_and_show(experiment, fresh=fresh, central=central)


def _run_and_show(experiment: "Experiment", *, fresh: bool, central: bool) -> None:
    from trishul_ray.cli.listing import client_sentence, summary_table
    from trishul_ray.runs.runner import central_twin

    experiments = [("federated", experiment)]
    if central:
        experiments.append(("central", central_twin(experiment)))
    results = [(label, _run_one(label, each, fresh)) for label, each in experiments]
    summaries = [(label, result.summary) for label, result in results]
    print_table(summary_table(summaries))
    first = results[0][1]
    print_field("data", first.summary.data.sentence)
    if clients := client_sentence(first.summary):
        print_field("clients", clients)
    for name, report in first.summary.reports.items():
        if "sentence" in report:
            print_field(name, report["sentence"])
    exported = first.summary.export or {"note": "PEFT or merged"}
    for label, name, note in (
        ("result", "result.json", ""),
        ("adapter", "adapter", f" ({exported['note']})"),
        ("model", "model", f" ({exported['note']})"),
    ):
        if first.home.exists(name):
            print_field(label, f"{first.home.place(name)}{note}")
    if first.mlflow_command:
        print_field("MLflow", as_typed(first.mlflow_command))


def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model with the update merged in.")
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Write this client's own model, by number or name, for a method that leaves a "
            "part of the model with each client.",
        ),
    ] = None,
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Write a run's adapter as a PEFT LoRA adapter, or merged into the model.

    Reads the newest checkpoint, so that a run in progress can be exported too, and needs no data.
    Beside it are a model card, the class names, and the image processor or the tokenizer. Full
    fine-tuning has no adapter: its model is written.
    """
    from trishul_ray.runs.export import export_run

    written = export_run(run_id, directory, merged=merged, runs=runs, client=client)
    print_line(f"{written.note}, after round {written.round}: {directory}")


def evaluate(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    rows: Annotated[
        int, typer.Option(min=1, help="Most rows, in equal shares of every group.")
    ] = 500,
    batch: Annotated[int, typer.Option(min=1, help="Rows answered at once.")] = 16,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Also evaluate the backbone before training.")
    ] = False,
    validation: Annotated[
        bool, typer.Option("--validation", help="Take validation rows in place of test rows.")
    ] = False,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer. Default: task.target_length."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Tasks of lm-evaluation-harness to run instead (extra `eval`), into harness.json.",
        ),
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="--tasks: examples in each prompt.")] = 0,
    task_files: Annotated[
        Path | None, typer.Option(metavar="DIR", help="--tasks: a folder of your own tasks' files.")
    ] = None,
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Generate answers to test rows with a finished run of instruction tuning, and score them.

    Greedy, with the run's own template, precision and limits. Writes `eval.json` and, with each
    answer, `answers.jsonl` beside `result.json`; repeat the command to show them. Tables show a
    score with `eval: {score: rouge_l}`.
    """
    from trishul_ray.runs.evaluate import evaluate_run
    from trishul_ray.runs.harness import run_harness

    if tasks is not None:
        given = {"--untuned": untuned, "--validation": validation, "--new-tokens": new_tokens}
        if unread := [option for option, value in given.items() if value]:
            raise InputError(f"{unread[0]}: --tasks runs the harness, which does not take it")
        how = {"limit": rows, "batch_size": batch, "num_fewshot": shots}
        _print_harness(run_harness(run_id, tasks.split(","), task_files, runs=runs, **how))
        return
    with show_progress() as progress:
        found = evaluate_run(
            run_id, runs=runs, rows=rows, batch_size=batch, untuned=untuned,
            split="validation" if validation else "test", new_tokens=new_tokens,
            progress=progress.task_progress("evaluating"),
        )  # fmt: skip
    _print_scores(found)


def _print_harness(results: "Json") -> None:
    for name, numbers in results.items():
        scores = {k: v for k, v in numbers.items() if isinstance(v, float)}
        print_field(name, ", ".join(f"{k} {v:.4g}" for k, v in scores.items()))


def _print_scores(found: "Json") -> None:
    """Print the scores of answers, by group too, and warn where hardly any answer ends."""
    from rich.table import Table

    from trishul_ray.runs.evaluate import FEW_END, MUCH_REPEATED

    models = [name for name in ("tuned", "untuned") if name in found]
    table = Table(
        "score", *models, title=f"{found['rows']:,} of {found['of']:,} {found['split']} rows"
    )
    for score in [name for name, value in found["tuned"].items() if isinstance(value, float)]:
        table.add_row(score, *(f"{found[model].get(score, math.inf):.4g}" for model in models))
    for group, scores in found["tuned"].get("groups", {}).items():
        each = [found[model]["groups"][group].get("rouge_l", math.nan) for model in models]
        table.add_row(f"rouge_l, {scores['rows']:,} rows of {group}", *(f"{x:.4g}" for x in each))
    print_table(table)
    ended, repeated = found["tuned"]["ended"], found["tuned"].get("repeated", 0.0)
    if ended < FEW_END:
        why = "the model has hardly learned to stop, or the template has no end that is generated"
        if repeated > MUCH_REPEATED:
            why = f"{repeated:.0%} of their text repeats itself, as greedy ones of small models do"
        print_line(f"warning: {ended:.0%} of the answers end: {why}; look at the answers", err)


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.")],
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Compare two finished runs row by row, on the test rows that both scored.

    The interval and the p-value are about these two models and other rows: they say nothing about
    other seeds. Several seeds are compared by the command `table` or `sweep`.
    """
    from trishul_ray.api import load

    one, other = (load(run, runs=runs) for run in (first, second))
    found = one.compare(other)
    headline = one.summary["headline"]
    low, high = (100 * end for end in found.interval)
    for run in (one, other):
        print_field(run.id, f"{headline} {run.final[headline]:.2%} of {found.rows} rows")
    print_field(
        "difference", f"{100 * found.difference:+.2f} points, 95 % {low:+.2f} to {high:+.2f}"
    )
    print_field(
        "better", f"{found.first_better} rows by the first, {found.second_better} by the second"
    )
    print_field("p-value", f"{found.p_value:.2g}")


def load_arguments(arguments: list[str] | None) -> "Experiment":
    """Load the experiment that ``[CONFIG.yaml] [key=value ...]`` describes."""
    from trishul_ray.experiment.loading import is_field, load_experiment

    words = list(arguments or [])
    for name, value in zip(words, words[1:] or [""], strict=False):
        if is_field(name) and not Path(name).exists() and "=" not in value:
            meant = f"{name}={value or 'VALUE'}"
            raise InputError(f"{name}: write a field and its value as one word, {meant}")
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    return load_experiment(path, words)


def _run_one(label: str, experiment: "Experiment", fresh: bool) -> "FinishedRun":
    from trishul_ray.runs.mlflow_log import describe

    print_line(f"{label}: {describe(experiment)}", err)
    progress = show_progress(experiment.federation.rounds)
    earlier = _local_attempt(experiment) if fresh else ""
    with (
        resumable(progress, partial(_how_to_continue, experiment, earlier)),
        _workers_for(experiment, fresh, progress) as workers,
    ):
        from trishul_ray.runs.runner import run_experiment  # while the workers start

        result = run_experiment(experiment, progress, fresh=fresh, workers=workers)
    if result.repeated:
        print_line("this run had finished before; showing its result (--fresh runs it again)", err)
    return result


@contextmanager
def _workers_for(
    experiment: "Experiment", fresh: bool, progress: "RunProgress"
) -> Iterator["Workers | None"]:
    """Start Ray, and then the run's actors, while a thread imports what this process needs.

    What is refused without torch and Ray is refused before, while the parent of the actors, another
    process, imports.
    """
    import ray

    from trishul_ray.federation.on_ray.fork_server import ForkServer
    from trishul_ray.federation.on_ray.session import forks_workers, joins_cluster, ray_session
    from trishul_ray.federation.on_ray.slices import plan_slices
    from trishul_ray.runs.first_checks import check_first
    from trishul_ray.runs.folder import RunFolder
    from trishul_ray.runtime.cpu import usable_cores

    resources, finished = experiment.resources, False
    with suppress(OSError):  # reported by the run itself, with what is kept
        finished = not fresh and RunFolder.of(experiment).home.exists("result.json")
    # A run that asks for a GPU may be refused first, where there is neither one nor a cluster.
    early = resources.backend == "ray" and resources.device != "cuda" and not finished
    if not early or joins_cluster():
        yield None
        return
    with ExitStack() as stack:
        forks = forks_workers() and not ray.is_initialized()
        fork_server = stack.enter_context(ForkServer()) if forks else None
        if forks:  # there is no GPU, and the CPUs of Ray will be these
            plan_slices(experiment, {"CPU": float(usable_cores())})
        check_first(experiment, progress.task_progress("preparing data"))
        progress.phase("starting Ray")
        ahead = import_ahead("trishul_ray.runs.runner")
        stack.enter_context(ray_session(fork_server=fork_server))
        ahead.join()
        from trishul_ray.federation.on_ray.driver import Workers

        workers = stack.enter_context(Workers())
        if forks:  # others import first, and would slow this one down
            workers.request(experiment)
        yield workers


def _local_attempt(experiment: "Experiment") -> str:
    """Return the attempt of a run's files; empty without them, or in a remote storage."""
    from trishul_ray.report.summary import attempt_of
    from trishul_ray.runs.folder import RunFolder

    home = RunFolder.of(experiment).home
    with suppress(OSError):  # reported by the run itself
        return attempt_of(home) if home.is_local else ""
    return ""


def _how_to_continue(experiment: "Experiment", earlier: str, fails_again: bool) -> str:
    """Return how to go on; ``earlier`` is the attempt that was to be removed, if any."""
    from trishul_ray.runs.folder import RunFolder

    if earlier and _local_attempt(experiment) == earlier:
        return f"The earlier run is still there; to start over: {typed()}"
    home = RunFolder.of(experiment).home
    # A remote storage may be what has failed: do not ask it.
    any_kept = not home.is_local or home.child("checkpoints").names() != []
    if any_kept:
        kept = f"Finished rounds are kept in {home.place('checkpoints')}"
    else:
        kept = "No round was finished, so nothing is kept"
    if fails_again:
        return f"The same command would fail again; with a changed field it is another run. {kept}"
    goal = "continue" if any_kept else "start again"
    return f"{kept}; to {goal}: {typed().replace(' --fresh', '')}"
