"""The MLflow run of a sweep, the parent of the runs of its cells.

A cell's run is found by the tag ``sweep.<name>`` with the sweep's profile as value. A run that
another sweep or a single run has logged keeps its parent, and gets that tag, too. As MLflow shows a
run below one parent, this sweep then gets a short run in its place: with this sweep's labels as
name, parameters and tags, the parameters and scores of the cell, and the tag :data:`SHARED_TAG`,
but without ``trishul.id``, by which every experiment has one run.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trishul_ray.runtime.lazy import mlflow
from trishul_ray.storage.integrity import stamp
from trishul_ray.storage.store import Store
from trishul_ray.tracking.mlflow import (
    ID_TAG,
    PARENT_TAG,
    MlflowTracker,
    find_runs,
    points_of,
    public,
)
from trishul_ray.tracking.mlflow_store import SCORES, TRAINING, sqlite_file
from trishul_ray.tracking.tracker import RunEnd, RunStart, Status

if TYPE_CHECKING:
    from mlflow.entities import Run

#: Tag of the run of a cell that early stopping ended: after which round, at which score.
STOPPED_TAG = "trishul.stopped"
#: Beginning of the tag of the run of a cell that names a sweep; the value is the profile.
SWEEP_TAG = "sweep."
#: Tag of a short run: the MLflow run of the same cell, which has everything.
SHARED_TAG = "trishul.shared_run"
#: Tag of a short run: the id of its experiment, whose run it is not.
SHARED_ID_TAG = "trishul.shared_id"
#: Tag of a sweep's cell: its name.
CELL_TAG = "cell"
#: Beginning of the tags of a cell's labels, by axis. They are parameters, too: MLflow compares runs
#: by the first that differ, in the order of names.
AXIS_TAG = "axis."


@dataclass(frozen=True)
class CellLog:
    """A cell as its sweep logs it once no cell is running.

    Attributes:
        tags: The tags of its run.
        status: ``FINISHED`` if it has a result, ``FAILED`` if it has failed, else ``KILLED``.
        run_id: The MLflow run of its result.
        stopped: Why early stopping has ended it; empty if it has not.
        rounds: Return the metrics of its rounds, by the names of MLflow, with their ``round``.
    """

    tags: Mapping[str, str]
    status: Status
    run_id: str | None = None
    stopped: str = ""
    rounds: Callable[[], Sequence[Mapping[str, float]]] = tuple


class SweepRun(MlflowTracker):
    """The MLflow run of a sweep, the same one at every call.

    Args:
        uri: Address of the MLflow store.
        experiment_name: Name of the MLflow experiment.
        runs: Folder of the sweep's runs.
        tags: ``sweep``, its name, ``profile``, and what else is noted.
        params: Labels of its axes.
        cells: Ids of its cells if the sweep has no name of its own.
    """

    def __init__(
        self,
        uri: str,
        experiment_name: str,
        runs: Store,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        cells: Sequence[str] = (),
    ) -> None:
        super().__init__(uri, experiment_name)
        self._tags, self._params, self._notes = tags, params, runs.child("sweeps")
        names = [tags["sweep"], tags["profile"], runs.uri, *cells]
        self._key = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    def open(self) -> None:
        """Create the run, or open it.

        Raises:
            InputError: The tracking store cannot be used.
        """
        name = f"{self._tags['sweep']}-{self._tags['profile']}"
        self.start(RunStart(f"sweep-{self._key}", name, self._params, self._tags))

    def close(
        self, cells: Mapping[str, CellLog], counts: Mapping[str, int], status: Status
    ) -> list[str]:
        """Bring the runs of all cells, by id, into line with their results, and end the run.

        A run that is still open ends as its cell did; so does one that ended as ``FAILED`` although
        its cell did not fail. Cells that were logged by another sweep or a single run get the tag
        of this sweep, which gets a short run for each, unless it was stopped itself (``KILLED``).
        ``counts`` tells how many cells are in which state.

        Returns:
            The files that the tracking store did not accept.
        """
        if status == "KILLED":
            self.patience = 0.0
        self._send("runs of cells", partial(self._settle, cells))
        if status != "KILLED":
            self._send("runs of shared cells", partial(self._add_shared, cells))
        tags = {f"cells.{name}": count for name, count in counts.items()}
        return self.end(status, RunEnd(0, {}, tags))

    def _settle(self, cells: Mapping[str, CellLog]) -> None:
        children = self._children()
        for id, child in children.items():
            cell, was = cells.get(id), child.info.status
            if cell is None and child.data.tags.get(PARENT_TAG) != self._id:
                continue  # of another sweep of this name, which may go on
            ended: Status = "KILLED" if cell is None else cell.status
            # A run that is interrupted may see its actors end first, and take that for a failure.
            if was == "RUNNING" or (was == "FAILED" and cell is not None and ended != was):
                self.client.set_terminated(child.info.run_id, ended)
            if cell is not None and cell.stopped:
                self._add_tags(child.info.run_id, {STOPPED_TAG: cell.stopped})
        for id, cell in cells.items():
            if id not in children and cell.run_id is not None:
                marks = {k: v for k, v in cell.tags.items() if k.startswith(SWEEP_TAG)}
                try:
                    self._add_tags(cell.run_id, marks)
                except mlflow.MlflowException as error:
                    if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # it is in another store
                        raise

    def _children(self) -> "dict[str, Run]":
        """Return the runs of this sweep's cells, by the id of their experiment."""
        marked = f"tags.`{SWEEP_TAG}{self._tags['sweep']}` = '{self._tags['profile']}'"
        return {r.data.tags[ID_TAG]: r for r in self._find(marked) if ID_TAG in r.data.tags}

    def _find(self, wanted: str) -> "list[Run]":
        return find_runs(self.client, self.experiment.experiment_id, wanted)

    def _add_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Add the tags that a run does not have."""
        known = self.client.get_run(run_id).data.tags
        for key in tags.keys() - known.keys():
            self.client.set_tag(run_id, key, tags[key])

    def _add_shared(self, cells: Mapping[str, CellLog]) -> None:
        """Add a short run for each finished cell whose run is not below this sweep's.

        The short run of a cell that was run afresh since is replaced.
        """
        below = self._find(f"tags.`{PARENT_TAG}` = '{self._id}'")
        shorts = {r.data.tags[SHARED_ID_TAG]: r for r in below if SHARED_ID_TAG in r.data.tags}
        runs = self._children()
        for id, cell in cells.items():
            if cell.status != "FINISHED":
                continue
            if id not in runs and (found := self._find(f"tags.`{ID_TAG}` = '{id}'")):
                runs[id] = found[-1]  # logged from its files, for another sweep
            whole, short = runs.get(id), shorts.get(id)
            if whole is None:
                continue
            own = whole.data.tags.get(PARENT_TAG) == self._id
            if short is not None:
                source = short.data.tags[SHARED_TAG]
                if not own and source == whole.info.run_id and short.info.status == "FINISHED":
                    continue
                self.client.delete_run(short.info.run_id)
            if not own and whole.info.status == "FINISHED":
                self._add_short(id, whole, cell)

    def _add_short(self, id: str, whole: "Run", cell: CellLog) -> None:
        client, info, number = self.client, whole.info, self.experiment.experiment_id
        tags = {
            **{k: v for k, v in cell.tags.items() if not k.startswith(SWEEP_TAG)},
            PARENT_TAG: self._id,
            SHARED_TAG: info.run_id,
            SHARED_ID_TAG: id,
            "mlflow.note.content": "Scores of a run that this sweep shares. All of it: "
            f"[{info.run_name}](#/experiments/{number}/runs/{info.run_id}?{TRAINING})",
        }
        axes = public({k: v for k, v in cell.tags.items() if k.startswith(AXIS_TAG)})
        params = {k: v for k, v in whole.data.params.items() if not k.startswith(AXIS_TAG)} | axes
        name = cell.tags.get(CELL_TAG, info.run_name)
        short = client.create_run(number, info.start_time, public(tags), name).info.run_id
        points = [
            point
            for each in cell.rounds()
            for point in points_of(
                {k: v for k, v in each.items() if k.startswith(SCORES)}, int(each["round"])
            )
        ]
        entities = [mlflow.entities.Param(*each) for each in params.items()]
        client.log_batch(short, metrics=points, params=entities)
        client.set_terminated(short, "FINISHED", info.end_time)

    def note(self, results: Mapping[str, str]) -> None:
        """Note beside the runs that the store has these results, checksums by id."""
        self._notes.write(f"{self._key}.json", json.dumps(self._content(results)).encode())

    def has(self, results: Mapping[str, str]) -> bool:
        """Return whether the store has these results, as :meth:`note` noted; it is not asked.

        A file must be as it was then: it may be lost, another one, or without some runs by now.
        """
        try:
            return bool(json.loads(self._notes.read(f"{self._key}.json")) == self._content(results))
        except (FileNotFoundError, ValueError):
            return False

    def _content(self, results: Mapping[str, str]) -> dict[str, object]:
        file = sqlite_file(self.uri)
        state = list(stamp(file)) if file is not None else None
        return {"place": self.place, "file": state, "results": dict(results)}
