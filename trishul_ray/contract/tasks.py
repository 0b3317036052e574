"""Contract checks of a task, on a small random model of every family that it supports."""

import math
import pickle
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trishul_ray.adapters.model import Trained
from trishul_ray.contract.checks import Check, require, require_close, require_hooks
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import WorkerContext, build_context
from trishul_ray.tasks.base import Task, task_classes

#: Rows of each kind, and a small model of each family.
DATA = {
    "image": "digits",
    "text": "synthetic/rte",
    "qa": "synthetic/questions",
    "instruction": "synthetic/instructions",
}
MODELS = {
    "image-classification": "vit-digits",
    "sequence-classification": "bert-tiny",
    "seq2seq-lm": "t5-tiny",
    "causal-lm": "llama-tiny",
}


def checks_of(name: str) -> list[Check]:
    # The cache lives as long as the checks: another content of a plug-in needs a new one.
    found, context = [], cache(context_of)
    for (kind, reads), task in sorted(task_classes().items()):
        if kind == name:
            for family in task.families:
                case = (kind, reads, family)
                found += [
                    Check(f"{title} ({family})", partial(_run, check, context, case))
                    for title, check in PROMISES.items()
                ]
    return found


def _run(check: Any, context: Any, case: tuple[str, str, str], folder: Path) -> None:
    check(context(*case))


def context_of(kind: str, reads: str, family: str) -> WorkerContext:
    """Build a worker context on the task's sample, or on synthetic rows."""
    task = task_classes()[kind, reads]  # type: ignore[index]
    require_hooks(task, Task)
    words = [*task.sample] or [f"dataset={DATA[reads]}"]
    words += [f"model={MODELS[family]}", f"task.kind={kind}", "model.init=random"]
    experiment = load_experiment(None, [*words, "tracking.mlflow=false"])
    context = build_context(experiment, prepare_run(experiment))
    context.model.bind(Trained(context.initial))
    return context


def outputs_of(context: WorkerContext, rows: Iterable[int]) -> tuple[Any, Any]:
    """Return a prepared batch of test rows, and the outputs of the model."""
    stored = context.test.batch(np.array([*rows]))
    batch = context.task.prepare_batch(stored, context.device, context.dtype)
    with torch.inference_mode():
        return batch, context.task.predict(context.model, batch)


def _evaluated(context: WorkerContext, rows: Iterable[int]) -> Any:
    batch, outputs = outputs_of(context, rows)
    return context.task.evaluate(outputs, batch)


def batches_are_free(context: WorkerContext) -> None:
    """Check that metrics of several batches equal the metrics of all rows at once, in any order."""
    metrics = context.task.metrics
    sums = [_evaluated(context, part) for part in (range(0, 3), range(3, 12), range(12, 16))]
    found, whole = metrics.merge(sums), metrics.merge([_evaluated(context, range(16))])
    require(metrics.merge(sums[::-1]) == found, "metrics depend on the order of batches")
    require(found.keys() == whole.keys() <= {*context.task.metrics.names}, "undeclared metrics")
    for name, value in whole.items():
        close = math.isclose(found[name], value, rel_tol=1e-4, abs_tol=1e-6)
        require(close, f"{name} is {found[name]:.6g} over three batches, but {value:.6g} over one")
    metric = context.task.primary_metric
    require(0 <= found[metric] <= 1, f"primary metric {metric}={found[metric]:g} is not in [0, 1]")


def loss_is_reported(context: WorkerContext) -> None:
    """Check that ``loss`` equals the mean loss of ``score``."""
    batch, outputs = outputs_of(context, range(8))
    trained = float(context.task.loss(outputs, batch))
    reported = context.task.metrics.merge([context.task.evaluate(outputs, batch)])["loss"]
    close = math.isclose(trained, reported, rel_tol=1e-5)
    require(close, f"loss() is {trained:.6g}, but score() reports {reported:.6g}")


def padding_is_free(context: WorkerContext) -> None:
    """Check that the loss of a row is the same without other rows as next to longer rows."""
    batch, outputs = outputs_of(context, range(6))
    together = context.task.score(outputs, batch).loss
    each = [outputs_of(context, [row]) for row in range(6)]
    alone = torch.stack([context.task.score(o, b).loss[0] for b, o in each])
    require_close(alone, together, "losses of single rows and of a batch", atol=1e-5, rtol=1e-4)


def primary_metric_is_a_mean(context: WorkerContext) -> None:
    """Check that the primary metric is the mean of the rows' scores, each in [0, 1]."""
    batch, outputs = outputs_of(context, range(16))
    scores = context.task.score(outputs, batch).scores[context.task.primary_metric].double()
    require(scores.shape == (16,), f"score() returns {tuple(scores.shape)} for 16 rows")
    require(bool(((scores >= 0) & (scores <= 1)).all()), "a score is not in [0, 1]")
    found = context.task.metrics.merge([context.task.evaluate(outputs, batch)])[
        context.task.primary_metric
    ]
    close = math.isclose(float(scores.mean()), found, rel_tol=1e-6, abs_tol=1e-9)
    require(
        close,
        f"primary metric {found:.6g} is not the mean of the rows, {float(scores.mean()):.6g}",
    )


def rows_get_answers(context: WorkerContext) -> None:
    """Check that every row gets a text."""
    stored = context.test.batch(np.arange(5))
    batch = context.task.prepare_batch(stored, context.device, context.dtype)
    with torch.inference_mode():
        answers = context.task.respond(context.model, batch, context.info.classes)
    require(len(answers) == 5, f"respond() returns {len(answers)} for 5 rows")
    require(all(isinstance(answer, str) for answer in answers), "a response is not a string")


def can_be_sent(context: WorkerContext) -> None:
    """Check that the task can be pickled without its tokenizer."""
    stored = pickle.dumps(context.task)
    require(
        len(stored) < 4000,
        f"pickled size is {len(stored)} bytes: store no large objects in fields",
    )
    again = pickle.loads(stored)  # noqa: S301
    same = type(again) is type(context.task) and again.metrics == context.task.metrics
    require(same, "the task changes when pickled")
    keys = [each.encoder and each.encoder.key for each in (again, context.task)]
    require(keys[0] == keys[1], "its encoder changes when pickled")


#: Checks of every task, keyed by name.
PROMISES: dict[str, Callable[[WorkerContext], None]] = {
    "metrics do not depend on the batches": batches_are_free,
    "reports the loss that it trains": loss_is_reported,
    "gives a row the same loss without other rows": padding_is_free,
    "has a primary metric that is the mean over rows": primary_metric_is_a_mean,
    "answers every row": rows_get_answers,
    "can be sent to another process": can_be_sent,
}
