"""What every registered task must satisfy; new tasks are picked up automatically."""

import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from newcomers import unloaded_after

from trishul_ray.adapters.model import Trained
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.workbench import build_workbench
from trishul_ray.plugins import load_plugin
from trishul_ray.tasks.base import task_classes

#: Rows of each kind, and a small model of each family.
DATA = {"image": "digits", "text": "synthetic/rte", "qa": "synthetic/questions"}
MODELS = {
    "image-classification": "vit-digits",
    "sequence-classification": "bert-tiny",
    "seq2seq-lm": "t5-tiny",
    "causal-lm": "llama-tiny",
}
CASES = [
    (kind, reads, family)
    for (kind, reads), task in sorted(task_classes().items())
    for family in task.families
]
#: A task of a file, which names rows that it accepts.
NEWCOMER = ("rating", "text", "sequence-classification")


@pytest.fixture(scope="module", params=[*CASES, NEWCOMER], ids="-".join)
def bench(request, tmp_path_factory):
    with unloaded_after():
        if request.param == NEWCOMER:
            load_plugin(Path(__file__).parent / "newcomers" / "rating.py")
        yield made(request.param, tmp_path_factory)


def made(case, tmp_path_factory):
    kind, reads, family = case
    words = list(task_classes()[kind, reads].sample) or [f"dataset={DATA[reads]}"]
    words += [f"model={MODELS[family]}", f"task.kind={kind}"]
    words += ["model.init=random", f"storage.cache={tmp_path_factory.mktemp('cache')}"]
    experiment = load_experiment(None, [*words, "tracking.mlflow=false"])
    bench = build_workbench(experiment, prepare_run(experiment))
    assert type(bench.task) is task_classes()[kind, reads]
    bench.model.bind(Trained(bench.initial))
    return bench


def outputs_of(bench, rows):
    """A prepared batch of test rows, and the model's outputs."""
    batch = bench.task.prepare_batch(bench.test.batch(np.array(rows)), bench.device, bench.dtype)
    with torch.inference_mode():
        return batch, bench.task.predict(bench.model, batch)


def test_metrics_are_those_declared_whatever_the_batches(bench):
    task, metrics = bench.task, bench.task.metrics
    parts = [range(0, 3), range(3, 12), range(12, 16)]
    sums = [task.evaluate(*reversed(outputs_of(bench, part))) for part in parts]
    found = metrics.merge(sums)
    assert metrics.merge(sums[::-1]) == found
    whole = metrics.merge([task.evaluate(*reversed(outputs_of(bench, range(16))))])
    assert found.keys() == whole.keys() <= set(task.metrics.names)
    assert whole == pytest.approx(found, rel=1e-4, abs=1e-6)
    assert metrics.names[0] == task.headline and 0 <= found[task.headline] <= 1
    with pytest.raises(ValueError, match="no rows"):
        metrics.merge([])


def test_the_reported_loss_is_the_trained_one(bench):
    batch, outputs = outputs_of(bench, range(8))
    loss = float(bench.task.loss(outputs, batch))
    assert math.isfinite(loss)
    reported = bench.task.metrics.merge([bench.task.evaluate(outputs, batch)])["loss"]
    assert loss == pytest.approx(reported, rel=1e-5)


def test_a_row_has_the_same_loss_alone(bench):
    """However its texts are padded."""
    together = bench.task.score(*reversed(outputs_of(bench, range(6)))).loss
    alone = [bench.task.score(*reversed(outputs_of(bench, [row]))).loss[0] for row in range(6)]
    torch.testing.assert_close(torch.stack(alone), together, rtol=1e-4, atol=1e-5)


def test_the_headline_is_the_mean_of_the_scores_of_the_rows(bench):
    batch, outputs = outputs_of(bench, range(16))
    scores = bench.task.score(outputs, batch).scores[bench.task.headline].double()
    assert scores.shape == (16,) and ((scores >= 0) & (scores <= 1)).all()
    headline = bench.task.metrics.merge([bench.task.evaluate(outputs, batch)])[bench.task.headline]
    assert float(scores.mean()) == pytest.approx(headline)


def test_every_row_gets_an_answer(bench):
    answers = bench.task.answers(outputs_of(bench, range(5))[1], bench.info.classes)
    assert len(answers) == 5 and all(isinstance(answer, str) for answer in answers)


def test_the_coordinator_needs_no_model(bench):
    """Metrics reach it as bytes, in a process that knows neither task nor model."""
    sums = [bench.task.evaluate(*reversed(outputs_of(bench, range(8))))]
    code = (
        "import pickle, sys\n"
        f"metrics, sums = pickle.loads({pickle.dumps((bench.task.metrics, sums))!r})\n"
        "heavy = {'torch', 'transformers', 'trishul_ray.tasks.base'} & set(sys.modules)\n"
        "print([metrics.merge(sums), sorted(heavy)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str([bench.task.metrics.merge(sums), []])


def test_it_can_be_sent_to_another_process(bench):
    stored = pickle.dumps(bench.task)
    assert len(stored) < 4000  # its tokenizer is not sent
    again = pickle.loads(stored)
    assert type(again) is type(bench.task) and again.metrics == bench.task.metrics
    if again.encoder is not None:
        assert again.encoder.key == bench.task.encoder.key
