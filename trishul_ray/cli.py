"""The ``trishul`` command.

Exit codes: 0 done; 2 the input is wrong (one line); 1 the run failed (one paragraph that says what
happened, what is kept and how to continue); 130 stopped by Ctrl-C, 143 by SIGTERM (Slurm, Docker,
systemd), 129 by SIGHUP (a lost terminal).
"""

import math
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from trishul_ray.errors import InputError, RunError
from trishul_ray.federation.determinism import set_environment

set_environment()

app = typer.Typer(
    name="trishul",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated fine-tuning with shared frozen bases: one run, from the command line.",
)

#: Typer carries a copy of Click's exceptions; this public class leads to their common base.
_UsageError: Any = typer.BadParameter.__mro__[1]

out = Console()
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="CONFIG.yaml (optional), then key=value overrides, e.g. method=ravan "
        "partition.alpha=0.1 federation.rounds=20",
        show_default=False,
    ),
]


@app.command()
def run(
    arguments: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, forgetting an earlier run of the same id.")
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
) -> None:
    """Run one federated experiment, or continue it where it stopped.

    Without arguments: TRISHUL on the embedded handwritten digits, in under two minutes.

    - `trishul run method=ravan seed=1` — another method on the same task
    - `trishul run cifar.yaml budget=8 federation.clients=50` — your file, two fields changed
    - `trishul run dataset=cifar100 model=trishul/vit-cifar10-128x6 budget=8` — a dataset's preset

    The same command again continues a stopped run and reads a finished one. A changed field that
    can change a number makes a different run with an id of its own.
    """
    from trishul_ray.report.tables import data_sentence, summary_table
    from trishul_ray.run.results import config_yaml
    from trishul_ray.run.runner import central_twin

    experiment = _load(arguments)
    if show:
        out.print(f"# id: {experiment.id}", highlight=False)
        out.print(config_yaml(experiment).decode(), highlight=False, end="")
        return
    twins = [("federated", experiment)]
    if central:
        twins.append(("central", central_twin(experiment)))
    results = [(label, _run_one(label, twin, fresh)) for label, twin in twins]
    out.print(summary_table([(label, o.summary) for label, o in results]))
    first = results[0][1]
    out.print(f"data      {data_sentence(first.summary)}", highlight=False, soft_wrap=True)
    parts = [("result", "result.json", ""), ("figures", "figures", "")]
    parts += [("adapter", "adapter", " (PEFT)"), ("model", "model", " (merged)")]
    for kind, name, what in parts:
        if first.home.exists(name):
            told = f"{kind:9} {first.home.place(name)}{what}"
            out.print(told, highlight=False, soft_wrap=True)
    if first.mlflow_command:
        out.print(f"MLflow    {first.mlflow_command}", highlight=False, soft_wrap=True)


@app.command()
def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model with the update in its weights.")
    ] = False,
    runs: Annotated[str, typer.Option(help="Where runs lie.")] = "runs",
) -> None:
    """Write a run's adapter as a PEFT LoRA adapter, or merged into the model.

    The newest checkpoint counts, so a run that is still going can be exported too.
    """
    from trishul_ray.run.artifacts import export_run

    rounds = export_run(run_id, directory, merged=merged, runs=runs)
    kind = "merged model" if merged else "PEFT adapter"
    out.print(f"{kind} after round {rounds}: {directory}", highlight=False, soft_wrap=True)


