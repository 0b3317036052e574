"""Log a sweep to an MLflow run, the parent of the runs of its cells.

Every run of a cell has the tag ``sweep.<name>``, whose value is the profile of the sweep. Runs that
were logged by another sweep or a single run keep their parent, but also receive the tag, so that
the filter ``tags.`sweep.<name>` = '<profile>'`` finds all runs of a sweep.
"""

import hashlib
from collections.abc import Mapping, Sequence

from trishul_ray.tracking.mlflow import ID_TAG, RESULT_TAG, MlflowRun, Status

#: Prefixes of the tags of a cell's run: the sweeps that include it, and its labels on each axis.
#: Labels are also parameters, because MLflow compares runs by the first parameters that differ.
SWEEP_TAG, AXIS_TAG = "sweep.", "axis."
#: Tag with the name of a cell.
CELL_TAG = "cell"


class SweepRun(MlflowRun):
    """The MLflow run of a sweep. Repeated calls use the same run.

    Args:
        uri: Address of the MLflow store.
        experiment: Name of the MLflow experiment.
        tags: ``sweep`` (the name), ``profile``, and additional tags.
        params: Labels of each axis.
        keys: Texts that distinguish sweeps with the same name: the folder of runs, and the ids of
            the cells if the sweep has no file.
    """

    def __init__(
        self, uri: str, experiment: str, tags: Mapping[str, str], params: Mapping[str, str],
        keys: Sequence[str],
    ) -> None:  # fmt: skip
        self._sweep, self._profile = tags["sweep"], tags["profile"]
        text = "\n".join([self._sweep, self._profile, *keys])
        self._cells = f"tags.`{SWEEP_TAG}{self._sweep}` = '{self._profile}'"
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        varying = [k.removeprefix(AXIS_TAG) for k, labels in params.items() if "," in labels]
        name = " ".join([f"{self._sweep}-{self._profile}", *varying])
        super().__init__(uri, experiment, f"sweep-{key}", name, params=params, tags=tags)

    def results(self) -> set[str] | None:
        """Return the checksums of the logged results of all cells, or None if MLflow fails."""
        found = set[str]()

        def find() -> None:
            found.update(r.data.tags.get(RESULT_TAG, "") for r in self._search(self._cells))

        self._send("runs of cells", find)
        return None if self._rejected else found

    def close(
        self, cells: Mapping[str, Status], counts: Mapping[str, int], status: Status
    ) -> list[str]:
        """End the run, and update the tags and status of its cells' runs.

        The status is updated because a stopped trial may have left its run open, or may have
        marked it as failed because its actors stopped first.

        Args:
            cells: Status of each cell, keyed by id.
            counts: Number of cells per status, logged as tags.
            status: Status of the sweep.

        Returns:
            The rejected parts.
        """
        if status == "KILLED":
            self.patience = 0.0
        self._send("runs of cells", self._settle, cells)
        return self.end(status, tags={f"cells.{name}": count for name, count in counts.items()})

    def _settle(self, cells: Mapping[str, Status]) -> None:
        others = {*cells}
        for run in self._search(self._cells):
            id = run.data.tags.get(ID_TAG, "")
            if id in cells and run.info.status != cells[id]:
                self.client.set_terminated(run.info.run_id, cells[id])
            others.discard(id)
        for id in others:  # logged by another sweep or a single run
            for run in self._search(f"tags.`{ID_TAG}` = '{id}'"):
                self.client.set_tag(run.info.run_id, f"{SWEEP_TAG}{self._sweep}", self._profile)
