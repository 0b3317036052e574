"""Messages between a method and the platform: states, a round at a client and server, surveys.

All trainables of a client are in one flat float32 vector, named by a
:class:`~trishul_ray.adapters.layout.Layout`. The server keeps, broadcasts, receives and averages
a :class:`State`.

Legend: P trainables of a client, W entries of the shared part on the wire, U units of
aggregation (one core head, or one whole tensor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.layout import Layout
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeVar as TypeVarWithDefault

    from trishul_ray.config.fields import AdapterConfig, OptimizerConfig

    A = TypeVarWithDefault("A", default=Tensor)
else:
    A = TypeVar("A")
_New = TypeVar("_New")
_S = TypeVar("_S")

#: Tensors by name: what a client keeps, or its answer to a survey.
Tensors: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class State(Generic[A]):
    """A global state, a broadcast, an upload, or a mean of uploads; of tensors or of arrays.

    Attributes:
        shared: float32 [W], trained by all clients and averaged by the server, in the order of
            :meth:`Method.wire`.
        extra: Tensors that the method adds, by name, such as a control variate.
        base: By layer, [d_out, d_in] that is added to the frozen weight.
        constants: By layer, frozen tensors by name that replace those of the adapter.
        survey: By layer, the answers to a survey that decides the adapters; the platform's.
    """

    shared: A
    extra: dict[str, A] = field(default_factory=dict)
    base: dict[str, A] = field(default_factory=dict)
    constants: dict[str, dict[str, A]] = field(default_factory=dict)
    survey: dict[str, A] = field(default_factory=dict)

    def map(self, change: Callable[[A], _New]) -> State[_New]:
        """Return the state with every tensor changed."""
        return State(
            change(self.shared),
            {name: change(value) for name, value in self.extra.items()},
            {layer: change(value) for layer, value in self.base.items()},
            {
                layer: {name: change(value) for name, value in tensors.items()}
                for layer, tensors in self.constants.items()
            },
            {layer: change(value) for layer, value in self.survey.items()},
        )


def count_numbers(tensors: Mapping[str, Tensor]) -> int:
    """Return how many numbers are in all tensors."""
    return sum(value.numel() for value in tensors.values())


@dataclass(frozen=True)
class Site:
    """Layers to which adapters may be attached: a method's view of the frozen backbone.

    Attributes:
        layers: The targeted linear layers, in the model's order.
        squared_norms: ``||W||_F^2`` of ``layers`` and ``scored``, by layer name.
        lora_rank: The budget as a LoRA rank per adapted matrix.
        adapter: The experiment's adapter section.
        survey: The mean of the clients' answers (see :meth:`Method.survey`); empty if the method
            makes no survey, or while only sizes are checked.
        scored: The linear layers whose weights score their block: see :attr:`Method.block_scores`.
    """

    layers: tuple[LayerSpec, ...]
    squared_norms: Mapping[str, float]
    lora_rank: int
    adapter: AdapterConfig
    survey: Tensors = field(default_factory=dict)
    scored: tuple[LayerSpec, ...] = ()

    def blocks(self) -> dict[str, list[LayerSpec]]:
        """Group the layers by transformer block, in the model's order."""
        grouped: dict[str, list[LayerSpec]] = {}
        for layer in self.layers:
            grouped.setdefault(layer.block, []).append(layer)
        return grouped


@dataclass(frozen=True)
class SurveyPlan:
    """Clients that answer a survey before round 1, and the amount of their data.

    Attributes:
        clients: Number of clients to ask.
        batches: Mini-batches per client.
        batch_size: Examples per mini-batch; None takes ``federation.batch_size``.
        decides_adapters: Whether :meth:`Method.adapters` reads the answers, so that every worker
            needs them.
    """

    clients: int
    batches: int
    batch_size: int | None = None
    decides_adapters: bool = False


def _no_gradient(step: int) -> Tensor:
    raise LookupError("run.gradient() has no mini-batches while a model is evaluated")


