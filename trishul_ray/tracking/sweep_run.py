"""The MLflow run of a sweep: the parent of the runs of its cells.

A cell's run is found by the tag ``sweep.<name>`` with the sweep's profile as value. A run that
another sweep or a single run has logged keeps its parent, and gets that tag, too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from trishul_ray.errors import first_line
from trishul_ray.tracking.mlflow_run import MlflowRun, Status

if TYPE_CHECKING:
    from mlflow.entities import Run

#: Tag of the run of a cell: the id of its experiment.
ID_TAG = "trishul.id"
#: Beginning of the tag of the run of a cell that names a sweep; the value is the profile.
SWEEP_TAG = "sweep."
#: Tag of the run of a cell that early stopping ended: after which round, at which score.
STOPPED_TAG = "trishul.stopped"


class SweepRun(MlflowRun):
    """The run of one sweep in an MLflow store. Create it with :meth:`open`."""

    def settle(
        self,
        cells: Mapping[str, Mapping[str, str]],
        finished: Mapping[str, str | None],
        failed: Callable[[str], bool],
        records: Callable[[str], Sequence[Mapping[str, float]] | None],
        stopped: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Bring the runs of all cells into line with their results, once no cell is running.

        A run that is still open is completed if its cell has finished (its process was killed after
        it had written the result), and otherwise ends as ``FAILED`` or ``KILLED``; so does one that
        ended as ``FAILED`` although its cell did not fail. Cells that were logged by another sweep
        or a single run get the tags of this sweep.

        Args:
            cells: Tags of each cell, by id.
            finished: MLflow run id of each finished cell, as in its result, by id.
            failed: Returns whether a cell has failed.
            records: Returns the rounds of a cell, or None if it has not finished.
            stopped: Why early stopping ended a cell, by id; its run is ``KILLED``, with a tag.

        Returns:
            What the tracking store did not accept.
        """
        from mlflow.exceptions import MlflowException

        rejected: list[str] = []
        try:
            children = self._wait(self._children)
        except MlflowException as error:
            return [first_line(error)]
        for id, child in children.items():
            if child.info.status not in ("RUNNING", "FAILED"):
                continue
            ended: Status = "FAILED" if id in cells and failed(id) else "KILLED"
            # A run that is interrupted may see its actors end first, and take that for a failure.
            if child.info.status == "FAILED" and (id not in cells or ended == "FAILED"):
                continue
            run = MlflowRun(self._client, self._uri, self._experiment_id, child)
            run._patience = self._patience
            rounds = records(id) if id in cells else None
            for each in rounds or ():
                metrics = {name: value for name, value in each.items() if name != "round"}
                run.log_round(int(each["round"]), metrics)
            missing = run.finish("FINISHED" if rounds is not None else ended)
            rejected += [f"{what} of {child.info.run_name}" for what in missing]
            self._patience = run._patience  # one outage is waited for once
        for id, why in (stopped or {}).items():
            if id in children:
                with suppress(MlflowException):
                    run_id = children[id].info.run_id
                    self._wait(partial(self._add_tags, run_id, {STOPPED_TAG: why}))
        for id, run_id in finished.items():
            if id not in children and run_id is not None:
                with suppress(MlflowException):  # it was logged to another store
                    self._wait(partial(self._add_tags, run_id, cells[id]))
        return rejected

    def close(self, counts: Mapping[str, int], status: Status) -> list[str]:
        """Log how many cells are in which state, and end the run; return what was not accepted."""
        metrics = {f"cells.{name}": count for name, count in counts.items()}
        self._log_batch("counts of cells", 0, metrics, {})
        return self.finish(status)

    def _children(self) -> "dict[str, Run]":
        """Return the runs of this sweep's cells, by the id of their experiment."""
        tags = self._client.get_run(self._run_id).data.tags
        marked = f"tags.`{SWEEP_TAG}{tags['sweep']}` = '{tags['profile']}'"
        found: dict[str, Run] = {}
        token: Any = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id], filter_string=marked, page_token=token
            )
            found |= {run.data.tags[ID_TAG]: run for run in page if ID_TAG in run.data.tags}
            token = page.token
            if not token:
                return found

    def _add_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        run = self._client.get_run(run_id)
        for key, value in tags.items():
            if key not in run.data.tags:
                self._client.set_tag(run.info.run_id, key, value)
