"""The server of a run: its cohorts, rounds, records and checkpoints.

Both backends use the same server. An executor runs the jobs, in this process or on Ray actors.
Every decision that affects results is made here, in an order that does not depend on the executor.

Evaluation does not delay training: the model after round t is the broadcast of round t + 1, so
evaluation and training run together, and the record of round t is complete one round later.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trishul_ray.data.sampling import capacities, participants, uniform_cohort
from trishul_ray.errors import PermanentError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.aggregate import Aggregator, UploadReader
from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.diagnostics import (
    Comparison,
    Diagnostics,
    append_round,
    reported_diagnostics,
)
from trishul_ray.federation.executor import Executor
from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    Arrays,
    EvalJob,
    Outcome,
    TrainJob,
    TrainReport,
    WorkerSpec,
    changed_sources,
    to_array,
    to_tensor,
)
from trishul_ray.federation.records import RoundRecord
from trishul_ray.federation.reduce import Reducer, combine, finish, round_units
from trishul_ray.federation.scoring import Scoring
from trishul_ray.federation.transfers import Transfers, over_clients
from trishul_ray.methods.base import Method, build_method
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.memory import PeakMemory
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import ArrayState, BroadcastMessage, Cohort, Partial, RunPlan, Stages, Start


def broadcast_of(method: Method, state: ArrayState) -> ArrayState:
    """Return the method's broadcast of a state, with the survey."""
    broadcast = method.broadcast(state.map(to_tensor)).map(to_array)
    return replace(broadcast, survey=state.survey)


@dataclass(frozen=True)
class RoundReport:
    """Progress of a run after one step."""

    records: list[RoundRecord]  # complete records, oldest first
    events: list[str]
    round: int  # the last aggregated round
    finished: bool
    primary_metric: str


@dataclass(frozen=True)
class RunResult:
    """State and records from which the results of a finished run are computed."""

    checkpoint: Checkpoint  # the last one, without client states
    spec: WorkerSpec
    broadcast: ArrayState  # broadcast of the round after the last one
    memory: PeakMemory | None = None  # see Server

    @property
    def digest(self) -> str:
        """Digest of the state after the last round; see :func:`state_digest`."""
        return self.checkpoint.records[-1].state_sha256


