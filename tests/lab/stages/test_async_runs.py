"""Asynchronous runs: models against float64 references, bytes, rejected experiments."""

import os
import signal

import numpy as np
import pytest
from contract.digests import outcome
from method_runs import BY_MEAN, resumed, run, server_of

from trishul_ray.contract.methods import without_timings
from trishul_ray.errors import InputError
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.messages import TrainJob
from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.lab.clock.asynchronous import Asynchronous
from trishul_ray.methods.base import method_class
from trishul_ray.methods.base.messages import State

CLOCK = ["devices.kind=lognormal", "devices.speed=1e8", "federation.clients=8"]
EQUAL = [*CLOCK, "devices.speed_spread=0", "devices.network_spread=0"]
BUFFERED = [*CLOCK, "async.kind=fedbuff", "federation.rounds=5"]
IMMEDIATE = [*CLOCK, "async.kind=fedasync", "federation.clients_per_round=1", "federation.rounds=6"]


def stored_states(server):
    """Run to the end; return the state before round 1 and after each round."""
    states = [server.checkpoint.state]
    while not server.finished:
        server.step()
        if server.checkpoint.round == len(states):
            states.append(server.checkpoint.state)
    return states


#: Methods whose next state follows from the mean change, without the rejected methods.
METHODS = [
    name
    for name in BY_MEAN
    if name != "fedsvd" and not (method_class(name).mirrored or method_class(name).personal)
]


@pytest.mark.parametrize("method", METHODS)
def test_equal_speeds_give_the_synchronous_bytes(method, executor, tmp_path):
    words = [f"method={method}", *EQUAL]
    plain = run(executor(*words), tmp_path).checkpoint
    words += ["async.kind=fedbuff", "async.concurrency=3", "federation.clients_per_round=3"]
    found = run(executor(*words), tmp_path).checkpoint
    for one, other in zip(plain.records, found.records, strict=True):
        assert one.state_sha256 == other.state_sha256
        assert one.clients == other.clients and one.scores == other.scores
        assert one.downloaded_parameters == other.downloaded_parameters
        assert other.stages.get("simulated_seconds") == one.stages.get("simulated_seconds")


@pytest.mark.parametrize(
    "words",
    [
        [*BUFFERED],
        [*BUFFERED, "server.optimizer=sgd", "server.momentum=0"],
        [*BUFFERED, "federation.weighting=size", "async.weight=constant"],
        [*IMMEDIATE, "async.concurrency=4"],
        [*IMMEDIATE, "async.concurrency=4", "server.optimizer=sgd", "server.momentum=0"],
    ],
)
def test_models_follow_the_published_updates(words, executor, tmp_path, monkeypatch):
    """Each upload is trained again from the model of its version; the update is in float64."""
    started = []
    real = Asynchronous.cohort

    def watched(stage, number, cohort):
        found = real(stage, number, cohort)
        early = {client: start.round for start in found.earlier for client in start.clients}
        started.append({client: early.get(client, number) for client in found.clients})
        return found

    monkeypatch.setattr(Asynchronous, "cohort", watched)
    inline = executor("method=fedit", *words)
    states = stored_states(server := server_of(inline, tmp_path))
    options = inline.experiment.stages["async"]
    assert max(max(number - r for r in each.values()) for number, each in enumerate(started, 1)) > 1
    for number, each in enumerate(started, 1):
        now = states[number - 1].shared.astype(np.float64)
        total, weights = np.zeros_like(now), 0.0
        for client, start in each.items():
            broadcast = states[start - 1]
            ((upload, _),) = inline.train(broadcast, [TrainJob(start, client)])
            trained = upload.arrays.shared.astype(np.float64)
            if inline.context.stages.act_on_changes:
                trained += broadcast.shared
            weight = upload.rows if "federation.weighting=size" in words else 1.0
            scale = options.weight_of(number - start)
            if options.kind == "fedasync":
                moved = options.mixing * scale * (trained - now)
            else:
                moved = scale * (trained - broadcast.shared)
            total, weights = total + weight * moved, weights + weight
        np.testing.assert_allclose(states[number].shared, now + total / weights, rtol=0, atol=2e-7)
    assert server.checkpoint.records[-1].stages["async_staleness_max"] >= 1


def test_the_last_upload_wins_with_mixing_one(executor, tmp_path):
    words = [*IMMEDIATE, "async.mixing=1", "async.weight=constant", "async.concurrency=4"]
    inline = executor("method=fedit", *words)
    server = server_of(inline, tmp_path)
    states = [server.broadcast()]
    while not server.finished:
        before = dict(server.stages._stages[-1].memory.get("read", {}))
        server.step()
        record = server.checkpoint.records[-1]
        if record.round < len(states):
            continue
        start = record.round - int(record.stages["async_staleness_max"])
        assert start == record.round or str(start) in before
        ((upload, _),) = inline.train(states[start - 1], [TrainJob(start, *record.clients)])
        np.testing.assert_array_equal(server.checkpoint.state.shared, upload.arrays.shared)
        states.append(server.broadcast())


@pytest.mark.parametrize("words", [BUFFERED, [*IMMEDIATE, "async.concurrency=4"]])
def test_a_stopped_run_continues_with_the_same_bytes(words, executor, tmp_path):
    whole, parts = resumed(executor("method=trishul", *words), tmp_path, stops=3)
    assert outcome(parts) == outcome(whole)


