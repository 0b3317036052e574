"""Clients weighted by label tokens: the average of their steps is the central step."""

import numpy as np
import pytest
from method_runs import resumed, run

from trishul_ray.errors import InputError
from trishul_ray.federation.prepare import prepare_run

ROWS = (
    "dataset=synthetic/instructions", "model.name=llama-tiny", "method=fedit", "optimizer.name=sgd",
    "optimizer.lr=1.0", "partition.kind=iid", "data.train_limit=16", "federation.rounds=1",
    "federation.local_steps=1", "evaluation.limit=8",
)  # fmt: skip
TWO = ("federation.clients=2", "federation.clients_per_round=2", "federation.batch_size=8")
ONE = ("federation.clients=1", "federation.clients_per_round=1", "federation.batch_size=16")


def test_average_equals_central_step_for_matching_weights(executor, tmp_path):
    def moved(*overrides):
        server = run(executor(*ROWS, *overrides), tmp_path)
        before = run(executor(*ROWS, *ONE, "optimizer.lr=1e-30"), tmp_path).checkpoint.state.shared
        return server.checkpoint.state.shared - before

    def differ(loss, weighting):
        whole = moved(*ONE, f"task.loss={loss}")
        mean = moved(*TWO, f"task.loss={loss}", f"federation.weighting={weighting}")
        return np.linalg.norm(mean - whole) / np.linalg.norm(whole)

    tokens = prepare_run(
        executor(*ROWS, *TWO, "federation.weighting=tokens").context.settings
    ).tokens
    assert tokens[0] != tokens[1] and len(tokens) == 2
    assert differ("tokens", "tokens") < 1e-5
    assert differ("rows", "size") < 1e-5
    assert differ("tokens", "size") > 1e-3


def test_stopped_run_resumes_with_same_bytes(executor, tmp_path):
    resumed(executor(*ROWS, *TWO, "federation.weighting=tokens", "federation.rounds=3"), tmp_path)


def test_a_task_without_label_tokens_is_rejected(small):
    with pytest.raises(InputError, match=r"weighting='tokens'.*allowed: uniform, size"):
        prepare_run(small("federation.weighting=tokens"))
