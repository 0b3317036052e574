"""Cells of sweeps that have a valid result: the store of results is the truth.

A result is valid if it is complete, belongs to its experiment, and was computed from the data and
weights that are on this machine now. Times and places of files do not matter.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from trishul_ray.data.dataset import ProgressCallback, score_name
from trishul_ray.errors import CorruptFileError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.experiment import id_of
from trishul_ray.experiment.identity import local_sources
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.messages import changed_sources, comparable
from trishul_ray.report.outcomes import CellOutcome, CellStatus, SweepOutcome
from trishul_ray.report.summary import FAILURE, NUMBERS, RunSummary, run_ids, unscored
from trishul_ray.runs.folder import RunFolder
from trishul_ray.storage.integrity import from_checked_json, to_checked_json
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import Cell, Sweep
from trishul_ray.version import NUMERICS

#: Number of results that are read from a server at the same time.
READERS = 16


@dataclass(frozen=True)
class CellState:
    """State of an experiment in the store.

    Attributes:
        status: ``finished``: the result is valid; ``missing``: there is none; ``failed``: there
            is none, and the last attempt failed; ``stale``: it belongs to other data, weights or
            numerics, or lacks a score; ``corrupt``: files are damaged, which the last checkpoint
            may restore.
        reason: One line on the fault; empty if finished.
        summary: Content of ``result.json`` if finished.
        failure: Reason of the last failure, or an empty string.
        sources: Hashes of the data and weights of the stored files, or None.
    """

    status: CellStatus
    reason: str = ""
    summary: RunSummary | None = None
    failure: str = ""
    sources: Mapping[str, str] | None = field(default=None, repr=False, compare=False)

    @property
    def fresh(self) -> bool:
        """Whether the next run must delete the stored files first."""
        return self.status == "stale"


#: State of a run that has never started.
NOT_RUN = CellState("missing", "not run yet")


def examine(
    experiments: Mapping[str, Experiment], progress: ProgressCallback | None = None
) -> dict[str, CellState]:
    """Return the state of each experiment in the store, by id.

    Nothing is downloaded: data and weights that are not on this machine are not compared.

    Raises:
        InputError: The bucket of a store does not exist.
        StorageError: A store cannot be read.
    """
    stores = _open_stores(experiments.values())
    stored = {uri: {*run_ids(store)} for uri, store in stores.items()}
    found = {id: each for id, each in experiments.items() if id in stored[each.storage.runs]}
    states = dict.fromkeys(experiments, NOT_RUN)

    def read(id: str) -> CellState:
        return _read_state(stores[found[id].storage.runs].child(id), found[id])

    # Local files are read one after the other: threads would take longer.
    remote = any(not store.is_local for store in stores.values())
    with ThreadPoolExecutor(READERS if remote else 1) as pool:
        try:
            for number, (id, state) in enumerate(zip(found, pool.map(read, found), strict=True), 1):
                states[id] = state
                if progress is not None:
                    progress("reading results", number / len(found))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    groups: dict[str, list[str]] = {}
    for id, state in states.items():
        if state.sources is not None:
            groups.setdefault(_sources_key(experiments[id]), []).append(id)
    for ids in groups.values():
        now, _ = local_sources(experiments[ids[0]], progress)
        states |= {id: _compare(states[id], now) for id in ids}
    return states


def record_failure(experiment: Experiment, reason: str, attempts: int) -> None:
    """Store the reason why a run has no result; its next finished run deletes the file."""
    note = {"id": experiment.id, "reason": redact(reason), "attempts": attempts}
    RunFolder.of(experiment).home.write(FAILURE, to_checked_json(note))


def collect(sweeps: Sequence[Sweep], states: Mapping[str, CellState]) -> tuple[SweepOutcome, ...]:
    """Return the outcomes of sweeps whose cells have all been examined."""
    cells = [cell for sweep in sweeps for cell in sweep.cells]
    stores = _open_stores(cell.experiment for cell in cells)
    headlines = {
        _task_of(cell.experiment): summary.headline
        for cell in cells
        if (summary := states[cell.experiment.id].summary) is not None
    }

    def outcome(cell: Cell) -> CellOutcome:
        experiment = cell.experiment
        state = states[experiment.id]
        # A cell without a result has the headline of other runs of its task.
        metric = cell.metric or headlines.get(_task_of(experiment), "accuracy")
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
    """Open each store of runs once; return them by ``storage.runs``.

    Raises:
        InputError: The bucket of one does not exist.
    """
    options = {e.storage.runs: e.storage.retry_seconds for e in experiments}
    stores = {runs: Store.open(runs, retry_seconds) for runs, retry_seconds in options.items()}
    for runs, store in stores.items():
        store.check_bucket(runs)
    return stores


def _read_state(home: Store, experiment: Experiment) -> CellState:
    """Return the state of an experiment according to the files of its run."""
    sources, failure = None, _read_failure(home)
    try:
        summary = RunSummary.read(home)
        sources = summary.sources
        same = id_of(summary.identity) == experiment.id
        if not same or summary.versions["numerics"] != str(NUMERICS):
            reason = f"{home.place('result.json')} belongs to another experiment"
            return CellState("stale", _with(reason, failure), failure=failure)
        for name, fault in summary.damaged_files(home, NUMBERS).items():
            raise CorruptFileError(f"{home.place(name)} is {fault}")
    except FileNotFoundError:
        if failure:
            return CellState("failed", failure, failure=failure)
        return CellState("missing", "not finished yet") if home.names() else NOT_RUN
    except CorruptFileError as error:
        if sources is None and (checkpoint := open_checkpoints(experiment).newest()) is not None:
            sources = checkpoint.sources
        reason = _with(str(error), failure)
        return CellState("corrupt", reason, failure=failure, sources=sources)
    if why := unscored(experiment, summary.scored_rounds):
        return CellState("stale", why)
    return CellState("finished", "", summary, sources=sources)


def _with(reason: str, failure: str) -> str:
    return f"{reason}; {failure}" if failure else reason


def _read_failure(home: Store) -> str:
    """Return the reason that :func:`record_failure` stored, or an empty string."""
    try:
        return str(from_checked_json(home.read(FAILURE), FAILURE)["reason"])
    except FileNotFoundError:
        return ""
    except CorruptFileError:
        return "the last attempt failed"


def _sources_key(experiment: Experiment) -> str:
    """Return what decides the sources of an experiment, so that each is computed once."""
    storage = experiment.storage
    parts = [
        experiment.data.model_dump(exclude={"train_limit"}),
        experiment.task.model_dump(),
        experiment.model.model_dump(include={"name", "init"}),
        [storage.cache, storage.hub],
    ]
    return json.dumps(parts, sort_keys=True)


def _compare(state: CellState, now: Mapping[str, str]) -> CellState:
    """Return the state of a stored run, given the sources on this machine."""
    before = state.sources or {}
    if not comparable(before, now):
        now = {name: source for name, source in now.items() if name != "backbone"}
    if changed := changed_sources(before, now):
        return CellState("stale", f"the {changed} have changed since it was run")
    return state


def _task_of(experiment: Experiment) -> str:
    return f"{experiment.data.name} {experiment.task.kind} {experiment.model.name}"
