"""The server of a run: sampling, validation of uploads, aggregation, records and checkpoints.

Both backends use the same server. An executor runs the jobs, in this process or on Ray actors;
everything that decides a number happens here, in an order that does not depend on the executor.

Evaluation does not delay training: the model after round t is the broadcast of round t + 1, so
evaluation and training run together, and the record of round t is complete one round later.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from trishul_ray import plugins
from trishul_ray.data.dataset import RowSet, score_name
from trishul_ray.data.partition import client_names
from trishul_ray.edge.cohorts import CohortConfig
from trishul_ray.edge.devices import DevicesConfig
from trishul_ray.edge.draws import capacities, participants, poisson_cohort, uniform_cohort
from trishul_ray.edge.fleet import Asked, Fleet, Traffic
from trishul_ray.edge.privacy.config import PrivacyConfig
from trishul_ray.edge.privacy.mechanism import SURVEY_NORM
from trishul_ray.errors import FailsAgainError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.diagnostics import (
    aggregation_error,
    append_round,
    compare_everyone,
    upload_diagnostics,
)
from trishul_ray.federation.edge import audited, mechanism_of, release, unit_shares
from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    Arrays,
    Blueprint,
    EvalJob,
    EvalReport,
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
from trishul_ray.methods.base import ClientUpload, Method, Round, State, build_method
from trishul_ray.rng import numpy_rng
from trishul_ray.stages import ArrayState, MeanChange, Partial, RunPlan, Sent, Stages
from trishul_ray.tasks.sums import EvalSums, client_metrics, score_by_mix

A = TypeVar("A", int, float)


class Executor(Protocol):
    """Runs jobs. The results depend on the jobs alone, not on where or in which order they run."""

    def describe(self, survey: Arrays) -> Blueprint:
        """Return the blueprint of the workbench that every worker builds, given the survey."""

    def run(
        self, broadcast: ArrayState, jobs: Sequence[Job], reducer: Reducer | None = None
    ) -> Outcome:
        """Run all jobs with one broadcast.

        With a reducer, uploads of more than ``FAN_IN`` clients are validated and summed in groups
        as they come, and only the first ``MOST_CLIENTS`` are kept.
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
        if restored is not None:
            checkpoints.tidy()
            self.events.append(f"continuing after round {restored.round}")
        elif self.events:
            self.events.append("no valid checkpoint is left: the run starts over")
        start = Checkpoint(experiment.id, attempt, 0, State(np.zeros(0)), records=[RoundRecord(0)])
        self.checkpoint = restored or start
        # The clients that have been asked so far, and the round in which they were last.
        self._asked: dict[int, int] = {}
        for record in self.checkpoint.records:
            self._remember(record)
        self.blueprint = executor.describe(self.checkpoint.state.survey)
        self.private = mechanism_of(experiment, self.method, self.blueprint, self.checkpoint.edge)
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
        if self.private is not None:
            self.events += self.private.lines()
        self.events += lines
        self.checkpoint.sources = self.blueprint.sources
        self.checkpoint.info = self.blueprint.info
        self.fleet = self._fleet()
        if self.fleet is not None and self.checkpoint.edge.clock is None:
            self.checkpoint.edge.clock = self.fleet.start()

    def _begin(self) -> list[str]:
        """Let the stages prepare for the rounds; return lines for the reader of the run."""
        layout = self.blueprint.layout
        units = tuple(layout.units(self.blueprint.wire))
        shares = partial(unit_shares, self.experiment, self.method, self.blueprint)
        return self.stages.begin(
            RunPlan(self.method, layout, units, shares), self.checkpoint.stages
        )

    def _fleet(self) -> Fleet | None:
        """Return the clients on the simulated clock; None if cohorts are drawn without one."""
        settings, fed = self.experiment, self.experiment.federation
        devices, cohort = settings.section(DevicesConfig), settings.section(CohortConfig)
        if not devices.on and cohort.select == "uniform":
            return None
        sizes = self.blueprint.shard_sizes
        shares = capacities(fed.compute, settings.seed, fed.clients, fed.compute_shares)
        return Fleet(
            devices,
            cohort,
            fed,
            settings.seed,
            rows=np.zeros(0, dtype=np.int64) if sizes is None else sizes,
            capacity=np.array(shares),
            flops=self.blueprint.flops,
            least=max(self.stages.quorum.values(), default=1),
        )

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
        """Return the mean answer of some clients to the method's survey; empty without one.

        Under privacy it is a release like those of rounds, of a cohort that is drawn like theirs.
        """
        plan, fed = self.method.survey_plan, self.experiment.federation
        if plan is None:
            return {}
        if self.private is None:
            rng = numpy_rng(self.experiment.seed, "survey-cohort")
            size = min(plan.clients, fed.participants)
            cohort = sorted(rng.choice(self.participants, size, replace=False).tolist())
            jobs = [TrainJob(0, client) for client in cohort]
        else:
            cohort = self.cohort(0)
            jobs = [TrainJob(0, client, clip_norm=SURVEY_NORM) for client in cohort]
            # An empty cohort needs the names and shapes of answers: take one of zeros.
            jobs = jobs or [TrainJob(0, int(self.participants[0]), clip_norm=0.0)]
        state, record = self.checkpoint.state, self.checkpoint.records[0]
        reducer = Reducer(self.method, self.blueprint.layout, fed.weighting, None)
        outcome = self.executor.run(state, jobs, reducer)
        self.events += outcome.events
        total = self._sum(0, outcome, reducer)
        record.uploaded_parameters = sum(r.uploaded for r in outcome.reports if r.client in cohort)
        if self.private is None:
            found = finish(total, state, reducer)[0].extra
        else:
            assert total.sums is not None  # answers are finite
            found = self.private.surveyed(total.sums.extra)
            if self.private.noise > 0:
                numbers = sum(answer.size for answer in found.values())
                self.events.append(
                    "privacy: signal-to-noise ratio of the survey "
                    f"{self.private.signal_to_noise(numbers):.2g} at most, with {numbers:,} numbers"
                )
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
        now, fed = self.checkpoint, self.experiment.federation
        complete, number = now.records[-1], now.round + 1
        with deterministic(self.experiment):
            state = self.broadcast()
            sent = Sent(state, state)
            if number <= fed.rounds:
                sent = self.stages.broadcast(number, state)
            asked = self._ask(number, sent) if number <= fed.rounds else Asked([])
            cohort = asked.clients
            train = [self._job(number, client, asked.steps.get(client)) for client in cohort]
            outcome = self._run(sent, train)
            self.events += outcome.events
            for rows in self.blueprint.scored if outcome.evaluations else ():
                found = [each for each in outcome.evaluations if each.rows == rows]
                self._score(complete, rows, found)
                if each := [report.each for report in found if report.each]:
                    now.test_rows = {k: np.concatenate([part[k] for part in each]) for k in each[0]}
            if number <= fed.rounds:  # under privacy, even a cohort of nobody is a round
                paused = time.perf_counter()
                everyone = self._compare_everyone(number, sent.read, outcome)
                began += time.perf_counter() - paused
                record = self._aggregate(number, sent, outcome)
                self._tick(asked, sent, outcome, record)
                self._remember(record)
                now.matrices |= everyone
                record.seconds = time.perf_counter() - began
                now.records.append(record)
            self.checkpoints.save(now)
        return self._report([complete])

    def _remember(self, record: RoundRecord) -> None:
        self._asked |= dict.fromkeys([*record.clients, *map(int, record.missing)], record.round)

    def _setup(self, broadcast: State, client: int) -> int:
        """Return how many numbers a client downloads once in this round; see the method's."""
        last = self._asked.get(client)
        return self.method.setup_parameters(broadcast, self.blueprint.layout, last)

    def _run(self, sent: Sent, train: list[TrainJob]) -> Outcome:
        """Train and evaluate.

        What is evaluated is the state as it is, which is the one that a run ends with. If clients
        read another one, both cannot run together: evaluation waits for training.
        """
        evaluation = self._evaluation_jobs()
        every = self.method.needs_uploads or self.experiment.evaluation.diagnostics_cohort == "all"
        reducer = None if every else self._reducer()
        if sent.is_exact:
            return self.executor.run(sent.state, [*train, *evaluation], reducer)
        outcome = self.executor.run(sent.read, train, reducer)
        scored = self.executor.run(sent.state, evaluation) if evaluation else Outcome([], [], [])
        events = outcome.events + scored.events
        return replace(outcome, evaluations=scored.evaluations, events=events)

    def _ask(self, number: int, sent: Sent) -> Asked:
        """Return whom a round asks; on the clock, by the bytes that are expected.

        Who comes in time must be known before anyone trains: a client is expected to send as much
        as those of the round before on average, and in round 1 four bytes for each number.
        """
        clock, last = self.checkpoint.edge.clock, self.checkpoint.records[-1]
        if self.fleet is None or clock is None:
            return Asked(self.cohort(number))
        tensors, expected = sent.state.map(as_tensor), self.blueprint.expected
        up = 4.0 * sum(expected.lengths.values())
        if last.clients:
            up = last.metrics()["uploaded_bytes"] / len(last.clients)
        layout, before = self.blueprint.layout, last.accepted_uploads
        down = 4 * self.method.download_parameters(tensors, layout, 0, before)
        down = down if sent.size is None else sent.size
        traffic = Traffic(down, 4 * self.method.setup_parameters(tensors, layout, None), up)
        chosen = None if self.private is None else self.cohort(number)
        return self.fleet.ask(number, clock, traffic, chosen)

    def _tick(self, asked: Asked, sent: Sent, outcome: Outcome, record: RoundRecord) -> None:
        """Move the clock to the end of a round, and add what it says to the round's record."""
        if self.fleet is None:
            return
        method, layout, reports = self.method, self.blueprint.layout, outcome.reports
        tensors, before = sent.read.map(as_tensor), self.checkpoint.records[-1].accepted_uploads

        def down(unsent: int) -> int:
            return method.download_parameters(tensors, layout, unsent, before)

        size = sent.size
        setup = sum(self._setup(tensors, client) for client in asked.missing)
        if record.downloaded_parameters is not None:
            record.downloaded_parameters += asked.wasted * down(0) + setup
        if record.downloaded_bytes is not None and size is not None:
            record.downloaded_bytes += asked.wasted * size + 4 * setup
        record.missing = {str(client): fate for client, fate in asked.missing.items()}
        # What is downloaded once came with an earlier attempt of this round, if there was one.
        earlier = {c for each in asked.plans[:-1] for c in each.clients.tolist()}
        once = [0 if c in earlier else self._setup(tensors, c) for c in asked.clients]
        downs = [4 * down(r.unsent) if size is None else size for r in reports]
        ups = [4 * r.uploaded if r.uploaded_bytes is None else r.uploaded_bytes for r in reports]
        self.checkpoint.edge.clock, numbers = self.fleet.close(
            asked,
            number=record.round,
            down_bytes=np.array(downs, dtype=np.float64) + 4 * np.array(once, dtype=np.float64),
            up_bytes=np.array(ups, dtype=np.float64),
            loss=np.array([r.loss for r in reports]),
            squared=np.array([r.squared_loss for r in reports]),
        )
        record.edge |= numbers

    def _job(self, number: int, client: int, steps: int | None = None) -> TrainJob:
        """Return the job of a client in a round, with what it has kept."""
        now = self.checkpoint
        state, kept = now.client_states.get(client, {}), now.edge.kept.get(client, {})
        norm = None if now.edge.privacy is None else now.edge.privacy.clip_norm
        return TrainJob(number, client, state, kept, norm, steps)

    def _values(self, uploads: list[Any], broadcast: ArrayState) -> list[Upload]:
        """Bring uploads into this process, as values even where clients send changes."""
        fetched = self.executor.fetch(uploads)
        if not self.stages.act_on_changes:
            return fetched
        return [self._restored(upload, broadcast) for upload in fetched]

    def _restored(self, upload: Upload, broadcast: ArrayState) -> Upload:
        weight = configured_weight(self.experiment.federation.weighting, upload)
        value = broadcast.shared + self.stages.restore(upload.arrays.shared, weight)
        return replace(upload, arrays=replace(upload.arrays, shared=value.astype(np.float32)))

    def _score(self, record: RoundRecord, rows: RowSet, reports: list[EvalReport]) -> None:
        """Add to a record the metrics of a set of rows, and of the test rows more than numbers.

        These are the scores by class and, if asked for, by client, of which the last are kept: of
        the global model and, for a method that leaves a part of it with the clients, of their own.
        """
        metrics, info = self.blueprint.metrics, self.blueprint.info
        sums = [report.sums for report in reports if report.client is None]
        found, recall = metrics.merge(sums), metrics.recall(sums)
        by_client: dict[int, float] = {}
        own: dict[int, float] = {}
        if self.experiment.evaluation.per_client:
            mix = self.blueprint.client_mix
            by_client = metrics.by_client(sums) if mix is None else score_by_mix(recall, mix)
            if self.method.personal:
                # The model of a client that has kept nothing yet is the global one.
                own = by_client | self._personal_scores(reports)
            took_part = self._participation()
            found |= client_metrics(by_client, own, took_part)
        record.scores |= {score_name(name, rows): value for name, value in found.items()}
        if rows == "validation":
            return
        record.recall = recall
        if by_client:
            for earlier in self.checkpoint.records:
                earlier.per_client, earlier.personal, earlier.participation = {}, {}, {}
            names = info.clients if self.blueprint.client_mix is None else self._client_names()

            def named(values: dict[int, A]) -> dict[str, A]:
                return {names[c] if names else str(c): value for c, value in values.items()}

            record.per_client, record.personal = named(by_client), named(own)
            record.participation = named(took_part)

    def _client_names(self) -> tuple[str, ...]:
        fed, partition = self.experiment.federation, self.experiment.partition
        return client_names(self.blueprint.info, partition, fed.clients)

    def _participation(self) -> dict[int, int]:
        """Return in how many rounds each client has counted, of those that may take part.

        Empty if what is scored are clients of the data, and not those of the run.
        """
        if self.blueprint.client_mix is None and not self._client_names():
            return {}
        counts = Counter(
            client
            for record in self.checkpoint.records
            for client in record.clients
            if str(client) not in record.refused
        )
        return {client: counts[client] for client in self.participants.tolist()}

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

    def cohort(self, round_number: int) -> list[int]:
        """Return the clients of a round, ascending; with Poisson sampling, their number varies."""
        fed, options = self.experiment.federation, self.experiment.section(PrivacyConfig)
        poisson = options.on and options.sampling == "poisson"
        draw = poisson_cohort if poisson else uniform_cohort
        seed, size = self.experiment.seed, len(self.participants)
        drawn: list[int] = self.participants[
            draw(seed, round_number, size, fed.clients_per_round)
        ].tolist()
        return drawn

    def broadcast(self) -> ArrayState:
        """Return the broadcast of the next round."""
        with deterministic(self.experiment):
            return broadcast_of(self.method, self.checkpoint.state)

    def _evaluation_jobs(self) -> list[EvalJob]:
        number = self.checkpoint.round
        fed = self.experiment.federation
        if not self.experiment.evaluation.scores(number, fed.rounds):
            return []
        size = self.experiment.evaluation.batch_size

        def chunks(count: int) -> list[tuple[int, int]]:
            return [(start, min(start + size, count)) for start in range(0, count, size)]

        jobs = []
        last = number == self.experiment.federation.rounds
        for rows, count in self.blueprint.scored.items():
            each = last and rows == "test"
            jobs += [EvalJob(number, *chunk, rows, each=each) for chunk in chunks(count)]
            if (counts := self.blueprint.client_rows.get(rows)) is not None and number:
                for client, state in sorted(self.checkpoint.client_states.items()):
                    own = chunks(int(counts[client]))
                    jobs += [EvalJob(number, *chunk, rows, client, state) for chunk in own]
        return jobs

    def _compare_everyone(self, number: int, broadcast: ArrayState, outcome: Outcome) -> Arrays:
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
        uploads = self._values([*outcome.uploads, *more.uploads], broadcast)
        valid = [u for u in uploads if rejection_reason(u, self.blueprint.expected) is None]
        valid.sort(key=lambda upload: upload.client)
        return compare_everyone(valid, broadcast, self.blueprint, options.top_k) if valid else {}

    def _reducer(self) -> Reducer:
        weighting, blueprint = self.experiment.federation.weighting, self.blueprint
        return Reducer(self.method, blueprint.layout, weighting, blueprint.expected)

    def _aggregate(self, number: int, sent: Sent, outcome: Outcome) -> RoundRecord:
        """Aggregate the uploads of a round into the next state and return the round's record."""
        fed, layout, now = self.experiment.federation, self.blueprint.layout, self.checkpoint
        reducer, broadcast = self._reducer(), sent.read
        total = self.stages.total(self._sum(number, outcome, reducer))
        accepted, count = set(total.clients), len(total.clients)
        reported = dict(total.metrics)
        changes = self.stages.act_on_changes
        if self.private is None:
            # A unit that nobody trained keeps its value, or does not change.
            before = now.state
            if changes:
                before = replace(before, shared=np.zeros_like(before.shared))
            mean, trained = finish(total, before, reducer)
        else:
            mean, trained, released = release(
                self.private, number, total, reducer, now.state, outcome.reports, now.edge
            )
            reported |= released
            count = fed.clients_per_round  # how many came is private
        # Before the state changes: fetching may fail if a node is lost.
        needed = None if self.method.needs_uploads else MOST_CLIENTS
        fetched = self._values(outcome.uploads[:needed], broadcast)
        sample = fetched[:MOST_CLIENTS]
        singles: tuple[ClientUpload, ...] = ()
        if self.method.needs_uploads:
            singles = tuple(_single(u, reducer) for u in fetched if u.client in accepted)
        round_ = Round(
            number, count, fed.participants, torch.from_numpy(trained), singles, rounds=fed.rounds
        )
        if changes:
            round_ = replace(round_, change=torch.from_numpy(mean.shared))
            mean = self.stages.mean(number, MeanChange(mean, trained, count)).state
            moved = now.state.shared + mean.shared.astype(np.float64)
            mean = replace(mean, shared=moved.astype(np.float32))
        new = self.method.aggregate(now.state.map(to_tensor), mean.map(to_tensor), round_, layout)
        after = new.map(to_array)
        if not _is_finite(after) and _is_finite(mean):
            raise FailsAgainError(
                f"round {number}: aggregate() of {plugins.named(type(self.method))} returns a "
                "state that is not finite, of uploads that are"
            )
        now.state = replace(after, survey=now.state.survey)
        now.client_states |= {
            r.client: r.state for r in outcome.reports if r.state and r.client in accepted
        }
        now.edge.kept |= {
            r.client: r.kept for r in outcome.reports if r.kept and r.client in accepted
        }
        now.round = number
        record = self._record(number, sent, outcome, total)
        record.edge |= reported | audited(self.private, number, now.state, now.edge)
        if self.experiment.evaluation.diagnoses(number, fed.rounds):
            valid = [u for u in sample if u.client in accepted]
            diagnosed = upload_diagnostics(
                valid,
                broadcast,
                self.blueprint,
                self.experiment,
                [report for report in outcome.reports if report.client in accepted],
            )
            record.diagnostics = diagnosed.metrics
            units = round_units(self.method, layout, number)
            alike = all(
                u.active is None or (units is not None and np.array_equal(u.active, units))
                for u in valid
            )
            if len(valid) == len(total.clients) and alike and not self.stages.move_beyond_mean:
                error = aggregation_error(valid, reducer, broadcast, self.broadcast())
                if error is not None:
                    record.diagnostics["aggregation_error"] = error
            now.spectra = (diagnosed.spectra | round_.spectra) or now.spectra
            now.matrices = append_round(now.matrices, number, diagnosed.matrices)
        record.diagnostics |= round_.metrics
        if number == 1 and (warning := self.method.warning(round_.metrics)):
            self.events.append(f"warning: {warning}")
        return record

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
        private = self.experiment.is_set("privacy")  # what is refused counts as zeros
        needed = self.stages.quorum if number else {}
        if len(total.clients) < max([quorum * sent, *needed.values()]) and not private:
            remedy = f"a smaller learning rate (optimizer.lr={self.experiment.optimizer.lr:g})"
            limits = {"federation.quorum": quorum} | needed
            below = " or ".join(f"{field}={value}" for field, value in limits.items())
            raise FailsAgainError(
                f"round {number}: only {len(total.clients)} of {sent} uploads are valid, "
                f"below {below}; rejected: {total.refused}: try "
                f"{remedy if number else 'other weights or data'} or a lower quorum"
            )
        return total

    def _record(self, number: int, sent: Sent, outcome: Outcome, total: Partial) -> RoundRecord:
        tensors, reports = sent.read.map(as_tensor), outcome.reports
        uploaded = {report.client: report.uploaded for report in reports}  # ascending
        before = self.checkpoint.records[-1].accepted_uploads
        down = sum(
            self.method.download_parameters(tensors, self.blueprint.layout, r.unsent, before)
            for r in reports
        )
        setup = sum(self._setup(tensors, client) for client in uploaded)
        size = sent.size
        losses = [r.loss for r in reports if math.isfinite(r.loss)]
        coded = [r.uploaded_bytes for r in reports if r.uploaded_bytes is not None]
        return RoundRecord(
            round=number,
            clients=list(uploaded),
            refused={str(client): why for client, why in total.refused.items()},
            accepted_uploads=[uploaded[client] for client in total.clients],
            train_loss=float(np.mean(losses)) if losses else None,
            uploaded_parameters=sum(uploaded.values()),
            uploaded_bytes=sum(coded) if coded else None,
            downloaded_parameters=down + setup,
            downloaded_bytes=None if size is None else size * len(reports) + 4 * setup,
            client_seconds=float(np.mean([r.seconds for r in reports])) if reports else None,
            edge=_over_clients(reports, self.stages.summed),
        )

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
        edge = replace(self.checkpoint.edge, kept={})
        kept = replace(self.checkpoint, client_states={}, edge=edge)
        return RunResult(kept, self.blueprint, self.broadcast())


def _over_clients(reports: Sequence[TrainReport], summed: AbstractSet[str]) -> dict[str, float]:
    """Return what stages report of a round's clients: means, or sums of the named ones."""
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.edge.items():
            if math.isfinite(value):  # that of what is refused may not be
                found.setdefault(name, []).append(value)
    return {n: float(np.sum(v) if n in summed else np.mean(v)) for n, v in found.items()}


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
