"""Commands on a cluster: submit a command as a job, see how far it is, stop it."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trishul_ray.cli.data import pretrain
from trishul_ray.cli.output import Plugins, UsageError, err, print_field, print_line, typed
from trishul_ray.cli.run import load_arguments, run
from trishul_ray.cli.sweeps import load_sweeps, report, split_arguments, sweep, table
from trishul_ray.errors import InputError, RunError, StorageError, join_limited
from trishul_ray.plugins.registry import none_run

if TYPE_CHECKING:
    from trishul_ray.experiment.experiment import Experiment
    from trishul_ray.jobs.cluster import Cluster, Job, Node

#: Commands that make sense as a job.
SUBMITTED: dict[str, Callable[..., None]] = {
    "run": run,
    "table": table,
    "sweep": sweep,
    "report": report,
    "pretrain": pretrain,
}

_KEPT = "Finished cells and rounds are kept; to continue"

File = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Cluster file of `ray up`; reached over SSH."),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Address of the cluster's dashboard, such as http://127.0.0.1:8265 (the default).",
    ),
]


def submit(
    words: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND ...", help="A command of trishul.", show_default=False),
    ],
    cluster: File = None,
    address: Address = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Do not wait for the job and show no output.")
    ] = False,
    runs: Annotated[
        str | None,
        typer.Option(
            help="Where the cluster stores runs: a URI or a folder that all its machines share. "
            "Default: that of the cluster file.",
            envvar="TRISHUL_RUNS",
        ),
    ] = None,
    working_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that is shipped, without data and results.")
    ] = Path("."),
    ship: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="What is shipped although its name says that it may hold secrets: a path in the "
            "folder, as the command has printed it; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command on a cluster, as a Ray job, and show its output.

    - `trishul submit --cluster cluster/aws.yaml -- table vision --profile paper`
    - `trishul submit --address http://127.0.0.1:8265 --detach -- sweep mine.yaml`

    Ctrl-C ends the output, not the job. The same command again shows the output of a job that is
    running, or continues one that has ended: finished runs are never repeated. Files that may hold
    secrets (`.env`, `.aws`, keys, tokens) are not shipped, and are named.
    """
    from trishul_ray.jobs.shipping import (
        check_directory,
        check_no_secret,
        check_shipped,
        find_secrets,
    )

    place = _place_of_runs(words, runs, cluster)
    check_no_secret([*words, place])
    _check_words(words, working_dir)
    working_dir = working_dir.resolve()
    check_directory(working_dir)
    left_out = find_secrets(working_dir, ship or ())
    check_shipped(_files_of(words), working_dir, left_out)
    with _connect(cluster, address) as there:
        job = there.find_active(words, place)
        if job is None:
            if left_out:
                print_line(
                    f"{len(left_out)} not shipped, as they may hold secrets: "
                    f"{join_limited(left_out, 10)} (to ship one: --ship PATH)",
                    err,
                )
            job = there.submit(words, place, working_dir, left_out)
            print_line(f"{job.id}: submitted", err)
        else:
            print_line(f"{job.id}: runs already; showing its output", err)
        where = _where(cluster, address)
        if detach:
            print_field("job", job.id)
            print_field("status", f"trishul status{where}")
            print_field("stop", f"trishul stop{where} {job.id}")
            return
        try:
            job = there.follow(job.id, _write)
        except KeyboardInterrupt:
            print_line(
                f"the job goes on; to see it again: {typed()}; "
                f"to end it: trishul stop{where} {job.id}",
                err,
            )
            raise typer.Exit(130) from None
    _end(job)


def status(
    cluster: File = None,
    address: Address = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a GPU for an hour (without GPUs, of a machine)."),
    ] = None,
    head_price: Annotated[float, typer.Option(min=0, help="Price of the head for an hour.")] = 0.0,
    last: Annotated[int, typer.Option(min=1, help="Number of jobs that are shown.")] = 5,
    plugin: Plugins = None,
) -> None:
    """Show the jobs of a cluster: cells done, running and missing, speed, and spend so far.

    - `trishul status --cluster cluster/aws.yaml --price 0.4 --head-price 0.1`

    Cells are read from the store of results, with the credentials of this machine. Jobs may be
    other people's: of what their commands name, no plug-in is run (name yours with `--plugin`), and
    only files in this folder are read. With
    `--cluster`, also show what the autoscaler waits for, and why machines could not be started.
    """
    from trishul_ray.jobs.ray_up import shortages

    with _connect(cluster, address) as there:
        jobs, nodes = there.jobs(), there.nodes()
        problems = shortages(cluster) if cluster is not None else []
    print_field("cluster", _describe_nodes(nodes, price, head_price))
    for problem in problems:
        print_field("machines", problem)
    if not jobs:
        print_field("jobs", "none yet")
    for job in jobs[:last]:
        _show(job)


