"""Run what is missing of sweeps: the implementation of ``trishul table`` and ``trishul sweep``.

Cells are experiments, which sweeps share; each runs once. A repeated call examines the results in
the store and runs only the cells that have none that can be used.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from trishul_ray.data.user_data import USER_DATA
from trishul_ray.errors import InputError, at_loss, how_to_install
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.rows import check_rows
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.summary import attempt_of
from trishul_ray.runs.folder import RunFolder, tidy_finished
from trishul_ray.runs.mlflow_log import log_reused
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import Cell, CellRun, FindRun, Sweep, TuneOptions, distinct
from trishul_ray.sweeps.samples import sampled, with_random_samples, with_samples
from trishul_ray.sweeps.status import CellState, collect, examine, read_failure
from trishul_ray.tracking.mlflow import Status
from trishul_ray.tracking.progress import SweepProgress
from trishul_ray.tracking.store import tracking_uri, ui_command
from trishul_ray.tracking.sweep import AXIS_TAG, CELL_TAG, SWEEP_TAG, CellLog, SweepRun

#: Sections on which it depends whether adapters fit.
_ADAPTERS = ("model", "adapter", "budget", "method")

#: A number of more digits than a name needs.
_LONG = re.compile(r"\d+\.\d{5,}(e[-+]?\d+)?")


@dataclass(frozen=True)
class Reproduced:
    """Result of :func:`reproduce`: found and new runs.

    Attributes:
        outcomes: Results of every sweep, with the cells that a search sampled.
        failures: Why cells have no result, by name.
        ran: Number of cells that were run.
        mlflow_command: Opens the tracking store of the first sweep.
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
    _check_searches(sweeps)
    work = _Work([with_random_samples(sweep) for sweep in sweeps], progress)
    work.examine()
    missing = work.unfinished()
    check_cells({id: work.experiments[id] for id in missing}, work.name)
    for id in missing:
        if (state := work.states[id]).status in ("stale", "corrupt"):
            goes_on = "runs again" if state.fresh else "goes on from its last whole checkpoint"
            progress.note(f"{work.name(id)} is {state.status} and {goes_on}: {state.reason}")
    for note in dict.fromkeys(state.note for state in work.states.values() if state.note):
        progress.note(f"finished results were {note}")
    searches = [part for part in work.parts if part.sweep.is_adaptive]
    status: Status = "FAILED"
    try:
        for part in work.parts:  # before any trial opens the store
            part.tracking = open_parent(part.sweep)
        if missing or searches:
            from trishul_ray.federation.on_ray.session import (
                keep_session_logs,
                opening,
                ray_session,
            )

            progress.phase(opening())
            with (
                at_loss(lambda why: work.close_parents("FAILED" if why else "KILLED")),
                ray_session(),
            ):
                _run(work, missing, searches, options)
                work.examine()
                if work.unfinished():
                    keep_session_logs()
        else:
            work.examine()
        work.tidy()
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


def _check_searches(sweeps: Sequence[Sweep]) -> None:
    for sweep in sweeps:
        if sweep.is_adaptive and find_spec("optuna") is None:
            raise InputError(
                f"{sweep.file or sweep.name}: search: kind optuna needs the package optuna: "
                + how_to_install("search", "optuna>=5,<6")
            )


def _run(
    work: "_Work", missing: Sequence[str], searches: Sequence["_Part"], options: TuneOptions
) -> None:
    """Run missing cells, and the samples of searches, on Ray."""
    from trishul_ray.sweeps.tuner import check_stores, run_cells, run_search

    sweeps = [part.sweep for part in work.parts]
    check_stores({cell.experiment.storage.runs for sweep in sweeps for cell in sweep.cells})
    if missing:
        run_cells({id: work.run_of(id) for id in missing}, options, work.progress)
    for part in searches:
        assert part.sweep.search is not None
        for cell in part.sweep.cells:
            work.progress.expect(part.sweep.search.samples, cell.experiment.federation.rounds)
    for part in searches:
        assert part.sweep.search is not None
        samples: list[tuple[Cell, Mapping[str, object]]] = []
        for cell in part.sweep.cells:
            found = run_search(
                _sample_runs(part.sweep, cell, part.parent_id),
                cell.experiment,
                part.sweep,
                options,
                work.progress,
            )
            samples += [(cell, values) for values in found]
        work.set_samples(part, samples)


