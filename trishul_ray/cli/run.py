"""The command ``run``: run an experiment and print its result."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trishul_ray.cli.output import (
    Plugins,
    err,
    out,
    print_field,
    print_line,
    print_table,
    resumable,
    show_progress,
)
from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import import_ahead

if TYPE_CHECKING:
    from rich.table import Table

    from trishul_ray.experiment.experiment import Experiment
    from trishul_ray.federation.on_ray.driver import Workers
    from trishul_ray.report.summary import RunSummary
    from trishul_ray.runs.runner import FinishedRun
    from trishul_ray.storage.store import Store
    from trishul_ray.tracking.progress import RunProgress

#: Number of clients with the worst scores to print.
MAX_NAMED = 3


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
            "--central", help="Also train the same adapter on the pooled data, for comparison."
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Only print the resolved configuration and its id."),
    ] = False,
    fields: Annotated[
        bool,
        typer.Option(
            "--fields",
            help="List the fields of the named sections, or of all: current value, allowed values "
            "and meaning.",
        ),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of CONFIG.yaml, for editors.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Run a federated experiment, or resume it from its last round.

    Without arguments, it trains TRISHUL on the embedded handwritten digits, in under two minutes.

    - `trishul run method=ravan seed=1` — another method on the same task
    - `trishul run cifar.yaml budget=8 federation.clients=50` — a file with two overrides
    - `trishul run dataset=cifar100 model=trishul/vit-cifar10-128x6 budget=8` — a dataset's preset

    Repeat the command to resume a stopped run or to show a finished one. A change of any field that
    can change a result makes a different run, with a different id.
    """
    from trishul_ray.cli.fields import field_list, section_names
    from trishul_ray.data.user.user_data import USER_DATA
    from trishul_ray.experiment.identity import check_found
    from trishul_ray.experiment.rows import check_rows

    if schema:
        import json

        from trishul_ray.experiment.json_schema import experiment_schema

        print(json.dumps(experiment_schema(), indent=1))
        return
    if fields:
        sections = [word for word in arguments or () if word in section_names()]
        experiment = load_arguments([word for word in arguments or () if word not in sections])
        print_line(field_list(experiment, sections, out.width))
        return
    experiment = load_arguments(arguments)
    # Reject invalid input that can be found without data before importing torch.
    check_found(experiment)
    if show:
        if experiment.data.name in USER_DATA:
            check_rows(experiment)
        from trishul_ray.experiment.compatibility import check_layers  # imports torch

        if why := check_layers(experiment):
            print_line(f"could not check that the adapters fit the model: {why}", err)
        print_line(f"# id: {experiment.id}\n{experiment.to_yaml().decode().rstrip()}")
        return
    _run_and_show(experiment, fresh=fresh, central=central)


def _run_and_show(experiment: "Experiment", *, fresh: bool, central: bool) -> None:
    experiments = [("federated", experiment)]
    if central:
        from trishul_ray.runs.runner import central_twin

        experiments.append(("central", central_twin(experiment)))
    results = [(label, _run_one(label, each, fresh)) for label, each in experiments]
    first = results[0][1]
    print_result([(label, result.summary) for label, result in results], first.home)
    if first.mlflow_command:
        print_field("MLflow", first.mlflow_command)


def print_result(results: "Sequence[tuple[str, RunSummary]]", home: "Store") -> None:
    """Print the scores and the cost of runs, and the files of the first run."""
    first = results[0][1]
    print_table(_summary_table(results))
    print_field("data", first.data.sentence)
    for label, scores in (("clients", first.per_client), ("personal", first.personal)):
        if scores:
            print_field(label, _describe_scores(scores, first.headline))
    for name, report in first.reports.items():
        if "sentence" in report:
            print_field(name, report["sentence"])
    note = f" ({first.export['note']})" if first.export else ""
    for label, name in (("result", "result.json"), ("adapter", "adapter"), ("model", "model")):
        if home.exists(name):
            print_field(label, home.place(name) + (note if label == name else ""))


