"""Actors killed during a round: same bytes, limited replacements, no remaining processes."""

import os
import signal
import threading
import time

import psutil
import pytest
import ray

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.driver import Workers, open_driver
from trishul_ray.federation.prepare import prepare_run

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("local_ray")]

#: Rounds of several seconds, so that a kill hits one in progress.
LONG = ["federation.local_steps=40", "federation.rounds=2", "evaluation.diagnostics_every=0"]


def step_and_kill(driver, victim):
    """Run a step in which a process is killed, and return its report."""
    killed_at = []

    def kill():
        time.sleep(0.2)
        killed_at.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        return driver.step()
    finally:
        ended = time.monotonic()
        killer.join()
        assert killed_at[0] < ended, "the round ended before the kill"


def finish(driver, report):
    """Run the remaining rounds; return the result, the rounds of all records, and all events."""
    records, events = list(report.records), list(report.events)
    while not report.finished:
        report = driver.step()
        records += report.records
        events += report.events
    return driver.final(), [record.round for record in records], events


def replaced(events, pid):
    """Return whether an event reports that another actor replaces this one."""
    start = f"client actor {pid} died ("
    return [e for e in events if e.startswith(start) and e.endswith("another one replaces it")]


def test_client_killed_in_a_round_is_replaced(small, inline_result, assert_same):
    experiment = small(*LONG, "resources.actors=1")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        first_records = driver.begin().records
        _, client = driver.processes()
        result, rounds, events = finish(driver, step_and_kill(driver, client))
    assert [r.round for r in first_records] + rounds == [0, 1, 2]
    assert replaced(events, client)
    assert_same(result, inline_result(experiment))


def test_client_without_room_to_restart_blocks_nobody(small, inline_result, assert_same):
    @ray.remote(num_cpus=1)
    class Other:
        def ready(self):
            return True

    experiment = small("resources.actors=2", "evaluation.diagnostics_every=0")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        records = list(driver.begin().records)
        while len(driver.processes()) < 3:  # Both clients take part.
            records += driver.step().records
        other = Other.remote()  # It waits for the resources of a client, which then cannot restart.
        client = driver.processes()[1]
        os.kill(client, signal.SIGKILL)
        assert ray.get(other.ready.remote(), timeout=60)
        result, rounds, events = finish(driver, driver.step())
        assert len(driver.processes()) == 2
        ray.kill(other)
    assert [r.round for r in records] + rounds == [0, 1, 2, 3]
    assert replaced(events, client)
    assert_same(result, inline_result(experiment))


def test_client_without_replacements_is_dropped(small, inline_result, assert_same):
    experiment = small(*LONG, "resources.actors=2", "resources.max_restarts=0")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        first_records = driver.begin().records
        # This actor started first; the other may still be starting.
        first = driver.processes()[1]
        result, rounds, events = finish(driver, step_and_kill(driver, first))
        assert len(driver.processes()) == 2
        assert first not in driver.processes()
    assert [r.round for r in first_records] + rounds == [0, 1, 2]
    assert [e for e in events if e.startswith(f"client actor {first} died (")] != []
    assert_same(result, inline_result(experiment))


def test_run_without_actors_fails_and_continues(small, inline_result, assert_same, drive_to_end):
    experiment = small(*LONG, "resources.actors=1", "resources.max_restarts=0")
    prepared = prepare_run(experiment)
    with open_driver(experiment, prepared, "a") as driver:
        driver.begin()
        driver.step()
        with pytest.raises(RunError, match=r"every client actor died, .*: client actor \d+ died"):
            step_and_kill(driver, driver.processes()[1])
    inline = experiment.model_copy(
        update={"resources": experiment.resources.model_copy(update={"backend": "inline"})}
    )
    with open_driver(inline, prepared, "b") as driver:
        result = drive_to_end(driver)
    assert "continuing after round 1" in result.__dict__["events"]
    assert_same(result, inline_result(experiment))


def test_killed_coordinator_is_replaced_from_the_checkpoint(small, inline_result, assert_same):
    experiment = small(*LONG, "federation.rounds=3", "resources.actors=1")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        first_records = driver.begin().records + driver.step().records
        before = driver.processes()
        family = [psutil.Process(pid) for pid in before]
        report = step_and_kill(driver, before[0])
        # Its clients die with it.
        assert psutil.wait_procs(family, timeout=10)[1] == []
        result, rounds, events = finish(driver, report)
        after = [psutil.Process(pid) for pid in driver.processes()]
    assert [r.round for r in first_records] + rounds == [0, 1, 2, 3]
    assert [e for e in events if "another one continues from the checkpoint" in e] != []
    assert "continuing after round 1" in events
    assert_same(result, inline_result(experiment))
    assert psutil.wait_procs(after, timeout=10)[1] == []


def test_coordinator_without_replacements_fails_the_run(small):
    experiment = small(*LONG, "resources.actors=1", "resources.max_restarts=0")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        driver.begin()
        family = [psutil.Process(pid) for pid in driver.processes()]
        with pytest.raises(RunError, match=r"resources\.max_restarts=0 are used up") as failed:
            step_and_kill(driver, family[0].pid)
        assert "\n" not in str(failed.value)
        assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "client"])
def test_actor_dies_in_second_run(small, inline_result, assert_same, drive_to_end, victim):
    """Kill an actor in the second run: a new actor opens the run."""
    first, second, third = (
        small(*LONG, "resources.actors=1", f"method={name}", f"seed={seed}")
        for seed, name in enumerate(("fullft", "trishul", "fedit"))
    )
    with Workers() as workers:
        with open_driver(first, prepare_run(first), "a", workers=workers) as driver:
            assert_same(drive_to_end(driver), inline_result(first))
            processes = driver.processes()
        with open_driver(second, prepare_run(second), "a", workers=workers) as driver:
            records = driver.begin().records
            assert driver.processes() == processes
            result, rounds, _ = finish(driver, step_and_kill(driver, processes[victim]))
            after = driver.processes()
        assert [r.round for r in records] + rounds == [0, 1, 2]
        assert_same(result, inline_result(second))
        with open_driver(third, prepare_run(third), "a", workers=workers) as driver:
            assert_same(drive_to_end(driver), inline_result(third))
            assert set(driver.processes()) == set(after)
