"""What a worker keeps resident, and how a broadcast becomes a vector on it. No Ray here.

Legend: P trainables of a client, b batch size, n_c rows of client c.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.attach import AdaptedModel, Trained
from trishul_ray.federation.capacity import capacity
from trishul_ray.federation.jobs import Arrays, to_tensors
from trishul_ray.federation.schedule import learning_rates
from trishul_ray.methods.base import BASE, CONSTANT, LocalRun, Method, Site, State
from trishul_ray.rng import torch_rng
from trishul_ray.tasks.base import Task

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment


class Rows(Protocol):
    """A table of examples that can gather a batch of rows (a memory-mapped split)."""

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """The rows at ``indices`` [b] as tensors with b leading."""
        ...


class Shards(Protocol):
    """Which training rows each client holds."""

    def shard(self, client: int) -> np.ndarray:
        """Row indices of ``client``, [n_c]."""
        ...


@dataclass
class Workbench:
    """All that a worker keeps resident: one backbone with adapters, the data, the method."""

    settings: "Experiment"
    model: AdaptedModel
    initial: Tensor  # [P] float32, the untrained vector
    method: Method
    task: Task
    train: Rows
    test: Rows
    test_rows: np.ndarray  # rows of the test split that are evaluated
    shards: Shards
    device: torch.device
    dtype: torch.dtype
    site: Site
    sources: dict[str, str] = field(default_factory=dict)  # see Blueprint


def frozen_part(broadcast: State) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """What a broadcast changes of the frozen part: ``(base, constants)`` by layer."""
    base = {k.removeprefix(BASE): v for k, v in broadcast.items() if k.startswith(BASE)}
    constants: dict[str, dict[str, Tensor]] = {}
    for key, value in broadcast.items():
        if key.startswith(CONSTANT):
            layer, _, name = key.removeprefix(CONSTANT).rpartition("/")
            constants.setdefault(layer, {})[name] = value
    return base, constants


def new_run(bench: Workbench, broadcast: Arrays, round_number: int, client: int | None) -> LocalRun:
    """A run of ``client`` (None: of the global model, for evaluation), before its start."""
    settings, device = bench.settings, bench.device
    seed, vector = settings.seed, torch.empty_like(bench.initial)
    fed = settings.federation
    share: float = 1.0
    rates: tuple[float, ...] = ()
    if client is not None:
        share = capacity(fed.compute, seed, client, fed.compute_shares)
        rates = learning_rates(settings.optimizer, round_number, fed.rounds, fed.local_steps)
    return LocalRun(
        layout=bench.model.layout,
        vector=vector,
        grad=torch.empty(0) if client is None else torch.zeros_like(vector),
        broadcast={k: v.to(device) for k, v in to_tensors(broadcast).items()},
        client_state={},
        optimizer=settings.optimizer,
        rates=rates,
        generator=torch_rng(seed, "client", round_number, -1 if client is None else client),
        common=torch_rng(seed, "common", round_number),
        steps=settings.federation.local_steps,
        training=client is not None,
        capacity=share,
    )


def global_model(bench: Workbench, broadcast: Arrays, round_number: int) -> Trained:
    """The global model that a broadcast describes."""
    run = new_run(bench, broadcast, round_number, None)
    bench.method.start(run, bench.initial)
    return Trained(run.vector, *frozen_part(run.broadcast))
