"""The MLflow run of a sweep, the parent of the runs of its cells.

Every run of a cell has the tag ``sweep.<name>`` with the sweep's profile as value. A run that
another sweep or a single call has logged keeps its parent and also gets the tag: the filter
``tags.`sweep.<name>` = '<profile>'`` finds all runs of a sweep.
"""

import hashlib
from collections.abc import Mapping, Sequence

from trishul_ray.tracking.mlflow import ID_TAG, PARENT_TAG, MlflowRun, Status

#: Beginnings of the tags of a cell's run: the sweeps that need it, and its labels by axis. Labels
#: are also parameters: MLflow compares runs by the first parameters that differ.
SWEEP_TAG, AXIS_TAG = "sweep.", "axis."
#: Tag of a cell's run: its name.
CELL_TAG = "cell"


class SweepRun(MlflowRun):
    """The MLflow run of a sweep, the same one at every call.

    Args:
        uri: Address of the MLflow store.
        experiment: Name of the MLflow experiment.
        tags: ``sweep``, its name, ``profile``, and further tags.
        params: Labels of its axes.
        keys: What distinguishes sweeps of one name: the folder of runs, and the ids of its cells if
            the sweep has no file.
    """

    def __init__(
        self, uri: str, experiment: str, tags: Mapping[str, str], params: Mapping[str, str],
        keys: Sequence[str],
    ) -> None:  # fmt: skip
        self._sweep, self._profile = tags["sweep"], tags["profile"]
        text = "\n".join([self._sweep, self._profile, *keys])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        varying = [k.removeprefix(AXIS_TAG) for k, labels in params.items() if "," in labels]
        name = " ".join([f"{self._sweep}-{self._profile}", *varying])
        super().__init__(uri, experiment, f"sweep-{key}", name, params=params, tags=tags)

    def close(
        self, cells: Mapping[str, Status], counts: Mapping[str, int], status: Status
    ) -> list[str]:
        """End the open runs of cells, by id, tag runs that other sweeps logged, and end the run.

        A run that ended as ``FAILED`` although its cell did not fail gets the status of the cell.

        Returns:
            The rejected parts.
        """
        if status == "KILLED":
            self.patience = 0.0
        self._send("runs of cells", self._settle, cells)
        tags = {f"cells.{name}": count for name, count in counts.items()}
        return self.end(status, tags=tags)

    def _settle(self, cells: Mapping[str, Status]) -> None:
        client, tag = self.client, f"{SWEEP_TAG}{self._sweep}"
        wanted = f"tags.`{tag}` = '{self._profile}'"
        found = client.search_runs([self.experiment_id], wanted, max_results=50_000)
        tagged = {run.data.tags[ID_TAG]: run for run in found if ID_TAG in run.data.tags}
        for id, run in tagged.items():
            cell, was = cells.get(id), run.info.status
            if cell is None and run.data.tags.get(PARENT_TAG) != self._id:
                continue  # of another sweep of this name, which may go on
            ended: Status = "KILLED" if cell is None else cell
            # An interrupted run may see its actors end first, and take that for a failure.
            if was == "RUNNING" or (was == "FAILED" and cell is not None and ended != was):
                client.set_terminated(run.info.run_id, ended)
        for id in cells.keys() - tagged.keys():  # logged by another sweep or a single call
            wanted = f"tags.`{ID_TAG}` = '{id}'"
            for run in client.search_runs([self.experiment_id], wanted):
                client.set_tag(run.info.run_id, tag, self._profile)
