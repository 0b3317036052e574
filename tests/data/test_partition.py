"""Partitions: every row belongs to one client, reproducibly, with the configured skew."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.config.fields import PartitionConfig
from trishul_ray.data.dataset import DatasetInfo, Split, write_split
from trishul_ray.data.partition import (
    Partition,
    draw_held_out,
    partition,
    partition_column,
    skewed_by,
)
from trishul_ray.errors import InputError

KINDS = [("iid", "per-client"), ("dirichlet", "per-client"), ("dirichlet", "per-label")]


NATURAL = PartitionConfig(kind="natural")


def labels_of(rows: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, rows)


def clients_of_rows(shards: Partition) -> np.ndarray:
    """Return the client of each row, [n]."""
    clients = np.empty(len(shards.permutation), dtype=np.int64)
    for client in range(shards.clients):
        clients[shards.shard(client)] = client
    return clients


def label_counts(shards: Partition, labels: np.ndarray, classes: int) -> np.ndarray:
    """Count the rows of each label at each client, [C, classes]."""
    return np.stack(
        [np.bincount(labels[shards.shard(c)], minlength=classes) for c in range(shards.clients)]
    )


@st.composite
def cases(draw):
    rows = draw(st.integers(1, 400))
    clients = draw(st.integers(1, min(rows, 40)))
    kind, variant = draw(st.sampled_from(KINDS))
    config = PartitionConfig(
        kind=kind,
        variant=variant,
        alpha=draw(st.sampled_from([1e-3, 0.05, 0.3, 1.0, 100.0])),
        min_size=draw(st.integers(1, rows // clients)),
    )
    labels = labels_of(rows, draw(st.integers(1, 12)), draw(st.integers(0, 5)))
    return labels, config, clients, draw(st.integers(0, 100))


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_partition_is_complete_with_minimum_sizes(case):
    labels, config, clients, seed = case
    shards = partition(labels, config, clients, seed)
    np.testing.assert_array_equal(np.sort(shards.permutation), np.arange(len(labels)))
    assert shards.clients == clients and shards.sizes.sum() == len(labels)
    assert shards.sizes.min() >= config.min_size
    if config.kind == "iid" or config.variant == "per-client":
        assert shards.sizes.max() - shards.sizes.min() <= 1
    for client in range(clients):
        shard = shards.shard(client)
        assert (np.diff(shard) > 0).all() and (clients_of_rows(shards)[shard] == client).all()
    counts = label_counts(shards, labels, int(labels.max()) + 1)
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(labels))
    np.testing.assert_array_equal(counts.sum(axis=1), shards.sizes)
    for client in (0, clients - 1):
        np.testing.assert_array_equal(
            counts[client], np.bincount(labels[shards.shard(client)], minlength=counts.shape[1])
        )


@pytest.mark.parametrize(("kind", "variant"), KINDS)
def test_the_seed_decides(kind, variant):
    labels = labels_of(500, 10)
    config = PartitionConfig(kind=kind, variant=variant)
    first, again, other = (partition(labels, config, 7, seed) for seed in (3, 3, 4))
    assert first.permutation.tobytes() == again.permutation.tobytes()
    assert first.offsets.tobytes() == again.offsets.tobytes()
    assert first.permutation.tobytes() != other.permutation.tobytes()


def skew(labels: np.ndarray, config: PartitionConfig, clients: int, seed: int) -> float:
    """Compute the mean total variation distance of the clients' label proportions from all rows."""
    counts = label_counts(partition(labels, config, clients, seed), labels, int(labels.max()) + 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean() / 2)


@pytest.mark.parametrize("variant", ["per-client", "per-label"])
@pytest.mark.parametrize("seed", range(3))
def test_skew_falls_with_alpha(variant, seed):
    labels = labels_of(4000, 10, seed)
    skews = [
        skew(labels, PartitionConfig(alpha=alpha, variant=variant, min_size=10), 20, seed)
        for alpha in (0.05, 0.3, 1.0, 10.0, 1000.0)
    ]
    assert skews == sorted(skews, reverse=True)
    iid = skew(labels, PartitionConfig(kind="iid"), 20, seed)
    # Even cuts of every label are more similar than random parts, so iid is an upper bound.
    assert skews[0] > 0.5 and skews[-1] < iid + 0.03


def test_per_client_shares_follow_the_dirichlet():
    # While the pools last, E p_k^2 = (alpha + 1) / (K (K alpha + 1)) for Dir(alpha 1_K).
    alpha, classes, size = 0.5, 5, 200
    labels = np.repeat(np.arange(classes), 100_000)
    config = PartitionConfig(alpha=alpha)
    shards = partition(labels, config, len(labels) // size, 0)
    shares = label_counts(shards, labels, classes) / size
    # A multinomial of `size` rows adds (p - p^2) / size to the square.
    square = (alpha + 1) / (classes * (classes * alpha + 1))
    want = square + (1 / classes - square) / size
    assert np.mean(shares**2) == pytest.approx(want, rel=0.05)


def test_moved_rows_reach_the_smallest_from_the_largest():
    labels = labels_of(300, 3)
    config = PartitionConfig(alpha=1e-3, variant="per-label", min_size=9)
    shards = partition(labels, config, 30, 0)
    # Nearly all rows of each of three classes are at one client: thirty clients are filled by
    # moves.
    assert shards.sizes.min() == 9


def test_shards_cannot_be_written():
    shards = partition(labels_of(10, 2), PartitionConfig(), 2, 0)
    with pytest.raises(ValueError, match="read-only"):
        shards.shard(0)[0] = 1
    with pytest.raises(IndexError, match=r"client 2 is not in 0\.\.1"):
        shards.shard(2)


def test_too_few_rows_are_rejected():
    with pytest.raises(InputError, match=r"clients=5 .*min_size=3 requires 15 .* there are 14"):
        partition(labels_of(14, 2), PartitionConfig(min_size=3), 5, 0)


@pytest.mark.parametrize("variant", ["per-client", "per-label"])
@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e12, 1e300])
def test_extreme_alphas_work_or_are_named(variant, alpha):
    labels = labels_of(200, 10)
    try:
        shards = partition(labels, PartitionConfig(alpha=alpha, variant=variant), 10, 0)
    except InputError as error:
        assert "partition.alpha" in str(error)
    else:
        assert shards.sizes.sum() == 200 and shards.sizes.min() >= 1


