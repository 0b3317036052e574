"""Slices: what a run requests, what fits, and what a trial's bundles hold."""

import re

import pytest

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, slices_of_bundles
from trishul_ray.runtime.gpu import GIB

CPUS = {"CPU": 4.0}
BOX = {"CPU": 8.0, "GPU": 2.0}
CARD = {"CPU": 8.0, "GPU": 1.0}
#: A ViT-B/16 in fp32, for a step of which 7 GiB are reserved, and a GPU with room for three, for
#: two and for one.
VIT = ["model=vit-b16", "model.init=random"]
THREE, TWO, ONE = 40 * GIB, 18 * GIB, 13 * GIB
THIRD = 0.3333


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


def test_a_run_on_a_busy_cluster_waits_for_one_slice_on_the_same_device():
    assert plan_slices(make(), {}, CPUS) == Slices(1, 1, 0)
    assert plan_slices(make(), {"CPU": 8.0}, BOX) == Slices(1, 1, 1)


@pytest.mark.parametrize(
    ("overrides", "free"),
    [
        (["resources.actors=2", "resources.cpus_per_actor=3"], CPUS),
        (["resources.device=cuda"], CPUS),
        (["resources.actors=3"], BOX),
        ([], {}),
    ],
)
def test_a_request_that_exceeds_the_cluster_is_refused_with_numbers(overrides, free):
    with pytest.raises(
        InputError,
        match=r"actors x \(resources\.cpus_per_actor=.* CPU, . GPU(: each actor takes .*)?$",
    ):
        plan_slices(make(*overrides), free)


@pytest.mark.parametrize("overrides", [[], ["federation.clients_per_actor=1"]])
def test_bundles_of_a_trial_give_its_slices_back(overrides):
    experiment = make(*overrides)
    slices = plan_slices(experiment, BOX | {"GPU": 6.0})
    assert slices_of_bundles(experiment, [{}, *slices.bundles()]) == slices


def test_other_bundles_are_filled_with_slices_of_the_experiment():
    bundles = [{"CPU": 0.5}, {"CPU": 2.0}]
    assert slices_of_bundles(make(), bundles) == Slices(2, 1, 0)
    assert slices_of_bundles(make("resources.threads=2"), bundles) == Slices(1, 2, 0)
    with pytest.raises(InputError, match="exceed the cluster"):
        slices_of_bundles(make(), [{}])


@pytest.mark.parametrize(
    ("overrides", "free", "gpu_bytes", "expected"),
    [
        ([], CARD, THREE, Slices(3, 1, THIRD)),
        ([], CARD, TWO, Slices(2, 1, 0.5)),
        ([], CARD, ONE, Slices(1, 1, 1)),
        ([], CARD, None, Slices(1, 1, 1)),
        # No smaller than the cohort, the CPUs or other GPUs leave a use for.
        (["federation.clients_per_round=2"], CARD, THREE, Slices(2, 1, 0.5)),
        (["federation.clients_per_round=1"], CARD, THREE, Slices(1, 1, 1)),
        (["federation.clients_per_round=6"], CARD, THREE, Slices(3, 1, THIRD)),
        ([], {"CPU": 2.0, "GPU": 1.0}, THREE, Slices(2, 1, 0.5)),
        ([], BOX, THREE, Slices(3, 1, 0.5)),
        ([], {"CPU": 8.0, "GPU": 3.0}, THREE, Slices(3, 1, 1)),
        (["federation.stacked=3"], CARD, 80 * GIB, Slices(1, 1, 1)),
        (["resources.actors=2"], CARD, THREE, Slices(2, 1, 0.5)),
        (["resources.actors=1"], CARD, THREE, Slices(1, 1, 1)),
        (["federation.clients_per_actor=1"], BOX, THREE, Slices(6, 1, THIRD)),
        # Without gaps between launches another actor gains nothing.
        (["resources.cuda_graphs=true"], CARD, THREE, Slices(1, 1, 1)),
        (["resources.gpus_per_actor=1"], CARD, THREE, Slices(1, 1, 1)),
    ],
)
def test_a_gpu_is_shared_where_clients_and_memory_allow_it(overrides, free, gpu_bytes, expected):
    assert plan_slices(make(*VIT, *overrides), free, gpu_bytes=gpu_bytes) == expected


def test_the_choice_of_a_share_is_said_and_is_that_of_the_whole_cluster():
    shared = plan_slices(make(*VIT), {"CPU": 8.0, "GPU": 0.4}, CARD, gpu_bytes=THREE)
    assert shared == Slices(1, 1, THIRD)
    assert re.fullmatch("each actor takes 1/3 of a GPU: by an estimate .* of 40 GiB", shared.note)
    whole = "each actor takes a whole GPU (resources.gpus_per_actor sets a share): "
    unknown = plan_slices(make(*VIT), CARD)
    assert unknown.note == f"{whole}the memory of the cluster's GPUs is not known"
    absent = plan_slices(make("model=/none"), CARD, gpu_bytes=THREE)
    assert absent.gpus == 1 and absent.note.startswith(f"{whole}its memory cannot be estimated (")
    assert plan_slices(make(*VIT), CARD, gpu_bytes=ONE).note.startswith(f"{whole}by an estimate")
    assert plan_slices(make(*VIT, "federation.clients_per_round=1"), CARD).note == ""
    with pytest.raises(InputError, match=r"1 GPU: each actor takes a whole GPU .* is not known$"):
        plan_slices(make(*VIT, "resources.actors=2"), CARD)


def test_a_share_in_a_bundle_of_a_trial_is_taken_as_it_is():
    bundles = [{"CPU": 1.0}, {"CPU": 2.0, "GPU": 0.25}, {"CPU": 2.0, "GPU": 0.25}]
    assert slices_of_bundles(make(), bundles) == Slices(2, 1, 0.25)
    assert slices_of_bundles(make(), [{"CPU": 1.0}, {"CPU": 4.0, "GPU": 2.0}]) == Slices(2, 1, 1)