def _sample_runs(sweep: Sweep, cell: Cell, parent: str | None) -> FindRun:
    """Return how to find what to run for a sample of a cell."""

    def find(config: Mapping[str, object]) -> CellRun:
        assert sweep.search is not None
        made = sampled(cell, config, sweep.search)
        experiment = with_parent(made.experiment, parent)
        return CellRun(experiment, cell_name(sweep, made), cell_tags(sweep, made))

    return find


class _Part:
    """A sweep, its MLflow run, and its cells by the id of their experiment."""

    def __init__(self, sweep: Sweep) -> None:
        self.tracking: SweepRun | None = None
        self.set_sweep(sweep)

    def set_sweep(self, sweep: Sweep) -> None:
        """Set the sweep; the cells of an adaptive one are only known once it has run."""
        self.sweep = sweep
        self.cells: dict[str, Cell] = {}
        for cell in () if sweep.is_adaptive else sweep.cells:
            self.cells.setdefault(cell.experiment.id, cell)

    @property
    def parent_id(self) -> str | None:
        return self.tracking.run_id if self.tracking is not None else None


class _Work:
    """The cells of several sweeps, each once, and what is known of them."""

    def __init__(self, sweeps: Sequence[Sweep], progress: SweepProgress) -> None:
        self.progress = progress
        self.parts = [_Part(sweep) for sweep in sweeps]
        self.states: dict[str, CellState] = {}
        self._index()

    def _index(self) -> None:
        self.experiments = distinct([part.sweep for part in self.parts if part.cells])
        self.holders: dict[str, list[_Part]] = {}
        for part in self.parts:
            for id in part.cells:
                self.holders.setdefault(id, []).append(part)

    def set_samples(
        self, part: _Part, samples: Sequence[tuple[Cell, Mapping[str, object]]]
    ) -> None:
        """Set the cells that a search has run."""
        part.set_sweep(replace(with_samples(part.sweep, samples), search=None))
        self._index()

    def name(self, id: str) -> str:
        part = self.holders[id][0]
        return cell_name(part.sweep, part.cells[id])

    def tags(self, id: str) -> dict[str, str]:
        """Return the tags of a cell's MLflow run: those of the first sweep, and who else has it."""
        first, *others = self.holders[id]
        marks = {f"{SWEEP_TAG}{part.sweep.name}": part.sweep.profile for part in others}
        return marks | cell_tags(first.sweep, first.cells[id])

    def examine(self) -> None:
        """Look up the results of all cells that are not known to have finished."""
        unknown = [
            id for id in self.holders
            if id not in self.states or self.states[id].status != "finished"
        ]  # fmt: skip
        report = self.progress.task_progress("examining results")
        self.states |= examine({id: self.experiments[id] for id in unknown}, report)

    def unfinished(self) -> list[str]:
        """Return the cells that have no result that can be used, and that some sweep needs."""
        return [id for id in self.holders if self.states[id].status != "finished"]

    def tidy(self) -> None:
        """Remove what killed processes have left of cells with a result."""
        finished = {id for id, state in self.states.items() if state.status == "finished"}
        for runs in {experiment.storage.runs for experiment in self.experiments.values()}:
            tidy_finished(runs, finished)

    def run_of(self, id: str) -> CellRun:
        """Return what the trial of a cell runs."""
        experiment = self.experiments[id]
        return CellRun(
            with_parent(experiment, self.holders[id][0].parent_id),
            self.name(id),
            self.tags(id),
            replaces=attempt_of(RunFolder.of(experiment).home) if self.states[id].fresh else None,
        )

    def close_parents(self, status: Status) -> None:
        """End the MLflow runs of the sweeps, and of cells that were being driven."""
        for part in self.parts:
            if (tracking := part.tracking) is None:
                continue
            tags = {id: cell_tags(part.sweep, cell) for id, cell in part.cells.items()}
            rejected = self._log_results(part, tags)  # also those whose process ended too early
            found = Counter(self.states[id].status for id in part.cells)
            counts = {status: found[status] for status in ("finished", "failed", "stopped")}
            counts["missing"] = len(part.cells) - sum(counts.values())
            cells = {id: self._log_of(id) for id in part.cells}
            rejected += tracking.close(cells, counts, status)
            for line in rejected:
                self.progress.note(f"MLflow refused: {line}")

    def _log_of(self, id: str) -> CellLog:
        """Return a cell as the MLflow run of a sweep shows it."""
        state = self.states[id]
        if state.summary is not None:
            return CellLog("FINISHED")
        noted = read_failure(RunFolder.of(self.experiments[id]).home)
        failed = noted is not None and noted.status == "failed"
        stopped = state.reason if state.status == "stopped" else ""
        return CellLog("FAILED" if failed else "KILLED", stopped=stopped)

    def _log_results(self, part: _Part, tags: Mapping[str, Mapping[str, str]]) -> list[str]:
        """Log results that were made elsewhere, or that MLflow does not have whole."""
        rejected: list[str] = []
        for id, cell in part.cells.items():
            if (summary := self.states[id].summary) is not None:
                experiment = with_parent(cell.experiment, part.parent_id)
                home = RunFolder.of(experiment).home
                logged, refused = log_reused(experiment, summary, home, tags[id])
                self.states[id] = replace(self.states[id], summary=logged)
                rejected += refused
        return rejected


