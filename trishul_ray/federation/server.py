"""The server of a run: sampling, validation of uploads, aggregation, records and checkpoints.

Both backends use the same server. An executor runs the jobs, in this process or on Ray actors;
everything that decides a number happens here, in an order that does not depend on the executor.

Evaluation does not delay training: the model after round t is the broadcast of round t + 1, so
evaluation and training run together, and the record of round t is complete one round later.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from trishul_ray.data.dataset import RowSet, score_name
from trishul_ray.data.partition import client_names
from trishul_ray.errors import FailsAgainError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.diagnostics import (
    MOST_CLIENTS,
    aggregation_error,
    append_round,
    compare_everyone,
    upload_diagnostics,
)
from trishul_ray.federation.messages import (
    Arrays,
    ArrayState,
    Blueprint,
    EvalJob,
    EvalReport,
    Job,
    Outcome,
    TrainJob,
    Upload,
    as_tensor,
    changed_sources,
    to_array,
    to_tensor,
)
from trishul_ray.federation.reduce import Partial, Reducer, finish, rejection_reason, round_units
from trishul_ray.methods.base import (
    ClientUpload,
    Method,
    Round,
    State,
    build_method,
)
from trishul_ray.rng import numpy_rng
from trishul_ray.tasks.sums import EvalSums, score_by_mix, summarize_clients


class Executor(Protocol):
    """Runs jobs. The results depend on the jobs alone, not on where or in which order they run."""

    def describe(self, survey: Arrays) -> Blueprint:
        """Return the blueprint of the workbench that every worker builds, given the survey."""

    def run(self, broadcast: ArrayState, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs with one broadcast."""

    def reduce(self, uploads: list[Any], reducer: Reducer) -> Partial:
        """Validate and sum uploads in groups of ``FAN_IN``, in order."""

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Bring uploads into this process, for diagnostics."""


def broadcast_of(method: Method, state: ArrayState) -> ArrayState:
    """Return what is sent to every worker: the method's broadcast of a state, and the survey."""
    broadcast = method.broadcast(state.map(to_tensor)).map(to_array)
    return replace(broadcast, survey=state.survey)


@dataclass(frozen=True)
class RoundReport:
    """Progress of a run after one step."""

    records: list[dict[str, Any]]  # complete records, oldest first
    events: list[str]
    round: int  # the last aggregated round
    finished: bool
    headline: str  # the task's main metric


@dataclass(frozen=True)
class RunResult:
    """Final state of a run, with everything its results are made from."""

    state: ArrayState
    digest: str
    records: list[dict[str, Any]]
    spectra: Arrays
    matrices: Arrays
    test_rows: Arrays  # see Checkpoint
    blueprint: Blueprint
    attempt: str
    broadcast: ArrayState  # that of the round after the last


