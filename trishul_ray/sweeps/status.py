"""Determine which cells of sweeps have a valid result in the store.

A result is valid if it is complete, belongs to its experiment, and was computed from the data and
weights that are on this machine now. Timestamps and paths of files do not matter.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trishul_ray.data.dataset import ProgressCallback, score_name
from trishul_ray.errors import CorruptFileError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.experiment import id_of
from trishul_ray.experiment.identity import local_sources
from trishul_ray.federation.messages import changed_sources, comparable
from trishul_ray.report.outcomes import CellOutcome, CellStatus, SweepOutcome
from trishul_ray.report.summary import (
    FAILURE,
    NUMBERS,
    RunSummary,
    missing_scores,
    read_note,
    run_ids,
    write_note,
)
from trishul_ray.runs.folder import RunFolder
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import Cell, Sweep
from trishul_ray.version import NUMERICS

#: Number of results to load concurrently from a server.
READERS = 16


@dataclass(frozen=True)
class CellState:
    """State of an experiment in the store.

    Attributes:
        status: One of

            - ``finished``: the result is valid.
            - ``missing``: the run has not finished.
            - ``failed``: the run has not finished, and its last attempt failed.
            - ``stale``: the result belongs to other data, weights or numerics, or lacks a score.
              The next run deletes it first.
            - ``corrupt``: files are damaged. The last checkpoint may restore them.
        reason: Why the cell is not finished, in one line, or an empty string.
        summary: Content of ``result.json`` if finished, or if only scores are missing.
    """

    status: CellStatus
    reason: str = ""
    summary: RunSummary | None = None


def examine(
    experiments: Mapping[str, Experiment], progress: ProgressCallback | None = None
) -> dict[str, CellState]:
    """Load the state of each experiment from the store.

    Nothing is downloaded. Data and weights that are not on this machine are not compared.

    Raises:
        InputError: The bucket of a store does not exist.
        StorageError: A store cannot be read.
    """
    stores = _open_stores(experiments.values())
    stored = {runs: {*run_ids(store)} for runs, store in stores.items()}
    found = {id: each for id, each in experiments.items() if id in stored[each.storage.runs]}
    states = dict.fromkeys(experiments, CellState("missing", "not run yet"))

    def read(id: str) -> CellState:
        return _read_state(stores[found[id].storage.runs].child(id), found[id])

    # Threads would slow down local reads.
    remote = any(not store.is_local for store in stores.values())
    with ThreadPoolExecutor(READERS if remote else 1) as pool:
        for number, (id, state) in enumerate(zip(found, pool.map(read, found), strict=True), 1):
            states[id] = state
            if progress is not None:
                progress("reading results", number / len(found))
    sources: dict[str, Mapping[str, str]] = {}  # cached, because computing them is slow
    for id, state in states.items():
        if state.summary is not None:
            experiment, storage = experiments[id], experiments[id].storage
            key = experiment.model_dump_json(include={"data", "task", "model"})
            key = f"{key} {storage.cache} {storage.hub}"
            if key not in sources:
                sources[key], _ = local_sources(experiment, progress)
            states[id] = _compare(state, state.summary.sources, sources[key])
    return states


def record_failure(experiment: Experiment, reason: str) -> None:
    """Record why a run has no result, until the run finishes."""
    write_note(RunFolder.of(experiment).home, FAILURE, redact(reason))


def collect(sweeps: Sequence[Sweep], states: Mapping[str, CellState]) -> tuple[SweepOutcome, ...]:
    """Build the outcomes of sweeps from the states of all cells."""
    cells = [cell for sweep in sweeps for cell in sweep.cells]
    stores = _open_stores(cell.experiment for cell in cells)
    metrics = {
        _task_of(cell.experiment): summary.headline
        for cell in cells
        if (summary := states[cell.experiment.id].summary) is not None
    }

    def outcome(cell: Cell) -> CellOutcome:
        experiment = cell.experiment
        state = states[experiment.id]
        if (summary := state.summary) is not None:  # another sweep may require more scores
            why = missing_scores(experiment, summary.scored_rounds)
            state = CellState("stale", why) if why else CellState("finished", "", summary)
        # A cell without a result uses the primary metric of other runs of its task.
        metric = cell.metric or metrics.get(_task_of(experiment), "accuracy")
        return CellOutcome(
            labels=cell.labels,
            id=experiment.id,
            status=state.status,
            reason=state.reason,
            metric=score_name(metric, cell.rows),
            summary=state.summary,
            home=stores[experiment.storage.runs].child(experiment.id),
            scored=tuple(sorted(experiment.scored_rounds)),
        )

    return tuple(sweep.with_outcomes(map(outcome, sweep.cells)) for sweep in sweeps)


def _open_stores(experiments: Iterable[Experiment]) -> dict[str, Store]:
    """Open each store of runs once; keys are the values of ``storage.runs``.

    Raises:
        InputError: A bucket does not exist.
    """
    options = {e.storage.runs: e.storage.retry_seconds for e in experiments}
    stores = {runs: Store.open(runs, retry_seconds) for runs, retry_seconds in options.items()}
    for runs, store in stores.items():
        store.check_bucket(runs)
    return stores


def _read_state(home: Store, experiment: Experiment) -> CellState:
    """Determine the state of an experiment from the files of its run."""
    try:
        summary = RunSummary.read(home)
    except FileNotFoundError:
        return _without_result(home)
    except CorruptFileError as error:
        return CellState("corrupt", str(error))
    same_numerics = summary.versions.get("numerics") == str(NUMERICS)
    if not same_numerics or id_of(summary.identity) != experiment.id:
        return CellState("stale", f"{home.place('result.json')} belongs to another experiment")
    if damaged := summary.damaged_files(home, NUMBERS):
        faults = (f"{home.place(name)} is {fault}" for name, fault in damaged.items())
        return CellState("corrupt", ", ".join(faults))
    if why := missing_scores(experiment, summary.scored_rounds):
        return CellState("stale", why, summary)
    return CellState("finished", "", summary)


def _without_result(home: Store) -> CellState:
    names = home.names()
    if FAILURE in names:
        return CellState("failed", read_note(home, FAILURE) or "the last run failed")
    return CellState("missing", "not finished yet" if names else "not run yet")


def _compare(state: CellState, before: Mapping[str, str], now: Mapping[str, str]) -> CellState:
    """Mark a finished run as stale if its data or weights differ from those now on this machine."""
    if not comparable(before, now):
        now = {name: source for name, source in now.items() if name != "backbone"}
    if changed := changed_sources(before, now):
        return CellState("stale", f"the {changed} changed after the run")
    return state


def _task_of(experiment: Experiment) -> str:
    return f"{experiment.data.name} {experiment.task.kind} {experiment.model.name}"
