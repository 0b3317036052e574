import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.config import PartitionConfig
from trishul_ray.data.partition import partition
from trishul_ray.errors import InputError

KINDS = [("iid", "per-client"), ("dirichlet", "per-client"), ("dirichlet", "per-label")]


def labels_of(rows: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, rows)


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
def test_every_row_is_dealt_once_and_nobody_is_short(case):
    labels, config, clients, seed = case
    dealt = partition(labels, config, clients, seed)
    np.testing.assert_array_equal(np.sort(dealt.permutation), np.arange(len(labels)))
    assert dealt.clients == clients and dealt.sizes.sum() == len(labels)
    assert dealt.sizes.min() >= config.min_size
    if config.kind == "iid" or config.variant == "per-client":
        assert dealt.sizes.max() - dealt.sizes.min() <= 1
    for client in range(clients):
        shard = dealt.shard(client)
        assert (np.diff(shard) > 0).all() and (dealt.owners()[shard] == client).all()
    counts = dealt.label_counts(labels, int(labels.max()) + 1)
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(labels))
    np.testing.assert_array_equal(counts.sum(axis=1), dealt.sizes)
    for client in (0, clients - 1):
        np.testing.assert_array_equal(
            counts[client], np.bincount(labels[dealt.shard(client)], minlength=counts.shape[1])
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
    """Mean total variation distance of the clients' label shares from those of all rows."""
    counts = partition(labels, config, clients, seed).label_counts(labels, int(labels.max()) + 1)
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
    # Even cuts of every label are more alike than random parts: iid bounds from above.
    assert skews[0] > 0.5 and skews[-1] < iid + 0.03


def test_per_client_shares_follow_the_dirichlet():
    # While the pools last, E p_k^2 = (alpha + 1) / (K (K alpha + 1)) for Dir(alpha 1_K).
    alpha, classes, size = 0.5, 5, 200
    labels = np.repeat(np.arange(classes), 100_000)
    config = PartitionConfig(alpha=alpha)
    dealt = partition(labels, config, len(labels) // size, 0)
    shares = dealt.label_counts(labels, classes) / size
    # A multinomial of `size` rows adds (p - p^2) / size to the square.
    square = (alpha + 1) / (classes * (classes * alpha + 1))
    want = square + (1 / classes - square) / size
    assert np.mean(shares**2) == pytest.approx(want, rel=0.05)


def test_moved_rows_reach_the_smallest_from_the_largest():
    labels = labels_of(300, 3)
    config = PartitionConfig(alpha=1e-3, variant="per-label", min_size=9)
    dealt = partition(labels, config, 30, 0)
    # Three classes with nearly all their rows at one client each: only moving fills thirty.
    assert dealt.sizes.min() == 9


@pytest.mark.parametrize("variant", ["per-client", "per-label"])
def test_ten_thousand_clients_cost_two_small_arrays(variant):
    labels = labels_of(50_000, 100)
    dealt = partition(labels, PartitionConfig(variant=variant), 10_000, 0)
    assert dealt.nbytes <= 4 * 50_000 + 8 * 10_001
    assert dealt.sizes.min() >= 1
    assert np.shares_memory(dealt.shard(9_999), dealt.permutation)


def test_shards_cannot_be_written():
    dealt = partition(labels_of(10, 2), PartitionConfig(), 2, 0)
    with pytest.raises(ValueError, match="read-only"):
        dealt.shard(0)[0] = 1
    with pytest.raises(IndexError, match=r"client 2 is not in 0\.\.1"):
        dealt.shard(2)


def test_too_few_rows_are_refused():
    with pytest.raises(InputError, match=r"clients=5 .*min_size=3 need 15 .* there are 14"):
        partition(labels_of(14, 2), PartitionConfig(min_size=3), 5, 0)


@pytest.mark.parametrize("variant", ["per-client", "per-label"])
@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e12, 1e300])
def test_extreme_alphas_deal_or_say_so(variant, alpha):
    labels = labels_of(200, 10)
    try:
        dealt = partition(labels, PartitionConfig(alpha=alpha, variant=variant), 10, 0)
    except InputError as error:
        assert "partition.alpha" in str(error)
    else:
        assert dealt.sizes.sum() == 200 and dealt.sizes.min() >= 1