class Server:
    """One federated run. Call :meth:`step` until :attr:`finished`.

    The constructor starts the run, or restores the newest valid checkpoint. ``attempt`` names the
    run in the tracking server; a restored run keeps its name.

    Raises:
        RunError: the data or the backbone differ from those of the checkpoint.
    """

    def __init__(
        self, experiment: Experiment, executor: Executor, checkpoints: CheckpointStore, attempt: str
    ) -> None:
        self.experiment, self.executor, self.checkpoints = experiment, executor, checkpoints
        self.method = build_method(experiment.method, experiment.adapter)
        self.attempt, self.round = attempt, 0
        self.state: ArrayState = State(np.zeros(0))
        self.client_states: dict[int, Arrays] = {}
        self.records: list[dict[str, Any]] = [{"round": 0}]
        self.spectra: Arrays = {}
        self.matrices: Arrays = {}
        self.test_rows: Arrays = {}
        checkpoint = checkpoints.newest()
        self.events: list[str] = list(checkpoints.skipped)
        if checkpoint is not None:
            self._restore(checkpoint)
        # The clients that have taken part so far.
        self._known = {client for r in self.records for client in r.get("clients", ())}
        if checkpoint is None and self.events:
            self.events.append("no valid checkpoint is left: the run starts over")
        self.blueprint = executor.describe(self.state.survey)
        if checkpoint is None:
            with deterministic(experiment):
                self.state = self._initial_state()
        elif changed := changed_sources(checkpoint.sources, self.blueprint.sources):
            raise RunError(
                f"run {experiment.id} was started with other {changed}: restore the original, or "
                "start over with --fresh"
            )

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.round = checkpoint.round
        self.state = checkpoint.state
        self.client_states = checkpoint.client_states
        self.records = checkpoint.records
        self.spectra = checkpoint.spectra
        self.matrices = checkpoint.matrices
        self.test_rows = checkpoint.test_rows
        self.attempt = checkpoint.attempt
        self.events.append(f"continuing after round {checkpoint.round}")

    def _initial_state(self) -> ArrayState:
        """Return the state before round 1; a survey comes before it, as round 0."""
        survey = self.survey()
        plan = self.method.survey_plan
        decisive = survey if plan is not None and plan.decides_adapters else {}
        if decisive:
            self.blueprint = self.executor.describe(decisive)
        answers = {layer: to_tensor(answer) for layer, answer in survey.items()}
        initial = to_tensor(self.blueprint.initial)
        state = self.method.initial_state(self.blueprint.layout, initial, answers).map(to_array)
        return replace(state, survey=decisive)

    def survey(self) -> Arrays:
        """Return the mean answer of some clients to the method's survey; empty without one."""
        plan, fed = self.method.survey_plan, self.experiment.federation
        if plan is None:
            return {}
        rng = numpy_rng(self.experiment.seed, "survey-cohort")
        clients = rng.choice(fed.clients, min(plan.clients, fed.clients), replace=False)
        cohort = sorted(clients.tolist())
        outcome = self.executor.run(self.state, [TrainJob(0, client) for client in cohort])
        self.events += outcome.events
        reducer = Reducer(self.method, self.blueprint.layout, fed.weighting, None)
        mean, _ = finish(self._sum(0, cohort, outcome, reducer), self.state, reducer)
        sent = sum(report.uploaded for report in outcome.reports)
        self.records[0] |= {"uploaded_parameters": sent, "uploaded_bytes": 4 * sent}
        return {layer: answer.astype(np.float32) for layer, answer in mean.extra.items()}

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the last one is evaluated."""
        return self.round >= self.experiment.federation.rounds and "loss" in self.records[-1]

    def step(self) -> RoundReport:
        """Train and aggregate the next round, and evaluate the model after the previous one.

        Returns:
            The record that this step completes (that of the previous round), and new events.

        Raises:
            FailsAgainError: too few uploads are valid.
        """
        began = time.perf_counter()
        number = self.round + 1
        cohort = self.cohort(number) if number <= self.experiment.federation.rounds else []
        with deterministic(self.experiment):
            broadcast = self.broadcast()
            train = [TrainJob(number, c, self.client_states.get(c, {})) for c in cohort]
            outcome = self.executor.run(broadcast, [*train, *self._evaluation_jobs()])
            self.events += outcome.events
            complete = self.records[-1]
            for rows in self.blueprint.scored if outcome.evaluations else ():
                found = [each for each in outcome.evaluations if each.rows == rows]
                complete.update(self._scores(rows, found))
                if each := [report.each for report in found if report.each]:
                    self.test_rows = {
                        k: np.concatenate([part[k] for part in each]) for k in each[0]
                    }
            if cohort:
                paused = time.perf_counter()
                everyone = self._compare_everyone(number, cohort, broadcast, outcome)
                began += time.perf_counter() - paused
                record = self._aggregate(number, cohort, broadcast, outcome)
                self.matrices |= everyone
                record["seconds"] = time.perf_counter() - began
                self.records.append(record)
            self.checkpoints.save(self.checkpoint())
        return self._report([complete])

    def _scores(self, rows: RowSet, reports: list[EvalReport]) -> dict[str, Any]:
        """Return the metrics of a set of rows, and of the test rows more than numbers.

        These are the scores by class and, if asked for, by client, of which the last are kept: of
        the global model and, for a method that leaves a part of it with the clients, of their own.
        """
        metrics, info = self.blueprint.metrics, self.blueprint.info
        sums = [report.sums for report in reports if report.client is None]
        found: dict[str, Any] = dict(metrics.merge(sums))
        recall = metrics.recall(sums)
        found |= {"recall": recall} if recall else {}
        if self.experiment.evaluation.per_client:
            mix = self.blueprint.client_mix
            scores = metrics.by_client(sums) if mix is None else score_by_mix(recall, mix)
            names = info.clients if mix is None else self._client_names()
            found |= summarize_clients("per_client", scores)
            found["per_client"] = {names[c] if names else str(c): s for c, s in scores.items()}
            if self.method.personal:
                # The model of a client that has kept nothing yet is the global one.
                own = scores | self._personal_scores(reports)
                found |= summarize_clients("personal", own)
                found["personal"] = {names[c] if names else str(c): s for c, s in own.items()}
        if rows == "validation":
            return {score_name(k, rows): v for k, v in found.items() if isinstance(v, float)}
        if "per_client" in found:
            for record in self.records:
                record.pop("per_client", None)
                record.pop("personal", None)
        return found

    def _personal_scores(self, reports: list[EvalReport]) -> dict[int, float]:
        """Return the score of each client's own model on this client's rows, or by its mix."""
        metrics, mix = self.blueprint.metrics, self.blueprint.client_mix
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

    def _client_names(self) -> tuple[str, ...]:
        fed, info = self.experiment.federation, self.blueprint.info
        return client_names(info, self.experiment.partition, fed.clients)

    def cohort(self, round_number: int) -> list[int]:
        """Return the clients of a round, ascending, drawn uniformly without replacement."""
        fed = self.experiment.federation
        rng = numpy_rng(self.experiment.seed, "cohort", round_number)
        return sorted(rng.choice(fed.clients, fed.clients_per_round, replace=False).tolist())

    def broadcast(self) -> ArrayState:
        """Return the broadcast of the next round."""
        with deterministic(self.experiment):
            return broadcast_of(self.method, self.state)

    def _evaluation_jobs(self) -> list[EvalJob]:
        if self.round not in self.experiment.scored_rounds:
            return []
        size = self.experiment.evaluation.batch_size

        def chunks(count: int) -> list[tuple[int, int]]:
            return [(start, min(start + size, count)) for start in range(0, count, size)]

        jobs = []
        last = self.round == self.experiment.federation.rounds
        for rows, count in self.blueprint.scored.items():
            each = last and rows == "test"
            jobs += [EvalJob(self.round, *chunk, rows, each=each) for chunk in chunks(count)]
            if (counts := self.blueprint.client_rows.get(rows)) is not None and self.round:
                for client, state in sorted(self.client_states.items()):
                    own = chunks(int(counts[client]))
                    jobs += [EvalJob(self.round, *chunk, rows, client, state) for chunk in own]
        return jobs

    def _compare_everyone(
        self, number: int, cohort: list[int], broadcast: ArrayState, outcome: Outcome
    ) -> Arrays:
        """In the last round, train the other clients, too, if all are to be compared.

        Nothing of it is kept but the comparison: states, records and traffic are the cohort's.
        """
        fed, layout, wire = self.experiment.federation, self.blueprint.layout, self.blueprint.wire
        options = self.experiment.evaluation
        has_cores = any(unit.rank is not None for unit in layout.units(wire))
        if options.diagnostics_cohort != "all" or number < fed.rounds or not has_cores:
            return {}
        others = sorted({*range(fed.clients)} - {*cohort})
        jobs = [TrainJob(number, c, self.client_states.get(c, {})) for c in others]
        try:
            more = self.executor.run(broadcast, jobs)
        except FailsAgainError as error:  # no client of the run itself
            self.events.append(f"evaluation.diagnostics_cohort=all: no comparison: {error}")
            return {}
        self.events += more.events
        uploads = self.executor.fetch([*outcome.uploads, *more.uploads])
        valid = [u for u in uploads if rejection_reason(u, self.blueprint.expected) is None]
        valid.sort(key=lambda upload: upload.client)
        return compare_everyone(valid, broadcast, self.blueprint, options.top_k) if valid else {}

    def _aggregate(
        self, number: int, cohort: list[int], broadcast: ArrayState, outcome: Outcome
    ) -> dict[str, Any]:
        """Aggregate the uploads of a round into the next state and return the round's record."""
        fed, layout = self.experiment.federation, self.blueprint.layout
        reducer = Reducer(self.method, layout, fed.weighting, self.blueprint.expected)
        total = self._sum(number, cohort, outcome, reducer)
        mean, trained = finish(total, self.state, reducer)
        accepted = set(total.clients)
        # Before the state changes: fetching may fail if a node is lost.
        needed = None if self.method.needs_uploads else MOST_CLIENTS
        fetched = self.executor.fetch(outcome.uploads[:needed])
        sample = fetched[:MOST_CLIENTS]
        singles: tuple[ClientUpload, ...] = ()
        if self.method.needs_uploads:
            singles = tuple(_single(u, reducer) for u in fetched if u.client in accepted)
        round_ = Round(number, len(accepted), fed.clients, torch.from_numpy(trained), singles)
        new = self.method.aggregate(self.state.map(to_tensor), mean.map(to_tensor), round_, layout)
        self.state = replace(new.map(to_array), survey=self.state.survey)
        self.client_states |= {
            r.client: r.state for r in outcome.reports if r.state and r.client in accepted
        }
        self.round = number
        record = self._record(number, cohort, broadcast, outcome, total)
        if self.experiment.evaluation.diagnoses(number, fed.rounds):
            valid = [u for u in sample if u.client in accepted]
            diagnosed = upload_diagnostics(
                valid, broadcast, self.blueprint, self.experiment, outcome.reports
            )
            record |= diagnosed.metrics
            units = round_units(self.method, layout, number)
            alike = all(
                u.active is None or (units is not None and np.array_equal(u.active, units))
                for u in valid
            )
            if len(valid) == len(total.clients) and alike:
                error = aggregation_error(valid, reducer, broadcast, self.broadcast())
                if error is not None:
                    record["aggregation_error"] = error
            self.spectra = diagnosed.spectra or self.spectra
            self.matrices = append_round(self.matrices, number, diagnosed.matrices)
        return record

    def _sum(self, number: int, cohort: list[int], outcome: Outcome, reducer: Reducer) -> Partial:
        """Validate and sum the uploads of a round; name those that are refused.

        Raises:
            FailsAgainError: Too few are valid.
        """
        total, quorum = (
            self.executor.reduce(outcome.uploads, reducer),
            self.experiment.federation.quorum,
        )
        for client, reason in sorted(total.refused.items()):
            self.events.append(f"round {number}: upload of client {client} rejected: {reason}")
        if len(total.clients) < max(quorum * len(cohort), 1):
            remedy = f"a smaller learning rate (optimizer.lr={self.experiment.optimizer.lr:g})"
            raise FailsAgainError(
                f"round {number}: only {len(total.clients)} of {len(cohort)} uploads are valid, "
                f"below federation.quorum={quorum}; rejected: {total.refused}: try "
                f"{remedy if number else 'other weights or data'} or a lower quorum"
            )
        return total

    def _record(
        self,
        number: int,
        cohort: list[int],
        broadcast: ArrayState,
        outcome: Outcome,
        total: Partial,
    ) -> dict[str, Any]:
        tensors, reports = broadcast.map(as_tensor), outcome.reports
        before = self.records[-1].get("accepted_uploads", ())
        down = sum(
            self.method.download_parameters(tensors, self.blueprint.layout, r.unsent, before)
            for r in reports
        )
        down += len(set(cohort) - self._known) * self.method.setup_parameters(tensors)
        self._known |= set(cohort)
        sent = {r.client: r.uploaded for r in reports}
        up = sum(sent.values())
        return {
            "round": number,
            "clients": cohort,
            "refused": {str(c): why for c, why in total.refused.items()},
            "train_loss": float(np.mean([r.loss for r in reports])),
            "accepted_uploads": [sent[client] for client in total.clients],
            "uploaded_parameters": up,
            "downloaded_parameters": down,
            "uploaded_bytes": 4 * up,
            "downloaded_bytes": 4 * down,
            "client_seconds": float(np.mean([r.seconds for r in reports])),
        }

    def progress(self) -> RoundReport:
        """Return the records that no later step changes, and the events since the last report."""
        return self._report(self.records if self.finished else self.records[:-1])

    def _report(self, records: list[dict[str, Any]]) -> RoundReport:
        events, self.events = self.events, []
        headline = self.blueprint.metrics.headline
        return RoundReport(records, events, self.round, self.finished, headline)

    def result(self) -> RunResult:
        """Return the result of a finished run."""
        return RunResult(
            state=self.state,
            digest=state_digest(self.state),
            records=self.records,
            spectra=self.spectra,
            matrices=self.matrices,
            test_rows=self.test_rows,
            blueprint=self.blueprint,
            attempt=self.attempt,
            broadcast=self.broadcast(),
        )

    def checkpoint(self) -> Checkpoint:
        """Return everything that the next round needs."""
        return Checkpoint(
            experiment_id=self.experiment.id,
            attempt=self.attempt,
            round=self.round,
            state=self.state,
            client_states=self.client_states,
            records=self.records,
            spectra=self.spectra,
            matrices=self.matrices,
            test_rows=self.test_rows,
            sources=self.blueprint.sources,
            info=self.blueprint.info,
        )


def _single(upload: Upload, reducer: Reducer) -> ClientUpload:
    """Return an accepted upload for a method that needs each of them."""
    return ClientUpload(
        client=upload.client,
        weight=reducer.weight(upload),
        arrays=reducer.contribution(upload).map(as_tensor),
        trained=None if upload.active is None else torch.from_numpy(upload.active.copy()),
    )
