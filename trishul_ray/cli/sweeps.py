"""Commands on many runs: the paper's tables, and your own sweeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from trishul_ray.errors import InputError, RunError
from trishul_ray.storage.durable import check_writable, scratch_folder

if TYPE_CHECKING:
    from trishul_ray.report.outcomes import SweepOutcome
    from trishul_ray.report.tables import SweepTable
    from trishul_ray.sweeps.cells import Sweep, TuneOptions
    from trishul_ray.sweeps.reproduce import Reproduced

Profile = Annotated[
    str, typer.Option(help="paper (its protocol), small (real data, small models) or smoke.")
]
RunsOption = Annotated[
    str | None, typer.Option(help="Folder or URI where runs are stored; short for storage.runs")
]
Retries = Annotated[
    int,
    typer.Option(min=0, help="How often a failed cell is tried again, from its last round."),
]
StallMinutes = Annotated[
    float,
    typer.Option(
        min=0.05,
        help="Minutes without a finished round after which a cell that has loaded is tried again; "
        "at least five times its median round.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Cells at a time; default: as many as the cluster holds."),
]
NamesOrFiles = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...|all|SWEEP.yaml [KEY=VALUE ...]",
        help="Tables of the paper or sweep files, then key=value overrides of every run",
        show_default=False,
    ),
]


def _report_option(*names: str) -> Any:
    """Return the option of where the report is written; by default, named as its parameter."""
    where = "Where the report is written: a folder or URI."
    return typer.Option(*names, metavar="DIR", help=where, envvar="TRISHUL_REPORT")


ReportFolder = Annotated[str, _report_option("--report")]


def table(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...|all [KEY=VALUE ...]",
            help="Tables of the paper, then key=value overrides of every run, e.g. "
            "federation.rounds=5 storage.runs=s3://bucket/runs",
            show_default=False,
        ),
    ],
    profile: Profile = "paper",
    retries: Retries = 2,
    stall_minutes: StallMinutes = 30.0,
    concurrency: Concurrency = None,
    report: ReportFolder = "report",
    plugin: Plugins = None,
) -> None:
    """Reproduce tables and figures of the paper: run what is missing, print them, write a report.

    - `trishul table all --profile smoke` — every cell of every table, on embedded data
    - `trishul table vision glue` — two tables by the paper's protocol
    - `trishul table vision seed=0..2` — with three seeds, as the paper, instead of five

    Repeat the command to continue: finished cells are never run again. The command `plan` shows
    what would run.
    """
    from trishul_ray.sweeps.cells import TuneOptions
    from trishul_ray.sweeps.loading import find_sweeps

    names, overrides = split_arguments(arguments)
    if not names:
        raise InputError("name at least one table, or all")
    sweeps = find_sweeps(names, profile, overrides)
    run_sweeps(sweeps, TuneOptions(retries, stall_minutes, concurrency), report)


def sweep(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP.yaml] [KEY=VALUE ...]",
            help="A sweep file (optional), then key=value overrides of every run",
            show_default=False,
        ),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUES", help="Values of a field, as 0,0.01,0.1 or 0..4."),
    ] = None,
    retries: Retries = 2,
    stall_minutes: StallMinutes = 30.0,
    concurrency: Concurrency = None,
    report: ReportFolder = "report",
    plugin: Plugins = None,
) -> None:
    """Run a grid or a search of whole runs, print its tables, and write a report.

    - `trishul sweep mine.yaml federation.rounds=5`
    - `trishul sweep --axis method.lam=0,0.01,0.1 --axis seed=0..4 dataset=digits`

    Repeat the command to continue: finished cells are never run again.
    """
    from trishul_ray.sweeps.cells import TuneOptions
    from trishul_ray.sweeps.loading import load_sweep, sweep_from_axes

    file, overrides = _split_file(arguments or [])
    if bool(file) == bool(axis):
        raise InputError("give either a sweep file, or at least one --axis field=value,value")
    made = load_sweep(file, overrides) if file else sweep_from_axes(axis or [], overrides)
    run_sweeps([made], TuneOptions(retries, stall_minutes, concurrency), report)


def rates(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP.yaml] [KEY=VALUE ...]",
            help="A sweep file; default: that of the profile. Then overrides of every run",
            show_default=False,
        ),
    ] = None,
    profile: Profile = "paper",
    retries: Retries = 2,
    stall_minutes: StallMinutes = 30.0,
    concurrency: Concurrency = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the rates are written; default rates-PROFILE.yaml."
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Tune learning rates on validation rows, for each method, budget, dataset and partition.

    - `trishul rates --profile smoke` — a small grid, on embedded data
    - `trishul table all --profile smoke optimizer.rates=rates-smoke.yaml` — the tables with them

    Without such a file, tables take published rates. Repeat the command to continue; `trishul plan
    rates` shows what it costs.
    """
    from trishul_ray.sweeps.cells import TuneOptions
    from trishul_ray.sweeps.loading import find_sweeps, load_sweep
    from trishul_ray.sweeps.rates import RATES, check_rates, choose_rates, rates_table, write_rates

    file, overrides = _split_file(arguments or [])
    if file:
        sweep = load_sweep(file, overrides)
    else:
        (sweep,) = find_sweeps([RATES], profile, overrides)
    check_rates(sweep)
    written = output or Path(f"rates-{sweep.profile}.yaml")
    check_writable(written.absolute().parent, "--output")
    result = _reproduce([sweep], TuneOptions(retries, stall_minutes, concurrency))
    chosen = choose_rates(result.outcomes[0])
    write_rates(chosen, sweep.profile, written)
    print_table(rates_table(chosen))
    if result.failures:
        print_line(f"{len(result.failures)} runs failed, and their rates are not chosen", err)
    print_field("rates", written)


