"""The commands ``sweep``, with the alias ``table``, and ``report``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    typed,
)
from trishul_ray.errors import InputError, RunError
from trishul_ray.storage.durable import check_writable, scratch_folder

if TYPE_CHECKING:
    from trishul_ray.report.outcomes import SweepOutcome
    from trishul_ray.report.tables import SweepTable
    from trishul_ray.sweeps.cells import Sweep, TuneOptions
    from trishul_ray.sweeps.run import Reproduced

FILES = (".yaml", ".yml")
KEPT = "Finished cells and rounds are kept"
Profile = Annotated[
    str, typer.Option(help="paper (full protocol), small (real data, small models) or smoke.")
]
RunsOption = Annotated[
    str | None, typer.Option(help="Folder or URI where runs are stored; same as storage.runs.")
]
NamesOrFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME...|all|SWEEP.yaml] [KEY=VALUE ...]",
        help="Tables of the paper or sweep files, then key=value overrides for every run.",
        show_default=False,
    ),
]


def _report_option(*names: str) -> Any:
    """Build the option for the path of the report; without ``names``, Typer derives its name."""
    where = "Folder or URI of the report; by default a folder in report/, named after the sweep."
    return typer.Option(*names, metavar="DIR", help=where, envvar="TRISHUL_REPORT")


def sweep(
    arguments: NamesOrFiles = None,
    profile: Profile = "paper",
    axis: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUES", help="Values of a field, such as 0,0.01,0.1 or 0..4."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only show the finished runs and the remaining hours.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Device for --plan, such as h100, a100, l4 or cpu (this machine)."),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the best learning rates to a file for optimizer.rates."
        ),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="Retries of a failed run, resuming from its last round.")
    ] = 2,
    stall_minutes: Annotated[
        float,
        typer.Option(min=0.05, help="Minutes without a finished round before a run is retried."),
    ] = 30.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent runs; default: as many as fit.")
    ] = None,
    report: Annotated[str | None, _report_option("--report")] = None,
    plugin: Plugins = None,
) -> None:
    """Run tables of the paper, a grid or a search, print the tables, and write a report.

    - `trishul sweep all --profile smoke` — every table and figure, on embedded data
    - `trishul sweep vision glue` — two tables, with the protocol of the paper
    - `trishul sweep vision --plan --device l4` — finished and running runs, and the remaining hours
    - `trishul sweep mine.yaml federation.rounds=5`
    - `trishul sweep --axis method.lam=0,0.01,0.1 --axis seed=0..4 dataset=digits`
    - `trishul sweep rates --profile smoke --rates rates-smoke.yaml` — tune learning rates

    Repeat the command to resume; finished runs are never repeated.
    """
    from trishul_ray.sweeps.cells import TuneOptions

    sweeps = load_sweeps(arguments or [], profile, None, axis)
    options = TuneOptions(retries, stall_minutes, concurrency)
    if plan:
        _show_plan(sweeps, device)
    elif rates is not None:
        _tune_rates(sweeps, options, rates)
    else:
        run_sweeps(sweeps, options, report or _report_folder(arguments, profile, axis))


def _show_plan(sweeps: "Sequence[Sweep]", device: str | None) -> None:
    from trishul_ray.experiment.compatibility import check_layers
    from trishul_ray.sweeps.cells import distinct
    from trishul_ray.sweeps.plan import default_device, plan_table
    from trishul_ray.sweeps.run import cell_names, check_cells
    from trishul_ray.sweeps.status import examine

    experiments = distinct([sweep for sweep in sweeps if sweep.search is None])
    with show_progress() as progress:
        states = examine(experiments, progress.task_progress("reading results"))
    missing = {id: each for id, each in experiments.items() if states[id].status != "finished"}
    check_cells(missing, cell_names(sweeps), check_layers)
    table, notes = plan_table(sweeps, states, device or default_device(sweeps))
    print_table(table)
    for note in notes:
        print_line(note)


def _tune_rates(sweeps: "Sequence[Sweep]", options: "TuneOptions", file: Path) -> None:
    from trishul_ray.sweeps.rates import check_rates, choose_rates, rates_table, write_rates

    if len(sweeps) != 1:
        raise InputError("--rates requires one sweep with an axis optimizer.lr, such as rates")
    check_rates(sweeps[0])
    check_writable(file.absolute().parent, "--rates")
    result = _reproduce(sweeps, options)
    chosen = choose_rates(result.outcomes[0])
    write_rates(chosen, sweeps[0].profile, file)
    print_table(rates_table(chosen))
    if result.failures:
        print_line(f"{len(result.failures)} runs failed; their rates were not considered", err)
    print_field("rates", file)


def report(
    arguments: NamesOrFiles = None,
    profile: Profile = "paper",
    runs: RunsOption = None,
    output: Annotated[str | None, _report_option()] = None,
    plugin: Plugins = None,
) -> None:
    """Write tables and figures of finished runs: an HTML page, Markdown, LaTeX and CSV.

    - `trishul report all --profile smoke`
    - `trishul report vision glue --runs s3://bucket/runs`
    - `trishul report mine.yaml federation.rounds=5`

    It starts no runs. The report lists missing runs, and the reasons of failed ones.
    """
    sweeps = load_sweeps(arguments or [], profile, runs)
    searched = [sweep.name for sweep in sweeps if sweep.search]
    if searched:
        raise InputError(
            f"{', '.join(searched)}: the samples of an Optuna search depend on its results; use "
            "`trishul sweep` to write the report"
        )
    outcomes = read_outcomes(sweeps)
    place = _write_report(outcomes, output or _report_folder(arguments, profile))
    states = {cell.id: cell.status for outcome in outcomes for cell in outcome.cells}
    print_field("runs", f"{[*states.values()].count('finished')} of {len(states)} finished")
    print_field("report", place)


def read_outcomes(sweeps: "Sequence[Sweep]") -> "tuple[SweepOutcome, ...]":
    """Read the outcomes of sweeps from the store, without running anything."""
    from trishul_ray.sweeps.cells import distinct
    from trishul_ray.sweeps.status import collect, examine

    with show_progress() as progress:
        report = progress.task_progress("reading results")
        return collect(sweeps, examine(distinct(sweeps), report))


def load_sweeps(
    arguments: Sequence[str], profile: str, runs: str | None, axes: Sequence[str] | None = None
) -> "list[Sweep]":
    """Load the sweeps given by ``[NAME...|all|SWEEP.yaml] [KEY=VALUE ...]``.

    Raises:
        InputError: No sweep is named, or a sweep cannot be loaded.
    """
    from trishul_ray.sweeps.loading import find_sweeps, load_sweep, sweep_from_axes

    names, overrides = split_arguments(arguments)
    overrides += [f"storage.runs={runs}"] if runs is not None else []
    if bool(names) == bool(axes):
        raise InputError("name tables (or all) or sweep files, or use --axis field=value,value")
    if axes:
        return [sweep_from_axes(axes, overrides)]
    files = [name for name in names if name.endswith(FILES)]
    tables = [name for name in names if name not in files]
    sweeps = [*(find_sweeps(tables, profile, overrides) if tables else ())]
    return [*sweeps, *(load_sweep(Path(file), overrides) for file in files)]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into names and ``key=value`` overrides."""
    return [a for a in arguments if "=" not in a], [a for a in arguments if "=" in a]


