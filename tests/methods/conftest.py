"""Small real workbenches: digits, a random-weight ViT, no Ray."""

import functools

import pytest
from newcomers import FOLDER, unloaded_after

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.plugins import load_plugin

#: A run of seconds: random weights, so that nothing needs pretraining.
SMALL = [
    "model.init=random",
    "federation.clients=4",
    "federation.clients_per_round=3",
    "federation.rounds=2",
    "federation.local_steps=4",
    "federation.batch_size=8",
    "evaluation.limit=64",
    "tracking.mlflow=false",
    "resources.backend=inline",
    "optimizer.lr=0.01",
]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def executor(cache):
    """``executor("method=ravan", ...)`` -> an inline executor with its experiment."""

    @functools.cache
    def make(*overrides):
        experiment = load_experiment(None, [*SMALL, f"storage.cache={cache}", *overrides])
        return InlineExecutor(experiment, prepare_run(experiment))

    return make


@pytest.fixture(scope="package", autouse=True)
def newcomers():
    """The methods of ``newcomers/`` are known to the tests of methods."""
    with unloaded_after():
        for file in sorted(FOLDER.glob("*.py")):
            load_plugin(file)
        yield
