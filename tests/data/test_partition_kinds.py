"""Partitions by what a dataset has: classes, sub-datasets, natural clients, or nothing."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.config import PartitionConfig
from trishul_ray.data.partition import partition, partition_column, skewed_by
from trishul_ray.data.prepared import DatasetInfo, Split, write_split
from trishul_ray.errors import InputError

NATURAL = PartitionConfig(kind="natural")


def split_of(folder, columns, kind="text", **fields):
    info = DatasetInfo("toy", kind, "test", **fields)
    write_split(folder / "train.arrow", columns, info)
    return Split(folder / "train.arrow")


def test_natural_clients_keep_their_rows():
    members = np.array([7, 3, 7, 9, 3, 7])
    dealt = partition(members, NATURAL, 3, seed=0)
    assert [dealt.shard(c).tolist() for c in range(3)] == [[1, 4], [0, 2, 5], [3]]
    assert partition(members, NATURAL, 3, seed=5).permutation.tolist() == [1, 4, 0, 2, 5, 3]


@settings(deadline=None, max_examples=80)
@given(data=st.data(), members=st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_fewer_clients_hold_whole_natural_clients_evenly(data, members):
    members = np.array(members)
    found, sizes = np.unique(members, return_counts=True)
    clients = data.draw(st.integers(1, len(found)))
    dealt = partition(members, NATURAL, clients, seed=0)
    np.testing.assert_array_equal(np.sort(dealt.permutation), np.arange(len(members)))
    homes = [np.unique(dealt.owners()[members == member]) for member in found]
    assert all(len(home) == 1 for home in homes)
    # Largest first to the emptiest: no two differ by more than the largest natural client.
    assert dealt.sizes.min() >= 1 and dealt.sizes.max() - dealt.sizes.min() <= sizes.max()


def test_natural_limits_are_named():
    members = np.array([0, 0, 0, 1])
    with pytest.raises(
        InputError, match=r"clients=3: the training rows have 2 natural .* 2 or few"
    ):
        partition(members, NATURAL, 3, seed=0)
    strict = PartitionConfig(kind="natural", min_size=2)
    with pytest.raises(InputError, match=r"min_size=2: natural client 1 holds 1 rows; fewer fed"):
        partition(members, strict, 2, seed=0)
    assert partition(members, strict, 1, seed=0).sizes.tolist() == [4]


def test_what_a_partition_is_by(tmp_path):
    texts = pa.array(["a", "b", "c"])
    numbers = {"label": np.array([0, 1, 1]), "group": np.array([1, 0, 1]), "client": np.arange(3)}
    split = split_of(
        tmp_path,
        {"text": texts, **numbers},
        classes=("x", "y"),
        groups=("g", "h"),
        fields=("text",),
    )
    for config, want in (
        (PartitionConfig(), "label"),
        (PartitionConfig(by="label"), "label"),
        (PartitionConfig(by="group"), "group"),
        (NATURAL, "client"),
    ):
        np.testing.assert_array_equal(partition_column(split, config), numbers[want])
    assert partition_column(split, PartitionConfig(kind="iid")).tolist() == [0, 0, 0]


def test_questions_are_dealt_by_sub_dataset_or_evenly(tmp_path):
    groups = np.repeat([0, 1, 2], [600, 300, 100])
    columns = {"question": pa.array(["q"] * 1000), "group": groups}
    split = split_of(tmp_path, columns, kind="qa", groups=("a", "b", "c"))
    assert skewed_by(split.info, PartitionConfig()) == "group"
    for variant in ("per-client", "per-label"):
        config = PartitionConfig(alpha=0.1, variant=variant)
        dealt = partition(partition_column(split, config), config, 10, seed=1)
        shares = dealt.label_counts(groups, 3) / dealt.sizes[:, None]
        assert shares.max(axis=1).mean() > 0.75  # iid: 0.6
        assert (dealt.sizes.max() - dealt.sizes.min() <= 1) == (variant == "per-client")


def test_rows_without_classes_and_groups_are_dealt_iid_only(tmp_path):
    split = split_of(tmp_path, {"question": pa.array(["q"] * 10)}, kind="qa")
    iid = PartitionConfig(kind="iid")
    assert partition(partition_column(split, iid), iid, 3, seed=0).sizes.tolist() == [4, 3, 3]
    with pytest.raises(
        InputError, match=r"'dirichlet' by auto: .* toy have neither of label and g"
    ):
        partition_column(split, PartitionConfig())
    with pytest.raises(InputError, match=r"kind='natural' needs a column of clients"):
        partition_column(split, NATURAL)


def test_a_dirichlet_by_what_the_training_rows_lack_is_named(tmp_path):
    # As MNLI: groups of test rows alone.
    columns = {"text": pa.array(["a"]), "label": np.array([0])}
    split = split_of(tmp_path, columns, classes=("x", "y"), groups=("matched", "mismatched"))
    with pytest.raises(InputError, match=r"by group: the training rows of dataset toy have label"):
        partition_column(split, PartitionConfig(by="group"))