def stop(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Id of a job.", show_default=False)
    ] = None,
    cluster: File = None,
    address: Address = None,
    every: Annotated[bool, typer.Option("--all", help="All jobs that run or wait.")] = False,
) -> None:
    """End jobs on a cluster and wait until they have ended; finished cells and rounds are kept.

    - `trishul stop --cluster cluster/aws.yaml --all`

    The machines stay: `ray down` ends them.
    """
    if (job is None) != every:
        raise InputError("give either the id of a job, or --all")
    where = _where(cluster, address)
    with _connect(cluster, address) as there:
        found = there.jobs() if job is None else [there.job(job)]
        active = [each for each in found if each.active]
        for each in found:
            if each in active:
                there.stop(each.id)
                again = shlex.join(["--runs", each.runs, "--", *each.words])
                print_line(f"{each.id}: ends. {_KEPT}: trishul submit{where} {again}")
            elif not every:
                print_line(f"{each.id}: had ended before ({each.status.lower()})")
        # The same command would show the output of a job that is still ending.
        for each in active:
            if there.wait_for_end(each.id).active:
                print_line(f"{each.id}: has not ended yet; see trishul status{where}", err)


@contextmanager
def _connect(file: Path | None, address: str | None) -> "Iterator[Cluster]":
    """Yield the cluster of a file or at an address."""
    from trishul_ray.jobs.cluster import Cluster
    from trishul_ray.jobs.ray_up import open_tunnel, results_of

    if file is not None and address is not None:
        raise InputError("give either --cluster or --address")
    if file is None:
        yield Cluster(address or os.environ.get("RAY_API_SERVER_ADDRESS", "127.0.0.1:8265"))
        return
    results_of(file)  # says what is wrong with the file before SSH is tried
    with open_tunnel(file) as opened:
        yield Cluster(opened)


def _place_of_runs(words: Sequence[str], runs: str | None, file: Path | None) -> str:
    """Return where a command on the cluster stores its runs; an InputError if that is not clear."""
    from trishul_ray.jobs.ray_up import results_of

    named = [word.partition("=")[2] for word in words if word.startswith("storage.runs=")]
    place = named[-1] if named else runs
    if place is None and file is not None:
        place = results_of(file)
    if place is None:
        raise InputError("say where the cluster stores runs: --runs s3://bucket/runs")
    if "CHANGE-ME" in place:
        raise InputError(f"cluster file {file}: put the name of your bucket in place of CHANGE-ME")
    if "://" not in place and not Path(place).is_absolute():
        raise InputError(
            f"--runs {place!r}: the job runs elsewhere; name a URI, or the full path of a folder "
            "that all machines share"
        )
    return place


def _check_words(words: Sequence[str], directory: Path) -> None:
    """Check a command here, as it would be there, before a machine is started for it."""
    if words[0] not in SUBMITTED:
        raise InputError(f"{words[0]!r} is not run on clusters; submit {', '.join(SUBMITTED)}")
    if not directory.is_dir():
        raise InputError(f"--working-dir {directory}: is not a folder")
    _check_files(words, directory)
    if words[0] == "table":
        _experiments(words, None)  # a misspelt name or field


def _check_files(words: Sequence[str], directory: Path) -> None:
    """Check that the files of a command are in a directory, which is what is shipped."""
    for word in _files_of(words):
        inside = (directory / word).resolve()
        if Path(word).is_absolute() or not inside.is_relative_to(directory.resolve()):
            raise InputError(f"{word}: is not in {directory}, which is what is shipped")
        if not inside.is_file():
            raise InputError(f"{inside}: does not exist, or is no file")


