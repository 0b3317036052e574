"""Checks of a task on every family of backbones that it names, small and with random weights."""

import math
import pickle
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trishul_ray.adapters.model import Trained
from trishul_ray.contract.checks import Check, require, require_close
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.workbench import Workbench, build_workbench
from trishul_ray.tasks.base import task_classes

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
    """Return the checks of a task."""
    found, bench = [], cache(bench_of)  # of this content of a plug-in alone
    for (kind, reads), task in sorted(task_classes().items()):
        if kind == name:
            for family in task.families:
                case = (kind, reads, family)
                found += [
                    Check(f"{title} ({family})", partial(_run, check, bench, case))
                    for title, check in PROMISES.items()
                ]
    return found


def _run(check: Any, bench: Any, case: tuple[str, str, str], folder: Path) -> None:
    check(bench(*case))


def bench_of(kind: str, reads: str, family: str) -> Workbench:
    """Return a workbench of the task's sample, or of synthetic rows."""
    words = [*task_classes()[kind, reads].sample] or [f"dataset={DATA[reads]}"]  # type: ignore[index]
    words += [f"model={MODELS[family]}", f"task.kind={kind}", "model.init=random"]
    experiment = load_experiment(None, [*words, "tracking.mlflow=false"])
    bench = build_workbench(experiment, prepare_run(experiment))
    bench.model.bind(Trained(bench.initial))
    return bench


def outputs_of(bench: Workbench, rows: Iterable[int]) -> tuple[Any, Any]:
    """Return a prepared batch of test rows, and the model's outputs."""
    stored = bench.test.batch(np.array([*rows]))
    batch = bench.task.prepare_batch(stored, bench.device, bench.dtype)
    with torch.inference_mode():
        return batch, bench.task.predict(bench.model, batch)


def _evaluated(bench: Workbench, rows: Iterable[int]) -> Any:
    batch, outputs = outputs_of(bench, rows)
    return bench.task.evaluate(outputs, batch)


def batches_are_free(bench: Workbench) -> None:
    """The sums of batches give the metrics of all rows at once, in any order."""
    metrics = bench.task.metrics
    sums = [_evaluated(bench, part) for part in (range(0, 3), range(3, 12), range(12, 16))]
    found, whole = metrics.merge(sums), metrics.merge([_evaluated(bench, range(16))])
    require(metrics.merge(sums[::-1]) == found, "metrics depend on the order of batches")
    require(found.keys() == whole.keys() <= {*bench.task.metrics.names}, "undeclared metrics")
    for name, value in whole.items():
        close = math.isclose(found[name], value, rel_tol=1e-4, abs_tol=1e-6)
        require(close, f"{name} is {found[name]:.6g} in three batches and {value:.6g} in one")
    headline = found[bench.task.headline]
    require(
        0 <= headline <= 1, f"the headline {bench.task.headline} is {headline:g}, not in [0, 1]"
    )


def loss_is_reported(bench: Workbench) -> None:
    """``loss`` and the mean of ``score``'s losses are the same number."""
    batch, outputs = outputs_of(bench, range(8))
    trained = float(bench.task.loss(outputs, batch))
    reported = bench.task.metrics.merge([bench.task.evaluate(outputs, batch)])["loss"]
    close = math.isclose(trained, reported, rel_tol=1e-5)
    require(close, f"loss() is {trained:.6g}, and score() reports {reported:.6g}")


def padding_is_free(bench: Workbench) -> None:
    """A row has the same loss alone as among longer ones."""
    batch, outputs = outputs_of(bench, range(6))
    together = bench.task.score(outputs, batch).loss
    each = [outputs_of(bench, [row]) for row in range(6)]
    alone = torch.stack([bench.task.score(o, b).loss[0] for b, o in each])
    require_close(alone, together, "losses of rows alone and in a batch", atol=1e-5, rtol=1e-4)


def headline_is_a_mean(bench: Workbench) -> None:
    """The headline is the mean of the rows' scores, each in [0, 1]."""
    batch, outputs = outputs_of(bench, range(16))
    scores = bench.task.score(outputs, batch).scores[bench.task.headline].double()
    require(scores.shape == (16,), f"score() returns {tuple(scores.shape)} for 16 rows")
    require(bool(((scores >= 0) & (scores <= 1)).all()), "a score is not in [0, 1]")
    found = bench.task.metrics.merge([bench.task.evaluate(outputs, batch)])[bench.task.headline]
    close = math.isclose(float(scores.mean()), found, rel_tol=1e-6, abs_tol=1e-9)
    require(close, f"the headline {found:.6g} is not the mean {float(scores.mean()):.6g} of rows")


def rows_get_answers(bench: Workbench) -> None:
    """Every row gets a text."""
    stored = bench.test.batch(np.arange(5))
    batch = bench.task.prepare_batch(stored, bench.device, bench.dtype)
    with torch.inference_mode():
        answers = bench.task.respond(bench.model, batch, bench.info.classes)
    require(len(answers) == 5, f"respond() returns {len(answers)} for 5 rows")
    require(all(isinstance(answer, str) for answer in answers), "an answer is no text")


def can_be_sent(bench: Workbench) -> None:
    """It can be pickled, without its tokenizer."""
    stored = pickle.dumps(bench.task)
    require(
        len(stored) < 4000, f"it takes {len(stored)} bytes: keep what is large out of its fields"
    )
    again = pickle.loads(stored)  # noqa: S301
    same = type(again) is type(bench.task) and again.metrics == bench.task.metrics
    require(same, "it changes on the way to another process")
    keys = [each.encoder and each.encoder.key for each in (again, bench.task)]
    require(keys[0] == keys[1], "its encoder changes on the way to another process")


#: Promises of every task, by name.
PROMISES: dict[str, Callable[[Workbench], None]] = {
    "metrics do not depend on the batches": batches_are_free,
    "reports the loss that it trains": loss_is_reported,
    "gives a row the same loss alone": padding_is_free,
    "has a headline that is the mean over rows": headline_is_a_mean,
    "answers every row": rows_get_answers,
    "can be sent to another process": can_be_sent,
}
