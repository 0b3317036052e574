"""Every registered method: one actor, two actors, a kill and a resume give the inline bytes."""

import os
import signal

import pytest

from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base import method_class, method_names

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

#: What makes a method keep state of its own at clients, beside limited compute where it can.
STATEFUL = {"hetlora": ["method.prune=true"]}


@pytest.mark.parametrize("name", method_names())
def test_actors_a_kill_and_a_resume_change_nothing(
    name, small, inline_result, assert_same, drive_to_end
):
    words = [f"method={name}", *STATEFUL.get(name, [])]
    if method_class(name).takes_limits:
        words.append("federation.compute=uniform")
    # Three of three clients every round: what a client keeps is used again.
    words.append("federation.clients=3")
    one, two = small(*words, "resources.actors=1"), small(*words, "resources.actors=2")
    assert one.id == two.id
    prepared = prepare_run(one)
    with open_driver(one, prepared, "a") as driver:
        driver.begin()
        driver.step()
        for process in driver.processes():  # the coordinator and its client: nothing is said
            os.kill(process, signal.SIGKILL)
    with open_driver(two, prepared, "a") as driver:
        result = drive_to_end(driver)
        assert driver.slices.actors == 2
    assert [event for event in result.events if "continuing after round 1" in event] != []
    assert_same(result, inline_result(one))
