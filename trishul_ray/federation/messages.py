"""Jobs of the server and results of a worker: small, picklable, without Ray.

Legend: P trainables of a client, W entries of the shared part, U units of aggregation, C clients, K
classes, b rows.
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
from trishul_ray.stages import ArrayState, Start, StepFlops
from trishul_ray.tasks.sums import EvalSums, Metrics

#: Arrays in messages and files, keyed by name; the object store returns views without copying.
Arrays = dict[str, np.ndarray]


def to_array(tensor: "torch.Tensor") -> np.ndarray:
    """Convert a tensor to an array in host memory."""
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


def to_tensor(array: np.ndarray) -> "torch.Tensor":
    """Copy an array to a tensor; arrays from the object store are read-only."""
    return torch.from_numpy(np.array(array))


def as_tensor(array: np.ndarray) -> "torch.Tensor":
    """Convert an array to a tensor that shares its memory; do not write to it."""
    with warnings.catch_warnings():
        # torch warns about read-only arrays, such as views of the object store.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


@dataclass(frozen=True)
class TrainJob:
    """Train one client for one round, or respond to the method's survey in round 0."""

    round: int
    client: int
    state: Arrays = field(default_factory=dict)  # the client's state
    kept: Arrays = field(default_factory=dict)  # state of stages on the client
    # numbers from stages, keyed by name
    instructions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalJob:
    """Evaluate the broadcast on rows ``start:stop`` of the scored rows of a set.

    With a ``client``, evaluate its personalized model: the broadcast with the client's state. If
    the set's rows belong to clients, ``start:stop`` then counts only the rows of this client. With
    ``each``, also return the score of every row.
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


#: Maximum number of uploads to compare per round, as in the paper's covariance matrices.
MOST_CLIENTS = 20


@dataclass(frozen=True)
class Upload:
    """Upload of one client."""

    client: int
    rows: int  # size of the client's shard, n_c
    arrays: ArrayState
    active: np.ndarray | None = None  # [U] bool, units that the client trained; None means all
    # number of labels in the shard, T_c; counted only for federation.weighting=tokens
    tokens: int = 0


@dataclass(frozen=True)
class TrainReport:
    """The rest of a training job's result; small, and always read by the server."""

    client: int
    state: Arrays  # the client's new state
    loss: float  # mean training loss over the local steps
    seconds: float  # duration of the local steps only
    uploaded: int  # numbers that a real deployment would send
    unsent: int = 0  # numbers of the shared part that it would not send; see LocalRun
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the method
    spectra: Arrays = field(default_factory=dict)
    uploaded_bytes: int | None = None  # size of the encoding; None means 4 bytes per number
    kept: Arrays = field(default_factory=dict)  # new state of stages on the client
    stages: dict[str, float] = field(default_factory=dict)  # numbers of stages, keyed by name
    memory: PeakMemory | None = None  # peak memory of its worker so far


@dataclass(frozen=True)
class EvalReport:
    """Sums over the rows of one evaluation job."""

    round: int
    start: int
    sums: EvalSums
    rows: RowSet = "test"
    client: int | None = None  # client of the personalized model; None for the global model
    # With EvalJob.each: "row" int64 [b], index in the dataset's split; "score" float32 [b].
    each: Arrays = field(default_factory=dict)
    memory: PeakMemory | None = None  # peak memory of its worker so far


@dataclass
class Outcome:
    """Results of a list of jobs, each kind in the order of its jobs."""

    #: Handles: the uploads stay in the process that made them. With ``sums``, only the first
    #: uploads.
    uploads: list[Any]
    reports: list[TrainReport]
    evaluations: list[EvalReport]
    events: list[str] = field(default_factory=list)  # one line per restart or loss
    # handles of the sums of groups of uploads, in order
    sums: list[Any] = field(default_factory=list)
    parts: "Sequence[tuple[Start, Outcome]]" = ()  # see joined()

    @classmethod
    def joined(cls, parts: "Sequence[tuple[Start, Outcome]]") -> "Outcome":
        """Return the results of a round, given those of the clients of each broadcast.

        Sums of groups stay with the parts. Only the last part, of the round itself, evaluates.
        """
        pairs = [p for _, part in parts for p in zip(part.reports, part.uploads, strict=False)]
        return cls(
            uploads=[handle for _, handle in sorted(pairs, key=lambda pair: pair[0].client)],
            reports=sorted((r for _, part in parts for r in part.reports), key=lambda r: r.client),
            evaluations=parts[-1][1].evaluations,
            events=[event for _, part in parts for event in part.events],
            parts=parts,
        )


@dataclass(frozen=True)
class Expected:
    """The form of a valid upload: lengths of ``shared`` and of ``extra`` by name, and the units."""

    lengths: Mapping[str, int]
    unit_sizes: np.ndarray  # [U] int64, sums to lengths["shared"]


@dataclass(frozen=True)
class WorkerSpec:
    """Description of a worker context, with which the server works without a backbone.

    Attributes:
        info: Description of the data, with which the model of a checkpoint is built without data.
        layout: Names of the trainables.
        wire: Names of the uploaded trainables.
        initial: [P] float32, the untrained vector.
        expected: Form of a valid upload.
        metrics: Metrics of the task.
        scored: Number of scored rows of every set.
        parameters: Numbers of trained parameters: ``adapter``, ``scalars``, ``head`` (the
            classification head).
        heads: Number of core heads on each adapted matrix, keyed by transformer block.
        block_norms: ``||W||_F^2`` of the adapted matrices, summed per block.
        stack: Stack of the worker.
        ranks: Rank of the core heads of each block; the largest rank if its matrices differ.
        sources: Identity of content that the configuration refers to by location: the SHA-256 of
            the dataset's ``rows`` and, for texts, of their ``tokens``, the tokens for the classes
            (``answers``), and the weights and configuration of the ``backbone``. Unknown sources
            are omitted.
        client_mix: [C, K], number of rows per client and class, if clients are scored by it
            (``evaluation.per_client``).
        client_rows: [C], number of rows of every set on which each client's personalized model is
            scored, if it is.
        flops: FLOPs of a local step, if a stage needs them.
        shard_sizes: [C], number of training rows per client, if a stage needs them.
    """

    info: DatasetInfo
    layout: Layout
    wire: tuple[str, ...]
    initial: np.ndarray
    expected: Expected
    metrics: Metrics
    scored: dict[RowSet, int]
    parameters: dict[str, int]
    heads: dict[str, int]
    block_norms: dict[str, float]
    stack: Stack
    ranks: dict[str, int] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    client_mix: np.ndarray | None = None
    client_rows: dict[RowSet, np.ndarray] = field(default_factory=dict)
    flops: StepFlops | None = None
    shard_sizes: np.ndarray | None = None


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the sources known in both that differ, as text for a message, or an empty string."""
    titles = {
        "rows": "data", "tokens": "tokens of the data", "answers": "answers of the classes",
        "backbone": "weights of the backbone",
    }  # fmt: skip
    changed = [s for s in titles if s in before and s in now and before[s] != now[s]]
    if "rows" in changed and "tokens" in changed:
        changed.remove("tokens")  # New rows imply new tokens.
    return " and ".join(titles[source] for source in changed)


def comparable(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether the backbone's sources are of one kind: a folder's hash or a hub's commit."""
    backbones = [s["backbone"] for s in (before, now) if "backbone" in s]
    return len({source.startswith("sha256:") for source in backbones}) < 2