def plan(
    arguments: NamesOrFiles,
    profile: Profile = "paper",
    device: Annotated[
        str | None,
        typer.Option(
            help="What computes: h100, h200, a100, v100, l4, a10g, t4 or cpu (this machine). "
            "Default: the GPU of this machine; without one h100 for the profile paper, and else "
            "cpu."
        ),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices that work at the same time.")] = 1,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a device for an hour.")
    ] = None,
    runs: RunsOption = None,
    plugin: Plugins = None,
) -> None:
    """Show what sweeps would run, how long it takes and what it costs. Runs nothing.

    - `trishul plan all --price 2.5` — the whole paper
    - `trishul plan vision glue --device a100 --devices 8`
    - `trishul plan mine.yaml federation.rounds=5`

    A run that several sweeps need is counted once, in the first of them. Hours are those of
    finished runs of the same kind where there are any, and else from a cost model.
    """
    from trishul_ray.sweeps.cells import distinct
    from trishul_ray.sweeps.plan import make_plan, plan_notes, plan_table, usual_device
    from trishul_ray.sweeps.reproduce import cell_name, check_adapters
    from trishul_ray.sweeps.status import examine, other_results

    sweeps = load_sweeps(arguments, profile, runs)
    experiments = distinct([sweep for sweep in sweeps if not sweep.is_adaptive])
    with show_progress() as progress:
        report = progress.task_progress("reading results")
        states = examine(experiments, report)
        measured = other_results(experiments, report)
    missing = {id: each for id, each in experiments.items() if states[id].summary is None}
    named = {cell.experiment.id: cell_name(sweep, cell) for sweep in sweeps for cell in sweep.cells}
    check_adapters(missing, named.__getitem__)
    device = device or usual_device({sweep.profile for sweep in sweeps})
    made = make_plan(sweeps, states, device, measured)
    print_table(plan_table(made, devices=devices, price=price))
    for note in plan_notes(made, states, devices):
        print_line(note)


def report(
    arguments: NamesOrFiles,
    profile: Profile = "paper",
    runs: RunsOption = None,
    output: Annotated[str, _report_option()] = "report",
    plugin: Plugins = None,
) -> None:
    """Write tables and figures from finished runs: one HTML page, Markdown, LaTeX and CSV.

    - `trishul report all --profile smoke`
    - `trishul report vision glue --runs s3://bucket/runs`
    - `trishul report mine.yaml federation.rounds=5`

    Runs nothing: what is missing is missing on the page, and what failed has its reason there.
    """
    sweeps = load_sweeps(arguments, profile, runs)
    searched = [sweep.name for sweep in sweeps if sweep.is_adaptive]
    if searched:
        raise InputError(
            f"{', '.join(searched)}: what a search by optuna samples depends on its results; "
            "the command `sweep` writes the report"
        )
    outcomes = read_outcomes(sweeps)
    place = _write_report(outcomes, output)
    states = {cell.id: cell.status for outcome in outcomes for cell in outcome.cells}
    print_field("runs", f"{[*states.values()].count('finished')} of {len(states)} finished")
    print_field("report", place)


