"""DP-SGD on Ray actors: the inline bytes on one and four actors, and after kills."""

import os
import signal

import pytest

from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.prepare import prepare_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]
WORDS = [
    "method=trishul", "privacy.unit=example", "privacy.noise=1", "privacy.chunk=5",
    "federation.clients_per_round=4", "resources.cpus_per_actor=0.25",
]  # fmt: skip


def test_actors_and_kills_change_nothing(small, inline_result, assert_same, drive_to_end):
    one, four = small(*WORDS, "resources.actors=1"), small(*WORDS, "resources.actors=4")
    prepared = prepare_run(one)
    with open_driver(one, prepared, "a") as driver:
        driver.begin()
        driver.step()
        os.kill(driver.processes()[1], signal.SIGKILL)  # a client
        driver.step()
        for process in driver.processes():
            os.kill(process, signal.SIGKILL)
    with open_driver(four, prepared, "a") as driver:
        result = drive_to_end(driver)
        assert driver.slices.actors == 4
    assert any("continuing after round 2" in event for event in result.events)
    assert_same(result, inline_result(one))
