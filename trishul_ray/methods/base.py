"""The contract of a federated method, and the registry that finds every method by itself.

A method says five things and nothing else: which adapters it attaches, what a client trains and
how its local step ends, what it uploads, how uploads become the next global state, and what the
next broadcast is. Sampling, data, optimizers, evaluation, tracking and faults are the platform's.

Every trainable of a client lies in one flat float32 vector, named by a
:class:`~trishul_ray.adapters.layout.Layout`; what travels is a dictionary of flat tensors. The key
``"shared"`` is what all clients train and the server averages, in the order of
:meth:`Method.wire`; a method may add keys of its own (a control variate, a residual).

Legend: P trainables of a client, W entries of the shared part on the wire, U units of
aggregation (one head's core, or one whole tensor).
"""

import importlib
import pkgutil
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.layout import Layout

if TYPE_CHECKING:
    from trishul_ray.experiment import AdapterConfig, OptimizerConfig

#: What a broadcast, an upload, a global state and a client's persistent state all are.
State = dict[str, Tensor]


class MethodConfig(BaseModel):
    """A method's own hyper-parameters; each method subclasses it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    name: str


@dataclass(frozen=True)
class Site:
    """Where adapters may be attached: what a method may know of the frozen backbone.

    Attributes:
        layers: the targeted linear layers, in the model's order.
        squared_norms: ``||W||_F^2`` of each, by layer name.
        lora_rank: the budget as a LoRA rank per adapted matrix.
        adapter: the experiment's adapter section.
    """

    layers: tuple[LayerSpec, ...]
    squared_norms: Mapping[str, float]
    lora_rank: int
    adapter: "AdapterConfig"

    def blocks(self) -> dict[str, list[LayerSpec]]:
        """The layers by transformer block, in the model's order."""
        grouped: dict[str, list[LayerSpec]] = {}
        for layer in self.layers:
            grouped.setdefault(layer.block, []).append(layer)
        return grouped


@dataclass
class LocalRun:
    """One client's round while it is under way, as the method's hooks see it.

    Attributes:
        layout: names the entries of ``vector`` and ``grad``.
        vector: [P] float32, what the client trains; hooks may change it in place.
        grad: [P] float32, the gradient of the current step; hooks may change it in place.
        broadcast: what the server sent.
        client_state: what this client kept from its last participation (may be empty).
        optimizer: the experiment's optimizer section.
        generator: the client's own stream for this round.
        active: [U] bool, which units of the wire this client trains; None means all.
        notes: numbers a hook wants reported with the upload.
    """

    layout: Layout
    vector: Tensor
    grad: Tensor
    broadcast: State
    client_state: State
    optimizer: "OptimizerConfig"
    generator: torch.Generator
    active: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class Method(ABC):
    """One federated method. Subclass, give ``Config``, ``summary`` and the rest, override hooks.

    Instances are stateless beside their configuration: the same object serves every client.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    #: One line for ``trishul methods``.
    summary: ClassVar[str]
    #: Where the method was published.
    reference: ClassVar[str]
    #: Parameters a client sends each round, as a formula.
    communication: ClassVar[str]

    def __init__(self, config: MethodConfig) -> None:
        self.config: Any = config

    # 1. Which adapters.
    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """The adapter of each layer, by layer name.

        Raises:
            InputError: the budget does not fit the backbone.
        """
        raise NotImplementedError(f"{type(self).__name__} must say which adapters it attaches")

    # 2. What a client trains and how its local step ends.
    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Fill ``run.vector`` before the first step; ``initial`` [P] is the untrained vector."""
        run.vector.copy_(initial)
        self.unpack(run.layout, run.vector, run.broadcast["shared"])

    def before_step(self, run: LocalRun) -> None:
        """Correct ``run.grad`` in place before the optimizer sees it (nothing by default)."""

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """End local step ``step`` of 1..``steps`` in place: a prox, a clip (nothing by default)."""

    # 3. What it uploads.
    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Names of the trainables that travel under ``"shared"``, in order (all by default)."""
        return tuple(entry.name for entry in layout.entries)

    def upload(self, run: LocalRun) -> tuple[State, State]:
        """What the client sends and what it keeps: ``(upload, new client state)``."""
        return {"shared": self.pack(run.layout, run.vector)}, {}

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Entries of each array a client uploads; the server refuses anything else."""
        return {"shared": sum(layout.entry(name).numel for name in self.wire(layout))}

    # 4. How uploads become the next global state.
    def initial_state(self, layout: Layout, initial: Tensor) -> State:
        """The global state before round 1, from the untrained vector [P]."""
        return {"shared": self.pack(layout, initial)}

    def aggregate(self, state: State, mean: State, trained: Tensor) -> State:
        """The next global state.

        Args:
            state: the current one.
            mean: the weighted mean of the uploads, each unit over those who trained it.
            trained: [U] bool, units that at least one client trained; others keep their value
                (the platform has already put the old value into ``mean``).
        """
        return dict(mean)

    # 5. What the next broadcast is.
    def broadcast(self, state: State) -> State:
        """What every client of the next cohort receives (the global state by default)."""
        return state

    # Helpers that follow from :meth:`wire`.
    def pack(self, layout: Layout, vector: Tensor) -> Tensor:
        """Gather the wire entries of a trainable vector [P] into one new vector [W]."""
        views = layout.views(vector)
        return torch.cat([views[name].reshape(-1) for name in self.wire(layout)])

    def unpack(self, layout: Layout, vector: Tensor, shared: Tensor) -> None:
        """Scatter a wire vector [W] into a trainable vector [P], in place."""
        views, start = layout.views(vector), 0
        for name in self.wire(layout):
            target = views[name]
            target.copy_(shared[start : start + target.numel()].view_as(target))
            start += target.numel()


_REGISTRY: dict[str, type[Method]] = {}
_M = TypeVar("_M", bound=type[Method])


def register(name: str) -> Callable[[_M], _M]:
    """Class decorator: make a method available under ``name`` in every config and test."""

    def add(cls: _M) -> _M:
        if _REGISTRY.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"method name {name!r} is taken by {_REGISTRY[name].__qualname__}")
        _REGISTRY[name] = cls
        return cls

    return add


def _discover() -> None:
    package = importlib.import_module("trishul_ray.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"trishul_ray.methods.{module.name}")


def method_names() -> list[str]:
    """Names of all registered methods, sorted; every file of the package is looked into."""
    _discover()
    return sorted(_REGISTRY)


def method_class(name: str) -> type[Method]:
    """The class registered under ``name``; KeyError if there is none."""
    _discover()
    return _REGISTRY[name]


def build_method(config: MethodConfig) -> Method:
    """The method a configuration asks for."""
    return method_class(config.name)(config)
