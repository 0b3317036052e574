"""The worked example of CONTRIBUTING.md is a whole method and runs."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.server import Server
from trishul_ray.loading import load_experiment
from trishul_ray.methods import registry
from trishul_ray.storage import Store

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
MODULE = "trishul_ray.methods.fedavgm"


@pytest.fixture
def example():
    """The guide's code as the module it says it is, for one test."""
    registry.method_names()  # all built-in files are found before
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    try:
        exec(compile(code, "CONTRIBUTING.md", "exec"), module.__dict__)
        yield code
    finally:
        registry._REGISTRY.pop("fedavgm", None)
        del sys.modules[MODULE]


def run(inline, folder):
    experiment = inline.bench.settings
    store = CheckpointStore(Store.open(str(folder)), experiment.id)
    server = Server(experiment, inline, store, "attempt")
    while not server.finished:
        server.step()
    return server


def test_it_is_short(example):
    assert len(example.splitlines()) < 60


def test_it_runs_and_without_momentum_it_is_fedavg(example, executor, tmp_path):
    assert "fedavgm" in registry.method_names()
    # SGD is continuous: Adam makes a whole step of a gradient's last bit.
    sgd = "optimizer.name=sgd"
    with_momentum = run(executor("method=fedavgm", sgd), tmp_path / "a")
    without = run(executor("method=fedavgm", "method.beta=0", sgd), tmp_path / "b")
    fedavg = run(executor("method=fedavg", sgd), tmp_path / "c")
    np.testing.assert_allclose(without.state["shared"], fedavg.state["shared"], atol=1e-6)
    assert state_digest(with_momentum.state) != state_digest(without.state)


def test_it_takes_the_rate_of_the_method_it_is_compared_with(example):
    rate = load_experiment(None, ["method=fedavgm"]).optimizer
    assert rate.lr == load_experiment(None, ["method=fedit"]).optimizer.lr
    assert "borrowed from fedit, for fedavgm" in rate.lr_source
