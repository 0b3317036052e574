"""Partition the training rows across clients; each row belongs to exactly one client.

A partition is a permutation of the rows and C + 1 offsets into it: two small arrays even for ten
thousand clients. Legend of shapes: n rows, C clients, K occurring classes.

The paper says "client-specific class proportions ~ Dirichlet(alpha)" but does not define the sizes
of the shards. The two usual interpretations are the variants ``per-client`` (equal sizes) and
``per-label`` (a class-wise split in the style of Hsu, Qi, Brown 2019, with varying sizes).
``partition.by`` selects whether a Dirichlet partition skews classes or sub-datasets; see
:func:`skewed_by`.

A client may have fewer rows than a batch. Training then wraps around its rows, so that every client
takes the same number of full steps.
"""

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from trishul_ray.errors import InputError
from trishul_ray.runtime.random_streams import numpy_rng

if TYPE_CHECKING:
    from trishul_ray.config.fields import PartitionConfig
    from trishul_ray.data.dataset import DatasetInfo, Split

#: Maximum number of repeated draws of a per-label partition before rows are moved to reach the
#: minimum size.
REDRAWS = 10


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of each client.

    Attributes:
        permutation: int32 (int64 from 2^31 rows) [n], rows ordered by client, then ascending.
        offsets: int64 [C + 1]; client c has the rows ``permutation[offsets[c] : offsets[c + 1]]``.
    """

    permutation: np.ndarray
    offsets: np.ndarray

    @property
    def clients(self) -> int:
        """The number of clients C."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """The number of rows per client, int64 [C]."""
        return np.diff(self.offsets)

    def shard(self, client: int) -> np.ndarray:
        """Return the rows of ``client``, read-only and ascending [n_c], or raise an IndexError."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} is not in 0..{self.clients - 1}")
        return self.permutation[self.offsets[client] : self.offsets[client + 1]]


def skewed_by(info: "DatasetInfo", config: "PartitionConfig") -> Literal["label", "group"] | None:
    """Return the column whose distribution differs between clients.

    Reports also count the clients' rows by this column. ``partition.by=auto`` selects the classes
    if there are any, otherwise the sub-datasets (MRQA).

    Returns:
        The column, or None if the dataset has neither classes nor sub-datasets.
    """
    if config.by != "auto":
        return config.by
    if info.classes:
        return "label"
    return "group" if info.groups else None


def client_names(info: "DatasetInfo", config: "PartitionConfig", clients: int) -> tuple[str, ...]:
    """Return the clients' names if each is one natural client of the data, otherwise none."""
    one_each = config.kind == "natural" and clients == len(info.clients)
    return info.clients if one_each else ()


@dataclass(frozen=True)
class LabelCounts:
    """The number of rows of each class, or sub-dataset, on each client."""

    counts: np.ndarray  # int64 [clients, classes]
    names: tuple[str, ...]  # of the classes
    what: str  # what a class is called: ``class``, ``sub-dataset``
    clients: tuple[str, ...] = ()  # names of the clients, if they have any


def class_mix(shards: Partition, labels: np.ndarray, classes: int) -> np.ndarray:
    """Count the rows of every client and class, int64 [C, K]."""
    owner = np.repeat(np.arange(shards.clients), shards.sizes)
    cells = owner * classes + labels[shards.permutation]
    return np.bincount(cells, minlength=shards.clients * classes).reshape(-1, classes)


def count_labels(train: "Split", shards: Partition, config: "PartitionConfig") -> LabelCounts:
    """Count each client's rows per class, or per sub-dataset if the partition is by these."""
    info = train.info
    clients = client_names(info, config, shards.clients)
    candidates = (skewed_by(info, config), "label", "group")
    column = next((name for name in candidates if name in train.columns), None)
    if column is None:
        return LabelCounts(shards.sizes[:, None], ("all",), "rows", clients)
    names, what = (info.classes, "class") if column == "label" else (info.groups, "sub-dataset")
    return LabelCounts(class_mix(shards, train.column(column), len(names)), names, what, clients)


def partition_column(split: "Split", config: "PartitionConfig") -> np.ndarray:
    """Return the labels by which :func:`partition` distributes the rows of ``split``, integers [n].

    An IID partition does not use them, and they are zeros.

    Raises:
        InputError: The rows lack the column.
    """
    name = split.info.name
    if config.kind == "iid":
        return np.zeros(len(split), dtype=np.int64)
    if config.kind == "natural":
        if "client" not in split.columns:
            raise InputError(
                f"partition.kind='natural' requires a client column, which dataset {name} does not "
                "have; set data.columns.client for user data"
            )
        return split.column("client")
    column = skewed_by(split.info, config)
    if column is None or column not in split.columns:
        raise InputError(
            f"partition.kind='dirichlet' with partition.by={config.by!r} requires a "
            f"{column or 'label or group'} column, but the training rows of dataset {name} have "
            f"{', '.join(split.columns)}; use partition.kind=iid"
        )
    return split.column(column)


