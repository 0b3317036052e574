"""What the server asks of a worker and what comes back: small, picklable, without Ray.

Legend: W entries of the shared part on the wire, U units of aggregation, n rows.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trishul_ray.methods.base import SURVEY

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