def _files_of(words: Sequence[str]) -> list[str]:
    """Return the YAML files and the plug-ins that a command names."""
    parameters = _parse(words)
    arguments: list[str] = parameters.get("arguments") or []
    files = [word for word in arguments if word.endswith((".yaml", ".yml")) and "=" not in word]
    return files + [str(file) for file in parameters.get("plugin") or ()]


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a command; raise a usage error if they are wrong."""
    app = typer.Typer()
    app.command()(SUBMITTED[words[0]])
    context = typer.main.get_command(app).make_context(words[0], list(words[1:]))
    parameters: dict[str, Any] = context.params
    return parameters


def _experiments(words: Sequence[str], runs: str | None) -> "dict[str, Experiment]":
    """Return the cells of a command by id, with their results at ``runs``."""
    from trishul_ray.sweeps.cells import distinct
    from trishul_ray.sweeps.loading import sweep_from_axes

    parameters = _parse(words)
    arguments: list[str] = list(parameters.get("arguments") or ())
    if runs is not None:
        arguments = [*(a for a in arguments if not a.startswith("storage.runs="))]
        arguments.append(f"storage.runs={runs}")
    if words[0] == "run":
        experiment = load_arguments(arguments)
        return {experiment.id: experiment}
    if words[0] == "sweep" and parameters.get("axis"):
        sweeps = [sweep_from_axes(parameters["axis"], split_arguments(arguments)[1])]
    else:
        sweeps = load_sweeps(arguments, parameters.get("profile") or "paper", None)
    if any(sweep.is_adaptive for sweep in sweeps):
        raise InputError("what a search by optuna samples depends on its results")
    return distinct(sweeps)


def _show(job: "Job") -> None:
    """Print a job, and how far its cells are."""
    from trishul_ray.tracking.progress import format_duration

    lasted = format_duration(job.seconds)
    lasted = f", {lasted} so far" if job.active else f" after {lasted}"
    print_field("job", f"{job.id}: {job.status.lower()}{lasted}")
    print_field("", job.command)
    if job.fault:
        print_field("fault", job.fault)
    if job.words[0] in ("run", "table", "sweep"):
        print_field("cells", _describe_cells(job))


def _describe_cells(job: "Job") -> str:
    from trishul_ray.jobs.progress import read_progress
    from trishul_ray.storage.store import Store
    from trishul_ray.tracking.progress import format_duration

    try:
        store = Store.open(job.runs)
        if store.is_local and not store.exists():  # a folder that the nodes share
            raise InputError(f"there is no folder {store.uri} on this machine")
        with none_run():
            _check_files(job.words, Path.cwd())
            progress = read_progress(_experiments(job.words, job.runs))
    except (InputError, StorageError) as error:
        return f"cannot be read from here: {error}"
    except (UsageError, typer.Exit):  # of another version, or no command of this program
        return "cannot be read from here: the command is not one of this version"
    states, running = progress.states, progress.running if job.active else 0
    known = sum(states[status] for status in ("finished", "stopped", "failed"))
    missing = progress.cells - running - known
    parts = [f"{states['finished']} of {progress.cells} done", f"{running} running"]
    parts += [f"{states['stopped']} stopped early"] * bool(states["stopped"])
    parts += [f"{missing} missing", f"{states['failed']} failed"]
    if progress.pace.done and job.active:
        left = format_duration(progress.pace.seconds_for(progress.rounds_left))
        parts.append(f"{60 * progress.pace.rate:.3g} rounds a minute, about {left} left")
    return ", ".join(parts)


def _describe_nodes(nodes: "Sequence[Node]", price: float | None, head_price: float) -> str:
    """Return the machines that there are, and what all since the start have cost."""
    workers = [node for node in nodes if node.cpus + node.gpus > 0]
    alive = [node for node in workers if node.alive]
    gpus = sum(node.gpus for node in alive)
    parts = [f"{len(alive)} workers" + (f" with {gpus:g} GPUs" if gpus else "")]
    with_gpus = any(node.gpus for node in workers)
    hours = sum(node.hours * (node.gpus or not with_gpus) for node in workers)
    unit = "GPU-hours" if with_gpus else "worker-hours"
    parts.append(f"{hours:.2f} {unit} since the cluster started")
    if price is not None:
        head = sum(node.hours for node in nodes if node.head)
        parts.append(f"{hours * price + head * head_price:,.2f} spent")
    return ", ".join(parts)


def _end(job: "Job") -> None:
    """Return if a job succeeded; otherwise end as its command has ended."""
    if job.status == "SUCCEEDED":
        return
    if job.status == "STOPPED":
        print_line(f"{job.id}: was stopped. {_KEPT}: {typed()}", err)
        raise typer.Exit(130)
    if job.fault:
        raise RunError(
            f"{job.id}: {job.fault}: install it in the environment that `ray start` was called in, "
            f"with that environment's bin folder on PATH; then {typed()}"
        )
    code = job.details.driver_exit_code
    if code == 2:
        raise InputError(f"{job.id}: its input is wrong; see above")
    why = "see above" if code is not None else " ".join((job.details.message or "").split())[:500]
    raise RunError(f"{job.id} failed: {why}. {_KEPT}: {typed()}")


def _where(file: Path | None, address: str | None) -> str:
    if file is not None:
        return f" --cluster {shlex.quote(str(file))}"
    return f" --address {shlex.quote(address)}" if address else ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
