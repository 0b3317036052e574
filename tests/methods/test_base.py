"""What the platform does alike for several methods: limited clients, counted downloads."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from method_runs import run, server_of
from newcomers import NEWCOMERS

from trishul_ray.federation.messages import to_tensor
from trishul_ray.federation.workbench import new_run
from trishul_ray.methods.base import exact_share, method_class, method_names
from trishul_ray.methods.fedit import FedIT

LIMITED = [name for name in method_names() if method_class(name).takes_limits]


@pytest.mark.parametrize("name", LIMITED)
def test_limited_clients_send_less(executor, tmp_path, name):
    full = run(executor(f"method={name}"), tmp_path)
    limited = run(executor(f"method={name}", "federation.compute=skewed-right"), tmp_path)
    for before, after in zip(
        full.checkpoint.records[1:], limited.checkpoint.records[1:], strict=True
    ):
        assert after.uploaded_parameters < before.uploaded_parameters


@pytest.mark.parametrize("name", ["trishul", "ravan", "fedit", "ffalora"])
def test_what_is_drawn_from_the_seed_is_not_downloaded(executor, tmp_path, name):
    server = run(executor(f"method={name}"), tmp_path)
    wire = server.blueprint.expected.lengths["shared"]
    assert [r.downloaded_parameters for r in server.checkpoint.records[1:]] == [3 * wire, 3 * wire]


def carried(server, bench, broadcast, client):
    """How many entries of the shared broadcast reach a client: those that move what it trains."""
    starts = []
    for seed in (1, 2):
        draw = np.random.default_rng(seed).normal(size=broadcast.shared.shape)
        run = new_run(bench, replace(broadcast, shared=draw.astype(np.float32)), 1, client)
        kept = server.checkpoint.client_states.get(client, {})
        run.client_state = {name: to_tensor(value) for name, value in kept.items()}
        server.method.start(run, bench.initial)
        starts.append(run.vector.clone())
    return int((starts[0] != starts[1]).sum())


@pytest.mark.parametrize(
    "options",
    [[f"method={name}"] for name in method_names()]
    + [[f"method={name}", "federation.compute=skewed-right"] for name in LIMITED]
    + [["method=flexlora", "method.truncate=false", "federation.compute=uniform"]]
    + [["method=trishul", "method.allocation=gradient"]],
    ids=" ".join,
)
def test_downloads_are_what_the_broadcast_carries(executor, tmp_path, options):
    """By client: the entries that reach it, and what the last round folded into frozen weights."""
    inline = executor(*options, "federation.rounds=3", "federation.clients=6")
    server = server_of(inline, tmp_path)
    folded = {"fedex": "dense", "flexlora": "dense", "flora": "stack", "frlora": None}
    known, stack = set(), 0
    for number in (1, 2, 3):
        broadcast, cohort = server.broadcast(), server.cohort(number)
        base = sum(v.size for v in broadcast.base.values())
        frozen = sum(v.size for v in broadcast.survey.values())
        frozen += sum(v.size for found in broadcast.constants.values() for v in found.values())
        beside = sum(v.size for v in broadcast.extra.values())
        reach = [carried(server, inline.bench, broadcast, c) for c in cohort]
        expected = sum(reach) + len(cohort) * beside + len(set(cohort) - known) * frozen
        if base:
            what = folded[server.method.config.name]
            expected += len(cohort) * {"dense": base, "stack": stack, None: 0}[what]
        server.step()
        known |= set(cohort)
        record = server.checkpoint.records[-1]
        assert record.downloaded_parameters == expected >= 0
        stack = record.uploaded_parameters - len(cohort) * server.blueprint.parameters["head"]


@given(st.integers(1, 400), st.integers(1, 1000), st.integers(1, 1000))
def test_exact_share_is_exact(count, first, second):
    """Compare with integer arithmetic on thousandths."""
    share = exact_share(count, first / 1000, second / 1000)
    assert share * 10**6 == count * first * second
    assert math.ceil(exact_share(5, 0.8, 0.75)) == 3


def test_a_promise_about_the_mean_is_inherited_only_with_what_is_averaged():
    class Renamed(FedIT):
        def after_step(self, run, step, steps):
            run.vector *= 0.5

    class Weighted(FedIT):
        def weight(self, upload, layout, weight):
            return 2 * weight

    class Promised(Weighted):
        mean_is_enough = True

    assert [each.mean_is_enough for each in (Renamed, Weighted, Promised)] == [True, False, True]
    newcomers = {name: method_class(name).mean_is_enough for name in NEWCOMERS}
    assert newcomers == {"fedmedian": False, "fedsam": True}
