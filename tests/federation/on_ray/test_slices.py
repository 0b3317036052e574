"""Slices: the request of a run, the fitting actors, and the bundles of a trial."""

import pytest

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, slices_of_bundles

CPUS = {"CPU": 4.0}
BOX = {"CPU": 8.0, "GPU": 2.0}


def make(*overrides):
    sizes = ["federation.clients=6", "federation.clients_per_round=3"]
    return load_experiment(None, [*sizes, *overrides])


@pytest.mark.parametrize(
    ("overrides", "free", "expected"),
    [
        ([], CPUS, Slices(3, 1, 0)),  # at most one actor per client of a cohort
        ([], {"CPU": 2.0}, Slices(2, 1, 0)),
        (["resources.threads=2"], CPUS, Slices(2, 2, 0)),
        (["resources.actors=2"], CPUS, Slices(2, 1, 0)),
        (["federation.clients_per_actor=1"], CPUS, Slices(6, 0.66, 0)),
        (["federation.clients_per_actor=4"], CPUS, Slices(2, 1, 0)),
        ([], BOX, Slices(2, 1, 1)),
        (["resources.gpus_per_actor=0.5"], BOX, Slices(3, 1, 0.5)),
        (["resources.device=cpu"], BOX, Slices(3, 1, 0)),
    ],
)
def test_slices_are_planned_from_free_resources(overrides, free, expected):
    assert plan_slices(make(*overrides), free) == expected


def test_run_on_busy_cluster_waits_for_one_slice():
    assert plan_slices(make(), {}, CPUS) == Slices(1, 1, 0)
    assert plan_slices(make(), {"CPU": 8.0}, BOX) == Slices(1, 1, 1)


def test_run_on_growing_cluster_requests_nodes():
    head = {"CPU": 0.0}
    cuda = make("resources.device=cuda")
    assert plan_slices(cuda, head, head, may_grow=True) == Slices(3, 1, 1)
    assert plan_slices(cuda, {"CPU": 4.0, "GPU": 0.0}, BOX, may_grow=True) == Slices(1, 1, 1)


@pytest.mark.parametrize(
    ("overrides", "free"),
    [
        (["resources.actors=2", "resources.cpus_per_actor=3"], CPUS),
        (["resources.device=cuda"], CPUS),
        (["resources.gpus_per_actor=0.5"], CPUS),
        (["resources.actors=3"], BOX),
        ([], {}),
    ],
)
def test_request_beyond_the_cluster_is_rejected(overrides, free):
    message = r"actors x \(resources\.cpus_per_actor=.*\) exceed the cluster's . CPU, . GPU$"
    with pytest.raises(InputError, match=message):
        plan_slices(make(*overrides), free)


@pytest.mark.parametrize("overrides", [[], ["federation.clients_per_actor=1"]])
def test_bundles_of_a_trial_give_its_slices(overrides):
    experiment = make(*overrides)
    slices = plan_slices(experiment, BOX | {"GPU": 6.0})
    assert slices_of_bundles(experiment, [{}, *slices.bundles()]) == slices


def test_largest_bundles_of_a_custom_trial_get_actors():
    bundles = [{"CPU": 1.0}, {"CPU": 2.0, "GPU": 0.25}, {"CPU": 2.0, "GPU": 0.25}]
    assert slices_of_bundles(make(), bundles) == Slices(2, 2, 0.25)
    assert slices_of_bundles(make(), [{"CPU": 0.5}, {"CPU": 2.0}]) == Slices(1, 2, 0)
    with pytest.raises(InputError, match="no bundle"):
        slices_of_bundles(make(), [{}])
