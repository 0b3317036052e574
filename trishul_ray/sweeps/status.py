"""Cells of sweeps that have a usable result: the store of results is the truth.

A result is used if it is whole, is that of its experiment, and was made from the data and weights
that are on this machine now. Times of files, their places, comments and tracking do not matter.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trishul_ray.data.dataset import ProgressCallback, score_name
from trishul_ray.errors import CorruptFileError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import local_sources
from trishul_ray.experiment.ids import id_of
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.messages import changed_sources, comparable
from trishul_ray.report.outcomes import CellOutcome, CellStatus, SweepOutcome
from trishul_ray.report.summary import (
    FAILURE,
    NUMBERS,
    RunSummary,
    run_ids,
    times_finished,
    unscored,
)
from trishul_ray.runs.folder import RunFolder
from trishul_ray.storage.integrity import from_checked_json, to_checked_json
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store, copy_in_cache, make_copy
from trishul_ray.sweeps.cells import Cell, Sweep
from trishul_ray.version import NUMERICS

T = TypeVar("T")
R = TypeVar("R")

#: Number of results that are read at the same time.
READERS = 16


@dataclass(frozen=True)
class CellState:
    """State of an experiment in the store.

    Attributes:
        status: ``finished``: the result can be used; ``missing``: there is none; ``failed``: there
            is none, and the last attempt failed; ``stopped``: early stopping ended it; ``stale``:
            it is of other data, weights or numerics, or lacks a score that is asked for;
            ``corrupt``: files are damaged, which the last checkpoint may restore.
        reason: One line on what is wrong; empty if finished.
        summary: Content of ``result.json`` if finished.
        note: One line on what could not be checked of a finished result; empty otherwise.
        sources: Hashes of the data and weights of what is kept, if it is known.
        home: Folder with the files that were read; None for what has none.
    """

    status: CellStatus
    reason: str = ""
    summary: RunSummary | None = None
    note: str = ""
    sources: Mapping[str, str] | None = field(default=None, repr=False, compare=False)
    home: Store | None = field(default=None, repr=False, compare=False)

    @property
    def fresh(self) -> bool:
        """Whether a result is in the way that the next run must delete first."""
        return self.status == "stale"


#: State of a run that has never begun.
NOT_RUN = CellState("missing", "not run yet")


def examine(
    experiments: Mapping[str, Experiment], progress: ProgressCallback | None = None
) -> dict[str, CellState]:
    """Return what the store has of each experiment, by id.

    Nothing is downloaded: data and weights that are not on this machine are not compared, which
    the state of the cell notes.

    Raises:
        InputError: The bucket of a store does not exist.
        StorageError: A store cannot be read.
    """
    states = _read_states(experiments, progress)
    groups: dict[str, list[str]] = {}
    for id, state in states.items():
        if state.sources is not None:
            groups.setdefault(_sources_key(experiments[id]), []).append(id)
    for ids in groups.values():
        now, unknown = local_sources(experiments[ids[0]], progress)
        states |= {id: _compare(states[id], now, unknown) for id in ids}
    return states


def _read_states(
    experiments: Mapping[str, Experiment], progress: ProgressCallback | None
) -> dict[str, CellState]:
    """Return the states of experiments by the files of their runs alone.

    With thousands of runs in a bucket, to read what is not new would take minutes: what has not
    finished since is read from copies.
    """
    stores = _open_stores(experiments.values())
    runs = {uri: set(run_ids(store)) for uri, store in stores.items()}
    times = {uri: times_finished(store) for uri, store in stores.items()}
    states = dict.fromkeys(experiments, NOT_RUN)
    found, copies = {}, {}
    for id, experiment in experiments.items():
        uri = experiment.storage.runs
        if id in runs[uri]:
            found[id] = stores[uri].child(id)
            if (time := times[uri].get(id)) is not None:
                copies[id] = copy_in_cache(experiment.storage.places.cache, found[id], time)

    def read_copy(id: str) -> CellState:
        return _read_state(copies[id], experiments[id])

    def read(id: str) -> CellState:
        if id in copies:
            make_copy(copies[id], found[id], ("result.json", *NUMBERS))
            if (state := read_copy(id)).status == "finished":
                return state
        return _read_state(found[id], experiments[id])

    known = [id for id, copy in copies.items() if copy.exists()]
    for id, state in zip(known, _read_all(known, read_copy, progress, remote=False), strict=True):
        if state.status == "finished":
            states[id] = state
    new = [id for id in found if states[id] is NOT_RUN]
    remote = any(not store.is_local for store in stores.values())
    states |= zip(new, _read_all(new, read, progress, remote=remote), strict=True)
    return states


def other_results(
    experiments: Mapping[str, Experiment], progress: ProgressCallback | None = None
) -> list[RunSummary]:
    """Return the readable results in the experiments' stores that are not theirs."""

    def read(home: Store) -> RunSummary | None:
        try:
            return RunSummary.read(home)
        except (FileNotFoundError, CorruptFileError):
            return None

    stores = _open_stores(experiments.values()).values()
    homes = [
        store.child(name) for store in stores for name in run_ids(store) if name not in experiments
    ]
    remote = any(not store.is_local for store in stores)
    found = _read_all(homes, read, progress, remote=remote, what="other results")
    return [summary for summary in found if summary is not None]


