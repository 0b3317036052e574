"""Messages between a method and the platform: states, rounds on clients and server, surveys.

All trainables of a client are in one flat float32 vector, named by a
:class:`~trishul_ray.adapters.layout.Layout`. The server stores, broadcasts, receives and averages a
:class:`State`.

Legend: P trainables of a client, W entries of the shared part in an upload, U units of aggregation
(one core head, or one whole tensor).
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

#: Tensors keyed by name: client state, or a response to a survey.
Tensors: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class State(Generic[A]):
    """A global state, a broadcast, an upload, or a mean of uploads; of tensors or of arrays.

    Attributes:
        shared: [W] float32, trained by all clients and averaged by the server, in the order of
            :meth:`Method.wire`.
        extra: Additional tensors of the method, keyed by name, such as a control variate.
        base: Changes [d_out, d_in] to add to the frozen weights, keyed by layer name.
        constants: Frozen tensors that replace the adapters' own, keyed by layer name and tensor
            name.
        survey: Responses to a survey that decides the adapters, keyed by layer name; set by the
            platform.
    """

    shared: A
    extra: dict[str, A] = field(default_factory=dict)
    base: dict[str, A] = field(default_factory=dict)
    constants: dict[str, dict[str, A]] = field(default_factory=dict)
    survey: dict[str, A] = field(default_factory=dict)

    def map(self, change: Callable[[A], _New]) -> State[_New]:
        """Apply a function to every tensor.

        Args:
            change: Function of one tensor.

        Returns:
            A new state of the results.
        """
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
    """Return the total number of entries of all tensors.

    Args:
        tensors: Tensors, keyed by name.
    """
    return sum(value.numel() for value in tensors.values())


@dataclass(frozen=True)
class TargetLayers:
    """Layers that adapters can be attached to: a method's view of the frozen backbone.

    Attributes:
        layers: The targeted linear layers, in the model's order.
        squared_norms: ``||W||_F^2`` of ``layers`` and ``scored``, keyed by layer name.
        lora_rank: The budget as a LoRA rank per adapted matrix.
        adapter: The section ``adapter``.
        survey: The mean of the clients' responses (see :meth:`Method.survey`). Empty if the method
            has no survey, or if only sizes are checked.
        scored: The linear layers whose weights score their block; see :attr:`Method.block_scores`.
    """

    layers: tuple[LayerSpec, ...]
    squared_norms: Mapping[str, float]
    lora_rank: int
    adapter: AdapterConfig
    survey: Tensors = field(default_factory=dict)
    scored: tuple[LayerSpec, ...] = ()

    def blocks(self) -> dict[str, list[LayerSpec]]:
        """Group the layers by transformer block.

        Returns:
            The layers of each block, in the model's order, keyed by the path of the block.
        """
        grouped: dict[str, list[LayerSpec]] = {}
        for layer in self.layers:
            grouped.setdefault(layer.block, []).append(layer)
        return grouped


@dataclass(frozen=True)
class SurveyPlan:
    """Size of a survey before round 1.

    Attributes:
        clients: Number of clients that respond.
        batches: Mini-batches per client.
        batch_size: Examples per mini-batch; None means ``federation.batch_size``.
        decides_adapters: Whether :meth:`Method.adapters` reads the responses, so that every worker
            needs them.
    """

    clients: int
    batches: int
    batch_size: int | None = None
    decides_adapters: bool = False


def _no_gradient(step: int) -> Tensor:
    raise LookupError(
        "run.gradient() is not available during evaluation, which has no mini-batches"
    )


@dataclass
class LocalRun:
    """A client's round in progress, as passed to the hooks of a method.

    Attributes:
        layout: Names of the entries of ``vector`` and ``grad``. Names of LoRA factors end in
            ``.lora_A`` and ``.lora_B``, names of core heads in ``.core`` and ``.scale``.
        vector: [P] float32, the client's trainables; hooks may modify it in place.
        grad: [P] float32, the gradient of the current step; hooks may modify it in place.
        broadcast: The state that the server sent.
        client_state: Tensors that this client kept from its last participation, keyed by name;
            empty in its first round, and during evaluation of the global model. See
            :attr:`Method.personal`.
        optimizer: The section ``optimizer``.
        client: The client's number, from 0; None during evaluation of the global model.
        generator: Random stream of this client and round.
        common: Random stream that is the same for all clients of the round.
        steps: Number of local steps of the round.
        step: The current local step, from 1; 0 before the first.
        loss: Scalar on the device, the loss of the current step's mini-batch at the vector before
            the step; None before the first step. Reading its value waits for the GPU.
        rates: η of each local step (``optimizer.schedule``), of step k at ``rates[k - 1]``; empty
            if all are ``optimizer.lr``.
        round: The round, from 1; during evaluation, the last aggregated round.
        training: False while a broadcast is turned into the model to evaluate.
        diagnosed: Whether the server diagnoses this round's uploads. Otherwise, values only for
            diagnostics need not be computed.
        capacity: Fraction of the full budget that this client can train, in (0, 1].
        gradient: Function that computes, into ``grad``, the gradient at the current vector of the
            mini-batch of the given local step (from 1), and returns its loss, a scalar on the
            device.
        active: [U] bool on the host, the units that this client trains; None means all. Initially
            the units of :meth:`Method.round_wire`.
        entries: [P] bool, the entries of these units that this client trains; None means all. Set
            by :meth:`Method.start`; the platform does not change the other entries.
        unsent: Number of entries of the shared part that a real deployment would not send for this
            client, up or (see :meth:`Method.download_parameters`) down.
        metrics: Numbers to report with the upload, keyed by name; the record has their mean.
        spectra: Singular values to report for figures; see ``Diagnostics``.

    Example:
        Copy the broadcast in :meth:`Method.start`, and read it in a later hook::

            run.set_state(Anchor(run.vector.clone()))
            ...
            drift = run.vector - run.state_of(Anchor).vector
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
        """Store an object for the later hooks of this round, keyed by its class.

        Each method defines a separate class for its object, so that one method can extend another
        that also stores an object. The object is discarded after the round; :meth:`Method.upload`
        returns the state that the client keeps.

        Args:
            state: The object.
        """
        self._states[type(state)] = state

    def state_of(self, kind: type[_S]) -> _S:
        """Return the object of this class that an earlier hook stored.

        Args:
            kind: Class of the object.

        Raises:
            LookupError: No hook has stored such an object.
        """
        if kind not in self._states:
            raise LookupError(f"no {kind.__name__} was set: call run.set_state() in start()")
        state: _S = self._states[kind]
        return state

    def summed_rate(self, step: int, since: int) -> float:
        """Return the sum of η over several local steps.

        Args:
            step: The last step, from 1.
            since: Number of steps that end with ``step``.
        """
        return math.fsum(self.rates[step - since : step] or [self.optimizer.lr] * since)


@dataclass(frozen=True)
class ClientUpload:
    """An accepted upload, for a method with :attr:`Method.needs_uploads`.

    Attributes:
        client: The client's number.
        weight: Its weight in the mean, from ``federation.weighting`` and :meth:`Method.weight`.
        arrays: Its contribution to the mean; read-only.
        trained: [U] bool, the units that the client trained; None means all.
    """

    client: int
    weight: float
    arrays: State
    trained: Tensor | None = None


@dataclass(frozen=True)
class Round:
    """Facts about a round for the aggregation.

    Attributes:
        number: The round, from 1.
        accepted: Number of clients with accepted uploads, m.
        clients: Number of registered clients, N.
        trained: [U] bool, the units that at least one client trained.
        uploads: The accepted uploads in ascending order of clients; empty unless
            :attr:`~Method.needs_uploads`.
        metrics: Output numbers of :meth:`Method.aggregate` for the round's record, keyed by name.
    """

    number: int
    accepted: int
    clients: int
    trained: Tensor
    uploads: tuple[ClientUpload, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
