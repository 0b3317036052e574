"""How training rows are dealt to clients: every row to exactly one of them.

A partition is one permutation of the rows and C + 1 offsets into it, so ten thousand clients cost
two small arrays. Legend of shapes: n rows, C clients, K classes that occur.

The paper says "client-specific class proportions ~ Dirichlet(alpha)" and leaves sizes open; the
two usual readings are the variants ``per-client`` (equal sizes) and ``per-label`` (Hsu, Qi, Brown
2019 style class-wise split, sizes vary). What stands for classes where a dataset has sub-datasets
is ``partition.by``; see :func:`skewed_by` and :func:`partition`.

A client may hold fewer rows than a batch: training wraps around its rows, so that every client
makes equally many full steps.
"""

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from trishul_ray.errors import InputError
from trishul_ray.rng import numpy_rng

if TYPE_CHECKING:
    from trishul_ray.config import PartitionConfig
    from trishul_ray.data.prepared import DatasetInfo, Split

#: Draws of a per-label partition before rows are moved to reach the minimum size.
REDRAWS = 10


@dataclass(frozen=True, eq=False)
class Partition:
    """Which rows each client holds, in compressed form.

    Attributes:
        permutation: int32 (int64 from 2^31 rows) [n], rows ordered by client, ascending within.
        offsets: int64 [C + 1]; client c holds ``permutation[offsets[c] : offsets[c + 1]]``.
    """

    permutation: np.ndarray
    offsets: np.ndarray

    @property
    def clients(self) -> int:
        """Number of clients C."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each client, int64 [C]."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.permutation.nbytes + self.offsets.nbytes

    def shard(self, client: int) -> np.ndarray:
        """Rows of ``client``, a read-only ascending view [n_c].

        Raises:
            IndexError: no such client.
        """
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} is not in 0..{self.clients - 1}")
        return self.permutation[self.offsets[client] : self.offsets[client + 1]]

    def owners(self) -> np.ndarray:
        """The client that holds each row, int64 [n]."""
        owners = np.empty(len(self.permutation), dtype=np.int64)
        owners[self.permutation] = np.repeat(np.arange(self.clients), self.sizes)
        return owners

    def label_counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Rows of each label at each client, int64 [C, classes].

        Args:
            labels: integers [n] in 0..classes-1, of the rows that were partitioned.
            classes: number of classes.
        """
        cells = self.owners() * classes + labels
        counts = np.bincount(cells, minlength=self.clients * classes)
        return counts.reshape(self.clients, classes)


def skewed_by(info: "DatasetInfo", config: "PartitionConfig") -> Literal["label", "group"] | None:
    """The column in whose terms clients differ, which is also what their rows are counted by.

    ``auto`` takes the classes, or the sub-datasets where there are no classes (MRQA); None where
    a dataset has neither.
    """
    if config.by != "auto":
        return config.by
    if info.classes:
        return "label"
    return "group" if info.groups else None


def partition_column(split: "Split", config: "PartitionConfig") -> np.ndarray:
    """What :func:`partition` deals the rows of ``split`` by: integers [n].

    Classes or sub-datasets for a Dirichlet partition, natural clients for a natural one, and
    zeros for an IID one, which looks at nothing.

    Raises:
        InputError: the dataset does not have what the partition is by.
    """
    name = split.info.name
    if config.kind == "iid":
        return np.zeros(len(split), dtype=np.int64)
    if config.kind == "natural":
        if "client" not in split.columns:
            raise InputError(
                f"partition.kind='natural' needs a column of clients, which dataset {name} does "
                "not have; your own data may (data.columns.client)"
            )
        return split.column("client")
    column = skewed_by(split.info, config)
    if column is None or column not in split.columns:
        have = " and ".join(c for c in ("label", "group") if c in split.columns) or "neither"
        raise InputError(
            f"partition.kind='dirichlet' by {config.by}: the training rows of dataset {name} have "
            f"{have} of label and group; partition.kind=iid needs none"
        )
    return split.column(column)


def partition(labels: np.ndarray, config: "PartitionConfig", clients: int, seed: int) -> Partition:
    """Deal the rows with ``labels`` to ``clients``.

    ``iid``: a random permutation cut into parts whose sizes differ by at most one.

    ``dirichlet``, ``per-client``: client c draws class proportions p_c ~ Dir(alpha 1_K) and then
    takes its n/C rows (the remainder goes one each to the first clients) without replacement,
    each row's class from p_c. A class whose rows have run out is struck from p_c, which is
    renormalised; when nothing of p_c is left, the rest is drawn from the remaining rows evenly.
    Clients draw in a random order, so that late ones, who find pools emptier, are not the
    highest-numbered.

    ``dirichlet``, ``per-label``: every class draws q_k ~ Dir(alpha 1_C) and its rows are cut into
    those fractions. Where a client would hold fewer than ``min_size`` rows, the whole is redrawn,
    up to :data:`REDRAWS` times; then single rows move from the largest client (its most frequent
    class; ties to the lower number) to the smallest until none is short.

    ``natural``: the rows of one natural client stay together. With as many clients as there are
    natural ones, client c is the c-th of them; with fewer, natural clients are put together,
    largest first, each to the client with the fewest rows so far (ties to the lower number).

    Args:
        labels: integers [n]: classes, sub-datasets or natural clients (:func:`partition_column`).
        config: kind, alpha, variant, min_size.
        clients: C.
        seed: the experiment's seed.

    Raises:
        InputError: fewer than ``clients * min_size`` rows, or alpha too small to draw with; or
            fewer natural clients than ``clients``, or one of them is left below ``min_size``.
    """
    rows = len(labels)
    if clients * config.min_size > rows:
        raise InputError(
            f"federation.clients={clients} with partition.min_size={config.min_size} need "
            f"{clients * config.min_size} training rows, but there are {rows}"
        )
    if config.kind == "natural":
        return _from_owners(_natural(labels, clients, config.min_size), clients)
    rng = numpy_rng(seed, "partition")
    if config.kind == "iid":
        owners = np.empty(rows, dtype=np.int64)
        owners[rng.permutation(rows)] = np.repeat(np.arange(clients), _even(rows, clients))
        return _from_owners(owners, clients)
    _, classes, pools = np.unique(labels, return_inverse=True, return_counts=True)
    if config.variant == "per-client":
        counts = _per_client(pools, clients, config.alpha, rng)
    else:
        counts = _per_label(pools, clients, config.alpha, config.min_size, rng)
    return _from_owners(_hand_out(classes, counts, rng), clients)


