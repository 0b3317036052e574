"""Run the missing cells of sweeps: the implementation of ``trishul sweep``.

Cells are experiments. Sweeps may share them, and each runs once: the store has the results, and a
repeated call runs only the cells that have no valid result there.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec

from trishul_ray.data.user.user_data import USER_DATA
from trishul_ray.errors import InputError, how_to_install
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.rows import check_rows
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.summary import attempt_of
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runs.mlflow_log import log_finished
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import Cell, CellRun, Sweep, TuneOptions, distinct
from trishul_ray.sweeps.samples import sampled, with_random_samples, with_samples
from trishul_ray.sweeps.status import CellState, collect, examine
from trishul_ray.tracking.mlflow import Status
from trishul_ray.tracking.progress import SweepProgress
from trishul_ray.tracking.store import tracking_uri, ui_command
from trishul_ray.tracking.sweep import AXIS_TAG, CELL_TAG, SWEEP_TAG, SweepRun


@dataclass(frozen=True)
class Reproduced:
    """Result of :func:`reproduce`: found and new runs.

    Attributes:
        outcomes: Results of every sweep, with the cells that a search sampled.
        failures: Reasons why cells have no result, by name.
        ran: Number of cells that were run.
        mlflow_command: Command that opens the MLflow store of the first sweep.
    """

    outcomes: tuple[SweepOutcome, ...]
    failures: Mapping[str, str]
    ran: int
    mlflow_command: str | None


def reproduce(sweeps: Sequence[Sweep], options: TuneOptions, progress: SweepProgress) -> Reproduced:
    """Run the missing cells of sweeps and return all outcomes.

    Raises:
        InputError: An experiment does not fit its backbone, the cluster cannot hold it, or no data
            are available; no run was started.
        RunError: Ray or Ray Tune failed.
    """
    for sweep in sweeps:
        if sweep.is_adaptive and find_spec("optuna") is None:
            install = how_to_install("search", "optuna>=5,<6")
            raise InputError(f"{sweep.file or sweep.name}: search: kind optuna needs {install}")
    work = _Work([_Part(with_random_samples(sweep)) for sweep in sweeps], progress)
    work.examine()
    missing = work.unfinished()
    check_cells({id: work.cells[id] for id in missing}, work.name)
    for id in missing:
        if (state := work.states[id]).status in ("stale", "corrupt"):
            follows = "runs again" if state.fresh else "resumes at its last valid checkpoint"
            progress.note(f"{work.name(id)} is {state.status} and {follows}: {state.reason}")
    status: Status = "FAILED"
    try:
        for part in work.parts:  # before any trial opens the store
            part.tracking = _open_parent(part.sweep)
        if missing or any(part.sweep.is_adaptive for part in work.parts):
            _run(work, missing, options)
            work.examine()
        failures = {work.name(id): work.states[id].reason for id in work.unfinished()}
        status = "FAILED" if failures else "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        work.close_parents(status)
    outcomes = collect([part.sweep for part in work.parts], work.states)
    command = next((ui_command(part.tracking.uri) for part in work.parts if part.tracking), None)
    return Reproduced(outcomes, failures, len(missing), command)


def _run(work: "_Work", missing: Sequence[str], options: TuneOptions) -> None:
    """Run missing cells, and the samples of searches, on Ray."""
    from trishul_ray.federation.on_ray.session import opening, ray_session
    from trishul_ray.sweeps.tuner import check_stores, run_cells, run_search

    work.progress.phase(opening())
    with ExitStack() as stack:
        stack.enter_context(ray_session())
        check_stores({c.experiment.storage.runs for part in work.parts for c in part.sweep.cells})
        if missing:
            run_cells({id: work.run_of(id) for id in missing}, options, work.progress)
        for part in work.parts:
            if not part.sweep.is_adaptive:
                continue
            samples: list[tuple[Cell, Mapping[str, object]]] = []
            for cell in part.sweep.cells:
                found = run_search(part.sample(cell), cell, part.sweep, options, work.progress)
                samples += [(cell, values) for values in found]
            part.sweep = replace(with_samples(part.sweep, samples), search=None)
        work.examine()


class _Part:
    """A sweep, and its MLflow run."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.tracking: SweepRun | None = None

    @property
    def cells(self) -> dict[str, Cell]:
        """The cells by id; those of a search are known once it has run."""
        cells = () if self.sweep.is_adaptive else self.sweep.cells
        return {cell.experiment.id: cell for cell in reversed(cells)}

    def with_parent(self, experiment: Experiment) -> Experiment:
        """Return an experiment whose MLflow run belongs to that of the sweep."""
        if self.tracking is None:
            return experiment
        tracking = experiment.tracking.model_copy(update={"parent_run": self.tracking.run_id})
        return experiment.model_copy(update={"tracking": tracking})

    def sample(self, cell: Cell) -> Callable[[Mapping[str, object]], CellRun]:
        """Return a function that makes the run of a sample of a cell."""

        def run_of(values: Mapping[str, object]) -> CellRun:
            assert self.sweep.search is not None
            made = sampled(cell, values, self.sweep.search)
            name, tags = self.sweep.cell_name(made), cell_tags(self.sweep, made)
            return CellRun(self.with_parent(made.experiment), name, tags)

        return run_of


