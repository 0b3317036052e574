"""One chunk of the evaluation of a model, as a pure function.

The model of a broadcast is bound only once for all its chunks.
"""

from contextlib import ExitStack

import numpy as np
import torch

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.messages import Arrays, EvalJob, EvalReport
from trishul_ray.federation.worker.context import WorkerContext, bound, global_model, rows_of
from trishul_ray.runtime.memory import memory_of, peak_memory
from trishul_ray.stages import ArrayState
from trishul_ray.tasks.sums import EvalSums

#: Advice for errors of too little memory.
_LESS = "lower evaluation.batch_size or set model.precision=bf16"


class EvaluatedModel:
    """The global or a personalized model to score, bound only once for all chunks of rows.

    Round 0 is the pretrained backbone, even for a method whose first broadcast already updates it
    (Fed-SB). The model stays bound until another one is needed, or until :meth:`release`.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._binding = ExitStack()
        self._made_of: tuple[tuple[int, int | None], list[np.ndarray]] | None = None

    def bind(self, broadcast: ArrayState, job: EvalJob) -> None:
        """Bind the model that a job scores."""
        context, key = self.context, (job.round, job.client)
        arrays = [*_arrays_of(broadcast), *(job.state[name] for name in sorted(job.state))]
        if self._made_of is not None:
            before, old = self._made_of
            if before == key and len(old) == len(arrays) and all(map(_are_equal, old, arrays)):
                return
        self.release()
        trained = Trained(context.initial)
        if job.round > 0:
            trained = global_model(context, broadcast, job.round, job.state, job.client)
        self._binding.enter_context(bound(context, trained))
        self._made_of = key, arrays

    def release(self) -> None:
        """Unbind the model, if it is bound."""
        self._binding.close()
        self._made_of = None


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one is other or np.array_equal(one, other)


def _arrays_of(state: ArrayState) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    state.map(found.append)
    return found


def evaluate_chunk(model: EvaluatedModel, broadcast: ArrayState, job: EvalJob) -> EvalReport:
    """Compute the sums of the metrics of a model on a chunk of scored rows.

    Raises:
        RunError: The memory of the device, or this process's share of it, is too small.
    """
    context = model.context
    context.model.train(False)
    split, rows = rows_of(context, job.rows, job.client)
    work = f"evaluation of {job.rows} rows {job.start}:{job.stop} after round {job.round}"
    with memory_of(work, _LESS), torch.inference_mode():
        model.bind(broadcast, job)
        stored = split.batch(rows[job.start : job.stop])
        if not context.settings.evaluation.per_client:
            stored.pop("client", None)
        batch = context.task.prepare_batch(stored, context.device, context.dtype)
        outputs = context.task.predict(context.model, batch)
        scored = context.task.score(outputs, batch)
        sums = EvalSums.of(scored, context.task.metrics, batch)
    each: Arrays = {}
    if job.each:
        each["row"] = np.asarray(rows[job.start : job.stop], dtype=np.int64)
        each["score"] = scored.scores[context.task.primary_metric].cpu().numpy().astype(np.float32)
    memory = peak_memory(context.device)
    return EvalReport(job.round, job.start, sums, job.rows, job.client, each, memory)
