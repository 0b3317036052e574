"""Numbers and bytes that the clients of a run receive and send, as stored in the records."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from trishul_ray.federation.messages import TrainReport, WorkerSpec, as_tensor
from trishul_ray.federation.records import RoundRecord
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import State
from trishul_ray.stages import BroadcastMessage, ClientRound, Cohort, Partial, Traffic


class Transfers:
    """Count the transfers of clients, given their earlier rounds.

    Args:
        method: The method.
        spec: The spec of the workers.
        records: The records so far.
    """

    def __init__(self, method: Method, spec: WorkerSpec, records: Sequence[RoundRecord]) -> None:
        self.method, self.spec = method, spec
        self._uploads: list[list[int]] = []  # per round, the numbers that each accepted client sent
        self._received: dict[int, int] = {}  # last round whose broadcast each client received
        for record in records:
            self.remember(record)

    def remember(self, record: RoundRecord) -> None:
        """Store which clients received the broadcast of a round, and the sizes of uploads."""
        self._received |= dict.fromkeys([*record.clients, *map(int, record.missing)], record.round)
        self._uploads.append(record.accepted_uploads)

    def expected(
        self, sent: BroadcastMessage, last: RoundRecord, clients: Sequence[int]
    ) -> Traffic:
        """Return the expected traffic of clients in the next round, in bytes.

        The clock selects clients before they train. The expected upload is the mean of the ``last``
        round, or in round 1 four bytes per number.
        """
        tensors = sent.state.map(as_tensor)
        up = 4.0 * sum(self.spec.expected.lengths.values())
        if last.clients:
            up = last.metrics()["uploaded_bytes"] / len(last.clients)
        received = [self._received.get(client) for client in clients]
        # Clients that received their last broadcast in the same round download the same tensors.
        sizes = {each: self._download(tensors, 0, each) for each in set(received)}
        setup = self.method.setup_parameters(tensors, self.spec.layout)
        down = [4 * sizes[each] if sent.size is None else sent.size for each in received]
        first = [4 * setup if each is None else 0 for each in received]
        return Traffic(np.array(down, float), np.array(first, float), up)

    def record(
        self,
        number: int,
        sent: BroadcastMessage,
        cohort: Cohort,
        reports: Sequence[TrainReport],
        total: Partial,
    ) -> tuple[RoundRecord, list[ClientRound]]:
        """Create the record of a round, and the transfers of each client.

        Args:
            number: The round.
            sent: Its broadcast.
            cohort: Its clients.
            reports: Reports of the clients, in ascending order.
            total: The sum of the uploads.
        """
        tensors, size = sent.read.map(as_tensor), sent.size
        uploaded = {report.client: report.uploaded for report in reports}
        received = self._received.get
        downs = [self._download(tensors, r.unsent, received(r.client)) for r in reports]
        setup = self.method.setup_parameters(tensors, self.spec.layout)
        new = {c for c in [*uploaded, *cohort.missing] if received(c) is None}
        clients = []
        for r, numbers in zip(reports, downs, strict=True):
            once = setup if r.client in new - cohort.repeated else 0
            down = 4 * numbers if size is None else size
            up = 4 * r.uploaded if r.uploaded_bytes is None else r.uploaded_bytes
            clients.append(ClientRound(r.client, down + 4 * once, up, r.loss))
        downs += [self._download(tensors, 0, received(client)) for client in cohort.wasted]
        losses = [r.loss for r in reports if math.isfinite(r.loss)]
        coded = [r.uploaded_bytes for r in reports if r.uploaded_bytes is not None]
        record = RoundRecord(
            round=number,
            clients=list(uploaded),
            refused={str(client): why for client, why in total.refused.items()},
            missing={str(client): why for client, why in cohort.missing.items()},
            accepted_uploads=[uploaded[client] for client in total.clients],
            train_loss=float(np.mean(losses)) if losses else None,
            uploaded_parameters=sum(uploaded.values()) + cohort.discarded,
            uploaded_bytes=sum(coded) if coded else None,
            downloaded_parameters=sum(downs) + setup * len(new),
            downloaded_bytes=None if size is None else size * len(downs) + 4 * setup * len(new),
            client_seconds=float(np.mean([r.seconds for r in reports])) if reports else None,
        )
        return record, clients

    def _download(self, broadcast: State, unsent: int, received: int | None) -> int:
        """Return how many numbers of a broadcast a client downloads.

        The broadcast of round r has the aggregates of the rounds before r, so a client that
        received it misses the aggregates of round r and later.
        """
        missed = self._uploads[max(1, received or 0) :]
        return self.method.download_parameters(broadcast, self.spec.layout, unsent, missed)


def over_clients(reports: Sequence[TrainReport], summed: AbstractSet[str]) -> dict[str, float]:
    """Average the numbers that stages report for a round's clients, or sum the ``summed`` names."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.stages.items():
            if math.isfinite(value):  # The numbers of a rejected upload may not be finite.
                found.setdefault(name, []).append(value)
    return {n: float(np.sum(v) if n in summed else np.mean(v)) for n, v in found.items()}
