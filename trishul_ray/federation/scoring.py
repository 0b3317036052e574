"""Scores of the model after a round: the jobs that compute them, and their entry in the record."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from trishul_ray.data.dataset import RowSet, score_name
from trishul_ray.data.partition import client_names
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint
from trishul_ray.federation.messages import EvalJob, EvalReport, WorkerSpec
from trishul_ray.federation.records import RoundRecord
from trishul_ray.tasks.sums import EvalSums, client_metrics, score_by_mix

A = TypeVar("A", int, float)


class Scoring:
    """Scoring of a run.

    Args:
        experiment: The experiment.
        spec: The spec of the workers.
        participants: int64, clients that may take part, ascending.
        personal: Whether clients keep a part of their models.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: WorkerSpec,
        participants: np.ndarray,
        *,
        personal: bool,
    ) -> None:
        self.options, self.rounds = experiment.evaluation, experiment.federation.rounds
        self.spec, self.participants, self.personal = spec, participants, personal
        clients = experiment.federation.clients
        self._names = client_names(spec.info, experiment.partition, clients)

    def jobs(self, now: Checkpoint) -> list[EvalJob]:
        """Return the jobs that score the model of a checkpoint, or no jobs if it is not scored."""
        number, size = now.round, self.options.batch_size
        if not self.options.scores(number, self.rounds):
            return []

        def chunks(count: int) -> list[tuple[int, int]]:
            return [(start, min(start + size, count)) for start in range(0, count, size)]

        jobs = []
        for rows, count in self.spec.scored.items():
            each = number == self.rounds and rows == "test"
            jobs += [EvalJob(number, *chunk, rows, each=each) for chunk in chunks(count)]
            if (counts := self.spec.client_rows.get(rows)) is not None and number:
                for client, state in sorted(now.client_states.items()):
                    own = chunks(int(counts[client]))
                    jobs += [EvalJob(number, *chunk, rows, client, state) for chunk in own]
        return jobs

    def add(self, now: Checkpoint, reports: Sequence[EvalReport]) -> None:
        """Add the results of such jobs to the last record of a checkpoint."""
        for rows in self.spec.scored if reports else ():
            found = [each for each in reports if each.rows == rows]
            self._score(now.records, rows, found)
            if each := [report.each for report in found if report.each]:
                now.test_rows = {k: np.concatenate([part[k] for part in each]) for k in each[0]}

    def _score(
        self, records: Sequence[RoundRecord], rows: RowSet, reports: list[EvalReport]
    ) -> None:
        """Add the metrics of a set of rows to the last record.

        For the test rows, also add the recall per class and, with ``evaluation.per_client``, scores
        per client of the global model and of personalized models. Only the last scored record has
        scores per client.
        """
        record, metrics, mix = records[-1], self.spec.metrics, self.spec.client_mix
        sums = [report.sums for report in reports if report.client is None]
        found, recall = metrics.merge(sums), metrics.recall(sums)
        by_client: dict[int, float] = {}
        own: dict[int, float] = {}
        if self.options.per_client:
            by_client = metrics.by_client(sums) if mix is None else score_by_mix(recall, mix)
            if self.personal:
                # The personalized model of a client without a state is the global model.
                own = by_client | self._personal_scores(reports)
            took_part = self._participation(records)
            found |= client_metrics(by_client, own, took_part)
        record.scores |= {score_name(name, rows): value for name, value in found.items()}
        if rows != "test":
            return
        record.recall = recall
        if by_client:
            for earlier in records:
                earlier.per_client, earlier.personal, earlier.participation = {}, {}, {}
            names = self.spec.info.clients if mix is None else self._names

            def named(values: dict[int, A]) -> dict[str, A]:
                return {names[c] if names else str(c): value for c, value in values.items()}

            record.per_client, record.personal = named(by_client), named(own)
            record.participation = named(took_part)

    def _participation(self, records: Sequence[RoundRecord]) -> dict[int, int]:
        """Count the rounds in which each participant of the run counted.

        The result is empty if the scored clients belong to the data instead of the run.
        """
        if self.spec.client_mix is None and not self._names:
            return {}
        counts = Counter(
            client
            for record in records
            for client in record.clients
            if str(client) not in record.refused
        )
        return {client: counts[client] for client in self.participants.tolist()}

    def _personal_scores(self, reports: Sequence[EvalReport]) -> dict[int, float]:
        """Score each client's personalized model on the client's rows, or by its class mix."""
        metrics, mix = self.spec.metrics, self.spec.client_mix
        sums: dict[int, list[EvalSums]] = {}
        for report in reports:
            if report.client is not None:
                sums.setdefault(report.client, []).append(report.sums)
        if mix is None:
            return {client: metrics.by_client(own)[client] for client, own in sums.items()}
        return {
            client: score
            for client, own in sums.items()
            for score in score_by_mix(metrics.recall(own), mix[client : client + 1]).values()
        }
