"""What the server asks of a worker and what comes back: small, picklable, without Ray.

Legend: W entries of the shared part on the wire, U units of aggregation, n rows.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import SURVEY
from trishul_ray.tasks.base import Task

#: Flat arrays by key: how states travel. NumPy, so that the object store hands out views.
Arrays = dict[str, np.ndarray]


def to_arrays(state: dict[str, torch.Tensor]) -> Arrays:
    """A state as host arrays, for the object store or a file."""
    return {key: value.detach().cpu().numpy() for key, value in state.items()}


def to_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Host arrays as tensors. Always a copy: arrays from the object store are read-only."""
    return {key: torch.from_numpy(np.array(value)) for key, value in arrays.items()}


def as_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Host arrays as tensors of the same memory, for reading only."""
    with warnings.catch_warnings():
        # torch warns of arrays it must not write to, as those of the object store; nobody does.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {key: torch.from_numpy(value) for key, value in arrays.items()}


@dataclass(frozen=True)
class TrainJob:
    """Train one client for one round."""

    round: int
    client: int
    state: Arrays = field(default_factory=dict)  # the client's persistent state


@dataclass(frozen=True)
class EvalJob:
    """Evaluate the broadcast on test rows ``start:stop`` (of the evaluation subset)."""

    round: int
    start: int
    stop: int


@dataclass(frozen=True)
class SurveyJob:
    """Ask one client what the method wants to know before round 1."""

    client: int


Job = TrainJob | EvalJob | SurveyJob


@dataclass(frozen=True)
class Upload:
    """What one client sends.

    Attributes:
        client: who.
        rows: n_c, size of the client's shard.
        arrays: what the method uploads; ``"shared"`` is [W] float32.
        active: [U] bool, the units this client trained; None means all.
    """

    client: int
    rows: int
    arrays: Arrays
    active: np.ndarray | None = None


@dataclass(frozen=True)
class TrainReport:
    """What a training job tells beside its upload; small, always read by the server."""

    client: int
    state: Arrays  # the client's new persistent state
    loss: float  # mean training loss over the local steps
    seconds: float
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalReport:
    """Sums over the rows of one evaluation job; see ``Task.evaluate``."""

    round: int
    start: int
    sums: dict[str, float]


def survey_in(broadcast: Arrays) -> Arrays:
    """The survey that a broadcast carries, if any."""
    return {k.removeprefix(SURVEY): v for k, v in broadcast.items() if k.startswith(SURVEY)}


@dataclass(frozen=True)
class Expected:
    """What a sound upload looks like: the length of each array, and how units cover "shared"."""

    lengths: Mapping[str, int]
    unit_sizes: np.ndarray  # [U] int64, sums to lengths["shared"]


@dataclass(frozen=True)
class Blueprint:
    """What the server must know of a workbench, without holding a backbone itself.

    ``sources`` says what the run is made from beyond its configuration, which names places and
    not what lies there: the SHA-256 of the dataset's ``rows`` and, for texts, of their
    ``tokens``, and the weights of the ``backbone``. What is unknown is left out.
    """

    layout: Layout
    wire: tuple[str, ...]
    initial: np.ndarray  # [P] float32, the untrained vector
    expected: Expected
    task: Task
    test_rows: int
    parameters: dict[str, int]  # adapter, scalars, head
    heads: dict[str, int]  # heads on each adapted matrix, by transformer block (if any)
    block_norms: dict[str, float]  # ||W||_F^2 of the adapted matrices, summed by block
    sources: dict[str, str] = field(default_factory=dict)


#: Names of sources for people.
_SOURCES = {"rows": "data", "tokens": "tokens of the data", "backbone": "weights of the backbone"}


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Names of the sources that are known in both and differ, for a message; empty if none do."""
    both = [kind for kind in _SOURCES if kind in before and kind in now]
    changed = [kind for kind in both if before[kind] != now[kind]]
    if "rows" in changed and "tokens" in changed:
        changed.remove("tokens")  # of other rows
    return " and ".join(_SOURCES[kind] for kind in changed)


@dataclass
class Outcome:
    """What a set of jobs brought: handles to uploads stay wherever they were made."""

    uploads: list[Any]  # in the order of the training jobs
    reports: list[TrainReport]  # likewise
    evaluations: list[EvalReport]  # in the order of the evaluation jobs
    surveys: list[Arrays] = field(default_factory=list)  # in the order of the survey jobs
    events: list[str] = field(default_factory=list)  # restarts and the like, for people
