"""Rules for the threshold of the prox, in runs."""

import numpy as np
import pytest
import torch
from method_runs import Recording, local_run, resumed, run, server_of
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.methods.trishul import TrishulConfig
from trishul_ray.rng import torch_rng

RULES = ("relative", "entropy", "continuation", "unknown", "edge", "sure")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("more", [(), ("method.prox_on=change", "method.head_fraction=0.5")])
def test_every_rule_runs_acts_and_resumes_to_the_same_bytes(rule, more, executor, tmp_path):
    options = ("federation.local_steps=8", "federation.rounds=3", *more)
    whole, _ = resumed(executor(f"method.lam_rule={rule}", *options), tmp_path)
    without = run(executor("method.lam=0", *options), tmp_path).checkpoint
    assert not np.array_equal(without.state.shared, whole.state.shared)
    for record in whole.records[1:]:
        assert record.diagnostics["svt_threshold"] > 0
        assert 0 < record.diagnostics["svt_energy_removed"] < 1


def test_the_default_has_the_id_and_the_records_it_had(executor):
    one = load_experiment(None, ["dataset=digits", "method=trishul"])
    assert one.id == load_experiment(None, ["dataset=digits", "method.lam_rule=fixed"]).id
    assert "lam_rule" not in one.identity()["method"]


def test_a_relative_prox_every_k_steps_removes_what_k_would(executor):
    start = None
    for every in (1, 3):
        words = ("method.lam_rule=relative", "method.lam_level=0.1", f"method.prox_every={every}")
        bench = executor(*words).bench
        if start is None:
            start = torch.randn(bench.initial.shape, generator=torch_rng(0, "x"))
        current = local_run(bench, start.clone())
        for step in range(1, 8):
            bench.method.after_step(current, step, 7)
        layout = current.layout
        banks = zip(layout.core_banks(current.vector), layout.core_banks(start), strict=True)
        for after, before in banks:
            values = torch.linalg.svdvals(before)
            expected = (values - (1 - 0.9**7) * values[:, :1]).clamp(min=0)
            torch.testing.assert_close(torch.linalg.svdvals(after), expected, atol=2e-5, rtol=0)


def test_the_server_moves_the_shares_toward_the_target(executor, tmp_path):
    inline = executor("method.lam_rule=entropy", "method.lam_level=0.2", "federation.rounds=3")
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
    words = ("method.lam_rule=entropy", "federation.compute=skewed-right", "federation.rounds=1")
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
    bench = executor("method.lam_rule=continuation", "method.lam=0.5").bench
    found = []
    for number in range(1, 12):
        current = local_run(bench, bench.initial.clone())
        current.round = number
        found += bench.method._strengths(current, 1, 4)[:1]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(0.01) and found[-1] == pytest.approx(0.5 * 0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lam_level": 0.1}, "lam_level=0.1 has no effect with lam_rule='fixed'"),
        (
            {"lam_rule": "edge", "lam_level": 0.1},
            "lam_level=0.1 has no effect with lam_rule='edge'",
        ),
        ({"lam_rule": "relative", "lam": 0.1}, "lam=0.1 has no effect with lam_rule='relative'"),
        ({"lam_rule": "sure", "prox_every": 2}, "prox_every=2 has no effect with lam_rule='sure'"),
        ({"lam_rule": "entropy", "lam_level": 1}, "lam_level=1 must be below 1"),
        ({"lam_rule": "relative", "lam_level": 0}, "greater than 0"),
    ],
)
def test_what_a_rule_does_not_read_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        TrishulConfig(name="trishul", **fields)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method.lam_rule=edge", "uploads.codec=int8"], "uploads: .*method.lam_rule='edge'"),
        (["method.lam_rule=sure", "server.optimizer=adam"], "server: .*method.lam_rule='sure'"),
        (["method.lam_rule=sure", "federation.clients_per_round=1"], "must be at least 2"),
        (["method.lam_rule=entropy", "privacy.noise=1"], "privacy: method.lam_rule='entropy'"),
    ],
)
def test_what_needs_more_than_the_mean_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        load_experiment(None, ["dataset=digits", "method=trishul", *words])


def test_the_rule_by_sums_composes_with_codecs_and_server_optimizers(executor, tmp_path):
    words = ("method.lam_rule=entropy", "uploads.codec=int8", "server.optimizer=sgd")
    assert run(executor(*words), tmp_path).finished
    ring = run(executor("method.lam_rule=entropy", "server.sum=ring"), tmp_path)
    plain = run(executor("method.lam_rule=entropy"), tmp_path)
    shares = [s.checkpoint.state.extra["log_share"] for s in (ring, plain)]
    np.testing.assert_allclose(*shares, atol=1e-3)