def split_of(folder, columns, kind="text", **fields):
    info = DatasetInfo("toy", kind, **fields)
    write_split(folder / "train.arrow", columns, info)
    return Split(folder / "train.arrow")


def test_natural_clients_keep_their_rows():
    members = np.array([7, 3, 7, 9, 3, 7])
    shards = partition(members, NATURAL, 3, seed=0)
    assert [shards.shard(c).tolist() for c in range(3)] == [[1, 4], [0, 2, 5], [3]]
    assert partition(members, NATURAL, 3, seed=5).permutation.tolist() == [1, 4, 0, 2, 5, 3]


@settings(deadline=None, max_examples=80)
@given(data=st.data(), members=st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_fewer_clients_hold_whole_natural_clients_evenly(data, members):
    members = np.array(members)
    distinct, sizes = np.unique(members, return_counts=True)
    clients = data.draw(st.integers(1, len(distinct)))
    shards = partition(members, NATURAL, clients, seed=0)
    np.testing.assert_array_equal(np.sort(shards.permutation), np.arange(len(members)))
    homes = [np.unique(clients_of_rows(shards)[members == member]) for member in distinct]
    assert all(len(home) == 1 for home in homes)
    # Sizes descend, and differ at most by the largest natural client.
    assert shards.sizes.min() >= 1 and shards.sizes.max() - shards.sizes.min() <= sizes.max()


def test_natural_limits_are_named():
    members = np.array([0, 0, 0, 1])
    with pytest.raises(
        InputError, match=r"clients=3 exceeds the 2 natural clients of the training rows"
    ):
        partition(members, NATURAL, 3, seed=0)
    strict = PartitionConfig(kind="natural", min_size=2)
    with pytest.raises(InputError, match=r"min_size=2: client 1 has 1 rows; reduce fed"):
        partition(members, strict, 2, seed=0)
    assert partition(members, strict, 1, seed=0).sizes.tolist() == [4]


def test_the_column_that_each_kind_uses(tmp_path):
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


def test_questions_are_partitioned_by_sub_dataset(tmp_path):
    groups = np.repeat([0, 1, 2], [600, 300, 100])
    columns = {"question": pa.array(["q"] * 1000), "group": groups}
    split = split_of(tmp_path, columns, kind="qa", groups=("a", "b", "c"))
    assert skewed_by(split.info, PartitionConfig()) == "group"
    for variant in ("per-client", "per-label"):
        config = PartitionConfig(alpha=0.1, variant=variant)
        shards = partition(partition_column(split, config), config, 10, seed=1)
        shares = label_counts(shards, groups, 3) / shards.sizes[:, None]
        assert shares.max(axis=1).mean() > 0.75  # iid: 0.6
        assert (shards.sizes.max() - shards.sizes.min() <= 1) == (variant == "per-client")


def test_unlabeled_rows_need_an_iid_partition(tmp_path):
    split = split_of(tmp_path, {"question": pa.array(["q"] * 10)}, kind="qa")
    iid = PartitionConfig(kind="iid")
    assert partition(partition_column(split, iid), iid, 3, seed=0).sizes.tolist() == [4, 3, 3]
    with pytest.raises(
        InputError, match=r"requires a label or group column, but .* toy have question; use"
    ):
        partition_column(split, PartitionConfig())
    with pytest.raises(InputError, match=r"kind='natural' requires a client column"):
        partition_column(split, NATURAL)


def test_a_dirichlet_by_a_missing_column_is_named(tmp_path):
    # Like MNLI, where only the test rows have groups.
    columns = {"text": pa.array(["a"]), "label": np.array([0])}
    split = split_of(tmp_path, columns, classes=("x", "y"), groups=("matched", "mismatched"))
    with pytest.raises(
        InputError, match=r"requires a group column, but .* toy have text, label; use"
    ):
        partition_column(split, PartitionConfig(by="group"))


@given(
    st.integers(2, 300), st.integers(1, 12), st.floats(0.05, 0.9), st.floats(0, 1), st.integers(0)
)
def test_held_out_rows_are_equal_shares_of_classes(rows, classes, share, repeated, seed):
    rng = np.random.default_rng(seed)
    strata = rng.integers(0, classes, rows)
    inputs = np.where(rng.random(rows) < repeated, strata, classes + np.arange(rows))
    held = draw_held_out(inputs, strata, share, f"{seed}")
    assert not set(inputs[held]) & set(inputs[~held])
    for stratum in np.unique(strata):
        units = inputs[strata == stratum]
        taken, known = len(set(units[held[strata == stratum]])), len(set(units))
        assert taken < known and abs(taken - share * known) <= 2
    np.testing.assert_array_equal(held, draw_held_out(inputs, strata, share, f"{seed}"))
