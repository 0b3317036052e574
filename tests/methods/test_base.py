"""Functions of the platform for several methods: constrained clients, counted downloads."""

import math
from dataclasses import replace

import numpy as np
import pytest
from example_plugins import EXAMPLES, unloaded_after
from hypothesis import given
from hypothesis import strategies as st
from method_runs import SINGLE, Recording, run, server_of

from trishul_ray.federation.messages import to_tensor
from trishul_ray.federation.worker.context import new_run
from trishul_ray.methods.base import build_method, method_class, register
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.proportions import exact_fraction


def takes_limits(name):
    """Return whether a method with its defaults supports constrained clients."""
    return build_method(method_class(name).Config(name=name)).takes_limits


LIMITED = [name for name in SINGLE if takes_limits(name)]


@pytest.mark.parametrize("name", LIMITED)
def test_limited_clients_send_less(executor, tmp_path, name):
    full = run(executor(f"method={name}"), tmp_path)
    limited = run(executor(f"method={name}", "federation.compute=skewed-right"), tmp_path)
    for before, after in zip(
        full.checkpoint.records[1:], limited.checkpoint.records[1:], strict=True
    ):
        assert after.uploaded_parameters < before.uploaded_parameters


@pytest.mark.parametrize("name", ["trishul", "ravan", "fedit", "ffalora"])
def test_seed_derived_tensors_are_not_downloaded(executor, tmp_path, name):
    server = run(executor(f"method={name}"), tmp_path)
    wire = server.spec.expected.lengths["shared"]
    assert [r.downloaded_parameters for r in server.checkpoint.records[1:]] == [3 * wire, 3 * wire]


def carried(server, context, broadcast, client):
    """Count the entries of the shared broadcast that reach a client and affect its trainables."""
    starts = []
    for seed in (1, 2):
        draw = np.random.default_rng(seed).normal(size=broadcast.shared.shape)
        run = new_run(context, replace(broadcast, shared=draw.astype(np.float32)), 1, client)
        kept = server.checkpoint.client_states.get(client, {})
        run.client_state = {name: to_tensor(value) for name, value in kept.items()}
        server.method.start(run, context.initial)
        starts.append(run.vector.clone())
    return int((starts[0] != starts[1]).sum())


@pytest.mark.parametrize(
    "options",
    # Truncated components stay on both sides: tests/lab/methods/test_florist.py counts them.
    [[f"method={name}"] for name in SINGLE if name != "florist"]
    + [
        [f"method={name}", "federation.compute=skewed-right"]
        for name in LIMITED
        if name != "florist"
    ]
    + [["method=flexlora", "method.truncate=false", "federation.compute=uniform"]]
    + [["method=fedex", "method.ship=factors"]]
    + [["method=frlora", "method.exact=true"] for name in SINGLE if name == "frlora"]
    + [["method=trishul", "method.allocation=gradient"]],
    ids=" ".join,
)
def test_downloads_are_what_the_broadcast_carries(executor, tmp_path, options):
    """Count per client the entries that reach it, and the folds of missed rounds into weights."""
    inline = executor(*options, "federation.rounds=4", "federation.clients=6")
    server = server_of(inline, tmp_path)
    lora, head = (server.spec.parameters[part] for part in ("adapter", "head"))
    name = server.method.config.name
    # Entries that a round adds to the frozen weights, as factors; 0 if the sum is sent dense.
    folded = {
        "flora": lambda uploaded, cohort: uploaded - cohort * head,
        "fedex ship": lambda uploaded, cohort: (cohort + 1) * lora,
        "federa": lambda uploaded, cohort: 0,  # each client computes it
        "frlora": lambda uploaded, cohort: lora,
        "frlora exact": lambda uploaded, cohort: uploaded - cohort * head,
    }.get(" ".join([name, *(o[7:].partition("=")[0] for o in options if o[:7] == "method.")]))
    received, changes = {}, [0]
    for number in (1, 2, 3, 4):
        broadcast, cohort = server.broadcast(), server.draw(number)
        base = sum(v.size for v in broadcast.base.values())
        frozen = sum(v.size for v in broadcast.survey.values())
        frozen += sum(v.size for found in broadcast.constants.values() for v in found.values())
        beside = sum(v.size for v in broadcast.extra.values())
        reach = [carried(server, inline.context, broadcast, c) for c in cohort]
        new = [client for client in cohort if client not in received]
        expected = sum(reach) + len(cohort) * beside + len(new) * frozen
        if name == "frlora":  # Clients store the factors of round 1.
            expected += (len(new) - len(cohort)) * lora
        for client in cohort:
            missed = sum(changes[max(1, received.get(client, 1)) :])
            expected += base if folded is None else min(missed, base)
        server.step()
        received |= dict.fromkeys(cohort, number)
        record = server.checkpoint.records[-1]
        assert record.downloaded_parameters == expected >= 0
        if folded is not None:
            changes.append(folded(record.uploaded_parameters, len(cohort)))


