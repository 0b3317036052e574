"""Rules for the threshold of the prox (``method=trishul-rules``), in runs."""

from functools import cache

import numpy as np
import pytest
import torch
from method_runs import Recording, local_run, resumed, run, server_of
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.methods.base import method_class
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.svt import singular_values

ENTROPY = ("method=trishul-rules", "method.rule=entropy")
RULES = ("relative", "entropy", "continuation", "unknown", "edge", "sure")
#: One on the client, one with numbers of the server, one on the server.
CHANGED = ("unknown", "entropy", "edge")


@pytest.fixture(scope="module")
def without_prox(executor, tmp_path_factory):
    """``without_prox(*options)`` -> the shared numbers of a run whose prox is off."""

    @cache
    def made(*options):
        inline = executor("method.lam=0", *options)
        return run(inline, tmp_path_factory.mktemp("plain")).checkpoint.state.shared

    return made


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        *((rule, ()) for rule in RULES),
        *((rule, ("method.prox_on=change", "method.head_fraction=0.5")) for rule in CHANGED),
    ],
)
def test_every_rule_runs_acts_and_resumes_to_the_same_bytes(
    rule, more, executor, without_prox, tmp_path
):
    options = ("federation.local_steps=4", "federation.rounds=2", *more)
    whole, _ = resumed(executor("method=trishul-rules", f"method.rule={rule}", *options), tmp_path)
    assert not np.array_equal(without_prox(*options), whole.state.shared)
    for record in whole.records[1:]:
        assert record.diagnostics["svt_threshold"] > 0
        assert 0 < record.diagnostics["svt_energy_removed"] < 1


def test_a_relative_prox_every_k_steps_removes_what_k_would(executor):
    start = None
    for every in (1, 3):
        words = ("method=trishul-rules", "method.level=0.1", f"method.prox_every={every}")
        bench = executor(*words).bench
        if start is None:
            start = torch.randn(bench.initial.shape, generator=torch_rng(0, "x"))
        current = local_run(bench, start.clone())
        for step in range(1, 8):
            bench.method.after_steps([current], step, 7)
        layout = current.layout
        banks = zip(layout.core_banks(current.vector), layout.core_banks(start), strict=True)
        for after, before in banks:
            values = torch.linalg.svdvals(before)
            expected = (values - (1 - 0.9**7) * values[:, :1]).clamp(min=0)
            torch.testing.assert_close(torch.linalg.svdvals(after), expected, atol=2e-5, rtol=0)


def test_the_server_moves_the_shares_toward_the_target(executor, tmp_path):
    inline = executor(*ENTROPY, "method.level=0.2", "federation.rounds=3")
    server = server_of(inline, tmp_path)
    before = server.checkpoint.state.extra["log_share"]
    assert np.allclose(np.exp(before), 0.03)
    while not server.finished:
        server.step()
        if server.checkpoint.round == 1:
            first = server.checkpoint.state.extra["log_share"]
    rank = server.checkpoint.records[1].diagnostics["effective_rank"]
    cores = inline.bench.model.layout.core_banks(inline.bench.initial)
    expected = 0.5 * (rank / cores[0].shape[-1] - 0.2)
    assert float((first - before).mean()) == pytest.approx(expected, rel=1e-3)


def test_a_share_does_not_move_by_what_one_client_tells(executor, tmp_path):
    """In the ring, the sum of one client's numbers is what it sent: its core is withheld, too."""
    words = (*ENTROPY, "federation.compute=skewed-right", "federation.rounds=1")
    server = server_of(executor(*words, "server.sum=ring"), tmp_path)
    recording = Recording(server.executor)
    server.executor = recording
    before = server.checkpoint.state.extra["log_share"]
    while not server.finished:
        server.step()
    moved = server.checkpoint.state.extra["log_share"] != before
    count = sum(upload.active[: len(moved)].astype(int) for upload in recording.uploads)
    assert {1, 2} <= {*count.tolist()}
    np.testing.assert_array_equal(moved, count >= 2)


def test_continuation_falls_to_lambda(executor):
    words = ("method=trishul-rules", "method.rule=continuation", "method.lam=0.5")
    bench = executor(*words).bench
    found = []
    for number in range(1, 12):
        current = local_run(bench, bench.initial.clone())
        current.round = number
        (stack,) = bench.method.stacks(current)
        found.append(bench.method.threshold(current, stack, stack.change(), 1).tau)
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(0.01) and found[-1] == pytest.approx(0.5 * 0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "edge", "level": 0.1}, "level=0.1 has no effect with rule='edge'"),
        ({"rule": "relative", "lam": 0.1}, "lam=0.1 has no effect with rule='relative'"),
        ({"rule": "sure", "prox_every": 2}, "prox_every=2 has no effect with rule='sure'"),
        ({"rule": "entropy", "level": 1}, "level=1 must be below 1"),
        ({"rule": "relative", "level": 0}, "greater than 0"),
    ],
)
def test_what_a_rule_does_not_read_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        method_class("trishul-rules").Config(**fields)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method.rule=edge", "uploads.codec=int8"], "uploads: .*method.rule='edge'"),
        (["method.rule=sure", "server.optimizer=adam"], "server: .*method.rule='sure'"),
        (
            ["method.rule=sure", "federation.clients_per_round=1"],
            "clients_per_round=1 must be at least 2 with method='trishul-rules' .*'sure'",
        ),
        (
            ["method.rule=edge", "federation.clients_per_round=2", "devices.kind=lognormal"],
            "federation.quorum=0.5 lets the clock end a round with one of 2 clients",
        ),
        (["method.rule=entropy", "privacy.noise=1"], "privacy: method.rule='entropy'"),
    ],
)
def test_what_needs_more_than_the_mean_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        load_experiment(None, ["dataset=digits", "method=trishul-rules", *words])


def test_the_rule_by_sums_composes_with_codecs_and_server_optimizers(executor, tmp_path):
    words = (*ENTROPY, "uploads.codec=int8", "server.optimizer=sgd")
    assert run(executor(*words), tmp_path).finished
    ring = run(executor(*ENTROPY, "server.sum=ring"), tmp_path)
    plain = run(executor(*ENTROPY), tmp_path)
    shares = [s.checkpoint.state.extra["log_share"] for s in (ring, plain)]
    np.testing.assert_allclose(*shares, atol=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_spectra_before_and_after_are_recorded_wherever_a_rule_shrinks(small, inline_result, rule):
    words = ["method=trishul-rules", f"method.rule={rule}", "resources.backend=inline"]
    final = inline_result(small(*words, "evaluation.every=9"))
    found = final.checkpoint.spectra
    before, after, tau = (found[name] for name in ("before", "after", "threshold"))
    assert before.shape == after.shape == found["uploaded"].shape
    assert len(tau) == (1 if rule == "continuation" else len(before))
    assert (tau > 0).all() and (after >= 0).all() and (after < before).any()
    removed = np.minimum(before, tau[:, None])
    if rule == "edge":  # shrunk by less
        assert (before - after <= removed * (1 + 1e-9)).all()
    elif rule == "unknown":  # hard
        np.testing.assert_allclose(after, np.where(before > tau[:, None], before, 0))
    else:
        np.testing.assert_allclose(before - after, removed, rtol=1e-9, atol=1e-15)
    if rule in ("edge", "sure"):  # of the mean, which the server has shrunk
        state, layout = torch.from_numpy(final.checkpoint.state.shared), final.blueprint.layout
        (bank,) = layout.core_banks(torch.nn.functional.pad(state, (0, layout.size - len(state))))
        np.testing.assert_allclose(singular_values(bank), after, atol=1e-6 * after.max())
