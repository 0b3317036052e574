"""The server of a run: sampling, validation of uploads, aggregation, records and checkpoints.

Both backends use the same server. An executor runs the jobs, in this process or on Ray actors;
everything that decides a number happens here, in an order that does not depend on the executor.

Evaluation does not delay training: the model after round t is the broadcast of round t + 1, so
evaluation and training run together, and the record of round t is complete one round later.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from trishul_ray import plugins
from trishul_ray.draws import capacities, participants, uniform_cohort
from trishul_ray.errors import FailsAgainError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, state_digest
from trishul_ray.federation.comparison import Compared, Comparison
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.diagnostics import (
    aggregation_error,
    append_round,
    compare_everyone,
    compare_uploads,
    reported_diagnostics,
)
from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    Arrays,
    Blueprint,
    Job,
    Outcome,
    TrainJob,
    TrainReport,
    Upload,
    as_tensor,
    changed_sources,
    to_array,
    to_tensor,
)
from trishul_ray.federation.records import RoundRecord
from trishul_ray.federation.reduce import (
    Reducer,
    configured_weight,
    finish,
    rejection_reason,
    round_units,
)
from trishul_ray.federation.scoring import Scoring
from trishul_ray.federation.transfers import Transfers, over_clients
from trishul_ray.memory import PeakMemory
from trishul_ray.methods.base import ClientUpload, Method, Round, State, build_method
from trishul_ray.rng import numpy_rng
from trishul_ray.stages import (
    ArrayState,
    Cohort,
    MeanChange,
    Partial,
    RunPlan,
    Sent,
    Stages,
)


class Executor(Protocol):
    """Runs jobs. The results depend on the jobs alone, not on where or in which order they run."""

    def describe(self, survey: Arrays) -> Blueprint:
        """Return the blueprint of the workbench that every worker builds, given the survey."""

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run all jobs with one broadcast.

        With a reducer, uploads of more than ``FAN_IN`` clients are validated and summed in groups
        as they come, and only the first ``MOST_CLIENTS`` are kept. ``trained`` is called with the
        first ``MOST_CLIENTS`` uploads when all clients have trained, and before all evaluation has
        ended: what it begins runs beside it.
        """

    def reduce(self, outcome: Outcome, reducer: Reducer) -> Partial:
        """Return the sum of all uploads, added in groups of ``FAN_IN``, in order."""

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Bring uploads into this process, for diagnostics."""


def broadcast_of(method: Method, state: ArrayState) -> ArrayState:
    """Return what is sent to every worker: the method's broadcast of a state, and the survey."""
    broadcast = method.broadcast(state.map(to_tensor)).map(to_array)
    return replace(broadcast, survey=state.survey)


@dataclass(frozen=True)
class RoundReport:
    """Progress of a run after one step."""

    records: list[RoundRecord]  # complete records, oldest first
    events: list[str]
    round: int  # the last aggregated round
    finished: bool
    headline: str  # the task's main metric


@dataclass(frozen=True)
class RunResult:
    """A finished run, with everything its results are made from."""

    checkpoint: Checkpoint  # the last one, without what the clients keep
    blueprint: Blueprint
    broadcast: ArrayState  # that of the round after the last
    memory: PeakMemory | None = None  # see Server

    @property
    def digest(self) -> str:
        """See :func:`state_digest`."""
        return state_digest(self.checkpoint.state)


