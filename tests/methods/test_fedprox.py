"""FedProx: equal to FedAvg without the proximal term, and closer to the broadcast with it."""

import numpy as np
import pytest
from example_plugins import unloaded_after
from method_runs import same_run, server_of

from trishul_ray.methods.base import register
from trishul_ray.methods.fedprox import Anchor
from trishul_ray.methods.trishul import Trishul


@pytest.mark.parametrize("adapter", ["lora", "ffa", "multihead"])
def test_fedprox_without_pull_is_fedavg(executor, tmp_path, adapter):
    kind = f"method.adapter={adapter}"
    same_run(
        executor,
        tmp_path,
        ["method=fedprox", kind, "method.mu=0"],
        ["method=fedavg", kind],
    )


def test_fedprox_holds_back(executor, tmp_path):
    moved = {}
    for mu in (0, 100):
        inline = executor(
            "method=fedprox", f"method.mu={mu}", "optimizer.name=sgd", "optimizer.lr=0.005"
        )
        server = server_of(inline, tmp_path)
        start = server.checkpoint.state.shared
        server.step()
        moved[mu] = np.linalg.norm(server.checkpoint.state.shared - start)
    assert moved[100] < 0.9 * moved[0]


@pytest.fixture
def pulled_trishul():
    """Register TRISHUL with the proximal term: both store state for later hooks."""
    with unloaded_after():

        @register("pulledtrishul")
        class PulledTrishul(Trishul):
            """TRISHUL that pulls back to the broadcast."""

            __module__ = Trishul.__module__

            summary, reference = "TRISHUL with a pull", "none"

            def start(self, run, initial):
                super().start(run, initial)
                run.set_state(Anchor(run.vector.clone()))

            def before_step(self, run):
                run.grad.add_(run.vector - run.state_of(Anchor).vector, alpha=100)

        yield PulledTrishul


def test_subclass_extends_client_state(executor, tmp_path, pulled_trishul):
    sgd = ["optimizer.name=sgd", "optimizer.lr=0.005", "federation.rounds=1"]
    moved, removed = {}, {}
    for name in ("trishul", "pulledtrishul"):
        server = server_of(executor(f"method={name}", *sgd), tmp_path)
        start = server.checkpoint.state.shared
        server.step()
        moved[name] = np.linalg.norm(server.checkpoint.state.shared - start)
        removed[name] = server.checkpoint.records[-1].diagnostics["svt_energy_removed"]
    assert moved["pulledtrishul"] < 0.9 * moved["trishul"]
    assert min(removed.values()) > 0, "the prox is applied in both"
