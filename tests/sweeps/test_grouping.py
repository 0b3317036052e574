"""Which cells form one group of trials, in which order, and what a trial requests."""

import pytest

from trishul_ray.errors import InputError
from trishul_ray.sweeps.tuner import group_cells

TWO_CORES = [{"CPU": 2.0}]


def cells(small, *overrides):
    return {f"{n}": small(*words) for n, words in enumerate(overrides)}


def test_many_cells_have_one_actor_each_and_few_share_the_cluster(small):
    four = cells(small, *[[f"seed={seed}"] for seed in range(4)])
    (group,) = group_cells(four, TWO_CORES)
    assert group.bundles == ({}, {"CPU": 1.0})
    assert (group.ids, group.concurrent) == (("0", "1", "2", "3"), 2)
    (group,) = group_cells({"0": four["0"]}, TWO_CORES)
    assert group.bundles == ({}, {"CPU": 1.0}, {"CPU": 1.0})
    assert group.concurrent == 1
    # Two at a time leave as much to each of them as one at a time on half the cluster.
    (group,) = group_cells(four, [{"CPU": 2.0}, {"CPU": 2.0}], concurrency=2)
    assert len(group.bundles) == 3 and group.concurrent == 2
    # No more actors than clients of a cohort (three).
    (group,) = group_cells({"0": four["0"]}, [{"CPU": 16.0}])
    assert len(group.bundles) == 4


def test_slices_must_fit_on_nodes_and_not_only_into_their_sum(small):
    two = cells(small, ["resources.threads=2"], ["resources.threads=2", "seed=1"])
    (group,) = group_cells(two, [{"CPU": 3.0}, {"CPU": 3.0}])
    assert group.concurrent == 2
    with pytest.raises(InputError, match=r"resources: 1 x \(4 CPU\) do not fit on the nodes"):
        group_cells(cells(small, ["resources.threads=4"]), [{"CPU": 3.0}, {"CPU": 3.0}])
    with pytest.raises(
        InputError, match=r"resources.gpus_per_actor=1\) exceed the cluster's 2 CPU"
    ):
        group_cells(cells(small, ["resources.device=cuda"]), TWO_CORES)


def test_cells_of_one_request_are_one_group_ordered_by_backbone_and_data(small, vit_folder):
    folder = vit_folder()
    mixed = cells(
        small,
        ["seed=0"],
        [f"model.name={folder}", "seed=0"],
        ["seed=1"],
        ["resources.actors=2", "seed=2"],
        ["resources.backend=inline", "seed=3"],
        [f"model.name={folder}", "seed=1"],
        ["federation.clients_per_actor=2", "seed=4"],  # two actors for four clients
    )
    groups = {group.ids: group for group in group_cells(mixed, TWO_CORES)}
    assert list(groups) == [("0", "2", "1", "5"), ("3", "6"), ("4",)]
    assert groups["3", "6"].concurrent == 1
    assert groups["4",].bundles == ({"CPU": 1.0},)  # in the trial's own process
    assert groups["4",].concurrent == 2


def test_gpus_are_shared_by_fractions(small):
    four = cells(small, *[[f"seed={s}", "resources.gpus_per_actor=0.25"] for s in range(4)])
    (group,) = group_cells(four, [{"CPU": 8.0, "GPU": 1.0}])
    assert group.bundles == ({}, {"CPU": 1.0, "GPU": 0.25})
    assert group.concurrent == 4
