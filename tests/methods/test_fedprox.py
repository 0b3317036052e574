"""FedProx: FedAvg without the pull, and held back with it."""

import numpy as np
import pytest
from method_runs import same_run, server_of


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
