"""Jobs of the server and results of a worker: small, picklable, without Ray.

Legend of shapes: P trainables of a client, W entries of the shared upload, U units of aggregation.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trishul_ray.adapters.layout import Layout
from trishul_ray.data.dataset import DatasetInfo, RowSet
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.memory import PeakMemory
from trishul_ray.runtime.stack import Stack
from trishul_ray.stages import ArrayState, StepFlops
from trishul_ray.tasks.sums import EvalSums, Metrics

#: Arrays by name, as in messages and files; the object store returns views without a copy.
Arrays = dict[str, np.ndarray]


def to_array(tensor: "torch.Tensor") -> np.ndarray:
    """Return a tensor as an array in host memory."""
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


def to_tensor(array: np.ndarray) -> "torch.Tensor":
    """Return a copy of an array as a tensor; arrays from the object store are read-only."""
    return torch.from_numpy(np.array(array))


def as_tensor(array: np.ndarray) -> "torch.Tensor":
    """Return an array as a tensor that shares its memory; do not write to it."""
    with warnings.catch_warnings():
        # torch warns of read-only arrays, such as views of the object store.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


@dataclass(frozen=True)
class TrainJob:
    """Train one client for one round; in round 0, answer the method's survey instead."""

    round: int
    client: int
    state: Arrays = field(default_factory=dict)  # the client's persistent state
    kept: Arrays = field(default_factory=dict)  # what stages left with the client
    instructions: Mapping[str, float] = field(default_factory=dict)  # of stages, by name


@dataclass(frozen=True)
class EvalJob:
    """Evaluate the broadcast on rows ``start:stop`` of the scored rows of a set.

    With a ``client``, its own model is evaluated: the broadcast with the client's state. The
    rows are then counted among those of this client, if the set's rows belong to clients. With
    ``each``, the score of every row is also returned.
    """

    round: int
    start: int
    stop: int
    rows: RowSet = "test"
    client: int | None = None
    state: Arrays = field(default_factory=dict)
    each: bool = False


Job = TrainJob | EvalJob


def units_of_work(jobs: Sequence[TrainJob], stacked: int) -> list[list[int]]:
    """Group the positions of jobs: up to ``stacked`` clients train together, but not in round 0."""
    size = stacked if jobs and jobs[0].round > 0 else 1
    positions = list(range(len(jobs)))
    return [positions[i : i + size] for i in range(0, len(positions), size)]


#: Uploads of a round that are compared: as many as clients in the paper's covariance matrices.
MOST_CLIENTS = 20


@dataclass(frozen=True)
class Upload:
    """What one client uploads."""

    client: int
    rows: int  # size of the client's shard, n_c
    arrays: ArrayState
    active: np.ndarray | None = None  # [U] bool, units that the client trained; None means all
    tokens: int = 0  # labels in the shard, T_c; counted only for federation.weighting=tokens


@dataclass(frozen=True)
class TrainReport:
    """The rest of a training job's result; small, and always read by the server."""

    client: int
    state: Arrays  # the client's new persistent state
    loss: float  # mean training loss over the local steps
    seconds: float  # of only the local steps
    uploaded: int  # numbers that a real deployment would send
    unsent: int = 0  # and numbers of the shared part that it would not; see LocalRun
    metrics: dict[str, float] = field(default_factory=dict)  # of the method
    spectra: Arrays = field(default_factory=dict)
    uploaded_bytes: int | None = None  # of an encoding; None: four for each number
    kept: Arrays = field(default_factory=dict)  # what stages leave with the client
    stages: dict[str, float] = field(default_factory=dict)  # numbers of theirs, by name
    memory: PeakMemory | None = None  # of its worker so far


@dataclass(frozen=True)
class EvalReport:
    """Sums over the rows of one evaluation job."""

    round: int
    start: int
    sums: EvalSums
    rows: RowSet = "test"
    client: int | None = None  # whose own model was evaluated; None for the global one
    # With EvalJob.each: "row" int64 [b], index in the dataset's split; "score" float32 [b].
    each: Arrays = field(default_factory=dict)
    memory: PeakMemory | None = None  # of its worker so far


@dataclass
class Outcome:
    """Results of a list of jobs, each kind in the order of its jobs."""

    #: Handles: the uploads stay where they were made. With ``sums``, those of the first clients.
    uploads: list[Any]
    reports: list[TrainReport]
    evaluations: list[EvalReport]
    events: list[str] = field(default_factory=list)  # one line for each restart or loss
    sums: list[Any] = field(default_factory=list)  # handles: of groups of uploads, in order


@dataclass(frozen=True)
class Expected:
    """The form of a valid upload: the lengths of ``shared`` and, by name, ``extra``; the units."""

    lengths: Mapping[str, int]
    unit_sizes: np.ndarray  # [U] int64, sums to lengths["shared"]


@dataclass(frozen=True)
class WorkerSpec:
    """Description of a worker context, from which the server works without a backbone.

    ``info`` describes the data; with it, the model of a checkpoint is built without them.
    ``sources`` identifies what the configuration names only by its place: the SHA-256 of the
    dataset's ``rows`` and, for texts, of their ``tokens``, the tokens that stand for the classes
    (``answers``), and the weights and configuration of the ``backbone``.
    Unknown sources are left out. ``client_mix`` is there if clients are scored by it
    (``evaluation.per_client``). ``scored`` is the number of rows of every set that is scored, and
    ``client_rows`` [C] that of every client if each client's own model is scored. ``flops`` and
    ``shard_sizes`` [C] are there if a stage needs them. ``stack`` is the stack of the worker.
    """

    info: DatasetInfo
    layout: Layout
    wire: tuple[str, ...]
    initial: np.ndarray  # [P] float32, the untrained vector
    expected: Expected
    metrics: Metrics
    scored: dict[RowSet, int]
    parameters: dict[str, int]  # adapter, scalars, head (the classification head)
    heads: dict[str, int]  # core heads on each adapted matrix, by transformer block
    block_norms: dict[str, float]  # ||W||_F^2 of the adapted matrices, summed by block
    stack: Stack
    #: Rank of the core heads of a block, of its matrix of largest rank.
    ranks: dict[str, int] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    client_mix: np.ndarray | None = None  # [C, K] rows of every client and class
    client_rows: dict[RowSet, np.ndarray] = field(default_factory=dict)
    flops: StepFlops | None = None
    shard_sizes: np.ndarray | None = None


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the sources known in both that differ, as text for a message; empty if none do."""
    titles = {
        "rows": "data", "tokens": "tokens of the data", "answers": "answers of the classes",
        "backbone": "weights of the backbone",
    }  # fmt: skip
    changed = [s for s in titles if s in before and s in now and before[s] != now[s]]
    if "rows" in changed and "tokens" in changed:
        changed.remove("tokens")  # new rows imply new tokens
    return " and ".join(titles[source] for source in changed)


def comparable(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the backbone's sources are of one kind: a folder's hash, or a hub's commit."""
    backbones = [s["backbone"] for s in (before, now) if "backbone" in s]
    return len({source.startswith("sha256:") for source in backbones}) < 2
