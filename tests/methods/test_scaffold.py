"""SCAFFOLD: control variates of clients and server."""

import numpy as np
import pytest
from method_runs import Recording, run, same_run, server_of

from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.worker.local import train_client


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_scaffold_in_its_first_round_is_fedit(executor, tmp_path, optimizer):
    """All variates are zero, so nothing is corrected."""
    options = [f"optimizer.name={optimizer}", "federation.rounds=1"]
    same_run(executor, tmp_path, ["method=scaffold", *options], ["method=fedit", *options])


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_scaffold_server_variate_averages_all_clients(executor, tmp_path, weighting):
    """c changes by 1/N times the plain sum of the changes, for any weights of the trainables."""
    words = ["method=scaffold", f"federation.weighting={weighting}", "partition.variant=per-label"]
    recording = Recording(executor(*words))
    server = run(recording, tmp_path)
    assert len({u.rows for u in recording.uploads}) > 1
    total = sum(
        state["control"].astype(np.float64) for state in server.checkpoint.client_states.values()
    )
    np.testing.assert_allclose(
        server.checkpoint.state.extra["control"], total / 4, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    "words",
    [
        ["uploads.codec=int8"],
        ["uploads.codec=topk", "uploads.density=0.05"],
        ["uploads.codec=topk", "uploads.density=0.05", "uploads.error_feedback=true"],
        ["privacy.noise=0", "privacy.clip=0.01", "privacy.sampling=fixed"],
    ],
)
def test_client_variates_follow_their_transmitted_changes(executor, tmp_path, words):
    """c is the mean of all c_i, even if a codec or a clip norm alters the changes."""
    pytest.importorskip("trishul_ray.lab")
    inline = executor("method=scaffold", "federation.rounds=4", *words)
    kept = run(inline, tmp_path).checkpoint
    mean = sum(state["control"].astype(np.float64) for state in kept.client_states.values()) / 4
    scale = np.abs(mean).max()
    np.testing.assert_allclose(kept.state.extra["control"], mean, rtol=0, atol=1e-5 * scale)


def variate(executor, *words):
    """Return the control variate of one client after round 1, which has no correction."""
    inline = executor("method=scaffold", *words)
    context = inline.context
    start = context.method.initial_state(context.model.layout, context.initial, {})
    with deterministic(context.settings):
        _, report = train_client(context, start.map(to_array), TrainJob(1, 0))
    return report.state["control"].astype(np.float64)


def test_scaffold_variate_approximates_mean_gradient(executor):
    """At a tiny learning rate, it does not depend on optimizer or option."""
    found = variate(executor, "optimizer.name=sgd", "optimizer.lr=1e-7")
    exact = variate(executor, "optimizer.name=adam", "optimizer.lr=1e-9")
    assert np.linalg.norm(exact) > 0
    assert np.linalg.norm(found - exact) < 1e-4 * np.linalg.norm(exact)
    first = variate(executor, "optimizer.name=sgd", "optimizer.lr=1e-7", "method.option=I")
    np.testing.assert_allclose(found, first, rtol=1e-3, atol=1e-6)


def test_scaffold_options_differ_where_they_should(executor):
    """Option II is the mean raw gradient under plain SGD and not a gradient under Adam."""
    for optimizer, equal in (("sgd", True), ("adam", False)):
        words = [f"optimizer.name={optimizer}", "optimizer.lr=0.05"]
        auto = variate(executor, *words)
        literal = variate(executor, *words, "method.option=II")
        first = variate(executor, *words, "method.option=I")
        assert (np.linalg.norm(literal - auto) < 1e-3 * np.linalg.norm(auto)) == equal
        assert np.linalg.norm(first - auto) > 1e-2 * np.linalg.norm(auto)


def test_scaffold_server_step(executor, tmp_path):
    """The server steps eta_g times as far from the broadcast as the mean."""
    moved = {}
    for rate in (1, 0.5):
        server = server_of(executor("method=scaffold", f"method.server_lr={rate}"), tmp_path)
        start = server.checkpoint.state.shared
        server.step()
        moved[rate] = server.checkpoint.state.shared - start
    np.testing.assert_allclose(moved[0.5], 0.5 * moved[1], atol=1e-6)


def test_the_classification_head_may_stay_uncorrected(executor, tmp_path):
    """Its variates stay zero, and without drift of the adapter it is averaged as in FedIT."""
    words = ["method=scaffold", "method.corrects=adapter"]
    server = run(executor(*words), tmp_path)
    layout = executor(*words).context.model.layout
    control = server.checkpoint.state.extra["control"]
    for entry in layout.entries:
        part = control[entry.offset : entry.offset + entry.numel]
        assert np.any(part) == (entry.kind != "classifier"), entry.name
