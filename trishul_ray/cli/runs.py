"""The commands ``show`` and ``rm`` for a stored run."""

import json
import shlex
from typing import Annotated

import typer

from trishul_ray.cli.output import AsJson, Plugins, Run, Runs, err, print_field, print_line
from trishul_ray.storage.redaction import redact
from trishul_ray.tracking.terminal import escape_controls


def show(
    run: Run,
    runs: Runs = "runs",
    as_json: AsJson = False,
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
        words = [
            "trishul",
            "run",
            home.place("config.yaml"),
            f"storage.runs={experiment.storage.runs}",
        ]
        print_field("continue", redact(shlex.join(words)))
        return
    if as_json:
        print_line(json.dumps(summary.to_dict(), indent=2, ensure_ascii=False))
    else:
        print_line(describe(experiment))
        print_result([("", summary)], home)


def rm(
    run: Run,
    runs: Runs = "runs",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    plugin: Plugins = None,
) -> None:
    """Remove a run: its folder and its MLflow run."""
    from trishul_ray.runs.folder import RunFolder, open_run
    from trishul_ray.runs.mlflow_log import describe

    home, experiment = open_run(run, runs)
    if not yes:
        question = f"Remove {home.uri}: {describe(experiment)}?"
        typer.confirm(escape_controls(question), abort=True)
    folder = RunFolder.of(experiment)
    with folder.locked(read_only=False):
        for rejected in folder.remove():
            print_line(f"not removed from MLflow: {rejected}", err)
    print_line(f"removed {home.uri}")