def check_cells(experiments: Mapping[str, Experiment], name: Callable[[str], str]) -> None:
    """Check own data and their partition, and that the adapters of all cells fit their backbones.

    Raises:
        InputError: Something does not fit; the message names the cell.
    """
    own = {id: each for id, each in experiments.items() if each.data.name in USER_DATA}
    _check_each(own, {"data", "partition", "federation", "seed"}, name, check_rows)

    if experiments:
        from trishul_ray.experiment.fit import check_fits  # imports torch

        _check_each(experiments, _ADAPTERS, name, check_fits)


def check_adapters(experiments: Mapping[str, Experiment], name: Callable[[str], str]) -> None:
    """Check the adapters of all cells whose model is known on this machine, as ``check_cells``.

    Of others, a plan says that their time is unknown, and why.
    """
    from trishul_ray.experiment.fit import check_layers

    _check_each(experiments, _ADAPTERS, name, check_layers)


def _check_each(
    experiments: Mapping[str, Experiment],
    sections: Collection[str],
    name: Callable[[str], str],
    check: Callable[[Experiment], object],
) -> None:
    """Call ``check`` once for all experiments that are alike in some sections."""
    checked: set[str] = set()
    for id, experiment in experiments.items():
        found = experiment.model_dump_json(include=set(sections))
        if found not in checked:
            checked.add(found)
            try:
                check(experiment)
            except InputError as error:
                raise InputError(f"cell {name(id)!r}: {error}") from error


def cell_name(sweep: Sweep, cell: Cell) -> str:
    """Return how a cell is called in messages: ``vision: FedIT, CIFAR-100, seed=0``."""
    labels = _joined(_shown_labels(sweep, cell))
    short = _LONG.sub(lambda found: f"{float(found.group()):.4g}", labels)  # as in a search's table
    return f"{sweep.name}: {short}" if short else sweep.name


def _shown_labels(sweep: Sweep, cell: Cell) -> dict[str, str]:
    return {axis: sweep.shown_label(axis, label) for axis, label in cell.labels.items()}


def _joined(labels: Mapping[str, str]) -> str:
    """Return labels as text; numbers have the name of their axis."""
    return ", ".join(
        f"{axis}={label}" if label.replace(".", "").isdigit() else label
        for axis, label in labels.items()
    )


def cell_tags(sweep: Sweep, cell: Cell) -> dict[str, str]:
    """Return the tags of a cell's MLflow run: the sweep, its labels, and its place in a table.

    Labels are those of the axes that vary, by which runs are named and compared.
    """
    labels = _shown_labels(sweep, cell)
    varying = {axis: text for axis, text in labels.items() if len(sweep.axes.get(axis, ())) != 1}
    tags = {
        **{f"{AXIS_TAG}{axis}": text for axis, text in varying.items()},
        **({CELL_TAG: _joined(varying)} if varying else {}),
        "sweep": sweep.name,
        "profile": sweep.profile,
        "seed": str(cell.experiment.seed),
        f"{SWEEP_TAG}{sweep.name}": sweep.profile,
    }
    for table in sweep.tables:
        if all(cell.labels[axis] in labels for axis, labels in table.where.items()):
            row, column = (
                ", ".join(cell.labels[axis] for axis in axes)
                for axes in (table.rows, table.columns)
            )
            return tags | {"table": table.name, "row": row, "column": column}
    return tags


def with_parent(experiment: Experiment, parent: str | None) -> Experiment:
    """Return an experiment whose MLflow run belongs to a sweep's."""
    if parent is None:
        return experiment
    tracking = experiment.tracking.model_copy(update={"parent_run": parent})
    return experiment.model_copy(update={"tracking": tracking})


def open_parent(sweep: Sweep) -> SweepRun | None:
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