def _even(rows: int, clients: int) -> np.ndarray:
    """Sizes [C] that differ by at most one, the larger first."""
    sizes = np.full(clients, rows // clients, dtype=np.int64)
    sizes[: rows % clients] += 1
    return sizes


def _natural(members: np.ndarray, clients: int, min_size: int) -> np.ndarray:
    """Owner of each row [n], given its natural client [n]."""
    _, inverse, sizes = np.unique(members, return_inverse=True, return_counts=True)
    if clients > len(sizes):
        raise InputError(
            f"federation.clients={clients}: the training rows have {len(sizes)} natural clients; "
            f"{len(sizes)} or fewer is allowed"
        )
    homes = np.arange(len(sizes), dtype=np.int64)
    if clients < len(sizes):
        held = [(0, client) for client in range(clients)]
        for member in np.argsort(-sizes, kind="stable"):
            rows, client = heapq.heappop(held)
            homes[member] = client
            heapq.heappush(held, (rows + int(sizes[member]), client))
    totals = np.bincount(homes, weights=sizes, minlength=clients)
    if totals.min() < min_size:
        short = int(totals.argmin())
        raise InputError(
            f"partition.min_size={min_size}: natural client {short} holds {int(totals[short])} "
            "rows; fewer federation.clients put natural clients together"
        )
    owners: np.ndarray = homes[inverse.reshape(-1)]
    return owners


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """One draw p [size] of Dir(alpha 1), normalised in float64."""
    drawn = rng.dirichlet(np.full(size, alpha))
    total = float(drawn.sum())
    if not np.isfinite(total) or total <= 0:
        raise InputError(f"partition.alpha={alpha} is out of what float64 can draw with")
    proportions: np.ndarray = drawn / total
    return proportions


def _per_client(
    pools: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Rows of each class at each client, int64 [C, K]; ``pools`` [K] are rows per class."""
    left = pools.astype(np.int64)
    counts = np.zeros((clients, len(pools)), dtype=np.int64)
    sizes = _even(int(pools.sum()), clients)
    for client in rng.permutation(clients):
        chances = _dirichlet(alpha, len(pools), rng)
        missing = int(sizes[client])
        while missing:
            chances = np.where(left > 0, chances, 0.0)
            total = chances.sum()
            chances = chances / total if total > 0 else left / left.sum()
            # Drawing all that is missing and keeping what the pools hold is the row-by-row
            # procedure in law: a rejected row is one whose class had just run out.
            taken = np.minimum(rng.multinomial(missing, chances), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def _per_label(
    pools: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Like :func:`_per_client`, by one Dirichlet over clients for each class."""
    counts = np.zeros((clients, len(pools)), dtype=np.int64)
    for _ in range(1 + REDRAWS):
        for k, pool in enumerate(pools):
            cuts = np.floor(np.cumsum(_dirichlet(alpha, clients, rng)) * pool).astype(np.int64)
            cuts[-1] = pool  # float sums may end just below 1
            counts[:, k] = np.diff(cuts, prepend=0)
        if counts.sum(axis=1).min() >= min_size:
            return counts
    _fill_up(counts, min_size)
    return counts


def _fill_up(counts: np.ndarray, min_size: int) -> None:
    """Move rows in ``counts`` [C, K] until every client holds ``min_size``; in place."""
    sizes = counts.sum(axis=1)
    largest = [(-int(size), client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    for client in np.flatnonzero(sizes < min_size):
        for _ in range(min_size - int(sizes[client])):
            size, donor = heapq.heappop(largest)
            label = int(counts[donor].argmax())
            counts[donor, label] -= 1
            counts[client, label] += 1
            heapq.heappush(largest, (size + 1, donor))


def _hand_out(classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Owner of each row [n], given its class [n] and how many each client gets [C, K]."""
    owners = np.empty(len(classes), dtype=np.int64)
    by_class = np.argsort(classes, kind="stable")
    start = 0
    for k in range(counts.shape[1]):
        stop = start + int(counts[:, k].sum())
        rows = rng.permutation(by_class[start:stop])
        owners[rows] = np.repeat(np.arange(len(counts)), counts[:, k])
        start = stop
    return owners


def _from_owners(owners: np.ndarray, clients: int) -> Partition:
    kind = np.int32 if len(owners) < 2**31 else np.int64
    permutation = np.argsort(owners, kind="stable").astype(kind)
    offsets = np.zeros(clients + 1, dtype=np.int64)
    np.cumsum(np.bincount(owners, minlength=clients), out=offsets[1:])
    permutation.setflags(write=False)
    offsets.setflags(write=False)
    return Partition(permutation, offsets)