def partition(labels: np.ndarray, config: "PartitionConfig", clients: int, seed: int) -> Partition:
    """Partition the rows with ``labels`` across ``clients``.

    ``iid``: cut a random permutation into parts whose sizes differ by at most one.

    ``dirichlet``, ``per-client``: client c draws class proportions p_c ~ Dir(alpha 1_K) and draws
    n/C rows (the first clients draw one more each if n/C is not whole) without replacement,
    sampling the class of each row from p_c. An exhausted class is removed from p_c, which is
    renormalized. If p_c becomes empty, the client draws uniformly from the remaining rows. The
    clients draw in random order, so that the nearly exhausted classes do not always go to the
    clients with the highest numbers.

    ``dirichlet``, ``per-label``: class k draws q_k ~ Dir(alpha 1_C), and its rows are cut into
    these fractions. If a client has fewer than ``min_size`` rows, all classes draw again, up to
    :data:`REDRAWS` times. After that, single rows move from the largest client (from its most
    frequent class, ties to the lower number) to the clients with fewer than ``min_size`` rows.

    ``natural``: the rows of a natural client stay together. With as many clients as natural
    clients, client c is the c-th natural client. With fewer, several natural clients form a client:
    in order of size, the largest first, each is assigned to the client with the fewest rows so far
    (ties to the lower number).

    ``labels`` are integers [n]: classes, sub-datasets or natural clients
    (:func:`partition_column`).

    Raises:
        InputError: There are fewer than ``clients * min_size`` rows or fewer natural clients than
            ``clients``, a client of a natural partition has fewer than ``min_size`` rows, or alpha
            is too small or too large to sample with.
    """
    rows = len(labels)
    if clients * config.min_size > rows:
        raise InputError(
            f"federation.clients={clients} with partition.min_size={config.min_size} requires "
            f"{clients * config.min_size} training rows, but there are {rows}"
        )
    rng = numpy_rng(seed, "partition")
    if config.kind == "natural":
        owners = _assign_natural_clients(labels, clients, config.min_size)
    elif config.kind == "iid":
        owners = np.empty(rows, dtype=np.int64)
        owners[rng.permutation(rows)] = np.repeat(np.arange(clients), _even_sizes(rows, clients))
    else:
        owners = _draw_owners(labels, config, clients, rng)
    return _to_partition(owners, clients)