@given(st.integers(1, 400), st.integers(1, 1000), st.integers(1, 1000))
def test_exact_fraction_is_exact(count, first, second):
    """Compare with integer arithmetic on thousandths."""
    share = exact_fraction(count, first / 1000, second / 1000)
    assert share * 10**6 == count * first * second
    assert math.ceil(exact_fraction(5, 0.8, 0.75)) == 3


def test_mean_claim_is_inherited_only_with_uploads():
    class Renamed(FedIT):
        def after_step(self, run, step, steps):
            run.vector *= 0.5

    class Weighted(FedIT):
        def weight(self, upload, layout, weight):
            return 2 * weight

    class Promised(Weighted):
        aggregates_mean_only = True

    classes = (Renamed, Weighted, Promised)
    assert [each.aggregates_mean_only for each in classes] == [True, False, True]
    example_plugins = {name: method_class(name).aggregates_mean_only for name in EXAMPLES}
    assert example_plugins == {"fedmedian": False, "fedsam": True, "hira": True}


@pytest.fixture
def watching():
    """Register FedIT with hooks that record the client and the step."""
    with unloaded_after():

        @register("watching")
        class Watching(FedIT):
            """FedIT that records."""

            __module__ = FedIT.__module__

            summary, reference = "FedIT that looks", "none"

            def start(self, run, initial):
                super().start(run, initial)
                assert (run.client is not None) == run.training
                assert (run.step, run.loss) == (0, None)
                if run.training:
                    run.set_state([float(run.gradient(1))])

            def after_step(self, run, step, steps):
                assert run.step == step
                run.state_of(list).append(float(run.loss))

            def upload(self, run, steps):
                before, *losses = run.state_of(list)
                run.metrics |= {"client": run.client, "loss": sum(losses) / steps}
                run.metrics["first"] = losses[0] - before
                return super().upload(run, steps)

        yield Watching


@pytest.mark.parametrize("stacked", [1, 2])
def test_hooks_receive_client_step_and_loss(executor, tmp_path, watching, stacked):
    inline = executor("method=watching", f"federation.stacked={stacked}")
    recording = Recording(inline)
    server = server_of(recording, tmp_path)
    server.step()
    (record,) = server.checkpoint.records[1:]
    assert record.diagnostics["client"] == np.mean([u.client for u in recording.uploads])
    assert record.diagnostics["loss"] == pytest.approx(record.train_loss, rel=1e-6)
    assert record.diagnostics["first"] == pytest.approx(0, abs=1e-5)


def test_a_state_that_nobody_left_is_named(executor, tmp_path):
    inline = executor("method=fedit")
    broadcast = server_of(inline, tmp_path).broadcast()
    started = new_run(inline.context, broadcast, 1, 0)
    with pytest.raises(LookupError, match="no dict was set"):
        started.state_of(dict)
    with pytest.raises(LookupError, match="no mini-batches"):
        started.gradient(1)
