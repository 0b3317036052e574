"""The example in docs/adding-a-method.md is a complete method and computes what it documents."""

import re
import sys
import types
from pathlib import Path

import pytest
from method_runs import run, server_of
from tolerances import rounding

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.methods import base as registry

GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"
MODULE = "trishul_ray.methods.feddyn"


@pytest.fixture
def example():
    """Load the example of the guide as a module, for one test."""
    registry.method_names()  # Register all built-in files first.
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    try:
        exec(compile(code, GUIDE.name, "exec"), module.__dict__)
        yield code
    finally:
        registry.METHODS.items.pop("feddyn", None)
        del sys.modules[MODULE]


def test_it_is_short(example):
    assert len(example.splitlines()) < 70


def test_example_depends_on_broadcast_and_kept_state(example, executor, tmp_path):
    """The first step of round 1 equals FedIT's; all later ones depend on the regularizer."""
    one = ["federation.rounds=1", "federation.local_steps=1"]
    start = server_of(executor("method=fedit", *one), tmp_path / "a").checkpoint.state.shared
    mean = run(executor("method=fedit", *one), tmp_path / "b").checkpoint.state.shared
    moved = run(executor("method=feddyn", *one), tmp_path / "c").checkpoint.state
    assert (start != mean).any()
    # Three of four clients took part, and all g were zero before.
    allowed = rounding(4, 1.0) * (abs(mean) + abs(start))
    assert (abs(moved.shared - (mean + 0.75 * (mean - start))) <= allowed).all()
    assert (abs(moved.extra["moved"] - 0.75 * (start - mean)) <= allowed).all()
    strong = run(executor("method=feddyn", "method.alpha=10"), tmp_path / "d")
    weak = run(executor("method=feddyn", "method.alpha=0.001"), tmp_path / "e")
    assert state_digest(strong.checkpoint.state) != state_digest(weak.checkpoint.state)


def test_rate_comes_from_the_compared_method(example):
    rate = load_experiment(None, ["method=feddyn"]).optimizer
    assert rate.lr == load_experiment(None, ["method=fedit"]).optimizer.lr
    assert "borrowed from method fedit, for feddyn" in rate.lr_source