def _draw_owners(
    labels: np.ndarray, config: "PartitionConfig", clients: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw the client of each row with ``labels`` [n], using one of the Dirichlet variants."""
    _, classes, pools = np.unique(labels, return_inverse=True, return_counts=True)
    if config.variant == "per-client":
        counts = _draw_per_client(pools, clients, config.alpha, rng)
    else:
        counts = _draw_per_label(pools, clients, config.alpha, config.min_size, rng)
    return _assign_rows(classes, counts, rng)


def draw_held_out(
    inputs: np.ndarray, strata: np.ndarray, share: float, fingerprint: str
) -> np.ndarray:
    """Draw the rows that are held out of the training rows, bool [n].

    The result depends only on the rows, so it is the same for every seed, method and partition. A
    fraction ``share`` of each stratum (class or natural client) is drawn, up to rounding, and at
    least one row of each is not. Rows with the same input are drawn together, so that no held-out
    input is in the training rows.

    Args:
        inputs: Number of the distinct input of each row, integers [n].
        strata: Class or natural client of each row, integers [n].
        share: Fraction of the distinct inputs, in (0, 1).
        fingerprint: Fingerprint of the rows; see
            :attr:`~trishul_ray.data.dataset.Split.fingerprint`.
    """
    _, first, owner = np.unique(inputs, return_index=True, return_inverse=True)
    _, strata = np.unique(strata[first], return_inverse=True)
    order = numpy_rng(0, "validation-share", fingerprint).permutation(len(first))
    order = order[np.argsort(strata[order], kind="stable")]
    # Select every (1/share)-th input across all strata, so that rounding errors cancel out.
    drawn = np.zeros(len(first), dtype=bool)
    drawn[order] = np.diff(np.floor(share * np.arange(len(first) + 1) + 0.5)) > 0
    emptied = np.bincount(strata[drawn], minlength=strata.max() + 1) == np.bincount(strata)
    last = dict(zip(strata[order].tolist(), order.tolist(), strict=True))
    drawn[[last[stratum] for stratum in np.flatnonzero(emptied)]] = False
    held: np.ndarray = drawn[owner]
    return held


def _even_sizes(rows: int, clients: int) -> np.ndarray:
    """Return sizes [C] that differ by at most one, larger ones first."""
    sizes = np.full(clients, rows // clients, dtype=np.int64)
    sizes[: rows % clients] += 1
    return sizes


def _assign_natural_clients(natural_clients: np.ndarray, clients: int, min_size: int) -> np.ndarray:
    """Assign each row [n] to a client, given its natural client [n]."""
    _, inverse, sizes = np.unique(natural_clients, return_inverse=True, return_counts=True)
    if clients > len(sizes):
        raise InputError(
            f"federation.clients={clients} exceeds the {len(sizes)} natural clients of the "
            "training rows"
        )
    client_of = np.arange(len(sizes), dtype=np.int64)
    if clients < len(sizes):
        smallest = [(0, client) for client in range(clients)]
        for natural in np.argsort(-sizes, kind="stable"):
            rows, client = heapq.heappop(smallest)
            client_of[natural] = client
            heapq.heappush(smallest, (rows + int(sizes[natural]), client))
    totals = np.bincount(client_of, weights=sizes, minlength=clients)
    if totals.min() < min_size:
        short = int(totals.argmin())
        raise InputError(
            f"partition.min_size={min_size}: client {short} has {int(totals[short])} rows; "
            "reduce federation.clients to combine more natural clients into one"
        )
    owners: np.ndarray = client_of[inverse.reshape(-1)]
    return owners


def _dirichlet(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw p [size] from Dir(alpha 1), normalized in float64."""
    drawn = rng.dirichlet(np.full(size, alpha))
    total = float(drawn.sum())
    if not np.isfinite(total) or total <= 0:
        raise InputError(f"partition.alpha={alpha} is outside the range that float64 can sample")
    proportions: np.ndarray = drawn / total
    return proportions


def _draw_per_client(
    pools: np.ndarray, clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw the number of rows per client and class, int64 [C, K], from pools of rows [K]."""
    left = pools.astype(np.int64)
    counts = np.zeros((clients, len(pools)), dtype=np.int64)
    sizes = _even_sizes(int(pools.sum()), clients)
    for client in rng.permutation(clients):
        chances = _dirichlet(alpha, len(pools), rng)
        missing = int(sizes[client])
        while missing:
            chances = np.where(left > 0, chances, 0.0)
            total = chances.sum()
            chances = chances / total if total > 0 else left / left.sum()
            # Draw all missing rows at once, and accept as many as the pools contain. The
            # distribution is the same as when drawing row by row: a rejected row is of a class that
            # was just exhausted.
            taken = np.minimum(rng.multinomial(missing, chances), left)
            counts[client] += taken
            left -= taken
            missing -= int(taken.sum())
    return counts


def _draw_per_label(
    pools: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Like :func:`_draw_per_client`, with one Dirichlet draw over the clients per class."""
    counts = np.zeros((clients, len(pools)), dtype=np.int64)
    for _ in range(1 + REDRAWS):
        for k, pool in enumerate(pools):
            cuts = np.floor(np.cumsum(_dirichlet(alpha, clients, rng)) * pool).astype(np.int64)
            cuts[-1] = pool  # the cumulative sum may end just below 1
            counts[:, k] = np.diff(cuts, prepend=0)
        if counts.sum(axis=1).min() >= min_size:
            return counts
    _fill_up(counts, min_size)
    return counts


def _fill_up(counts: np.ndarray, min_size: int) -> None:
    """Move rows in ``counts`` [C, K], in place, until every client has ``min_size`` rows."""
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


def _assign_rows(classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Assign each row [n] to a client, given its class [n] and the counts per client [C, K]."""
    owners = np.empty(len(classes), dtype=np.int64)
    by_class = np.argsort(classes, kind="stable")
    start = 0
    for k in range(counts.shape[1]):
        stop = start + int(counts[:, k].sum())
        rows = rng.permutation(by_class[start:stop])
        owners[rows] = np.repeat(np.arange(len(counts)), counts[:, k])
        start = stop
    return owners


def _to_partition(owners: np.ndarray, clients: int) -> Partition:
    """Build the partition in which row i belongs to client ``owners[i]``."""
    kind = np.int32 if len(owners) < 2**31 else np.int64
    permutation = np.argsort(owners, kind="stable").astype(kind)
    offsets = np.zeros(clients + 1, dtype=np.int64)
    np.cumsum(np.bincount(owners, minlength=clients), out=offsets[1:])
    permutation.setflags(write=False)
    offsets.setflags(write=False)
    return Partition(permutation, offsets)
