"""Run the missing cells of sweeps; the implementation of ``trishul sweep``.

Cells that share an experiment share its run, also across sweeps. Results are in the store, so a
repeated call only runs cells without a valid result.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from trishul_ray.data.user.user_data import USER_DATA
from trishul_ray.errors import InputError, how_to_install
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.rows import check_rows
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.summary import ATTEMPT, read_note
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.mlflow_log import log_finished
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import Cell, CellRun, Sweep, TuneOptions, distinct, joined
from trishul_ray.sweeps.samples import sample_of, with_samples
from trishul_ray.sweeps.search import Search
from trishul_ray.sweeps.status import CellState, collect, examine
from trishul_ray.tracking.mlflow import Status
from trishul_ray.tracking.progress import SweepProgress
from trishul_ray.tracking.store import tracking_uri, ui_command
from trishul_ray.tracking.sweep import AXIS_TAG, CELL_TAG, SWEEP_TAG, SweepRun


@dataclass(frozen=True)
class Reproduced:
    """Result of :func:`reproduce`, with existing and new runs.

    Attributes:
        outcomes: Outcomes of every sweep, including cells sampled by a search.
        failures: Reasons why cells have no result, keyed by the name of the cell.
        ran: Number of runs that were started.
        mlflow_command: Command that opens the MLflow store of the first sweep, or None if no sweep
            is logged.
    """

    outcomes: tuple[SweepOutcome, ...]
    failures: Mapping[str, str]
    ran: int
    mlflow_command: str | None


def reproduce(sweeps: Sequence[Sweep], options: TuneOptions, progress: SweepProgress) -> Reproduced:
    """Run the missing cells of sweeps and return all outcomes.

    Raises:
        InputError: An experiment does not fit its backbone or the cluster, or no data are
            available. No run was started.
        RunError: Ray or Ray Tune failed.
    """
    for sweep in sweeps:
        if sweep.search is not None and find_spec("optuna") is None:
            install = how_to_install("search", "optuna>=5,<6")
            raise InputError(f"{sweep.file or sweep.name}: search: kind optuna needs {install}")
    states: dict[str, CellState] = {}
    missing, names = _examine(sweeps, states, progress), cell_names(sweeps)
    if missing:
        from trishul_ray.experiment.compatibility import check_fits  # imports torch

        check_cells(missing, names, check_fits)
    for id in missing:
        if (state := states[id]).status in ("stale", "corrupt"):
            stale = state.status == "stale"
            follows = "runs again" if stale else "resumes at its last valid checkpoint"
            progress.note(f"{names[id]} is {state.status} and {follows}: {state.reason}")
    parents: list[SweepRun | None] = []
    failures: dict[str, str] = {}
    status: Status = "FAILED"
    try:
        for sweep in sweeps:  # before any trial opens the MLflow store
            parents.append(_open_parent(sweep))
        sweeps = [_with_parent(each, run) for each, run in zip(sweeps, parents, strict=True)]
        if missing or any(sweep.search for sweep in sweeps):
            sweeps, failures = _run(sweeps, missing, states, options, progress)
            missing_now = _examine(sweeps, states, progress)
            failures = {id: failures.get(id, states[id].reason) for id in missing_now}
        status = "FAILED" if failures else "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        for sweep, parent in zip(sweeps, parents, strict=False):
            if parent is not None:
                _close_parent(sweep, parent, states, status, progress)
    names = cell_names(sweeps)
    command = next((ui_command(parent.uri) for parent in parents if parent), None)
    reasons = {names[id]: reason for id, reason in failures.items()}
    return Reproduced(collect(sweeps, states), reasons, len(missing), command)


def cell_names(sweeps: Sequence[Sweep]) -> dict[str, str]:
    """Return names for messages, keyed by id, from the first sweep that contains the experiment."""
    cells = [(sweep, cell) for sweep in sweeps for cell in sweep.cells]
    return {cell.experiment.id: sweep.cell_name(cell) for sweep, cell in reversed(cells)}


def _examine(
    sweeps: Sequence[Sweep], states: dict[str, CellState], progress: SweepProgress
) -> dict[str, Experiment]:
    """Update ``states``, skipping finished cells, and return the unfinished experiments."""
    experiments = distinct([sweep for sweep in sweeps if sweep.search is None])
    done = {id for id, state in states.items() if state.status == "finished"}
    unknown = {id: each for id, each in experiments.items() if id not in done}
    states |= examine(unknown, progress.task_progress("reading results"))
    return {id: each for id, each in unknown.items() if states[id].status != "finished"}


def _run(
    sweeps: Sequence[Sweep],
    missing: Collection[str],
    states: Mapping[str, CellState],
    options: TuneOptions,
    progress: SweepProgress,
) -> tuple[list[Sweep], dict[str, str]]:
    """Run cells and searches on Ray.

    Returns:
        The sweeps, with the samples of searches as cells, and reasons of failures, keyed by id.
    """
    from trishul_ray.federation.on_ray.session import opening, ray_session
    from trishul_ray.sweeps.tuner import run_cells, run_search

    progress.phase(opening())
    with ray_session():
        runs = cell_runs(sweeps, missing, states)
        failures = run_cells(runs, options, progress) if runs else {}
        sampled = []
        for sweep in sweeps:
            if (search := sweep.search) is not None:
                samples = []
                for cell in sweep.cells:
                    find = partial(_sample_run, sweep, search, cell)
                    found, failed = run_search(find, cell.experiment, search, options, progress)
                    samples += [(cell, values) for values in found]
                    failures |= failed
                sweep = with_samples(sweep, search, samples)
            sampled.append(sweep)
    return sampled, failures


def _sample_run(sweep: Sweep, search: Search, cell: Cell, values: Mapping[str, Any]) -> CellRun:
    sample = sample_of(cell, values, search)
    return CellRun(sample.experiment, sweep.cell_name(sample), cell_tags(sweep, sample))


def cell_runs(
    sweeps: Sequence[Sweep], missing: Collection[str], states: Mapping[str, CellState]
) -> dict[str, CellRun]:
    """Build the runs of missing cells, keyed by id, with the tags of all sweeps that share them."""
    tags: dict[str, dict[str, str]] = {}
    for sweep in sweeps:
        for cell in sweep.cells:
            id = cell.experiment.id
            tags[id] = cell_tags(sweep, cell) | tags.get(id, {})
    runs, names = distinct(sweeps), cell_names(sweeps)
    homes = {id: RunFolder.of(runs[id]).home for id in missing if states[id].status == "stale"}
    stale = {id: read_note(home, ATTEMPT) for id, home in homes.items()}
    return {id: CellRun(runs[id], names[id], tags[id], stale.get(id)) for id in missing}


def _with_parent(sweep: Sweep, parent: SweepRun | None) -> Sweep:
    """Make the runs of a sweep children of its MLflow run."""
    if parent is None:
        return sweep
    cells = []
    for cell in sweep.cells:
        tracking = cell.experiment.tracking.model_copy(update={"parent_run": parent.run_id})
        experiment = cell.experiment.model_copy(update={"tracking": tracking})
        fields = {**cell.fields, "tracking.parent_run": parent.run_id}
        cells.append(replace(cell, experiment=experiment, fields=fields))
    return replace(sweep, cells=tuple(cells))


def _close_parent(
    sweep: Sweep,
    parent: SweepRun,
    states: dict[str, CellState],
    status: Status,
    progress: SweepProgress,
) -> None:
    """Log results that MLflow lacks, and end the MLflow runs of a sweep and its cells."""
    logs, rejected = dict[str, Status](), list[str]()
    logged = None if status == "KILLED" else parent.results()
    for cell in sweep.cells if sweep.search is None else ():
        id, experiment = cell.experiment.id, cell.experiment
        state = states[id]
        logs[id] = "FAILED" if state.status == "failed" else "KILLED"
        if state.status == "finished" and state.summary is not None:
            logs[id] = "FINISHED"
            if logged is not None and state.summary.checksum not in logged:
                home, tags = RunFolder.of(experiment).home, cell_tags(sweep, cell)
                rejected += log_finished(experiment, state.summary, home, tags)
    found = Counter(states[id].status for id in logs)
    counts = {name: found[name] for name in ("finished", "failed")}
    counts["missing"] = len(logs) - sum(counts.values())
    for line in rejected + parent.close(logs, counts, status):
        progress.note(f"MLflow rejected {line}")


def check_cells(
    experiments: Mapping[str, Experiment],
    names: Mapping[str, str],
    check_adapters: Callable[[Experiment], object],
) -> None:
    """Validate user data and partitions, and the fit of adapters to their backbones.

    Raises:
        InputError: A check failed. The message names the cell.
    """
    checks: list[tuple[Callable[[Experiment], object], set[str]]] = [
        (check_rows, {"data", "partition", "federation", "seed", "draw"}),
        (check_adapters, {"model", "adapter", "budget", "method", "resources"}),
    ]
    checked: set[str] = set()
    for id, experiment in experiments.items():
        for check, sections in checks[experiment.data.name not in USER_DATA :]:
            same = experiment.model_dump_json(include=sections)
            if same not in checked:
                checked.add(same)
                try:
                    check(experiment)
                except InputError as error:
                    raise InputError(f"cell {names[id]!r}: {error}") from error


def cell_tags(sweep: Sweep, cell: Cell) -> dict[str, str]:
    """Build the tags of a cell's MLflow run: the sweep, and the labels on axes that vary."""
    labels = sweep.displayed_labels(cell)
    varying = {axis: text for axis, text in labels.items() if len(sweep.axes.get(axis, ())) != 1}
    return {
        **{f"{AXIS_TAG}{axis}": text for axis, text in varying.items()},
        **({CELL_TAG: joined(varying)} if varying else {}),
        **{"sweep": sweep.name, "profile": sweep.profile, "seed": str(cell.experiment.seed)},
        f"{SWEEP_TAG}{sweep.name}": sweep.profile,
    }


def _open_parent(sweep: Sweep) -> SweepRun | None:
    """Open the MLflow run of a sweep, or return None if MLflow is disabled for all cells.

    Raises:
        InputError: The MLflow store cannot be opened.
    """
    tracked = [cell.experiment for cell in sweep.cells if cell.experiment.tracking.mlflow]
    if not tracked:
        return None
    storage, options = tracked[0].storage, tracked[0].tracking
    return SweepRun(
        tracking_uri(options.uri, storage.runs),
        options.experiment,
        {"sweep": sweep.name, "profile": sweep.profile, "title": sweep.title},
        {f"axis.{name}": ", ".join(labels) for name, labels in sweep.axes.items()},
        [Store.open(storage.runs).uri, *(sorted(distinct([sweep])) if sweep.file is None else ())],
    )