def _summary_table(results: "Sequence[tuple[str, RunSummary]]") -> "Table":
    """Build a table of the final scores and the cost of runs, with the untuned model first."""
    from rich.table import Table

    from trishul_ray.tracking.progress import format_bytes, format_count, format_duration

    metric, first = results[0][1].headline, results[0][1].untouched
    table = Table("", metric, "loss", "trained", "up / down", "time")
    table.add_row("untuned model", f"{first[metric]:.2%}", f"{first['loss']:.4f}")
    for label, summary in results:
        part = " (part of the data)" * summary.data.part
        table.add_row(
            f"{label} {summary.config['method']['name']}{part}".strip(),
            f"{summary.final[metric]:.2%}",
            f"{summary.final['loss']:.4f}",
            format_count(sum(summary.parameters.values())),
            f"{format_bytes(summary.uploaded_bytes)} / {format_bytes(summary.downloaded_bytes)}",
            format_duration(summary.seconds),
        )
    table.caption = f"after the last round, {results[0][1].final['round']}"
    return table


def _describe_scores(scores: "Mapping[str, float]", metric: str) -> str:
    """Describe the mean of the clients' scores and the worst clients."""
    worst = sorted(scores, key=scores.__getitem__)[:MAX_NAMED]
    mean = sum(scores.values()) / len(scores)
    named = ", ".join(f"{name} {scores[name]:.2%}" for name in worst)
    return f"mean {metric} of {len(scores)}: {mean:.2%}; worst: {named}"


def load_arguments(arguments: list[str] | None) -> "Experiment":
    """Load the experiment given by ``[CONFIG.yaml] [key=value ...]``."""
    from trishul_ray.experiment.loading import is_field, load_experiment

    words = list(arguments or [])
    if words and is_field(words[0]) and not Path(words[0]).exists():
        raise InputError(f"{words[0]} has no value; write a field as one word, {words[0]}=VALUE")
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    return load_experiment(path, words)


def _run_one(label: str, experiment: "Experiment", fresh: bool) -> "FinishedRun":
    from trishul_ray.runs.folder import RunFolder
    from trishul_ray.runs.mlflow_log import describe

    print_line(f"{label}: {describe(experiment)}", err)
    progress = show_progress(experiment.federation.rounds)
    home = RunFolder.of(experiment).home
    with (
        resumable(progress, f"Finished rounds are kept in {home.place('checkpoints')}"),
        _workers_for(experiment, home, fresh, progress) as workers,
    ):
        from trishul_ray.runs.runner import run_experiment  # import it while the workers start

        result = run_experiment(experiment, progress, fresh=fresh, workers=workers)
    if result.repeated:
        print_line("this run has already finished; use --fresh to run it again", err)
    return result


@contextmanager
def _workers_for(
    experiment: "Experiment", home: "Store", fresh: bool, progress: "RunProgress"
) -> Iterator["Workers | None"]:
    """Start Ray and the run's actors, while a thread imports the modules of this process.

    Input that can be checked without torch and Ray is rejected first, while the parent process of
    the actors runs its imports.
    """
    import ray

    from trishul_ray.federation.on_ray.fork_server import ForkServer
    from trishul_ray.federation.on_ray.session import forks_workers, joins_cluster, ray_session
    from trishul_ray.federation.on_ray.slices import plan_slices
    from trishul_ray.runs.first_checks import check_first
    from trishul_ray.runtime.device import usable_cores

    resources, finished = experiment.resources, False
    with suppress(OSError):  # the run itself reports the error
        finished = not fresh and home.exists("result.json")
    # Do not start actors early for a GPU: the run may be rejected if neither a GPU nor a cluster
    # exists.
    early = resources.backend == "ray" and not resources.needs_gpu and not finished
    if not early or joins_cluster():
        yield None
        return
    with ExitStack() as stack:
        forks = forks_workers() and not ray.is_initialized()
        fork_server = stack.enter_context(ForkServer()) if forks else None
        if forks:  # this machine has no GPU, and Ray will use all CPUs
            plan_slices(experiment, {"CPU": float(usable_cores())})
        check_first(experiment, progress.task_progress("preparing data"))
        progress.phase("starting Ray")
        ahead = import_ahead("trishul_ray.runs.runner")
        stack.enter_context(ray_session(fork_server=fork_server))
        ahead.join()
        from trishul_ray.federation.on_ray.driver import Workers

        workers = stack.enter_context(Workers())
        if forks:  # otherwise the imports of workers would slow down this process
            workers.request(experiment)
        yield workers