def record_failure(
    experiment: Experiment, reason: str, attempts: int, status: CellStatus = "failed"
) -> None:
    """Note beside a run's files why it has no result; its next finished run deletes the note.

    ``status`` is ``failed``, or ``stopped`` by early stopping.
    """
    why = redact(reason)
    note = {"id": experiment.id, "status": status, "reason": why, "attempts": attempts}
    RunFolder.of(experiment).home.write(FAILURE, to_checked_json(note))


def collect(sweeps: Sequence[Sweep], states: Mapping[str, CellState]) -> tuple[SweepOutcome, ...]:
    """Return the outcomes of sweeps, of which every cell has been examined."""
    stores = _open_stores(cell.experiment for sweep in sweeps for cell in sweep.cells)
    headlines: dict[str, str] = {}
    for cell in (cell for sweep in sweeps for cell in sweep.cells):
        summary = states[cell.experiment.id].summary
        if summary is not None:
            headlines[_task_of(cell.experiment)] = summary.headline

    def outcome(cell: Cell) -> CellOutcome:
        experiment = cell.experiment
        state = states[experiment.id]
        # A cell without a result has the headline of other runs of its task, if there are any.
        metric = cell.metric or headlines.get(_task_of(experiment), "accuracy")
        return CellOutcome(
            labels=cell.labels,
            id=experiment.id,
            status=state.status,
            reason=state.reason,
            metric=score_name(metric, cell.rows),
            summary=state.summary,
            home=stores[experiment.storage.runs].child(experiment.id),
            copy=state.home,
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


def _read_all(
    items: Sequence[T],
    read: Callable[[T], R],
    progress: ProgressCallback | None,
    *,
    remote: bool,
    what: str = "results",
) -> list[R]:
    """Return what ``read`` makes of each item.

    From a server several are read at a time, as most of the time is spent waiting. Local files are
    read one after the other: threads would take 1.6 times as long.
    """
    results: list[R] = []
    with ThreadPoolExecutor(READERS) as pool:  # it starts a thread when there is work for it
        try:
            for result in pool.map(read, items) if remote else map(read, items):
                results.append(result)
                if progress is not None:
                    progress(f"reading {what}", len(results) / len(items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # do not try the rest first
            raise
    return results


def _read_state(home: Store, experiment: Experiment) -> CellState:
    """Return the state of an experiment by the files of its run alone."""
    sources = None
    try:
        summary = RunSummary.read(home)
        sources = summary.sources
        same = id_of(summary.identity) == experiment.id
        if not same or summary.versions["numerics"] != str(NUMERICS):
            reason = f"{home.place('result.json')} is that of another experiment"
            return CellState("stale", _with_failure(reason, home))
        for name, fault in summary.damaged_files(home, NUMBERS).items():
            raise CorruptFileError(f"{home.place(name)} is {fault}")
    except FileNotFoundError:
        kept = CellState("missing", "not finished yet") if home.names() else NOT_RUN
        return read_failure(home) or kept
    except CorruptFileError as error:
        if sources is None and (checkpoint := open_checkpoints(experiment).newest()) is not None:
            sources = checkpoint.sources
        return CellState("corrupt", _with_failure(str(error), home), sources=sources)
    if why := unscored(experiment, summary.scored_rounds):
        return CellState("stale", why)
    return CellState("finished", "", summary, sources=sources, home=home)


def _with_failure(reason: str, home: Store) -> str:
    noted = read_failure(home)
    return f"{reason}; {noted.reason}" if noted else reason


def read_failure(home: Store) -> CellState | None:
    """Return why a run has no result, as :func:`record_failure` noted it; None without a note."""
    try:
        note = from_checked_json(home.read(FAILURE), FAILURE)
        return CellState("stopped" if note["status"] == "stopped" else "failed", note["reason"])
    except FileNotFoundError:
        return None
    except CorruptFileError:  # or an earlier version's
        return CellState("failed", "the last attempt failed")


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


def _compare(state: CellState, now: Mapping[str, str], unknown: str) -> CellState:
    """Return the state of a run that is kept, given the sources on this machine."""
    before = state.sources or {}
    if not comparable(before, now):
        now = {name: source for name, source in now.items() if name != "backbone"}
        unknown = " and ".join(filter(None, [unknown, "the weights (from the hub or a folder)"]))
    if changed := changed_sources(before, now):
        return CellState("stale", f"the {changed} have changed since it was run")
    noted = unknown and state.status == "finished"
    return replace(state, note=f"not compared with {unknown}" if noted else "")


def _task_of(experiment: Experiment) -> str:
    return f"{experiment.data.name} {experiment.task.kind} {experiment.model.name}"
