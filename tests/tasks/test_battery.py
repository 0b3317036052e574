"""Contract checks of every registered task, including new ones."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from example_plugins import unloaded_after

from trishul_ray.adapters.model import Trained
from trishul_ray.contract import tasks
from trishul_ray.contract.tasks import DATA, MODELS, outputs_of
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import build_context
from trishul_ray.plugins.loading import load_plugin
from trishul_ray.tasks.base import task_classes

CASES = [
    (kind, reads, family)
    for (kind, reads), task in sorted(task_classes().items())
    for family in task.families
]
#: A task in a file with rows that it accepts.
EXAMPLE = ("rating", "text", "sequence-classification")


@pytest.fixture(scope="module", params=[*CASES, EXAMPLE], ids="-".join)
def context(request, tmp_path_factory):
    with unloaded_after():
        if request.param == EXAMPLE:
            load_plugin(Path(__file__).parent / "example_plugins" / "rating.py")
        yield made(request.param, tmp_path_factory)


def made(case, tmp_path_factory):
    kind, reads, family = case
    words = list(task_classes()[kind, reads].sample) or [f"dataset={DATA[reads]}"]
    words += [f"model={MODELS[family]}", f"task.kind={kind}"]
    words += ["model.init=random", f"storage.cache={tmp_path_factory.mktemp('cache')}"]
    experiment = load_experiment(None, [*words, "tracking.mlflow=false"])
    context = build_context(experiment, prepare_run(experiment))
    assert type(context.task) is task_classes()[kind, reads]
    context.model.bind(Trained(context.initial))
    return context


@pytest.mark.parametrize("check", tasks.PROMISES.values(), ids=lambda check: check.__name__)
def test_it_keeps_a_promise_of_the_contract(context, check):
    check(context)


def test_the_coordinator_needs_no_model(context):
    """Metrics are sent as bytes to a process that has neither task nor model."""
    sums = [context.task.evaluate(*reversed(outputs_of(context, range(8))))]
    code = (
        "import pickle, sys\n"
        f"metrics, sums = pickle.loads({pickle.dumps((context.task.metrics, sums))!r})\n"
        "heavy = {'torch', 'transformers', 'trishul_ray.tasks.base'} & set(sys.modules)\n"
        "print([metrics.merge(sums), sorted(heavy)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str([context.task.metrics.merge(sums), []])
