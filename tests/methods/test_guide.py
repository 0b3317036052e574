"""The example in CONTRIBUTING.md is a complete method and runs."""

import re
import sys
import types
from pathlib import Path

import pytest
from method_runs import run, server_of
from tolerances import rounding

from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.loading import load_experiment
from trishul_ray.methods import base as registry

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
MODULE = "trishul_ray.methods.fedavgm"


@pytest.fixture
def example():
    """Load the example of the guide as a module, for one test."""
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


def test_it_is_short(example):
    assert len(example.splitlines()) < 60


def test_it_runs_and_without_momentum_it_is_fedavg(example, executor, tmp_path):
    assert "fedavgm" in registry.method_names()
    with_momentum = run(executor("method=fedavgm"), tmp_path / "a")
    without = run(executor("method=fedavgm", "method.beta=0"), tmp_path / "b")
    assert state_digest(with_momentum.state) != state_digest(without.state)
    # One round: in the next, Adam's first steps would amplify the rounding of s + (mean - s).
    one = "federation.rounds=1"
    start = server_of(executor("method=fedavg", one), tmp_path / "d").state["shared"]
    mean = run(executor("method=fedavg", one), tmp_path / "e").state["shared"]
    moved = run(executor("method=fedavgm", "method.beta=0", one), tmp_path / "f").state["shared"]
    assert (start != mean).any()
    # A difference and a sum, each rounded once.
    allowed = rounding(2, 1.0) * (abs(mean - start) + abs(mean))
    assert (abs(moved - mean) <= allowed).all()


def test_it_takes_the_rate_of_the_method_it_is_compared_with(example):
    rate = load_experiment(None, ["method=fedavgm"]).optimizer
    assert rate.lr == load_experiment(None, ["method=fedit"]).optimizer.lr
    assert "borrowed from fedit, for fedavgm" in rate.lr_source
