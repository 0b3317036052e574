"""TRISHUL with core heads of different ranks, by block and by head (``method=trishul-ranks``)."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from method_runs import Recording, run
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.trishul.mixed import MixedHeads
from trishul_ray.methods.base import method_class

HALVED = "method=trishul-ranks"


def test_ranks_halve_within_the_budget_of_equal_heads(executor):
    bench = executor(HALVED, "budget=4").bench
    for spec in bench.model.specs:
        adapter = bench.model.adapters[spec.name]
        assert isinstance(adapter, MixedHeads)
        assert list(adapter.ranks) == sorted(adapter.ranks, reverse=True)
        assert adapter.ranks[0] > 1.5 * adapter.ranks[1] > adapter.ranks[2]
    equal = executor("budget=4").describe({}).parameters["adapter"]
    used = executor(HALVED, "budget=4").describe({}).parameters["adapter"]
    assert 0.9 * equal < used <= equal


@pytest.mark.parametrize(
    "words", [["method.lam=1"], ["method=trishul-ranks-rules", "method.scalars=fixed"]]
)
def test_products_are_averaged_exactly_head_by_head(executor, tmp_path, words):
    recording = Recording(executor(HALVED, *words))
    server = run(recording, tmp_path)
    layout = server.blueprint.layout
    ranks = {layout.entry(n).shape[-1] for n in server.blueprint.wire if n.endswith(".core")}
    assert len(ranks) > 2
    last = server.checkpoint.records[-1]
    assert last.diagnostics["aggregation_error"] < 1e-6
    mean = np.mean([u.arrays.shared.astype(float) for u in recording.uploads[-3:]], axis=0)
    np.testing.assert_allclose(server.checkpoint.state.shared, mean, atol=1e-6)
    # A threshold that is larger than all singular values leaves nothing of a core of any rank.
    nothing = run(executor(HALVED, "method.lam=1e6", "federation.rounds=1"), tmp_path / "none")
    state = torch.from_numpy(nothing.checkpoint.state.shared.copy())
    named = nothing.method.named_tensors(layout, state)
    assert not any(value.any() for name, value in named.items() if name.endswith(".core"))


def test_a_run_knows_the_ranks_of_its_heads(executor):
    blueprint = executor(HALVED).describe({})
    assert {*blueprint.heads.values()} == {4} and blueprint.ranks.keys() == blueprint.heads.keys()
    assert all(isinstance(r, list) and len(r) == 4 for r in blueprint.ranks.values())
    assert all(isinstance(rank, int) for rank in executor().describe({}).ranks.values())


def test_what_takes_all_heads_for_equal_is_refused():
    with pytest.raises(ValidationError, match="cannot be set with ranks_by='head', whose heads"):
        method_class("trishul-ranks").Config(ranks_by="head", head_fraction=0.5)
    for name in ("trishul-private-ranks", "trishul-ranks-moving"):
        for fields in ({}, {"ranks_by": "head"}):
            with pytest.raises(
                ValidationError, match=f"cannot be set with method='{name}': .*; set .*limits=ranks"
            ):
                method_class(name).Config(**fields)


def test_no_difference_at_all_is_the_method_that_it_extends():
    with pytest.raises(
        ValidationError, match="ranks_by='none' with limits='heads' is method=trishul"
    ):
        method_class("trishul-ranks").Config(ranks_by="none")


def test_what_it_needs_is_said():
    words = [HALVED]
    for more, why in [
        ("adapter.init=random_normal", "adapter.init='random_normal' cannot be set with method"),
        ("federation.compute=uniform", "federation.compute='uniform' needs a method that supports"),
    ]:
        with pytest.raises(InputError, match=re.escape(why)):
            load_experiment(None, [*words, more])
    both = ["federation.compute=uniform", "method.limits=ranks", "method.ranks_by=head"]
    assert load_experiment(None, [*words, *both]).method.differ_by == "head"
    assert load_experiment(None, [*words, *both[:2]]).method.differ_by == "none"


@pytest.mark.parametrize("words", [("budget=4",), ("budget=2", "adapter.overflow=independent")])
def test_ranks_are_by_the_score_of_a_block_within_the_budget(executor, words):
    words = ("model=vit-digits", *words)
    bench = executor("method=trishul-ranks", "method.ranks_by=block", *words).bench
    number = {block: i for i, block in enumerate(bench.site.blocks())}
    layers = {layer.name: layer for layer in bench.site.layers}
    norms = {name: 4.0 ** number[layer.block] for name, layer in layers.items()}
    adapters = bench.method.adapters(replace(bench.site, squared_norms=norms))
    equal = executor("method.allocation=uniform", *words).describe({}).parameters["adapter"]
    used = sum(adapters[name].num_parameters(layer) for name, layer in layers.items())
    assert 0.9 * equal < used <= equal
    ranks = {layer.block: adapters[name].rank for name, layer in layers.items()}
    assert [*ranks.values()] == sorted(ranks.values()) and len({*ranks.values()}) > 2
    for name, layer in layers.items():
        assert adapters[name].rank == ranks[layer.block] and adapters[name].heads == 4
        if len(words) == 1:  # all heads are orthogonal
            assert 4 * adapters[name].rank <= min(layer.d_out, layer.d_in)


def test_equal_scores_have_the_equal_ranks_of_uniform_heads(executor, tmp_path):
    words = ("budget=4", "federation.rounds=1")  # random weights: norms are all but the same
    ranks = run(
        executor("method=trishul-ranks", "method.ranks_by=block", *words), tmp_path
    ).checkpoint
    uniform = run(executor("method.allocation=uniform", *words), tmp_path)
    assert {*uniform.blueprint.ranks.values()} == {11}  # floor of sqrt(4 (64 + 64) / 4 heads)
    equal = uniform.checkpoint
    assert torch.equal(*(torch.from_numpy(c.state.shared.copy()) for c in (ranks, equal)))


def test_a_preset_with_other_bases_is_refused_with_the_words_that_mend_it():
    words = ["dataset=synthetic/sst2", "method=trishul-ranks"]
    with pytest.raises(InputError, match=r"bases are orthonormal; .*: write ") as caught:
        load_experiment(None, words)
    bases, _, by = str(caught.value).rpartition(": write ")[2].partition(" or ")
    assert load_experiment(None, [*words, bases]).adapter.init == "gram_schmidt"
    assert load_experiment(None, [*words, by]).adapter.init == "random_normal"