class Server:
    """One federated run. Call :meth:`step` until :attr:`finished`.

    The constructor starts the run, or restores the newest valid checkpoint. ``attempt`` names the
    run in the tracking server; a restored run keeps its name.

    Attributes:
        checkpoint: Everything that the next round needs; saved after every step.
        blueprint: What is known of the workers' benches.
        participants: The clients that may take part, ascending.
        events: What has happened since the last report, a line each.
        memory: Peak of the worker that has used most since this process began.

    Raises:
        RunError: the data or the backbone differ from those of the checkpoint.
    """

    def __init__(
        self, experiment: Experiment, executor: Executor, checkpoints: CheckpointStore, attempt: str
    ) -> None:
        self.experiment, self.executor, self.checkpoints = experiment, executor, checkpoints
        self.method = build_method(experiment.method, experiment.adapter)
        self.stages = Stages.of(experiment)
        self.participants = participants(experiment.federation, experiment.seed)
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
        self.blueprint = executor.describe(self.checkpoint.state.survey)
        lines = self._begin()
        if restored is None:
            with deterministic(experiment):
                self.checkpoint.state = self._initial_state()
            lines = self._begin()
        elif changed := changed_sources(restored.sources, self.blueprint.sources):
            raise RunError(
                f"run {experiment.id} was started with other {changed}: restore the original, or "
                "start over with --fresh"
            )
        self.events += lines
        self.checkpoint.sources = self.blueprint.sources
        self.checkpoint.info = self.blueprint.info
        self.transfers = Transfers(self.method, self.blueprint, self.checkpoint.records)
        self.scoring = Scoring(
            experiment, self.blueprint, self.participants, personal=self.method.personal
        )

    def _begin(self) -> list[str]:
        """Let the stages prepare for the rounds; return lines for the reader of the run."""
        fed, seed, blueprint = self.experiment.federation, self.experiment.seed, self.blueprint
        method, layout = self.method, blueprint.layout
        every = np.array(capacities(fed.compute, seed, fed.clients, fed.compute_shares))
        plan = RunPlan(
            method,
            layout,
            tuple(layout.units(blueprint.wire)),
            blueprint.expected.lengths,
            self.participants,
            every,
            quorum=max(self.stages.quorum.values(), default=1),
            unit_shares=lambda: method.unit_shares(layout, every[self.participants].tolist()),
            sent_units=partial(round_units, method, layout),
            flops=blueprint.flops,
            shard_sizes=blueprint.shard_sizes,
        )
        return self.stages.begin(plan, self.checkpoint.stages)

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
        size = min(plan.clients, fed.participants)
        drawn = sorted(rng.choice(self.participants, size, replace=False).tolist())
        cohort = self.stages.cohort(0, Cohort(drawn)).clients
        # An empty cohort needs the names and shapes of answers: take one, which counts as zeros.
        jobs = [self._job(0, client) for client in cohort or self.participants[:1].tolist()]
        state, record = self.checkpoint.state, self.checkpoint.records[0]
        reducer = Reducer(self.method, self.blueprint.layout, fed.weighting, None)
        outcome = self.executor.run(state, jobs, reducer)
        self.events += outcome.events
        total = self._sum(0, outcome, reducer)
        record.uploaded_parameters = sum(r.uploaded for r in outcome.reports if r.client in cohort)
        assert total.sums is not None  # one is valid
        sums = {k: v if cohort else np.zeros_like(v) for k, v in total.sums.extra.items()}
        found = self.stages.survey(sums)
        if found is None:
            found = finish(total, state, reducer)[0].extra
        return {layer: answer.astype(np.float32) for layer, answer in found.items()}

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the last one is evaluated."""
        return self.checkpoint.is_last(self.experiment.federation.rounds)

    def step(self) -> RoundReport:
        """Train and aggregate the next round, and evaluate the model after the previous one.

        Returns:
            The record that this step completes (that of the previous round), and new events.

        Raises:
            FailsAgainError: too few uploads are valid.
        """
        began = time.perf_counter()
        now, number = self.checkpoint, self.checkpoint.round + 1
        complete, over = now.records[-1], number > self.experiment.federation.rounds
        with deterministic(self.experiment):
            state = self.broadcast()
            sent, cohort = Sent(state, state), Cohort([])
            if not over:
                sent = self.stages.broadcast(number, state)
                cohort = self._cohort(number, sent)
            compare, threads = partial(self._compare, sent.read), self.experiment.resources.threads
            with Comparison(compare, self.executor.fetch, threads) as comparison:
                outcome = self._run(number, sent, cohort, comparison)
                self.scoring.add(now, outcome.evaluations)
                peaks = [report.memory for report in outcome.reports]
                peaks += [self.memory, *(report.memory for report in outcome.evaluations)]
                self.memory = max((peak for peak in peaks if peak is not None), default=None)
                if not over:  # even a cohort of nobody is a round
                    paused = time.perf_counter()
                    everyone = self._compare_everyone(number, sent.read, outcome, comparison)
                    began += time.perf_counter() - paused
                    record = self._aggregate(number, sent, cohort, outcome, comparison)
                    self.transfers.remember(record)
                    now.matrices |= everyone
                    record.seconds = time.perf_counter() - began
                    now.records.append(record)
            self.checkpoints.save(now)
        return self._report([complete])

    def _run(self, number: int, sent: Sent, cohort: Cohort, comparison: Comparison) -> Outcome:
        """Train the clients of a round, and score the model after the previous one.

        The uploads of a round that is diagnosed are compared as soon as all have trained. What is
        evaluated is the state as it is, which is the one that a run ends with. If clients read
        another one, both cannot run together: evaluation waits for training.
        """
        train = [self._job(number, client, cohort.steps.get(client)) for client in cohort.clients]
        evaluation = self.scoring.jobs(self.checkpoint)
        every = self.method.needs_uploads or self.stages.read_changes
        every |= self.experiment.evaluation.diagnostics_cohort == "all"
        reducer = None if every else self._reducer()
        compare = comparison.begin if self._diagnoses(number) else None
        if sent.is_exact:
            outcome = self.executor.run(sent.state, [*train, *evaluation], reducer, compare)
        else:
            outcome = self.executor.run(sent.read, train, reducer, compare)
            if evaluation:
                scored = self.executor.run(sent.state, evaluation)
                outcome.evaluations += scored.evaluations
                outcome.events += scored.events
        self.events += outcome.events
        return outcome

    def _diagnoses(self, number: int) -> bool:
        fed, options = self.experiment.federation, self.experiment.evaluation
        return options.diagnoses(number, fed.rounds)

    def draw(self, number: int) -> list[int]:
        """Return clients for a round, ascending, drawn without replacement."""
        fed, seed = self.experiment.federation, self.experiment.seed
        drawn = uniform_cohort(seed, number, len(self.participants), fed.clients_per_round)
        clients: list[int] = self.participants[drawn].tolist()
        return clients

    def _cohort(self, number: int, sent: Sent) -> Cohort:
        """Return the clients of a round: those that are drawn, unless a stage chooses."""
        traffic = partial(self.transfers.expected, sent, self.checkpoint.records[-1])
        drawn = Cohort(self.draw(number), traffic=traffic)
        return self.stages.cohort(number, drawn)

    def _job(self, number: int, client: int, steps: int | None = None) -> TrainJob:
        """Return the job of a client in a round, with what it has kept."""
        state = self.checkpoint.client_states.get(client, {})
        kept = self.checkpoint.kept.get(client, {})
        return TrainJob(number, client, state, kept, self.stages.instruct(number), steps)

    def _values(self, uploads: Sequence[Upload], broadcast: ArrayState) -> list[Upload]:
        """Return uploads as values even where clients send changes."""
        if not self.stages.act_on_changes:
            return [*uploads]
        return [self._restored(upload, broadcast) for upload in uploads]

    def _changes(self, uploads: list[Any], accepted: set[int]) -> dict[int, np.ndarray]:
        """Return the accepted changes, decoded, by ascending client."""
        return {
            upload.client: self._decoded(upload)
            for upload in sorted(self.executor.fetch(uploads), key=lambda each: each.client)
            if upload.client in accepted
        }

    def _decoded(self, upload: Upload) -> np.ndarray:
        weight = configured_weight(self.experiment.federation.weighting, upload)
        return self.stages.restore(upload.arrays.shared, weight)

    def _restored(self, upload: Upload, broadcast: ArrayState) -> Upload:
        value = broadcast.shared + self._decoded(upload)
        return replace(upload, arrays=replace(upload.arrays, shared=value.astype(np.float32)))

    def broadcast(self) -> ArrayState:
        """Return the broadcast of the next round."""
        with deterministic(self.experiment):
            return broadcast_of(self.method, self.checkpoint.state)

    def _compare(
        self, broadcast: ArrayState, uploads: Sequence[Upload], pool: ThreadPoolExecutor
    ) -> Compared:
        """Compare the valid ones among uploads of clients that have read a broadcast."""
        expected = self.blueprint.expected
        valid = [each for each in uploads if rejection_reason(each, expected) is None]
        values = self._values(valid, broadcast)
        found = compare_uploads(values, broadcast, self.blueprint, self.experiment, pool)
        return Compared(values, found)

    def _compare_everyone(
        self, number: int, broadcast: ArrayState, outcome: Outcome, comparison: Comparison
    ) -> Arrays:
        """In the last round, train the other clients, too, if all are to be compared.

        Nothing of it is kept but the comparison: states, records and traffic are the cohort's.
        """
        fed, layout, wire = self.experiment.federation, self.blueprint.layout, self.blueprint.wire
        options = self.experiment.evaluation
        has_cores = any(unit.rank is not None for unit in layout.units(wire))
        if options.diagnostics_cohort != "all" or number < fed.rounds or not has_cores:
            return {}
        trained = [report.client for report in outcome.reports]
        others = np.setdiff1d(self.participants, trained).tolist()
        jobs = [self._job(number, client) for client in others]
        try:
            more = self.executor.run(broadcast, jobs)
        except FailsAgainError as error:  # no client of the run itself
            self.events.append(f"evaluation.diagnostics_cohort=all: no comparison: {error}")
            return {}
        self.events += more.events
        fetched = self.executor.fetch([*outcome.uploads, *more.uploads])
        uploads = self._values(fetched, broadcast)
        valid = [u for u in uploads if rejection_reason(u, self.blueprint.expected) is None]
        valid.sort(key=lambda upload: upload.client)
        if not valid:
            return {}
        return compare_everyone(valid, broadcast, self.blueprint, options.top_k, comparison.pool)

    def _reducer(self) -> Reducer:
        weighting, blueprint = self.experiment.federation.weighting, self.blueprint
        return Reducer(self.method, blueprint.layout, weighting, blueprint.expected)

    def _aggregate(
        self,
        number: int,
        sent: Sent,
        cohort: Cohort,
        outcome: Outcome,
        comparison: Comparison,
    ) -> RoundRecord:
        """Aggregate the uploads of a round into the next state and return the round's record."""
        now, reducer = self.checkpoint, self._reducer()
        total = self.stages.total(self._sum(number, outcome, reducer))
        accepted = set(total.clients)
        mean = self.stages.average(number, total, {r.client: r.stages for r in outcome.reports})
        if mean is None:
            mean = self._mean(total, reducer)
        if self.stages.read_changes:
            mean = self.stages.aggregate(number, mean, self._changes(outcome.uploads, accepted))
        # Before the state changes: fetching may fail if a node is lost.
        compared, valid = None, []
        if self._diagnoses(number):
            compared = comparison.result(outcome.uploads[:MOST_CLIENTS])
        if self.method.needs_uploads:
            fetched = self.executor.fetch(outcome.uploads)
            valid = self._values([u for u in fetched if u.client in accepted], sent.read)
        round_ = self._round(number, mean, valid, reducer)
        now.state = self._next_state(number, mean, round_)
        reports = [report for report in outcome.reports if report.client in accepted]
        now.client_states |= {r.client: r.state for r in reports if r.state}
        now.kept |= {r.client: r.kept for r in reports if r.kept}
        now.round = number
        record, clients = self.transfers.record(
            number, sent, cohort, outcome.reports, total, now.records[-1]
        )
        record.stages = over_clients(outcome.reports, self.stages.summed)
        record.stages |= {**total.metrics, **mean.metrics}
        record.stages |= self.stages.end(number, now.state, clients)
        if compared is not None:
            self._diagnose(record, compared, sent.read, reports, round_, comparison)
        record.diagnostics |= round_.metrics
        if number == 1 and (warning := self.method.warning(round_.metrics)):
            self.events.append(f"warning: {warning}")
        return record

    def _mean(self, total: Partial, reducer: Reducer) -> MeanChange:
        """Return the weighted mean; a unit that nobody trained keeps its value, or stays."""
        before = self.checkpoint.state
        if self.stages.act_on_changes:
            before = replace(before, shared=np.zeros_like(before.shared))
        return MeanChange(*finish(total, before, reducer), len(total.clients))

    def _round(
        self, number: int, mean: MeanChange, valid: Sequence[Upload], reducer: Reducer
    ) -> Round:
        """Return what a method may know of a round, given its valid uploads."""
        fed = self.experiment.federation
        singles: tuple[ClientUpload, ...] = ()
        if self.method.needs_uploads:
            singles = tuple(_single(upload, reducer) for upload in valid)
        change = torch.from_numpy(mean.state.shared) if self.stages.act_on_changes else None
        return Round(
            number,
            mean.clients,
            fed.participants,
            torch.from_numpy(mean.trained),
            singles,
            change=change,
            rounds=fed.rounds,
        )

    def _next_state(self, number: int, mean: MeanChange, round_: Round) -> ArrayState:
        """Return the state after a round.

        Raises:
            FailsAgainError: It is not finite, and the mean is.
        """
        now, method = self.checkpoint.state, self.method
        if self.stages.act_on_changes:
            mean = self.stages.mean(number, mean)
            moved = now.shared + mean.state.shared.astype(np.float64)
            mean = mean.with_shared(moved.astype(np.float32))
        new = method.aggregate(
            now.map(to_tensor), mean.state.map(to_tensor), round_, self.blueprint.layout
        )
        after = new.map(to_array)
        if not _is_finite(after) and _is_finite(mean.state):
            raise FailsAgainError(
                f"round {number}: aggregate() of {plugins.named(type(method))} returns a state "
                "that is not finite, of uploads that are"
            )
        return replace(after, survey=now.survey)

    def _diagnose(
        self,
        record: RoundRecord,
        compared: Compared,
        broadcast: ArrayState,
        reports: list[TrainReport],
        round_: Round,
        comparison: Comparison,
    ) -> None:
        """Add the diagnostics of some uploads to a record and to the checkpoint."""
        now, sample, found = self.checkpoint, compared.uploads, compared.diagnostics
        reported = reported_diagnostics(reports)
        record.diagnostics = reported.metrics | found.metrics
        units = round_units(self.method, self.blueprint.layout, record.round)
        alike = all(
            u.active is None or (units is not None and np.array_equal(u.active, units))
            for u in sample
        )
        if len(sample) == len(reports) and alike and not self.stages.move_beyond_mean:
            after, reducer = self.broadcast(), self._reducer()
            error = aggregation_error(sample, reducer, broadcast, after, comparison.pool)
            if error is not None:
                record.diagnostics["aggregation_error"] = error
        spectra = reported.spectra | found.spectra | round_.spectra
        now.spectra = spectra or now.spectra
        now.matrices = append_round(now.matrices, record.round, found.matrices)

    def _sum(self, number: int, outcome: Outcome, reducer: Reducer) -> Partial:
        """Validate and sum the uploads of a round; name those that are refused.

        Raises:
            FailsAgainError: Too few are valid.
        """
        if not outcome.reports:
            return Partial(None, 0.0, np.zeros(0), np.zeros(0))
        total = self.executor.reduce(outcome, reducer)
        quorum, sent = self.experiment.federation.quorum, len(outcome.reports)
        for client, reason in sorted(total.refused.items()):
            self.events.append(f"round {number}: upload of client {client} rejected: {reason}")
        hidden = self.stages.hide_clients  # what is refused counts as zeros
        needed = self.stages.quorum if number else {}
        if len(total.clients) < max([quorum * sent, *needed.values()]) and not hidden:
            remedy = f"a smaller learning rate (optimizer.lr={self.experiment.optimizer.lr:g})"
            limits = {"federation.quorum": quorum} | needed
            below = " or ".join(f"{field}={value}" for field, value in limits.items())
            raise FailsAgainError(
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
        headline = self.blueprint.metrics.headline
        return RoundReport(records, events, self.checkpoint.round, self.finished, headline)

    def result(self) -> RunResult:
        """Return the result of a finished run."""
        # What the clients keep may be large, and the result is sent to the driver.
        whole = replace(self.checkpoint, client_states={}, kept={})
        return RunResult(whole, self.blueprint, self.broadcast(), self.memory)


def _is_finite(state: ArrayState) -> bool:
    """Return whether all numbers of a state are finite, those of a survey aside."""
    found: list[bool] = []
    state.map(lambda array: found.append(bool(np.isfinite(array).all())))
    return all(found)


def _single(upload: Upload, reducer: Reducer) -> ClientUpload:
    """Return an accepted upload for a method that needs each of them."""
    return ClientUpload(
        client=upload.client,
        weight=reducer.weight(upload),
        arrays=reducer.contribution(upload).map(as_tensor),
        trained=None if upload.active is None else torch.from_numpy(upload.active.copy()),
    )
