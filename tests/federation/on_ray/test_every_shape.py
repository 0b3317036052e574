"""Every shape of a run gives the inline bytes on actors, after kills and on more actors.

A shape is the content of the messages between a server and its clients; the methods of one shape do
not differ for actors. The contract resumes every method inline.
"""

import os
import signal

import numpy as np
import pytest

from trishul_ray.federation.on_ray.driver import Workers, open_driver
from trishul_ray.federation.prepare import prepare_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="module")
def two_actors(local_ray):
    """Return the two client actors that resume every run."""
    with Workers() as workers:
        yield workers


pytest.importorskip("trishul_ray.lab")  # The stages of the lab are in these runs.
LIMITED = "federation.compute=uniform"
#: Shapes that differ in what a dying client has received, stored or sent.
A_CLIENT_DIES = {
    *("plain", "state at clients", "numbers beside the shared ones", "every upload", "a survey"),
    *("encoded and private", "two clients in one forward"),
}
#: Privacy selects its own cohorts, so the policies of the clock are separate.
PRIVATE = (
    "uploads.codec=int8 uploads.error_feedback=true downloads.codec=int8 privacy.noise=0.3 "
    "devices.kind=lognormal server.optimizer=adam"
)
CLOCK = (
    "uploads.codec=int4 uploads.error_feedback=true "
    "downloads.codec=topk server.optimizer=yogi devices.kind=lognormal "
    "cohort.select=power_of_choice cohort.deadline=600 cohort.dropout=0.1"
)
SHAPES = {
    "plain": "method=fedit",
    "limited heads": f"method=trishul {LIMITED}",
    "state at clients": f"method=hetlora method.prune=true {LIMITED}",
    "numbers beside the shared ones": "method=scaffold",
    "every upload": "method=fedit robust.rule=median",
    "a base for everyone": f"method=flora {LIMITED}",
    "nothing is uploaded": "method=local",
    "a survey": "method=fedsb",
    "two clients in one forward": "method=scaffold federation.stacked=2",
    "encoded and private": f"method=trishul {LIMITED} {PRIVATE}",
    "gradients of examples": f"method=trishul {LIMITED} privacy.unit=example privacy.noise=1",
    "a private survey": f"method=fedsb {PRIVATE}",
    "on a clock": f"method=scaffold {CLOCK}",
    "private heads": "method=trishul-private method.private_heads=2 evaluation.per_client=true",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_actors_a_kill_and_a_resume_change_nothing(
    shape, two_actors, small, inline_result, assert_same, drive_to_end
):
    # All three clients take part in every round, so that client state is used.
    overrides = [*SHAPES[shape].split(), "federation.clients=3", "resources.cpus_per_actor=0.5"]
    one, two = small(*overrides, "resources.actors=1"), small(*overrides, "resources.actors=2")
    assert one.id == two.id
    prepared = prepare_run(one)
    with open_driver(one, prepared, "a") as driver:
        driver.begin()
        driver.step()
        if shape in A_CLIENT_DIES:
            os.kill(driver.processes()[1], signal.SIGKILL)
            driver.step()
        for process in driver.processes():  # the coordinator and its client
            os.kill(process, signal.SIGKILL)
    with open_driver(two, prepared, "a", workers=two_actors) as driver:
        result = drive_to_end(driver)
        assert driver.slices.actors == 2
    kept = 2 if shape in A_CLIENT_DIES else 1
    assert [event for event in result.events if f"continuing after round {kept}" in event] != []
    assert_same(result, inline_result(one))


def test_actors_compare_all_clients_as_one_process_does(
    two_actors, small, inline_result, drive_to_end
):
    words = ["method=ravan", "resources.cpus_per_actor=0.5", "resources.actors=2"]
    experiment = small(*words, "evaluation.diagnostics_cohort=all")
    with open_driver(experiment, prepare_run(experiment), "a", workers=two_actors) as driver:
        found = drive_to_end(driver).checkpoint.matrices
    expected = inline_result(experiment).checkpoint.matrices
    assert found.keys() == expected.keys() and "everyone_cosine" in found
    for name, matrix in expected.items():
        np.testing.assert_array_equal(found[name], matrix)
