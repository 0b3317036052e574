"""Trials of a sweep: how cells are grouped, what is said about them, checks before they start."""

from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial

from trishul_ray.errors import InputError
from trishul_ray.sweeps import monitor, tuner
from trishul_ray.sweeps.cells import TuneOptions
from trishul_ray.sweeps.monitor import WAITING_NOTICE_SECONDS, Monitor
from trishul_ray.sweeps.tuner import check_stores, group_cells

TWO_CORES = [{"CPU": 2.0}]
#: Id of a node that no cluster has.
GONE = "a" * 56


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


def test_gpus_are_shared_by_the_clients_of_all_cells(small):
    four, card = cells(small, *[[f"seed={s}"] for s in range(4)]), {"CPU": 8.0, "GPU": 1.0}
    l4 = card | {"accelerator_type:L4": 1.0}
    (group,) = group_cells(four, [l4])
    assert group.bundles == ({}, {"CPU": 1.0, "GPU": 0.3333})
    assert group.concurrent == 3 and group.note.startswith("each actor takes 1/3 of a GPU")
    (group,) = group_cells(four, [l4], concurrency=1)
    assert group.bundles == ({}, *[{"CPU": 1.0, "GPU": 0.3333}] * 3)
    (group,) = group_cells(four, [l4, l4])
    assert group.concurrent == 6 // len(group.bundles[1:])
    (group,) = group_cells(four, [l4, card])  # whose memory is not known
    assert group.bundles == ({}, {"CPU": 1.0, "GPU": 1.0}) and "not known" in group.note


@pytest.fixture
def notes_after(monkeypatch):
    """``notes_after((seconds, statuses), ...)`` -> what was said at these times."""

    def look(*moments):
        notes = []
        progress = SimpleNamespace(note=notes.append)
        watched = Monitor(lambda config: None, TuneOptions(), progress, None)
        for seconds, statuses in moments:
            monkeypatch.setattr(monitor.time, "monotonic", lambda seconds=seconds: seconds)
            watched.on_step_end(0, [SimpleNamespace(status=status) for status in statuses])
        return notes

    reasons = ["cannot start gpu: InsufficientInstanceCapacity"]
    monkeypatch.setattr(monitor, "launch_failures", lambda: reasons)
    return look


def test_a_sweep_whose_nodes_do_not_come_says_why_once(notes_after):
    late = 1 + WAITING_NOTICE_SECONDS
    waits, some = [Trial.PENDING, Trial.PENDING], [Trial.RUNNING, Trial.PENDING]
    assert notes_after((0, waits), (1, waits), (late, waits), (10 * late, waits)) == [
        "no cell is running: waiting for resources on the cluster; "
        "cannot start gpu: InsufficientInstanceCapacity"
    ]
    assert notes_after((0, some), (late, some), (2 * late, waits)) == []


@pytest.mark.usefixtures("local_ray")
def test_a_node_that_has_gone_meanwhile_is_not_asked(tmp_path, monkeypatch):
    nodes = {**tuner.working_nodes(), GONE: {"CPU": 1.0}}
    monkeypatch.setattr(tuner, "working_nodes", lambda: nodes)
    check_stores([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("local_ray")
def test_a_folder_that_nodes_do_not_see_is_refused(tmp_path, monkeypatch):
    (node,) = tuner.working_nodes()
    monkeypatch.setattr(tuner, "working_nodes", lambda: {node: {}, GONE: {}})
    monkeypatch.setattr(tuner.Store, "write", lambda store, name, data: None)
    with pytest.raises(InputError, match="is not seen by 1 of 2 nodes"):
        check_stores([str(tmp_path)])
