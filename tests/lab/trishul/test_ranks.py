"""TRISHUL with heads of different ranks on one matrix (``method.head_ranks=geometric``)."""

import re

import numpy as np
import pytest
import torch
from method_runs import Recording, run
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.trishul.mixed import MixedHeads
from trishul_ray.methods.trishul import TrishulConfig

GEOMETRIC = "method.head_ranks=geometric"


def test_ranks_halve_within_the_budget_of_equal_heads(executor):
    bench = executor(GEOMETRIC, "budget=4").bench
    for spec in bench.model.specs:
        adapter = bench.model.adapters[spec.name]
        assert isinstance(adapter, MixedHeads)
        assert list(adapter.ranks) == sorted(adapter.ranks, reverse=True)
        assert adapter.ranks[0] > 1.5 * adapter.ranks[1] > adapter.ranks[2]
    equal = executor("budget=4").describe({}).parameters["adapter"]
    used = executor(GEOMETRIC, "budget=4").describe({}).parameters["adapter"]
    assert 0.9 * equal < used <= equal


@pytest.mark.parametrize(
    "words", [["method.lam=1"], ["method.lam_rule=relative", "method.scalars=fixed"]]
)
def test_products_are_averaged_exactly_head_by_head(executor, tmp_path, words):
    recording = Recording(executor(GEOMETRIC, *words))
    server = run(recording, tmp_path)
    layout = server.blueprint.layout
    ranks = {layout.entry(n).shape[-1] for n in server.blueprint.wire if n.endswith(".core")}
    assert len(ranks) > 2
    last = server.checkpoint.records[-1]
    assert last.diagnostics["aggregation_error"] < 1e-6
    mean = np.mean([u.arrays.shared.astype(float) for u in recording.uploads[-3:]], axis=0)
    np.testing.assert_allclose(server.checkpoint.state.shared, mean, atol=1e-6)
    # A threshold that is larger than all singular values leaves nothing of a core of any rank.
    nothing = run(executor(GEOMETRIC, "method.lam=1e6", "federation.rounds=1"), tmp_path / "none")
    state = torch.from_numpy(nothing.checkpoint.state.shared.copy())
    named = nothing.method.named_tensors(layout, state)
    assert not any(value.any() for name, value in named.items() if name.endswith(".core"))


def test_a_run_knows_the_ranks_of_its_heads(executor):
    blueprint = executor(GEOMETRIC).describe({})
    assert {*blueprint.heads.values()} == {4} and blueprint.ranks.keys() == blueprint.heads.keys()
    assert all(isinstance(r, list) and len(r) == 4 for r in blueprint.ranks.values())
    assert all(isinstance(rank, int) for rank in executor().describe({}).ranks.values())


@pytest.mark.parametrize("name", ["private_heads=1", "reallocate_every=2", "head_fraction=0.5"])
def test_what_takes_all_heads_for_equal_is_refused(name):
    field, value = name.split("=")
    with pytest.raises(ValidationError, match=f"{field}=.* cannot be set with head_ranks='geom"):
        TrishulConfig(name="trishul", head_ranks="geometric", **{field: float(value)})


def test_what_it_needs_is_said():
    words = ["method=trishul", GEOMETRIC]
    for more, why in [
        ("adapter.init=random_normal", "adapter.init='random_normal' cannot be set with method"),
        ("federation.compute=uniform", "federation.compute='uniform' needs a method that supports"),
    ]:
        with pytest.raises(InputError, match=re.escape(why)):
            load_experiment(None, [*words, more])
    load_experiment(None, [*words, "federation.compute=uniform", "method.limits=ranks"])
    assert load_experiment(None, words[:1]).id != load_experiment(None, words).id
