"""Small real workbenches: digits, a random-weight ViT, no Ray."""

import functools

import pytest
from newcomers import FOLDER, unloaded_after
from tiny_run import SMALL

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.plugins import load_plugin


@pytest.fixture(scope="session")
def executor(cache):
    """``executor("method=ravan", ...)`` -> an inline executor with its experiment."""

    @functools.cache
    def make(*overrides):
        here = ["federation.rounds=2", "resources.backend=inline", f"storage.cache={cache}"]
        experiment = load_experiment(None, [*SMALL, *here, *overrides])
        return InlineExecutor(experiment, prepare_run(experiment))

    return make


@pytest.fixture(scope="package", autouse=True)
def newcomers():
    """The methods of ``newcomers/`` are known to the tests of methods."""
    with unloaded_after():
        for file in sorted(FOLDER.glob("*.py")):
            load_plugin(file)
        yield
