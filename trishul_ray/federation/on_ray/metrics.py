"""Prometheus metrics of runs, which Ray's agent on each node of a cluster serves.

A local Ray that this package starts does not collect them.
"""

from collections.abc import Iterable
from functools import cache

from ray.util.metrics import Counter, Gauge

from trishul_ray.experiment import Experiment
from trishul_ray.federation.records import RoundRecord

#: Gauges and counters, keyed by name; Ray adds ``ray_`` to a name, and ``_total`` to a counter's.
METRICS: dict[str, tuple[type[Counter] | type[Gauge], str]] = {
    "trishul_round": (Gauge, "Last aggregated round"),
    "trishul_rounds": (Gauge, "Rounds of the run"),
    "trishul_round_seconds": (Gauge, "Duration of the last round"),
    "trishul_waiting_jobs": (Gauge, "Jobs of the round that wait for an idle client actor"),
    "trishul_trained_clients": (Counter, "Clients that have trained, each once per round"),
    "trishul_local_steps": (Counter, "Local steps of clients; none with federation.local_epochs"),
    "trishul_uploaded_bytes": (Counter, "Bytes from clients to the server"),
    "trishul_downloaded_bytes": (Counter, "Bytes from the server to clients"),
    "trishul_rejected_uploads": (Counter, "Uploads that were rejected"),
    "trishul_restarts": (Counter, "Client actors and coordinators that replaced a dead one"),
    "trishul_retries": (Counter, "Retries of the run in a sweep"),
}


@cache
def _metric(name: str) -> Counter | Gauge:
    kind, description = METRICS[name]
    return kind(name, description, tag_keys=("run", "method"))


class RunMetrics:
    """The metrics of one run, tagged with its id and method."""

    def __init__(self, experiment: Experiment) -> None:
        self._tags = {"run": experiment.id, "method": experiment.method.name}
        self._fed = experiment.federation

    def update(self, name: str, value: float = 1) -> None:
        """Set a gauge, or increment a counter."""
        metric = _metric(name)
        if isinstance(metric, Gauge):
            metric.set(value, self._tags)
        elif value:  # Ray rejects 0.
            metric.inc(value, self._tags)

    def add_rounds(self, records: Iterable[RoundRecord]) -> None:
        """Update the metrics from complete records of rounds."""
        for record in records:
            row, clients = record.row(), len(record.clients)
            self.update("trishul_round", record.round)
            self.update("trishul_rounds", self._fed.rounds)
            self.update("trishul_round_seconds", record.seconds or 0.0)
            self.update("trishul_trained_clients", clients)
            if self._fed.local_epochs is None:
                self.update("trishul_local_steps", clients * self._fed.local_steps)
            self.update("trishul_uploaded_bytes", row.get("uploaded_bytes") or 0)
            self.update("trishul_downloaded_bytes", row.get("downloaded_bytes") or 0)
            self.update("trishul_rejected_uploads", len(record.refused))