def test_checkpoint_has_broadcasts_of_jobs_in_flight(executor, tmp_path):
    server = server_of(executor("method=trishul", *BUFFERED), tmp_path)
    states = [server.broadcast()]
    for number in range(1, 5):
        server.step()
        memory = server.checkpoints.newest().stages["async"]
        states.append(server.broadcast())
        rounds = [started for _, _, started, _ in memory["flying"]]
        assert memory["read"].keys() == {str(each) for each in rounds}
        for each in rounds:
            found = State(**memory["read"][str(each)])
            assert each <= number and state_digest(found) == state_digest(states[each - 1])


def test_a_longer_run_begins_with_the_shorter(executor, tmp_path):
    short, long = (
        without_timings(
            run(executor(*BUFFERED, f"federation.rounds={n}"), tmp_path).checkpoint.records
        )
        for n in (3, 5)
    )
    for one, other in zip(short, long, strict=False):
        one, other = ({k: v for k, v in r.items() if k != "participation"} for r in (one, other))
        assert one == other


def test_bytes_of_dropped_uploads_are_counted(executor, tmp_path):
    words = ["method=fedit", *BUFFERED, "async.max_staleness=0", "federation.rounds=4"]
    server = run(executor(*words), tmp_path)
    size, dropped = server.spec.expected.lengths["shared"], 0
    for record in server.checkpoint.records[1:]:
        found = int(record.stages["async_dropped"])
        assert record.stages["async_staleness_max"] == 0
        assert record.uploaded_parameters == (3 + found) * size == record.downloaded_parameters
        assert {*record.missing.values()} <= {"stale"}
        dropped += found
    assert dropped > 0
    (report,) = server.stages.reports(server.checkpoint.stages, {}).values()
    assert (report["uploads"], report["dropped"], report["staleness_max"]) == (12, dropped, 0)


def test_evaluation_changes_no_schedule(executor, tmp_path):
    words = ["method=fedit", *BUFFERED, "evaluation.diagnostics_every=0"]
    often, never = (
        run(executor(*words, f"evaluation.every={n}"), tmp_path).checkpoint for n in (1, 0)
    )
    for one, other in zip(often.records, never.records, strict=True):
        assert (one.state_sha256, one.clients) == (other.state_sha256, other.clients)
        assert one.stages == other.stages


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "async.kind='fedbuff' needs a clock: set devices.kind=lognormal or file"),
        (["method=scaffold", *CLOCK], "method='scaffold': it keeps a client state that the"),
        (["method=hetlora", *CLOCK], "method='hetlora': it needs more than the mean change"),
        (["method=fedex", *CLOCK], "method='fedex': it needs more than the mean change"),
        (["method=trishul-private", *CLOCK], "keeps a part of the model on the client"),
        (["method=fedsvd", *CLOCK], "changes its bases between rounds"),
        (["privacy.noise=1", *CLOCK], "section privacy: its accounting needs"),
        (["uploads.codec=int8", *CLOCK], "section uploads: the schedule needs the size"),
        (["downloads.codec=int8", *CLOCK], "section downloads: the schedule needs the size"),
        (["cohort.extra=1.5", *CLOCK], "section cohort: it selects the clients of synchronous"),
        (["robust.rule=median", *CLOCK], "section robust: it compares changes since"),
        (["federation.local_epochs=1", *CLOCK], "set them instead of federation.local_epochs"),
        (["async.concurrency=9", *CLOCK], "async.concurrency=9 exceeds the 8 clients"),
        (
            [*CLOCK, "federation.clients=5"],
            "async.concurrency=6, twice federation.clients_per_round, exceeds the 5 clients",
        ),
        (["async.kind=fedasync", *CLOCK], "federation.clients_per_round=3 must be 1"),
    ],
)
def test_experiments_without_meaning_are_rejected(words, said, small):
    with pytest.raises(InputError) as caught:
        small("async.kind=fedbuff", *words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("words", [BUFFERED, [*IMMEDIATE, "async.concurrency=4"]])
def test_actors_and_three_kills_change_nothing(
    words, small, inline_result, assert_same, drive_to_end, local_ray, tmp_path
):
    share = "resources.cpus_per_actor=0.5"
    experiments = {n: small(*words, share, f"resources.actors={n}") for n in (1, 2, 4)}
    reference, prepared = inline_result(experiments[1]), prepare_run(experiments[1])
    with open_driver(experiments[1], prepared, "a") as driver:
        driver.begin()
        driver.step()
        os.kill(driver.processes()[1], signal.SIGKILL)  # the client
        driver.step()
        for process in driver.processes():  # the coordinator and its client
            os.kill(process, signal.SIGKILL)
    with open_driver(experiments[2], prepared, "a") as driver:
        assert any("continuing after round 2" in event for event in driver.begin().events)
        driver.step()
        for process in driver.processes():
            os.kill(process, signal.SIGKILL)
    with open_driver(experiments[4], prepared, "a") as driver:
        assert driver.slices.actors == 4
        assert_same(drive_to_end(driver), reference)
    for count in (2, 4):  # without a kill
        other = small(
            *words, share, f"resources.actors={count}", f"storage.runs={tmp_path / str(count)}"
        )
        with open_driver(other, prepared, "a") as driver:
            assert_same(drive_to_end(driver), reference)
