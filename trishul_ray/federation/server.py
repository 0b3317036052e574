"""The server's side of a run: sampling, judging, aggregation, records, checkpoints. No Ray here.

The same object drives both backends: an executor runs the jobs (in this process, or on actors),
and everything that decides a number happens here, in an order that no executor can change.

Evaluation does not hold up training: the model after round t is exactly the broadcast of round
t + 1, so both are handed out together, and the record of round t is complete one round later.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from trishul_ray.errors import RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.diagnostics import (
    MOST_CLIENTS,
    aggregation_error,
    append_round,
    upload_diagnostics,
)
from trishul_ray.federation.messages import (
    Arrays,
    Blueprint,
    EvalJob,
    EvalReport,
    Job,
    Outcome,
    SurveyJob,
    TrainJob,
    TrainReport,
    Upload,
    as_tensors,
    changed_sources,
    to_arrays,
    to_tensors,
)
from trishul_ray.federation.reduce import Partial, Reducer, finish
from trishul_ray.methods.base import SURVEY, Method, Round, SurveyPlan, build_method
from trishul_ray.rng import numpy_rng


class Executor(Protocol):
    """Runs jobs somewhere. Results depend on the jobs alone, never on where or in which order."""

    def describe(self, survey: Arrays) -> Blueprint:
        """The blueprint of the workbench that every worker builds, given the survey (or none)."""
        ...

    def run(self, broadcast: Arrays, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs against one broadcast."""
        ...

    def reduce(self, uploads: list[Any], reducer: Reducer) -> Partial:
        """Judge and sum uploads in groups of ``FAN_IN``, in order."""
        ...

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Bring a few uploads here, for diagnostics."""
        ...


def survey_for_workers(method: Method, survey: Arrays) -> Arrays:
    """The part of a survey that every worker must have to build its adapters."""
    plan = method.survey_plan
    return survey if plan is not None and plan.decides_adapters else {}


def broadcast_of(method: Method, state: Arrays, survey: Arrays) -> Arrays:
    """What goes to every worker: the method's broadcast of a state, and the survey."""
    sent = to_arrays(method.broadcast(to_tensors(state)))
    return sent | {SURVEY + k: v for k, v in survey_for_workers(method, survey).items()}


@dataclass(frozen=True)
class RoundReport:
    """Progress of a run after one step."""

    records: list[dict[str, Any]]  # complete records, oldest first
    events: list[str]
    round: int  # the last aggregated round
    finished: bool


@dataclass(frozen=True)
class RunResult:
    """Final state of a run, with everything its results are made from."""

    state: Arrays
    digest: str
    records: list[dict[str, Any]]
    spectra: Arrays
    matrices: Arrays
    blueprint: Blueprint
    attempt: str
    broadcast: Arrays  # the broadcast of the round after the last