@dataclass
class LocalRun:
    """One client's round in progress, as the method's hooks see it.

    Attributes:
        layout: Names of the entries of ``vector`` and ``grad``; those of LoRA end in ``.lora_A``
            and ``.lora_B``, those of core heads in ``.core`` and ``.scale``.
        vector: [P] float32, the client's trainables; hooks may change it in place.
        grad: [P] float32, the gradient of the current step; hooks may change it in place.
        broadcast: State that the server sent.
        client_state: Tensors that this client kept from its last participation; empty before its
            first, and while the global model is evaluated. See :attr:`Method.personal`.
        optimizer: The experiment's optimizer section.
        client: The client's number, from 0; None while the global model is evaluated.
        generator: Random stream of this client and round.
        common: Random stream that is the same for all clients of the round.
        steps: Local steps of the round.
        step: Number of the current local step, from 1; 0 before the first.
        loss: The loss of the current step's mini-batch, a scalar on the device, at the vector
            before the step; None before the first. Reading its value waits for a GPU.
        rates: η of each local step (``optimizer.schedule``), step k's at ``rates[k - 1]``; if
            empty, all are ``optimizer.lr``.
        round: Number of the round, from 1; in evaluation that of the last aggregated one.
        training: False while a broadcast is turned into the model that is evaluated.
        diagnosed: Whether the server diagnoses this round's uploads: what only diagnostics read
            need not be computed otherwise.
        capacity: Share of the full budget that this client can compute, in (0, 1].
        gradient: Fills ``grad`` with the gradient, at the current vector, of the mini-batch of the
            given local step (from 1), and returns its loss, a scalar on the device.
        active: [U] bool on the host, the units this client trains; None means all. At first those
            of :meth:`Method.round_wire`.
        entries: [P] bool, what this client trains of those units; None means all. Set by
            :meth:`Method.start`; the platform leaves the rest as it is.
        unsent: Numbers of the shared part that a real deployment would not send for this client,
            up or (see :meth:`Method.download_parameters`) down.
        metrics: Numbers to report with the upload, by name; the record has their mean.
        spectra: Singular values to report, for figures; see ``Diagnostics``.
    """

    layout: Layout
    vector: Tensor
    grad: Tensor
    broadcast: State
    client_state: Tensors
    optimizer: OptimizerConfig
    generator: torch.Generator
    common: torch.Generator
    client: int | None = None
    steps: int = 0
    step: int = 0
    loss: Tensor | None = None
    rates: tuple[float, ...] = ()
    round: int = 0
    training: bool = True
    diagnosed: bool = True
    capacity: float = 1.0
    gradient: Callable[[int], Tensor] = _no_gradient
    active: Tensor | None = None
    entries: Tensor | None = None
    unsent: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    spectra: dict[str, np.ndarray] = field(default_factory=dict)
    _states: dict[type, Any] = field(default_factory=dict, init=False, repr=False)

    def set_state(self, state: object) -> None:
        """Leave an object for the later hooks, which find it by its class.

        Each method defines a class of its own, so that one method can extend another that leaves
        something, too. The state ends with the round; what a client keeps is returned by
        :meth:`Method.upload`.
        """
        self._states[type(state)] = state

    def state_of(self, kind: type[_S]) -> _S:
        """Return the object of this class that an earlier hook has left.

        Raises:
            LookupError: None was left.
        """
        if kind not in self._states:
            raise LookupError(f"no {kind.__name__} was left: call run.set_state() in start()")
        state: _S = self._states[kind]
        return state

    def summed_rate(self, step: int, since: int) -> float:
        """Return the sum of η over the ``since`` local steps that end with ``step`` (from 1)."""
        return math.fsum(self.rates[step - since : step] or [self.optimizer.lr] * since)


@dataclass(frozen=True)
class ClientUpload:
    """One accepted upload, for a method that :attr:`Method.needs_uploads`.

    Attributes:
        client: The client's number.
        weight: Its weight in the mean, by ``federation.weighting`` and :meth:`Method.weight`.
        arrays: Its contribution to the mean; do not write to it.
        trained: [U] bool, the units that the client trained; None means all.
    """

    client: int
    weight: float
    arrays: State
    trained: Tensor | None = None


@dataclass(frozen=True)
class Round:
    """Facts of a round that the server has when it aggregates.

    Attributes:
        number: Round number, from 1.
        accepted: Number of clients whose uploads were accepted, m.
        clients: Number of registered clients, N.
        trained: [U] bool, the units that at least one client trained.
        uploads: The accepted uploads by ascending client; empty unless the method
            :attr:`~Method.needs_uploads`.
        metrics: Numbers of :meth:`Method.aggregate` for the round's record, by name.
    """

    number: int
    accepted: int
    clients: int
    trained: Tensor
    uploads: tuple[ClientUpload, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