@dataclass
class _Work:
    """The cells of several sweeps, each once, and their states."""

    parts: Sequence[_Part]
    progress: SweepProgress

    def __post_init__(self) -> None:
        self.states: dict[str, CellState] = {}

    @property
    def cells(self) -> dict[str, Experiment]:
        return distinct([part.sweep for part in self.parts if not part.sweep.is_adaptive])

    def examine(self) -> None:
        """Look up the results of all cells that are not known to have finished."""
        known = {id for id, state in self.states.items() if state.status == "finished"}
        unknown = {id: each for id, each in self.cells.items() if id not in known}
        self.states |= examine(unknown, self.progress.task_progress("reading results"))

    def unfinished(self) -> list[str]:
        return [id for id in self.cells if self.states[id].status != "finished"]

    def name(self, id: str) -> str:
        return next(p.sweep.cell_name(p.cells[id]) for p in self.parts if id in p.cells)

    def run_of(self, id: str) -> CellRun:
        """Return the run of a cell, with the tags of the first sweep, and the mark of each."""
        first, *others = [part for part in self.parts if id in part.cells]
        tags = {f"{SWEEP_TAG}{part.sweep.name}": str(part.sweep.profile) for part in others}
        tags |= cell_tags(first.sweep, first.cells[id])
        experiment = first.with_parent(self.cells[id])
        old = attempt_of(RunFolder.of(experiment).home) if self.states[id].fresh else None
        search = first.sweep.search
        return CellRun(experiment, self.name(id), tags, old, search.metric if search else None)

    def close_parents(self, status: Status) -> None:
        """Log results that MLflow does not have, and end the MLflow runs of sweeps and cells."""
        for part in self.parts:
            if part.tracking is None:
                continue
            logs, rejected = dict[str, Status](), list[str]()
            for id, cell in part.cells.items():
                state, experiment = self.states[id], part.with_parent(cell.experiment)
                logs[id] = "FAILED" if state.failure else "KILLED"
                if state.summary is not None:
                    home, tags = RunFolder.of(experiment).home, cell_tags(part.sweep, cell)
                    logged, refused = log_finished(experiment, state.summary, home, tags)
                    self.states[id] = replace(state, summary=logged)
                    logs[id], rejected = "FINISHED", rejected + refused
            found = Counter(self.states[id].status for id in part.cells)
            counts = {name: found[name] for name in ("finished", "failed")}
            counts["missing"] = len(part.cells) - sum(counts.values())
            for line in rejected + part.tracking.close(logs, counts, status):
                self.progress.note(f"MLflow rejected {line}")


def check_cells(
    experiments: Mapping[str, Experiment],
    name: Callable[[str], str],
    check_adapters: Callable[[Experiment], object] | None = None,
) -> None:
    """Check user data and their partition, and that the adapters of all cells fit their backbones.

    Raises:
        InputError: Something does not fit; the message names the cell.
    """
    if check_adapters is None and experiments:
        from trishul_ray.experiment.fit import check_fits as check_adapters  # imports torch

    checked: set[str] = set()
    for id, experiment in experiments.items():
        checks: list[tuple[Callable[[Experiment], object] | None, set[str]]] = [
            (check_adapters, {"model", "adapter", "budget", "method"})
        ]
        if experiment.data.name in USER_DATA:
            checks.insert(0, (check_rows, {"data", "partition", "federation", "seed"}))
        for check, sections in checks:
            alike = experiment.model_dump_json(include=sections)
            if check is None or alike in checked:
                continue
            checked.add(alike)
            try:
                check(experiment)
            except InputError as error:
                raise InputError(f"cell {name(id)!r}: {error}") from error


def cell_tags(sweep: Sweep, cell: Cell) -> dict[str, str]:
    """Return the tags of a cell's MLflow run: its sweep, and its labels on the axes that vary."""
    labels = sweep.displayed_labels(cell)
    varying = {axis: text for axis, text in labels.items() if len(sweep.axes.get(axis, ())) != 1}
    return {
        **{f"{AXIS_TAG}{axis}": text for axis, text in varying.items()},
        **({CELL_TAG: sweep.joined(varying)} if varying else {}),
        **{"sweep": sweep.name, "profile": sweep.profile, "seed": str(cell.experiment.seed)},
        f"{SWEEP_TAG}{sweep.name}": sweep.profile,
    }


def _open_parent(sweep: Sweep) -> SweepRun | None:
    """Open the MLflow run of a sweep; None if it is not logged.

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
