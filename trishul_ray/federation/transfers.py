"""Numbers and bytes that the clients of a run receive and send, as the records have them."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from trishul_ray.federation.messages import TrainReport, WorkerSpec, as_tensor
from trishul_ray.federation.records import RoundRecord
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import State
from trishul_ray.stages import ClientRound, Cohort, Partial, Sent, Traffic


class Transfers:
    """Counts of what clients transfer, given what they have received in earlier rounds.

    Args:
        method: The method.
        spec: The spec of the workers.
        records: The records so far.
    """

    def __init__(self, method: Method, spec: WorkerSpec, records: Sequence[RoundRecord]) -> None:
        self.method, self.spec = method, spec
        # The clients that have been asked so far, and the round in which they were last.
        self._asked: dict[int, int] = {}
        for record in records:
            self.remember(record)

    def remember(self, record: RoundRecord) -> None:
        """Note which clients have received the broadcast of a round."""
        self._asked |= dict.fromkeys([*record.clients, *map(int, record.missing)], record.round)

    def expected(self, sent: Sent, last: RoundRecord) -> Traffic:
        """Return the bytes that a client of the next round is expected to transfer.

        The clock selects clients before they train: a client is expected to send the mean of the
        ``last`` round, and in round 1 four bytes for each number.
        """
        tensors = sent.state.map(as_tensor)
        up = 4.0 * sum(self.spec.expected.lengths.values())
        if last.clients:
            up = last.metrics()["uploaded_bytes"] / len(last.clients)
        down = 4 * self._download(tensors, 0, last) if sent.size is None else sent.size
        first = self.method.setup_parameters(tensors, self.spec.layout, None)
        return Traffic(down, 4 * first, up)

    def record(
        self,
        number: int,
        sent: Sent,
        cohort: Cohort,
        reports: Sequence[TrainReport],
        total: Partial,
        last: RoundRecord,
    ) -> tuple[RoundRecord, list[ClientRound]]:
        """Return the record of a round, after the ``last`` one, and each client's part in it.

        Args:
            number: The round.
            sent: Its broadcast.
            cohort: Its clients.
            reports: Theirs, by ascending client.
            total: The sum of their uploads.
            last: The record of the round before.
        """
        tensors, size = sent.read.map(as_tensor), sent.size
        uploaded = {report.client: report.uploaded for report in reports}
        downs = [self._download(tensors, report.unsent, last) for report in reports]
        setups = {each: self._setup(tensors, each) for each in [*uploaded, *cohort.missing]}
        clients = []
        for r, numbers in zip(reports, downs, strict=True):
            once = 0 if r.client in cohort.repeated else setups[r.client]
            down = 4 * numbers if size is None else size
            up = 4 * r.uploaded if r.uploaded_bytes is None else r.uploaded_bytes
            clients.append(ClientRound(r.client, down + 4 * once, up, r.loss))
        if cohort.wasted:
            downs.append(cohort.wasted * self._download(tensors, 0, last))
        setup, received = sum(setups.values()), len(reports) + cohort.wasted
        losses = [r.loss for r in reports if math.isfinite(r.loss)]
        coded = [r.uploaded_bytes for r in reports if r.uploaded_bytes is not None]
        record = RoundRecord(
            round=number,
            clients=list(uploaded),
            refused={str(client): why for client, why in total.refused.items()},
            missing={str(client): why for client, why in cohort.missing.items()},
            accepted_uploads=[uploaded[client] for client in total.clients],
            train_loss=float(np.mean(losses)) if losses else None,
            uploaded_parameters=sum(uploaded.values()),
            uploaded_bytes=sum(coded) if coded else None,
            downloaded_parameters=sum(downs) + setup,
            downloaded_bytes=None if size is None else size * received + 4 * setup,
            client_seconds=float(np.mean([r.seconds for r in reports])) if reports else None,
        )
        return record, clients

    def _setup(self, broadcast: State, client: int) -> int:
        """Return how many numbers a client downloads once in this round; see the method's."""
        last = self._asked.get(client)
        return self.method.setup_parameters(broadcast, self.spec.layout, last)

    def _download(self, broadcast: State, unsent: int, last: RoundRecord) -> int:
        """Return how many numbers of a broadcast a client receives."""
        layout, before = self.spec.layout, last.accepted_uploads
        return self.method.download_parameters(broadcast, layout, unsent, before)


def over_clients(reports: Sequence[TrainReport], summed: AbstractSet[str]) -> dict[str, float]:
    """Return what stages report of a round's clients: means, or sums of the ``summed`` names."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.stages.items():
            if math.isfinite(value):  # a rejected upload may have others
                found.setdefault(name, []).append(value)
    return {n: float(np.sum(v) if n in summed else np.mean(v)) for n, v in found.items()}
