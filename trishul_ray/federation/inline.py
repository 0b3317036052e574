"""The inline backend: a run in one process, for debugging and to measure Ray's overhead."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import (
    MOST_CLIENTS,
    Arrays,
    EvalJob,
    EvalReport,
    Job,
    Outcome,
    TrainJob,
    TrainReport,
    Upload,
    WorkerSpec,
    units_of_work,
)
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.reduce import FAN_IN, Reducer, combine, groups, partial_sum, sum_groups
from trishul_ray.federation.server import Server
from trishul_ray.federation.worker.context import (
    BackboneCache,
    WorkerContext,
    adapt_to,
    build_context,
    worker_spec,
)
from trishul_ray.federation.worker.evaluation import EvaluatedModel, evaluate_chunk
from trishul_ray.federation.worker.flops import count_flops
from trishul_ray.federation.worker.local import send_change, train_clients
from trishul_ray.runtime.stack import stack_of
from trishul_ray.stages import ArrayState, Partial


class InlineExecutor:
    """Run jobs in this process: all jobs of a run, or the jobs that an actor receives.

    It uses a backbone from ``backbones`` until :meth:`close`.
    """

    def __init__(
        self, experiment: Experiment, prepared: Prepared, backbones: BackboneCache | None = None
    ) -> None:
        self.experiment, self.backbones = experiment, backbones or BackboneCache()
        with deterministic(experiment):
            self.context: WorkerContext = build_context(experiment, prepared, self.backbones)
        self.stacks = [stack_of(self.context.device)]
        self._evaluated = EvaluatedModel(self.context)

    def describe(self, survey: Arrays) -> WorkerSpec:
        """Return the spec of the worker context, given the survey."""
        self._evaluated.release()
        with deterministic(self.experiment):
            adapt_to(self.context, survey)
            spec = worker_spec(self.context)
            if "flops" in self.context.stages.needs:
                spec = replace(spec, flops=count_flops(self.context))
            return spec

    def train(
        self, broadcast: ArrayState, jobs: Sequence[TrainJob]
    ) -> list[tuple[Upload, TrainReport]]:
        """Run the rounds of clients that train together."""
        self._evaluated.release()
        with deterministic(self.experiment):
            adapt_to(self.context, broadcast.survey)
            trained = train_clients(self.context, broadcast, jobs)
            # Round 0 has the responses to a survey.
            if jobs[0].round == 0 or not self.context.stages.act_on_changes:
                return trained
            return [
                send_change(self.context, broadcast, job, *each)
                for job, each in zip(jobs, trained, strict=True)
            ]

    def evaluate(self, broadcast: ArrayState, job: EvalJob) -> EvalReport:
        """Evaluate the broadcast on one chunk of rows; its model stays bound for the next chunk."""
        try:
            with deterministic(self.experiment):
                adapt_to(self.context, broadcast.survey)
                return evaluate_chunk(self._evaluated, broadcast, job)
        except BaseException:
            self._evaluated.release()
            raise

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run the jobs in order, and sum uploads as they arrive; see ``Executor.run``."""
        train = [job for job in jobs if isinstance(job, TrainJob)]
        parts = deque(groups(train) if reducer is not None and len(train) > FAN_IN else [])
        uploads: dict[int, Upload] = {}
        reports: dict[int, TrainReport] = {}
        sums: list[Partial] = []
        for unit in units_of_work(train, self.experiment.federation.stacked):
            for i, (upload, report) in zip(
                unit, self.train(broadcast, [train[i] for i in unit]), strict=True
            ):
                uploads[i], reports[i] = upload, report
            while parts and uploads.keys() >= {*parts[0]}:
                assert reducer is not None
                part = parts.popleft()
                sums.append(partial_sum([uploads[i] for i in part], reducer))
                for i in part:
                    if i >= MOST_CLIENTS:
                        del uploads[i]
        if train and trained is not None:
            trained([uploads[i] for i in range(len(train))[:MOST_CLIENTS]])
        scored = [self.evaluate(broadcast, job) for job in jobs if isinstance(job, EvalJob)]
        self._evaluated.release()
        return Outcome(
            uploads=[uploads[i] for i in sorted(uploads)],
            reports=[reports[i] for i in sorted(reports)],
            evaluations=scored,
            sums=sums,
        )

    def reduce(self, outcome: Outcome, reducer: Reducer) -> Partial:
        """Add the sums of groups, in the same order as the Ray backend."""
        return combine(outcome.sums or sum_groups(outcome.uploads, reducer))

    def fetch(self, uploads: list[Upload]) -> list[Upload]:
        """Return the uploads, which are already in this process."""
        return uploads

    def close(self) -> None:
        """Release the backbone."""
        self._evaluated.release()
        self.context.close()


class InlineDriver(Server):
    """Drive a run in this process; the counterpart of ``RayDriver``."""

    executor: InlineExecutor
    begin, final = Server.progress, Server.result

    def __init__(
        self,
        experiment: Experiment,
        prepared: Prepared,
        attempt: str,
        backbones: BackboneCache | None = None,
    ) -> None:
        executor = InlineExecutor(experiment, prepared, backbones)
        super().__init__(experiment, executor, open_checkpoints(experiment), attempt)

    def close(self) -> None:
        """Release the backbone."""
        self.executor.close()