def run_sweeps(sweeps: "Sequence[Sweep]", options: "TuneOptions", report: str) -> None:
    """Run the missing cells, print the tables, and write the report.

    Raises:
        RunError: Cells failed.
        typer.Exit: The command was interrupted.
    """
    _check_report(report)  # fail before hours of runs
    result = _reproduce(sweeps, options)
    _show(result.outcomes, report)
    if result.mlflow_command:
        print_field("MLflow", result.mlflow_command)
    if result.failures:
        raise RunError(_describe_failures(result))


def _reproduce(sweeps: "Sequence[Sweep]", options: "TuneOptions") -> "Reproduced":
    from trishul_ray.sweeps.run import reproduce
    from trishul_ray.tracking.progress import SweepProgress

    progress = SweepProgress(err)
    with resumable(progress, KEPT):
        return reproduce(sweeps, options, progress)


def _show(outcomes: "Sequence[SweepOutcome]", report: str) -> None:
    from trishul_ray.report.formats import to_rich
    from trishul_ray.report.tables import build_tables

    tables = build_tables(outcomes)
    for built in tables:
        out.print(to_rich(built, out.width))
    print_field("report", _write_report(outcomes, report, tables))


def _check_report(place: str) -> None:
    """Check that a folder or URI is writable, or raise an InputError."""
    from trishul_ray.storage.store import Store

    if "://" in place:
        Store.open(place, field="--report").check_bucket(place, "--report")
    else:
        check_writable(Path(place), "--report")


def _report_folder(
    arguments: Sequence[str] | None, profile: str, axes: Sequence[str] | None = None
) -> str:
    """Return the default folder of a report, which depends on the names and axes of the sweeps."""
    names, _ = split_arguments(arguments or ())
    names = [Path(n).stem if n.endswith(FILES) else f"{n}-{profile}" for n in names]
    return "report/" + "+".join(names or [axis.partition("=")[0].strip() for axis in axes or ()])


def _write_report(
    outcomes: "Sequence[SweepOutcome]",
    place: str,
    tables: "Sequence[SweepTable] | None" = None,
) -> str:
    """Write a report to a folder or URI, and return the address of its page."""
    from trishul_ray.report.page import write_report
    from trishul_ray.storage.store import Store

    with show_progress() as progress:
        progress.phase("writing the report")
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
        f"{KEPT}; to retry them: {typed()}"
    )
