"""Actors killed in mid-round: the same bytes, told and bounded restarts, nothing left behind."""

import os
import signal
import threading
import time

import psutil
import pytest

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.prepare import prepare_run

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("local_ray")]

#: Rounds of seconds, so that there is a middle to be killed in.
LONG = ["federation.local_steps=40", "federation.rounds=2", "evaluation.diagnostics_every=0"]


def step_with_murder(driver, victim):
    """One round in which a process is killed after a part of it; the step and its length."""
    gone = []

    def kill():
        time.sleep(0.2)
        gone.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    murder = threading.Thread(target=kill)
    murder.start()
    try:
        return driver.step()
    finally:
        ended = time.monotonic()
        murder.join()
        assert gone[0] < ended, "the round was over before the murder"


def finish(driver, standing):
    """Drive on to the end; the result and everything told."""
    told, events = list(standing.records), list(standing.events)
    while not standing.finished:
        standing = driver.step()
        told += standing.records
        events += standing.events
    return driver.final(), [record["round"] for record in told], events


def test_a_client_killed_in_mid_round_is_restarted(small, inline_result, assert_same):
    experiment = small(*LONG, "resources.actors=1")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        told = driver.begin().records
        _, client = driver.processes()
        result, more, events = finish(driver, step_with_murder(driver, client))
    assert [r["round"] for r in told] + more == [0, 1, 2]
    assert [e for e in events if f"client actor {client} died and was restarted as" in e] != []
    assert "(restart 1)" in "".join(events)
    assert_same(result, inline_result(experiment))


def test_a_client_beyond_its_restarts_is_dropped_and_its_work_done_by_another(
    small, inline_result, assert_same
):
    experiment = small(*LONG, "resources.actors=2", "resources.max_restarts=0")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        told = driver.begin().records
        # The one that came up first; the other may still be on its way.
        first = driver.processes()[1]
        result, more, events = finish(driver, step_with_murder(driver, first))
        assert len(driver.processes()) == 2
        assert first not in driver.processes()
    assert [r["round"] for r in told] + more == [0, 1, 2]
    assert [e for e in events if f"client actor {first} is gone for good" in e] != []
    assert_same(result, inline_result(experiment))


def test_without_any_actor_left_the_run_fails_and_can_be_continued(
    small, inline_result, assert_same, drive_to_end
):
    experiment = small(*LONG, "resources.actors=1", "resources.max_restarts=0")
    prepared = prepare_run(experiment)
    with open_driver(experiment, prepared, "a") as driver:
        driver.begin()
        driver.step()
        with pytest.raises(RunError, match=r"every client actor is gone: client actor \d+ is gone"):
            step_with_murder(driver, driver.processes()[1])
    inline = experiment.model_copy(
        update={"resources": experiment.resources.model_copy(update={"backend": "inline"})}
    )
    with open_driver(inline, prepared, "b") as driver:
        result = drive_to_end(driver)
    assert "continuing after round 1" in result.__dict__["events"]
    assert_same(result, inline_result(experiment))


def test_a_coordinator_killed_in_mid_round_goes_on_from_the_checkpoint(
    small, inline_result, assert_same
):
    experiment = small(*LONG, "federation.rounds=3", "resources.actors=1")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        told = driver.begin().records + driver.step().records
        before = driver.processes()
        family = [psutil.Process(pid) for pid in before]
        standing = step_with_murder(driver, before[0])
        # Its clients die with it.
        assert psutil.wait_procs(family, timeout=10)[1] == []
        result, more, events = finish(driver, standing)
        after = [psutil.Process(pid) for pid in driver.processes()]
    assert [r["round"] for r in told] + more == [0, 1, 2, 3]
    assert [e for e in events if "loss 1 of at most 3, going on from the checkpoint" in e] != []
    assert "continuing after round 1" in events
    assert_same(result, inline_result(experiment))
    assert psutil.wait_procs(after, timeout=10)[1] == []


def test_a_coordinator_beyond_its_restarts_fails_the_run(small):
    experiment = small(*LONG, "resources.actors=1", "resources.max_restarts=0")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        driver.begin()
        family = [psutil.Process(pid) for pid in driver.processes()]
        with pytest.raises(RunError, match=r"resources\.max_restarts=0 are used up") as failed:
            step_with_murder(driver, family[0].pid)
        assert "\n" not in str(failed.value)
        assert psutil.wait_procs(family, timeout=10)[1] == []