def read_outcomes(sweeps: "Sequence[Sweep]") -> "tuple[SweepOutcome, ...]":
    """Return what the store has of sweeps; nothing is run."""
    from trishul_ray.sweeps.cells import distinct
    from trishul_ray.sweeps.status import collect, examine

    with show_progress() as progress:
        report = progress.task_progress("reading results")
        return collect(sweeps, examine(distinct(sweeps), report))


def load_sweeps(arguments: Sequence[str], profile: str, runs: str | None) -> "list[Sweep]":
    """Load the sweeps of ``NAME...|all|SWEEP.yaml [KEY=VALUE ...]``, random samples as cells.

    Raises:
        InputError: There is no name, or a sweep cannot be loaded.
    """
    from trishul_ray.sweeps.loading import find_sweeps, load_sweep
    from trishul_ray.sweeps.samples import with_random_samples

    names, overrides = split_arguments(arguments)
    overrides += [f"storage.runs={runs}"] if runs is not None else []
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    tables = [name for name in names if name not in files]
    if not names:
        raise InputError("name at least one table or sweep file, or all")
    sweeps = [*(find_sweeps(tables, profile, overrides) if tables else ())]
    sweeps += [load_sweep(Path(file), overrides) for file in files]
    return [with_random_samples(sweep) for sweep in sweeps]


def _split_file(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the sweep file of ``[SWEEP.yaml] [KEY=VALUE ...]``, and the overrides.

    Raises:
        InputError: There are several files.
    """
    files, overrides = split_arguments(arguments)
    if len(files) > 1:
        raise InputError(f"one sweep file at a time, not {', '.join(files)}")
    return Path(files[0]) if files else None, overrides


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return names and ``key=value`` overrides."""
    return [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]


def run_sweeps(sweeps: "Sequence[Sweep]", options: "TuneOptions", report: str) -> None:
    """Run what is missing, print the tables, and write the report.

    Raises:
        RunError: Cells failed.
        typer.Exit: Interrupted.
    """
    _check_report(report)  # before hours of runs, not after
    result = _reproduce(sweeps, options)
    _show(result.outcomes, report)
    if result.mlflow_command:
        print_field("MLflow", as_typed(result.mlflow_command))
    if result.failures:
        raise RunError(_describe_failures(result))


def _reproduce(sweeps: "Sequence[Sweep]", options: "TuneOptions") -> "Reproduced":
    from trishul_ray.sweeps.reproduce import reproduce
    from trishul_ray.tracking.progress import SweepProgress

    progress = SweepProgress(err)
    with resumable(progress, lambda _: _how_to("continue")):
        return reproduce(sweeps, options, progress)


def _show(outcomes: "Sequence[SweepOutcome]", report: str) -> None:
    from trishul_ray.report.formats import to_rich
    from trishul_ray.report.tables import build_tables

    tables = build_tables(outcomes)
    for built in tables:
        out.print(to_rich(built, out.width))
    print_field("report", _write_report(outcomes, report, tables))


def _check_report(place: str) -> None:
    """Check that a report can be written to a folder or URI, or raise an InputError."""
    from trishul_ray.storage.store import Store

    if "://" in place:
        Store.open(place, field="--report").check_bucket(place, "--report")
    else:
        check_writable(Path(place), "--report")


def _write_report(
    outcomes: "Sequence[SweepOutcome]",
    place: str,
    tables: "Sequence[SweepTable] | None" = None,
) -> str:
    """Write a report into a folder or to a URI, and return the address of its page."""
    from trishul_ray.report.page import write_report
    from trishul_ray.storage.store import Store

    with show_progress() as progress:
        progress.phase("writing the page")
        if "://" not in place:
            return str(write_report(outcomes, Path(place), tables))
        store = Store.open(place, field="--report")
        with scratch_folder("report") as folder:
            page = write_report(outcomes, Path(folder), tables)
            store.upload_folder(page.parent)
        return store.place(page.name)


def _describe_failures(result: "Reproduced") -> str:
    total = sum(len({cell.id for cell in outcome.cells}) for outcome in result.outcomes)
    shown = [f"{name} ({why})" for name, why in list(result.failures.items())[:5]]
    more = f", and {len(result.failures) - 5} more" if len(result.failures) > 5 else ""
    return (
        f"{len(result.failures)} of {total} cells have no result: {'; '.join(shown)}{more}. "
        f"{_how_to('try them again')}"
    )


def _how_to(goal: str) -> str:
    return f"Finished cells and rounds are kept; to {goal}: {typed()}"
