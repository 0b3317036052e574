"""Contract checks of every registered method, including new ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from example_plugins import EXAMPLES
from method_runs import KINDS, SINGLE, run, server_of
from pydantic import ValidationError

from trishul_ray.contract import methods
from trishul_ray.contract.checks import BrokenPromiseError
from trishul_ray.contract.methods import Shuffled, without_timings
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.worker.context import global_model
from trishul_ray.methods.base import method_class

METHODS = [*SINGLE, *EXAMPLES]
#: One method per algebra on the server: factors, cores and state; full matrices, their sum with a
#: base, decompositions of a step.
KINDS_OF_SERVERS = [
    *KINDS, "fedavg", "fedex", "flexlora", "flora", "fedsb", "fedsvd",
]  # fmt: skip
#: Checks of every method; "order" is checked with dropout below.
EVERY = [
    methods.starts_pretrained,
    methods.uploads_as_declared,
    methods.loss_falls,
    methods.call_repeats,
    methods.resumes,
    methods.exports,
]
#: Clients of ``local`` send nothing, so the global model stays unchanged.
EXCEPTIONS = {
    ("fedsb", methods.starts_pretrained),
    ("local", methods.exports),
}


def test_the_three_prongs_are_among_them():
    assert {"trishul", "ravan", "fedit"} <= set(METHODS)


@pytest.mark.parametrize("check", EVERY, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_it_keeps_a_promise_of_the_contract(name, check, executor, tmp_path):
    if (name, check) in EXCEPTIONS:
        pytest.skip("covered by a test below")
    check(tmp_path, name, executor)


@pytest.mark.parametrize("name", [n for n in SINGLE if method_class(n).aggregates_mean_only])
def test_mean_decides_the_next_state(name, executor, tmp_path):
    methods.mean_decides(tmp_path, name, executor)


def test_false_promise_about_the_mean_is_rejected(executor, tmp_path, monkeypatch):
    """HetLoRA weights uploads by their norms."""
    monkeypatch.setattr(method_class("hetlora"), "aggregates_mean_only", True)
    with pytest.raises(BrokenPromiseError, match="next states of two cohorts of one mean"):
        methods.mean_decides(tmp_path, "hetlora", executor)


def test_clients_of_local_move_no_global_model(executor, tmp_path):
    inline = executor("method=local")
    server = run(inline, tmp_path)
    assert [r.uploaded_parameters for r in server.checkpoint.records[1:]] == [0, 0]
    trained = global_model(inline.context, server.broadcast(), 2)
    assert torch.equal(methods.logits(inline.context, trained), methods.logits(inline.context))


def test_they_describe_themselves():
    for name in METHODS:
        methods.describes_itself(name)


def test_fedsb_starts_at_leading_singular_part(executor, tmp_path):
    """Fed-SB starts at W0 + U S V^T, the rank-r part of -eta0 sign(mean gradient)."""
    context = executor("method=fedsb").context
    server = server_of(executor("method=fedsb"), tmp_path)
    trained = global_model(context, server.broadcast(), 0)
    survey = server.survey()
    for layer, delta in context.model.deltas(replace(trained, base={})).items():
        step = -context.method.config.init_lr * np.sign(survey[layer].astype(np.float64))
        u, s, vt = np.linalg.svd(step)
        rank = trained.constants[layer]["basis_A"].shape[0]
        expected = (u[:, :rank] * s[:rank]) @ vt[:rank]
        np.testing.assert_allclose(delta.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_one_client_is_central_training(name, executor, tmp_path):
    if method_class(name).alters_mean:
        pytest.skip("its server moves beyond the mean")
    whole = {"flexlora": "method.truncate=false", "florist": "method.threshold=1"}
    methods.is_central(tmp_path, name, executor, [whole[name]] if name in whole else [])


def with_dropout(name, backbone):
    """Return options with dropout and, if a method has it, selection by gradient."""
    options = [f"method={name}", f"model.name={backbone}", "model.dropout=true", "budget=2"]
    options += ["adapter.dropout=0.2"]
    if "selection" in method_class(name).Config.model_fields:
        options += ["method.selection=gradient", "method.head_fraction=0.5"]
    return options


@pytest.mark.parametrize("name", METHODS)
def test_dropout_draws_from_the_clients_own_stream(name, executor, dropout_backbone, tmp_path):
    """Change the order of jobs, earlier jobs and torch's global stream: results are the same."""
    inline = executor(*with_dropout(name, dropout_backbone))
    torch.manual_seed(1)
    plain = run(inline, tmp_path, "plain")
    inline.context.model.train(True)  # An interrupted job may leave this mode.
    torch.manual_seed(2)
    again = run(Shuffled(inline, 2), tmp_path, "again")
    assert state_digest(again.checkpoint.state) == state_digest(plain.checkpoint.state)
    assert without_timings(again.checkpoint.records) == without_timings(plain.checkpoint.records)


def test_dropout_is_on_only_if_configured(executor, dropout_backbone, tmp_path):
    options = ["method=fedit", f"model.name={dropout_backbone}", "budget=2"]
    plain = run(executor(*options), tmp_path, "plain").checkpoint.records
    for option in ("model.dropout=true", "adapter.dropout=0.2"):
        dropped = run(executor(*options, option), tmp_path, option).checkpoint.records
        assert plain[0].scores == dropped[0].scores, "evaluation knows no dropout"
        assert plain[1].train_loss != dropped[1].train_loss


@pytest.fixture(scope="module")
def wide_backbone(vit_folder):
    """Return one block of the paper's width, where sums depend on the number of threads."""
    return vit_folder(width=768, layers=1)


@pytest.mark.parametrize("name", [name for name in KINDS_OF_SERVERS if name in METHODS])
def test_ambient_threads_change_nothing(name, executor, wide_backbone, tmp_path):
    """The caller's number of threads does not affect the run."""
    inline = executor(
        f"method={name}",
        f"model.name={wide_backbone}",
        "federation.rounds=1",
        "federation.local_steps=1",
        "evaluation.limit=8",
    )
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            server = run(inline, tmp_path, f"with{threads}")
            digests.add((state_digest(server.checkpoint.state), state_digest(server.broadcast())))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_invalid_hyperparameters_are_rejected():
    for name in METHODS:
        config = method_class(name).Config
        with pytest.raises(ValidationError, match="nonsense"):
            config(name=name, nonsense=1)
        for field, info in config.model_fields.items():
            if info.annotation in (int, float):
                for bad in (-1, float("nan"), "many"):
                    with pytest.raises(ValidationError, match=field):
                        config(name=name, **{field: bad})


@pytest.mark.parametrize("method", ["fedit", "flexlora", "flora"])
def test_rank_may_exceed_matrix_width(method, executor, tmp_path):
    """The factors then have directions that stay zero."""
    inline = executor(f"method={method}", "adapter.rank=80", "federation.rounds=1")
    server = run(inline, tmp_path)
    assert all(min(spec.d_out, spec.d_in) < 80 for spec in inline.context.model.specs)
    assert np.isfinite(server.checkpoint.state.shared).all()