class Server:
    """One federated run under way. Call :meth:`step` until :attr:`finished`."""

    def __init__(
        self, experiment: Experiment, executor: Executor, checkpoints: CheckpointStore, attempt: str
    ) -> None:
        """Start, or continue from the newest sound checkpoint.

        Args:
            experiment: what to run.
            executor: who runs the jobs.
            checkpoints: where the state of each round is kept.
            attempt: names this run in the tracking server; kept across resumes.

        Raises:
            RunError: the checkpoint is of other data or another backbone than are there now.
        """
        self.experiment = experiment
        self.executor = executor
        self.checkpoints = checkpoints
        self.method = build_method(experiment.method, experiment.adapter)
        self.attempt = attempt
        self.round = 0
        self.state: Arrays = {}
        self.survey: Arrays = {}
        self.client_states: dict[int, Arrays] = {}
        self.records: list[dict[str, Any]] = [{"round": 0}]
        self.spectra: Arrays = {}
        self.matrices: Arrays = {}
        found = checkpoints.newest()
        self.events: list[str] = list(checkpoints.skipped)
        if found is None and self.events:
            self.events.append("no sound checkpoint is left: the run starts over")
        if found is not None:
            self._restore(found)
        elif self.method.survey_plan is not None:
            self._ask(self.method.survey_plan)
        self.blueprint = executor.describe(self._survey_for_workers())
        if found is None:
            with deterministic(experiment):
                self.state = self._initial_state()
        elif changed := changed_sources(found.sources, self.blueprint.sources):
            raise RunError(
                f"run {experiment.id} began with other {changed} than are there now: put back "
                "what it began with, or start over with --fresh"
            )

    def _restore(self, found: Checkpoint) -> None:
        self.round = found.round
        self.state = found.state
        self.survey = found.survey
        self.client_states = found.client_states
        self.records = found.records
        self.spectra = found.spectra
        self.matrices = found.matrices
        self.attempt = found.attempt
        self.events.append(f"continuing after round {found.round}")

    def _ask(self, plan: SurveyPlan) -> None:
        """Ask some clients what the method wants to know, and average their answers."""
        fed = self.experiment.federation
        rng = numpy_rng(self.experiment.seed, "survey-cohort")
        asked = sorted(rng.choice(fed.clients, min(plan.clients, fed.clients), replace=False))
        outcome = self.executor.run({}, [SurveyJob(int(client)) for client in asked])
        self.events += outcome.events
        for client, answer in zip(asked, outcome.surveys, strict=True):
            if not all(np.isfinite(array).all() for array in answer.values()):
                raise RunError(f"the survey before round 1: client {client} sent non-finite values")
        self.survey = {
            key: np.mean([a[key].astype(np.float64) for a in outcome.surveys], axis=0).astype(
                np.float32
            )
            for key in outcome.surveys[0]
        }
        sent = sum(array.size for answer in outcome.surveys for array in answer.values())
        self.records[0] |= {"uploaded_parameters": sent, "uploaded_bytes": 4 * sent}

    def _survey_for_workers(self) -> Arrays:
        return survey_for_workers(self.method, self.survey)

    def _initial_state(self) -> Arrays:
        initial = torch.from_numpy(np.array(self.blueprint.initial))
        survey = to_tensors(self.survey)
        return to_arrays(self.method.initial_state(self.blueprint.layout, initial, survey))

    def broadcast(self) -> Arrays:
        """What goes to every worker for the next round."""
        with deterministic(self.experiment):
            return broadcast_of(self.method, self.state, self.survey)

    def progress(self) -> RoundReport:
        """Return the records no later step adds to, and the events since the last report."""
        return self._report(self.records if self.finished else self.records[:-1])

    def _report(self, records: list[dict[str, Any]]) -> RoundReport:
        events, self.events = self.events, []
        return RoundReport(records, events, self.round, self.finished)

    def result(self) -> RunResult:
        """Return the result of a finished run."""
        return RunResult(
            state=self.state,
            digest=state_digest(self.state),
            records=self.records,
            spectra=self.spectra,
            matrices=self.matrices,
            blueprint=self.blueprint,
            attempt=self.attempt,
            broadcast=self.broadcast(),
        )

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the last one is evaluated."""
        return self.round >= self.experiment.federation.rounds and "loss" in self.records[-1]

    def cohort(self, round_number: int) -> list[int]:
        """The clients of a round, ascending: uniform without replacement."""
        fed = self.experiment.federation
        rng = numpy_rng(self.experiment.seed, "cohort", round_number)
        return sorted(rng.choice(fed.clients, fed.clients_per_round, replace=False).tolist())

    def step(self) -> RoundReport:
        """Run the next round together with the evaluation of the previous one.

        Returns:
            The record completed by this step, if any (that of the previous round), and its events.

        Raises:
            RunError: Too few valid uploads arrived.
        """
        with deterministic(self.experiment):
            return self._report(self._step())

    def _step(self) -> list[dict[str, Any]]:
        began = time.perf_counter()
        fed = self.experiment.federation
        broadcast = self.broadcast()
        number = self.round + 1
        cohort = self.cohort(number) if number <= fed.rounds else []
        train = [TrainJob(number, c, self.client_states.get(c, {})) for c in cohort]
        outcome = self.executor.run(broadcast, [*train, *self._evaluation_jobs()])
        self.events += outcome.events
        complete = self._complete(outcome.evaluations)
        if cohort:
            self._aggregate(number, cohort, broadcast, outcome, time.perf_counter() - began)
        self.checkpoints.save(self.checkpoint())
        return complete

    def _evaluation_jobs(self) -> list[EvalJob]:
        options, last = self.experiment.evaluation, self.experiment.federation.rounds
        if self.round % options.every and self.round != last:
            return []
        rows = self.blueprint.test_rows
        return [
            EvalJob(self.round, start, min(start + options.batch_size, rows))
            for start in range(0, rows, options.batch_size)
        ]

    def _complete(self, evaluations: list[EvalReport]) -> list[dict[str, Any]]:
        if evaluations:
            sums = [report.sums for report in evaluations]
            self.records[-1].update(self.blueprint.task.merge(sums))
        return [self.records[-1]]

    def _aggregate(
        self, number: int, cohort: list[int], broadcast: Arrays, outcome: Outcome, seconds: float
    ) -> None:
        fed, expected = self.experiment.federation, self.blueprint.expected
        layout = self.blueprint.layout
        began = time.perf_counter()
        reducer = Reducer(self.method, layout, fed.weighting, expected)
        total = self.executor.reduce(outcome.uploads, reducer)
        for client, reason in sorted(total.refused.items()):
            self.events.append(f"round {number}: upload of client {client} refused: {reason}")
        if len(total.clients) < fed.quorum * len(cohort):
            raise RunError(
                f"round {number}: only {len(total.clients)} of {len(cohort)} uploads are sound, "
                f"below federation.quorum={fed.quorum}; refused: {total.refused}"
            )
        mean, trained = finish(total, self.state, expected)
        sample = self.executor.fetch(outcome.uploads[:MOST_CLIENTS])
        round_ = Round(number, len(total.clients), fed.clients, torch.from_numpy(trained))
        self.state = to_arrays(
            self.method.aggregate(to_tensors(self.state), to_tensors(mean), round_, layout)
        )
        accepted = set(total.clients)
        self.client_states |= {
            r.client: r.state for r in outcome.reports if r.state and r.client in accepted
        }
        self.round = number
        record = self._record(number, cohort, broadcast, outcome.reports, total)
        every = self.experiment.evaluation.diagnostics_every
        if every and (number % every == 0 or number == fed.rounds):
            sound = [u for u in sample if u.client in accepted]
            found = upload_diagnostics(
                sound, broadcast, self.blueprint, self.experiment, outcome.reports
            )
            record |= found.metrics
            if len(sound) == len(total.clients) and all(u.active is None for u in sound):
                record["aggregation_error"] = aggregation_error(
                    sound, reducer, broadcast, self.broadcast()
                )
            self.spectra = found.spectra or self.spectra
            self.matrices = append_round(self.matrices, number, found.matrices)
        record["seconds"] = seconds + time.perf_counter() - began
        self.records.append(record)

    def _record(
        self,
        number: int,
        cohort: list[int],
        broadcast: Arrays,
        reports: list[TrainReport],
        total: Partial,
    ) -> dict[str, Any]:
        sent = as_tensors(broadcast)
        one = self.method.download_parameters(sent, len(cohort), self.blueprint.layout)
        down = sum(one - int(r.notes["unsent"]) for r in reports)
        known = {client for record in self.records for client in record.get("clients", ())}
        down += len(set(cohort) - known) * self.method.setup_parameters(sent)
        up = sum(int(r.notes["uploaded_parameters"]) for r in reports)
        return {
            "round": number,
            "clients": cohort,
            "refused": {str(c): why for c, why in total.refused.items()},
            "train_loss": float(np.mean([r.loss for r in reports])),
            "uploaded_parameters": up,
            "downloaded_parameters": down,
            "uploaded_bytes": 4 * up,
            "downloaded_bytes": 4 * down,
            "client_seconds": float(np.mean([r.seconds for r in reports])),
        }

    def checkpoint(self) -> Checkpoint:
        """Everything the next round needs."""
        return Checkpoint(
            experiment_id=self.experiment.id,
            attempt=self.attempt,
            round=self.round,
            state=self.state,
            client_states=self.client_states,
            records=self.records,
            spectra=self.spectra,
            matrices=self.matrices,
            survey=self.survey,
            sources=self.blueprint.sources,
        )