class Server:
    """One federated run: call :meth:`step` until :attr:`finished`.

    The constructor starts the run, or restores the newest valid checkpoint. ``attempt`` is the name
    of the run in the tracking server; a restored run keeps its name.

    Attributes:
        checkpoint: The complete state of the run, saved after every step.
        spec: The spec of the workers.
        participants: The clients that may take part, ascending.
        events: Events since the last report, one line per event.
        memory: Largest peak memory of a worker since this process started.

    Raises:
        RunError: The data, the backbone or the stack differ from those of the checkpoint.
    """

    def __init__(
        self, experiment: Experiment, executor: Executor, checkpoints: CheckpointStore, attempt: str
    ) -> None:
        self.experiment, self.executor, self.checkpoints = experiment, executor, checkpoints
        self.method = build_method(experiment.method, experiment.adapter)
        self.stages = Stages.of(experiment)
        self.participants = participants(experiment.federation, experiment.draw_seed)
        restored = checkpoints.newest()
        self.events: list[str] = list(checkpoints.skipped)
        self.memory: PeakMemory | None = None
        if restored is not None:
            checkpoints.tidy()
            self.events.append(f"continuing after round {restored.round}")
        elif self.events:
            self.events.append("no valid checkpoint is left: the run starts over")
        start = Checkpoint(experiment.id, attempt, 0, State(np.zeros(0)), records=[RoundRecord(0)])
        self.checkpoint = restored or start
        self.spec = executor.describe(self.checkpoint.state.survey)
        lines = self._begin()
        if restored is None:
            with deterministic(experiment):
                self.checkpoint.state = self._initial_state()
            self.checkpoint.records[0].state_sha256 = state_digest(self.checkpoint.state)
            lines = self._begin()
        elif changed := changed_sources(restored.sources, self.spec.sources):
            raise RunError(
                f"run {experiment.id} was started with different {changed}: restore the original, "
                "or start over with --fresh"
            )
        self._record_stacks(self.checkpoint.round + (restored is not None))
        self.events += lines
        self.checkpoint.sources = self.spec.sources
        self.checkpoint.info = self.spec.info
        fed, layout = experiment.federation, self.spec.layout
        self.uploads = UploadReader(executor, self.stages)
        self.reducer = Reducer(self.method, layout, fed.weighting, self.spec.expected)
        self.aggregator = Aggregator(self.reducer, self.stages, self.uploads, fed)
        self.transfers = Transfers(self.method, self.spec, self.checkpoint.records)
        self.scoring = Scoring(
            experiment, self.spec, self.participants, personal=self.method.personal
        )

    def _record_stacks(self, number: int) -> None:
        """Record new stacks of workers, which compute from this round on.

        Raises:
            RunError: The run has another stack, and ``resources.mixed_stack`` is not set.
        """
        used = self.checkpoint.stacks
        for stack in self.executor.stacks:
            if stack in used:
                continue
            if used and not self.experiment.resources.mixed_stack:
                raise RunError(
                    f"run {self.experiment.id} was computed with {used[-1].difference(stack)}: "
                    "restore that, set resources.mixed_stack=true, or start over with --fresh"
                )
            if used:
                self.events.append(f"from round {number} on {stack.difference(used[-1])}")
            used.append(replace(stack, first_round=number))

    def _begin(self) -> list[str]:
        """Prepare the stages for the rounds, and return notices for the user."""
        fed, spec = self.experiment.federation, self.spec
        method, layout = self.method, spec.layout
        every = np.array(
            capacities(fed.compute, self.experiment.draw_seed, fed.clients, fed.compute_shares)
        )
        plan = RunPlan(
            tuple(layout.units(spec.wire)),
            spec.expected.lengths,
            self.participants,
            every,
            quorum=max(self.stages.quorum.values(), default=1),
            unit_shares=lambda: method.unit_shares(layout, every[self.participants].tolist()),
            sent_units=partial(round_units, method, layout),
            flops=spec.flops,
            shard_sizes=spec.shard_sizes,
        )
        return self.stages.begin(plan, self.checkpoint.stages)

    def _initial_state(self) -> ArrayState:
        """Return the state before round 1, after the survey, which is round 0."""
        survey = self.survey()
        plan = self.method.survey_plan
        decisive = survey if plan is not None and plan.decides_adapters else {}
        if decisive:
            self.spec = self.executor.describe(decisive)
        answers = {layer: to_tensor(answer) for layer, answer in survey.items()}
        initial = to_tensor(self.spec.initial)
        state = self.method.initial_state(self.spec.layout, initial, answers).map(to_array)
        return replace(state, survey=decisive)

    def survey(self) -> Arrays:
        """Return the mean response of some clients to the method's survey, if any."""
        plan, fed = self.method.survey_plan, self.experiment.federation
        if plan is None:
            return {}
        rng = numpy_rng(self.experiment.draw_seed, "survey-cohort")
        size = min(plan.clients, fed.participants)
        drawn = sorted(rng.choice(self.participants, size, replace=False).tolist())
        cohort = self.stages.cohort(0, Cohort(drawn)).clients
        # An empty cohort needs the names and shapes of responses: one client provides them, as
        # zeros.
        jobs = [self._job(0, client) for client in cohort or self.participants[:1].tolist()]
        state, record = self.checkpoint.state, self.checkpoint.records[0]
        reducer = Reducer(self.method, self.spec.layout, fed.weighting, None)
        outcome = self.executor.run(state, jobs, reducer)
        self.events += outcome.events
        total = self._sum(0, outcome, reducer)
        record.uploaded_parameters = sum(r.uploaded for r in outcome.reports if r.client in cohort)
        assert total.sums is not None  # at least one is valid
        sums = {k: v if cohort else np.zeros_like(v) for k, v in total.sums.extra.items()}
        found = self.stages.survey(sums)
        if found is None:
            found = finish(total, state, reducer)[0].extra
        return {layer: answer.astype(np.float32) for layer, answer in found.items()}

    @property
    def finished(self) -> bool:
        """Whether all rounds are complete and the last one is evaluated."""
        return self.checkpoint.is_last(self.experiment.federation.rounds)

    def step(self) -> RoundReport:
        """Train and aggregate the next round, and evaluate the model after the previous one.

        Returns:
            The record that this step completes, of the previous round, and new events.

        Raises:
            PermanentError: Too few uploads are valid.
        """
        now, number = self.checkpoint, self.checkpoint.round + 1
        previous = now.records[-1]
        with deterministic(self.experiment):
            if number <= self.experiment.federation.rounds:
                now.records.append(self._run_round(number))
            else:
                self._note(self.executor.run(self.broadcast(), self.scoring.jobs(now)))
            self._record_stacks(number)
            self.checkpoints.save(now)
        return self._report([previous])

    def _run_round(self, number: int) -> RoundRecord:
        """Broadcast, train and aggregate, even with an empty cohort, and return the record."""
        began = time.perf_counter()
        sent = self.stages.broadcast(number, self.broadcast())
        cohort = self._cohort(number, sent)
        with Comparison(
            self.experiment, self.spec, self.uploads, number, sent.read, cohort.earlier
        ) as comparison:
            outcome = self._train(number, sent, cohort, comparison)
            self._note(outcome)
            paused = time.perf_counter()
            everyone = self._compare_everyone(outcome, comparison)
            began += time.perf_counter() - paused
            record = self._aggregate(number, sent, cohort, outcome, comparison)
        self.transfers.remember(record)
        self.checkpoint.matrices |= everyone
        record.state_sha256 = state_digest(self.checkpoint.state)
        record.seconds = time.perf_counter() - began
        return record

    def _train(
        self, number: int, sent: BroadcastMessage, cohort: Cohort, comparison: Comparison
    ) -> Outcome:
        """Train the clients of a round, and score the model after the previous round.

        The uploads of a diagnosed round are compared as soon as all clients have trained. If a
        stage encodes the broadcast, evaluation waits for training, because it reads the exact
        state. Clients that train from earlier broadcasts come first.
        """
        earlier = {client for start in cohort.earlier for client in start.clients}
        now = Start(number, sent.read, [each for each in cohort.clients if each not in earlier])
        evaluation = self.scoring.jobs(self.checkpoint)
        every = self.method.needs_uploads or self.stages.read_changes
        every |= self.experiment.evaluation.diagnostics_cohort == "all"
        reducer = None if every else self.reducer
        parts = [(each, self._run(each, reducer)) for each in cohort.earlier]
        compare = comparison.begin if comparison.is_due and not earlier else None
        if sent.is_exact:
            outcome = self._run(now, reducer, compare, evaluation)
        else:
            outcome = self._run(now, reducer, compare)
            if evaluation:
                scored = self.executor.run(sent.state, evaluation)
                outcome.evaluations += scored.evaluations
                outcome.events += scored.events
        return Outcome.joined([*parts, (now, outcome)])

    def _run(
        self,
        start: Start,
        reducer: Reducer | None,
        trained: Callable[[Sequence[Any]], None] | None = None,
        evaluation: Sequence[EvalJob] = (),
    ) -> Outcome:
        """Train clients from a broadcast, and evaluate it."""
        train = [self._job(start.round, client) for client in start.clients]
        return self.executor.run(start.read, [*train, *evaluation], reducer, trained)

    def _note(self, outcome: Outcome) -> None:
        """Store the scores of the model before this round, the peak memory, and events."""
        self.scoring.add(self.checkpoint, outcome.evaluations)
        peaks = [self.memory, *(report.memory for report in outcome.reports)]
        peaks += (report.memory for report in outcome.evaluations)
        self.memory = max((peak for peak in peaks if peak is not None), default=None)
        self.events += outcome.events

    def draw(self, number: int) -> list[int]:
        """Sample clients for a round without replacement, in ascending order."""
        fed, seed = self.experiment.federation, self.experiment.draw_seed
        drawn = uniform_cohort(seed, number, len(self.participants), fed.clients_per_round)
        clients: list[int] = self.participants[drawn].tolist()
        return clients

    def _cohort(self, number: int, sent: BroadcastMessage) -> Cohort:
        """Return the clients of a round: the sampled clients, unless a stage selects others."""
        traffic = partial(self.transfers.expected, sent, self.checkpoint.records[-1])
        drawn = Cohort(self.draw(number), traffic=traffic)
        return self.stages.cohort(number, drawn)

    def _job(self, number: int, client: int) -> TrainJob:
        """Create the job of a client in a round, with its state."""
        state = self.checkpoint.client_states.get(client, {})
        kept = self.checkpoint.kept.get(client, {})
        return TrainJob(number, client, state, kept, self.stages.instruct(number))

    def broadcast(self) -> ArrayState:
        """Return the broadcast of the next round."""
        with deterministic(self.experiment):
            return broadcast_of(self.method, self.checkpoint.state)

    def _compare_everyone(self, outcome: Outcome, comparison: Comparison) -> Arrays:
        """In the last round, also train the other clients if all clients are to be compared.

        Only the comparison is stored. States, records and traffic belong to the cohort.
        """
        if not comparison.is_of_everyone:
            return {}
        trained = [report.client for report in outcome.reports]
        others = np.setdiff1d(self.participants, trained).tolist()
        jobs = [self._job(comparison.number, client) for client in others]
        try:
            more = self.executor.run(comparison.broadcast, jobs)
        # The failed client is not in the cohort, so the run can continue.
        except PermanentError as error:
            self.events.append(f"evaluation.diagnostics_cohort=all: no comparison: {error}")
            return {}
        self.events += more.events
        return comparison.of_everyone([*outcome.uploads, *more.uploads])

    def _aggregate(
        self,
        number: int,
        sent: BroadcastMessage,
        cohort: Cohort,
        outcome: Outcome,
        comparison: Comparison,
    ) -> RoundRecord:
        """Aggregate the uploads of a round into the next state, and return the round's record."""
        now = self.checkpoint
        total = self._sum(number, outcome, self.reducer)
        mean = self.aggregator.mean(number, now.state, total, outcome)
        # Before the state changes, because fetching may fail if a node is lost.
        first = outcome.uploads[:MOST_CLIENTS]
        found = comparison.result(first) if comparison.is_due else None
        facts = self.aggregator.facts(number, sent.read, mean, total, outcome)
        now.state, now.round = self.aggregator.next_state(now.state, mean, facts), number
        reports = [report for report in outcome.reports if report.client in {*total.clients}]
        now.client_states |= {r.client: r.state for r in reports if r.state}
        now.kept |= {r.client: r.kept for r in reports if r.kept}
        record, clients = self.transfers.record(number, sent, cohort, outcome.reports, total)
        record.stages = over_clients(outcome.reports, {n for s in self.stages for n in s.summed})
        record.stages |= mean.metrics
        record.stages |= self.stages.end(number, now.state, clients)
        if found is not None:
            self._diagnose(record, found, reports, comparison)
        record.diagnostics |= facts.metrics
        if number == 1 and (warning := self.method.warning(facts.metrics)):
            self.events.append(f"warning: {warning}")
        return record

    def _diagnose(
        self,
        record: RoundRecord,
        found: Diagnostics,
        reports: list[TrainReport],
        comparison: Comparison,
    ) -> None:
        """Add the diagnostics of some uploads to a record and to the checkpoint."""
        now, reported = self.checkpoint, reported_diagnostics(reports)
        record.diagnostics = reported.metrics | found.metrics
        moved = any(stage.alters_mean for stage in self.stages)
        if len(found.uploads) == len(reports) and not moved:
            error = comparison.aggregation_error(found.uploads, self.reducer, self.broadcast)
            if error is not None:
                record.diagnostics["aggregation_error"] = error
        now.spectra = (reported.spectra | found.spectra) or now.spectra
        now.matrices = append_round(now.matrices, record.round, found.matrices)

    def _sum(self, number: int, outcome: Outcome, reducer: Reducer) -> Partial:
        """Validate and sum the uploads of a round, and report rejected uploads.

        Raises:
            PermanentError: Too few uploads are valid.
        """
        parts = [(start, part) for start, part in outcome.parts if part.reports]
        if parts:
            now = outcome.parts[-1][0]
            sums = [(start, self.executor.reduce(part, reducer)) for start, part in parts]
            total = combine([self.stages.rebase(each, start, now) for start, each in sums])
            total.clients.sort()
        elif outcome.reports:
            total = self.executor.reduce(outcome, reducer)
        else:
            return Partial(None, 0.0, np.zeros(0), np.zeros(0))
        quorum, sent = self.experiment.federation.quorum, len(outcome.reports)
        for client, reason in sorted(total.refused.items()):
            self.events.append(f"round {number}: upload of client {client} rejected: {reason}")
        # If clients are hidden, a rejected upload counts as zeros.
        hidden = self.stages.hide_clients
        needed = self.stages.quorum if number else {}
        if len(total.clients) < max([quorum * sent, *needed.values()]) and not hidden:
            remedy = f"a smaller learning rate (optimizer.lr={self.experiment.optimizer.lr:g})"
            limits = {"federation.quorum": quorum} | needed
            below = " or ".join(f"{field}={value}" for field, value in limits.items())
            raise PermanentError(
                f"round {number}: only {len(total.clients)} of {sent} uploads are valid, "
                f"below {below}; rejected: {total.refused}: try "
                f"{remedy if number else 'other weights or data'} or a lower quorum"
            )
        return total

    def progress(self) -> RoundReport:
        """Return the records that no later step changes, and the events since the last report."""
        records = self.checkpoint.records
        return self._report(records if self.finished else records[:-1])

    def _report(self, records: list[RoundRecord]) -> RoundReport:
        events, self.events = self.events, []
        primary_metric = self.spec.metrics.primary_metric
        return RoundReport(records, events, self.checkpoint.round, self.finished, primary_metric)

    def result(self) -> RunResult:
        """Return the result of a finished run."""
        # Client states may be large, and the result is sent to the driver.
        whole = replace(self.checkpoint, client_states={}, kept={})
        return RunResult(whole, self.spec, self.broadcast(), self.memory)