@app.command()
def pretrain(
    name: Annotated[str, typer.Argument(help="A built-in backbone.")] = "vit-digits",
    dataset: Annotated[
        str | None,
        typer.Option(help="Texts for a text model to learn from; default 20newsgroups."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Cache folder; default $TRISHUL_CACHE.")
    ] = None,
    hub: Annotated[Path | None, typer.Option(help="A local mirror; default $TRISHUL_HUB.")] = None,
) -> None:
    """Train a built-in backbone centrally (Ray Train), once; runs do this by themselves.

    - `trishul pretrain` — the small ViT for digits
    - `trishul pretrain llama-tiny` — a small LLaMA, on the raw texts of 20 Newsgroups
    - `trishul pretrain t5-tiny --dataset mrqa` — on other texts; then `model=FOLDER` takes it
    """
    from trishul_ray.federation.on_ray.session import ray_session
    from trishul_ray.pretrain.training import get_builtin
    from trishul_ray.pretrain.training import pretrain as train
    from trishul_ray.storage import Places
    from trishul_ray.tracking.progress import RunProgress

    builtin = get_builtin(name, dataset)
    with RunProgress(1, err) as progress, ray_session():
        told = progress.task_progress(f"pretraining {name}")
        folder = train(builtin, Places.at(cache, hub), progress=told)
    out.print(f"{name}: {folder}", highlight=False, soft_wrap=True)


@app.command()
def methods() -> None:
    """List the methods: what they do, what they send, where they come from."""
    from trishul_ray.report.tables import methods_table

    out.print(methods_table())


@app.command()
def models() -> None:
    """List the backbones known by name: size, what is adapted, where the weights come from.

    Any other is named by its hub name, its name in a mirror, or its folder: `model=owner/name`.
    """
    from trishul_ray.report.tables import models_table

    out.print(models_table())


@app.command()
def datasets(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A dataset, then key=value overrides: prints who holds what."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:ALPHA]",
            help="iid, natural, dirichlet or e.g. dirichlet:0.1; short for partition.kind and "
            "partition.alpha.",
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw it, as a PNG file.")] = None,
) -> None:
    """List the datasets; with a name, show how its rows are dealt to the clients.

    - `trishul datasets digits --partition dirichlet:0.1 federation.clients=10`
    - `trishul datasets mrqa --picture mrqa.png` — by sub-dataset
    - `trishul datasets table data.path=notes.csv data.columns='{text: body, label: topic}'`
    """
    from trishul_ray.data.prepare import dataset_names
    from trishul_ray.federation.prepare import coverage_of, prepare_rows
    from trishul_ray.loading import load_experiment
    from trishul_ray.report.figures import label_distribution
    from trishul_ray.report.tables import datasets_table, describe_partition, partition_table
    from trishul_ray.run.artifacts import client_labels
    from trishul_ray.tracking.progress import RunProgress

    if not arguments:
        out.print(datasets_table())
        return
    name, *overrides = arguments
    if name not in dataset_names():
        raise InputError(f"unknown dataset {name!r}; known: {', '.join(dataset_names())}")
    if partition is not None:
        overrides += _partition_words(partition)
    experiment = load_experiment(None, [f"dataset={name}", *overrides])
    with RunProgress(1, err) as progress:
        prepared = prepare_rows(experiment, progress.task_progress("preparing data"))
    held = client_labels(prepared, experiment)
    out.print(describe_partition(held, experiment), highlight=False, soft_wrap=True)
    out.print(partition_table(held))
    data = coverage_of(experiment, prepared.dataset).sentence
    out.print(f"data      {data}", highlight=False, soft_wrap=True)
    if picture is not None:
        label_distribution(held.counts, picture, classes=held.names, what=held.what, note=data)
        out.print(f"picture   {picture}", highlight=False, soft_wrap=True)


@app.command()
def doctor(
    start_ray: Annotated[
        bool, typer.Option("--ray", help="Also start and stop a local Ray, as a run would.")
    ] = False,
    runs: Annotated[str, typer.Option(help="Where runs would lie.")] = "runs",
) -> None:
    """Check versions, devices, Ray, storage, hub or mirror: what would go wrong, and the cure."""
    from trishul_ray.doctor import diagnose, render

    checks = diagnose(runs=runs, start_ray=start_ray)
    render(checks, out)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _partition_words(text: str) -> list[str]:
    """``dirichlet:0.1`` as overrides."""
    kind, colon, alpha = text.partition(":")
    if colon and kind != "dirichlet":
        raise InputError(f"--partition {text!r}: only dirichlet has an alpha, as dirichlet:0.1")
    return [f"partition.kind={kind}", *([f"partition.alpha={alpha}"] if colon else [])]


def _run_one(label: str, experiment: Any, fresh: bool) -> Any:
    from trishul_ray.report.tables import describe
    from trishul_ray.run.runner import run_experiment
    from trishul_ray.tracking.progress import RunProgress

    err.print(f"{label}: {describe(experiment)}", highlight=False, soft_wrap=True)
    with RunProgress(experiment.federation.rounds, err) as progress:
        try:
            outcome = run_experiment(experiment, progress, fresh=fresh)
        except (RunError, OSError) as error:
            what = str(error) if isinstance(error, RunError) else _describe(error)
            raise RunError(f"{what}. {_how_to_continue(experiment)}") from error
        except KeyboardInterrupt:
            with suppress(OSError):  # a lost terminal shows nothing any more
                err.print(
                    f"stopped. {_how_to_continue(experiment)}", highlight=False, soft_wrap=True
                )
            raise typer.Exit(130) from None
    if outcome.repeated:
        err.print("this run had finished before; its result is shown (--fresh runs it again)")
    return outcome


def _load(arguments: list[str] | None) -> Any:
    from trishul_ray.loading import load_experiment

    words = list(arguments or [])
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    return load_experiment(path, words)


def _how_to_continue(experiment: Any) -> str:
    from trishul_ray.storage import place

    # The words the person typed, so that the line can be pasted.
    command = shlex.join(["trishul", *sys.argv[1:]]).replace(" --fresh", "")
    kept = place(experiment.storage.runs, f"{experiment.id}/checkpoints")
    return f"Finished rounds are kept in {kept}; to continue: {command}"


def _describe(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename or 'storage'}"


#: Seconds in which a repeated signal is not a second wish: `timeout` and Slurm send two at once.
_SAME_WISH = 10.0


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP stop what is inside as Ctrl-C does, unless ignored (nohup).

    Yields:
        The signals heard so far.
    """
    heard: list[int] = []
    last = -math.inf

    def stop(signum: int, _frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > _SAME_WISH:
            last = time.monotonic()
            heard.append(signum)
            raise KeyboardInterrupt

    mine = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in mine:
        signal.signal(signum, stop)
    try:
        yield heard
    finally:
        for signum in mine:
            signal.signal(signum, signal.SIG_DFL)


def main() -> None:
    """Entry point: errors become one line or one paragraph and an exit code."""
    try:
        with _stoppable() as heard:
            code = app(standalone_mode=False)
        if code == 130 and heard:
            code = 128 + heard[0]
    except InputError as error:
        _fail(str(error), 2)
    except typer.Abort:
        code = 130
    except _UsageError as error:
        _fail(error.format_message(), 2)
    except RunError as error:
        # Nothing that can be pasted is broken: neither words nor hyphenated paths.
        wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
        _fail(wrapper.fill(str(error)), 1)
    except OSError as error:
        _fail(_describe(error), 1)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
