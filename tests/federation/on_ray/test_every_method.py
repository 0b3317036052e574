"""Every registered method gives the inline bytes on actors, after a kill and a resume."""

import os
import signal

import numpy as np
import pytest
from method_runs import BY_MEAN, PUBLISHED

from trishul_ray.federation.on_ray.driver import Workers, open_driver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base import method_class

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

#: Overrides with which a method keeps state at its clients, on top of limited compute.
STATEFUL = {"hetlora": ["method.prune=true"]}


@pytest.fixture(scope="module")
def two_actors(local_ray):
    """The two client actors on which every method is continued."""
    with Workers() as workers:
        yield workers


#: Sections of the edge; privacy draws its own cohorts, so the policies of the clock are apart.
EDGE = {
    "plain": [],
    "private": [
        *("uploads.codec=int8", "uploads.error_feedback=true", "downloads.codec=int8"),
        *("privacy.noise=0.3", "privacy.adaptive=true", "privacy.bit_noise=1"),
        *("devices.kind=lognormal", "server.optimizer=adam"),
    ],
    "on a clock": [
        *("uploads.codec=skeleton", "uploads.threshold=0.003", "uploads.error_feedback=true"),
        *("downloads.codec=topk", "server.optimizer=yogi"),
        *("devices.kind=lognormal", "devices.availability=diurnal", "cohort.select=oort"),
        *("cohort.deadline=600", "cohort.late=partial", "cohort.dropout=0.1"),
    ],
    # Heads change place after each round.
    "moving": ["method.move_every=1", "method.allocation=gradient", "federation.rounds=4"],
    "halved": ["method.ranks_by=head", "method.limits=ranks"],
    "in the ring": ["server.sum=ring", "server.optimizer=sgd", "devices.kind=lognormal"],
}
RUNS = [(name, "plain") for name in PUBLISHED]
#: Core heads that stay with the clients, which all have to train.
PRIVATE_HEADS = ["method.private_heads=2", "evaluation.per_client=true"]
RUNS += [("ravan-private", "with private heads"), ("trishul-private", "with private heads")]
RUNS += [
    (name, edge) for name in BY_MEAN for edge in EDGE if edge not in ("plain", "moving", "halved")
]
RUNS += [("trishul-moving", "moving"), ("trishul-ranks", "halved")]


@pytest.mark.parametrize(("name", "edge"), RUNS)
def test_actors_a_kill_and_a_resume_change_nothing(
    name, edge, two_actors, small, inline_result, assert_same, drive_to_end
):
    overrides = [f"method={name}", *STATEFUL.get(name, []), *EDGE.get(edge, PRIVATE_HEADS)]
    if edge == "private" and name in ("fedsb", "ravan", "trishul"):  # those with cores
        overrides += ["privacy.denoise=shrink"]
    if name == "fedsvd":  # which refuses them
        kept = ("server.optimizer", "uploads.error_feedback")
        overrides = [words for words in overrides if not words.startswith(kept)]
    if method_class(name).takes_limits and edge in EDGE:
        overrides.append("federation.compute=uniform")
    # All three clients take part in every round, so that kept state is used.
    overrides += ["federation.clients=3", "resources.cpus_per_actor=0.5"]
    one, two = small(*overrides, "resources.actors=1"), small(*overrides, "resources.actors=2")
    assert one.id == two.id
    prepared = prepare_run(one)
    with open_driver(one, prepared, "a") as driver:
        driver.begin()
        driver.step()
        for process in driver.processes():  # the coordinator and its client
            os.kill(process, signal.SIGKILL)
    with open_driver(two, prepared, "a", workers=two_actors) as driver:
        result = drive_to_end(driver)
        assert driver.slices.actors == 2
    assert [event for event in result.events if "continuing after round 1" in event] != []
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
