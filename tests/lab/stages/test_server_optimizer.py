"""Server optimizers: their published formulas, unchanged entries, and compatible sections."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from method_runs import KINDS

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.server_optimizer import ServerConfig, server_step

ADAPTIVE = ["adagrad", "adam", "yogi"]
changes = arrays(np.float32, (6, 4), elements=st.floats(-4, 4, width=32))


def steps_of(options, rounds):
    """Return the steps of all rounds of fully trained entries."""
    moments, steps = {}, []
    for change in rounds:
        step, moments = server_step(change, moments, options, np.ones(len(change), dtype=bool))
        steps.append(step)
    return np.array(steps)


def by_entry(kind, lr, b1, b2, tau, entry):
    """Compute the steps of one entry over rounds, as published, in plain Python."""
    m, v, out = 0.0, tau**2, []
    for d in map(float, entry):
        if kind == "sgd":
            m = b1 * m + d
            out.append(lr * m)
            continue
        m = d if kind == "adagrad" else b1 * m + (1 - b1) * d
        if kind == "adagrad":
            v += d * d
        elif kind == "adam":
            v = b2 * v + (1 - b2) * d * d
        else:
            v -= (1 - b2) * d * d * ((v > d * d) - (v < d * d))
        out.append(lr * m / (v**0.5 + tau))
    return out


@pytest.mark.parametrize("kind", ["sgd", *ADAPTIVE])
@given(rounds=changes)
def test_every_entry_moves_as_published(kind, rounds):
    options = ServerConfig(optimizer=kind, lr=0.3)
    found = steps_of(options, rounds)
    for column in range(rounds.shape[1]):
        expected = by_entry(kind, 0.3, 0.9, 0.99, 1e-3, rounds[:, column])
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-9, atol=1e-12)


@given(change=arrays(np.float32, 5, elements=st.floats(-1, 1, width=32)))
def test_first_adam_step_has_closed_form(change):
    options = ServerConfig(optimizer="adam", lr=0.01)
    d = change.astype(np.float64)
    expected = 0.01 * 0.1 * d / (np.sqrt(0.99 * 1e-6 + 0.01 * d**2) + 1e-3)
    np.testing.assert_allclose(steps_of(options, [change])[0], expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", *ADAPTIVE])
def test_untrained_entries_and_their_moments_stay(kind):
    options, rng = ServerConfig(optimizer=kind), np.random.default_rng(0)
    change = rng.standard_normal(6).astype(np.float32)
    _, before = server_step(change, {}, options, np.ones(6, dtype=bool))
    trained = np.array([True, False] * 3)
    step, after = server_step(change, before, options, trained)
    assert (step[~trained] == 0).all() and (step[trained] != 0).all()
    for name, values in after.items():
        np.testing.assert_array_equal(values[~trained], before[name][~trained])
        assert kind == "adagrad" or (values[trained] != before[name][trained]).all()


@pytest.mark.parametrize("method", KINDS)
def test_sgd_at_rate_one_applies_the_mean(method, edge_run):
    # One round: Adam on the clients amplifies the rounding of a round in the next.
    options = [f"method={method}", "rounds=1"]
    plain = edge_run(*options)
    moved = edge_run(*options, "server.optimizer=sgd", "server.momentum=0")
    one, other = plain.checkpoint.state.shared, moved.checkpoint.state.shared
    np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-7)
    assert moved.checkpoint.records[1].uploaded_parameters == (
        plain.checkpoint.records[1].uploaded_parameters
    )


@pytest.mark.parametrize("kind", ["sgd", *ADAPTIVE])
def test_resumed_run_keeps_optimizer_moments(kind, edge_run, assert_same, tmp_path):
    options = ["method=trishul", f"server.optimizer={kind}"]
    again = edge_run(*options, stop=2)
    whole = edge_run(*options, f"storage.runs={tmp_path / 'whole'}")
    assert_same(again, whole)
    assert whole.checkpoint.stages["server"].keys() == again.checkpoint.stages["server"].keys()


def test_method_beyond_the_mean_is_rejected(small):
    with pytest.raises(InputError, match=r"server: needs a method .*trishul.*'flora'"):
        small("method=flora", "server.optimizer=adam")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["server.lr=0.1"], r"server: lr=0\.1 has no effect with optimizer='none'"),
        (["server.optimizer=sgd", "server.tau=0.1"], r"tau=0\.1 .* optimizer='sgd'"),
        (["server.optimizer=adamw"], r"server\.optimizer='adamw'"),
        (["server.optimizer=sgd", "method=fedsvd"], r"server\.optimizer='sgd' .* method='fedsvd'"),
        (["server.optimizer=adam", "server.lr=0"], r"server\.lr=0"),
    ],
)
def test_a_field_that_is_not_read_is_rejected(fields, message):
    with pytest.raises(InputError, match=message):
        load_experiment(None, fields)
