"""The contract of a federated method.

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
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.targets import BlockScores

if TYPE_CHECKING:
    from trishul_ray.config import AdapterConfig, OptimizerConfig


#: Keys of a broadcast that change what is frozen: ``base/<layer>`` is added to the frozen weight,
#: ``constant/<layer>/<name>`` replaces a frozen tensor of the layer's adapter.
BASE, CONSTANT = "base/", "constant/"


#: Keys under which the survey travels to workers, who build their adapters from it.
SURVEY = "survey/"


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
        squared_norms: ``||W||_F^2`` of each of them and of ``scored``, by layer name.
        lora_rank: the budget as a LoRA rank per adapted matrix.
        adapter: the experiment's adapter section.
        survey: what clients found out before round 1, averaged (see :meth:`Method.survey`);
            empty where the method asks for nothing, or while only sizes are being checked.
        scored: the linear layers whose weights score their block: see :meth:`Method.block_scores`.
    """

    layers: tuple[LayerSpec, ...]
    squared_norms: Mapping[str, float]
    lora_rank: int
    adapter: "AdapterConfig"
    survey: State = field(default_factory=dict)
    scored: tuple[LayerSpec, ...] = ()

    def blocks(self) -> dict[str, list[LayerSpec]]:
        """The layers by transformer block, in the model's order."""
        grouped: dict[str, list[LayerSpec]] = {}
        for layer in self.layers:
            grouped.setdefault(layer.block, []).append(layer)
        return grouped


@dataclass(frozen=True)
class SurveyPlan:
    """How much data a survey reads on each asked client.

    Attributes:
        clients: how many clients are asked.
        batches: mini-batches per client.
        batch_size: examples per mini-batch; None takes ``federation.batch_size``.
        decides_adapters: whether :meth:`Method.adapters` reads the answer, so that every worker
            must have it.
    """

    clients: int
    batches: int
    batch_size: int | None = None
    decides_adapters: bool = False


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
        common: a stream that is the same for all clients of the round.
        steps: local steps of the round.
        rates: η of each local step of this round (``optimizer.schedule``); step k's is
            ``rates[k - 1]``. Empty: ``optimizer.lr`` in all.
        training: False while a broadcast is only made into the global model, to evaluate it.
        capacity: share of the full budget this client can compute, in (0, 1].
        gradient: fills ``grad`` with the gradient, at the present vector, of the mini-batch that
            the given local step (from 1) will read.
        active: [U] bool, which units of the wire this client trains; None means all.
        memory: whatever a hook wants to find again in a later one.
        unsent: numbers that a real deployment would neither send up nor down to this client.
        notes: numbers a hook wants reported with the upload.
    """

    layout: Layout
    vector: Tensor
    grad: Tensor
    broadcast: State
    client_state: State
    optimizer: "OptimizerConfig"
    generator: torch.Generator
    common: torch.Generator
    steps: int = 0
    rates: tuple[float, ...] = ()
    training: bool = True
    capacity: float = 1.0
    gradient: Callable[[int], None] = lambda step: None
    active: Tensor | None = None
    memory: State = field(default_factory=dict)
    unsent: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def summed_rate(self, step: int, since: int) -> float:
        """Return the sum of η over the ``since`` local steps that end with ``step`` (from 1)."""
        return math.fsum(self.rates[step - since : step] or [self.optimizer.lr] * since)


@dataclass(frozen=True)
class Round:
    """What the server knows of a round when it aggregates.

    Attributes:
        number: from 1.
        accepted: clients whose uploads were sound, m.
        clients: registered clients, N.
        trained: [U] bool, units that at least one client trained.
    """

    number: int
    accepted: int
    clients: int
    trained: Tensor


class Method:
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

    #: Full fine-tuning: every parameter of the backbone is trained as it is.
    train_all: ClassVar[bool] = False
    #: Whether a client of limited compute can train a part of the budget.
    takes_limits: ClassVar[bool] = False
    #: Keys of a contribution, other than ``"shared"``, whose mean is the plain one: all accepted
    #: clients count alike, whatever ``federation.weighting`` and :meth:`weight` say. The sum over
    #: the cohort is then ``round_.accepted`` times the mean.
    plain_mean: ClassVar[frozenset[str]] = frozenset()
    #: Whether :meth:`weight` also weighs the classification head. Where it does not, the head is
    #: averaged by ``federation.weighting`` alone.
    weighs_head: ClassVar[bool] = True

    #: ``adapter.alpha`` of the experiment, for methods whose server multiplies LoRA factors.
    lora_alpha: float | None = None
    #: The method whose default learning rates this one takes where
    #: ``presets/learning_rates.yaml`` has no row of its own; a subclass inherits it. None: the
    #: general default, with a warning.
    rates_like: ClassVar[str | None] = None

    def __init__(self, config: MethodConfig) -> None:
        """Keep the configuration."""
        self.config: Any = config

    def ignored_fields(self, adapter: "AdapterConfig") -> frozenset[str]:
        """Return the shared fields that this method does not read, by dotted name.

        They cannot change a number of its runs and so are no part of their identity: ``budget``,
        fields of ``adapter``, or ``adapter`` for all of them. By default none is ignored.

        Args:
            adapter: the experiment's adapter section.
        """
        return frozenset()

    @property
    def block_scores(self) -> BlockScores:
        """Which linear weights :attr:`Site.scored` holds; those that are adapted by default."""
        return "adapted"

    # 1. Which adapters.
    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """The adapter of each layer, by layer name.

        Raises:
            InputError: the budget does not fit the backbone.
        """
        raise NotImplementedError(f"{type(self).__name__} must say which adapters it attaches")

    @property
    def survey_plan(self) -> SurveyPlan | None:
        """What clients must find out before round 1; None (the default) if nothing."""
        return None

    def survey(self, gradients: Iterator[dict[str, Tensor]]) -> State:
        """A client's answer; the server averages the answers.

        Args:
            gradients: one dictionary per mini-batch, the dense gradient [d_out, d_in] of each
                adapted layer's weight at the pretrained model.
        """
        raise NotImplementedError(f"{type(self).__name__} asks for a survey but reads none")

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

    def upload(self, run: LocalRun, steps: int) -> tuple[State, State]:
        """What the client sends after ``steps`` steps and what it keeps."""
        return {"shared": self.pack(run.layout, run.vector)}, {}

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Entries of each array a client uploads; the server refuses anything else."""
        return {"shared": sum(layout.entry(name).numel for name in self.wire(layout))}

    # 4. How uploads become the next global state.
    def initial_state(self, layout: Layout, initial: Tensor, survey: State) -> State:
        """The global state before round 1, from the untrained vector [P] and the survey."""
        return {"shared": self.pack(layout, initial)}

    def weight(self, upload: State, layout: Layout, weight: float) -> float:
        """Return this upload's weight in the mean.

        See :attr:`plain_mean` and :attr:`weighs_head` for what is averaged without it.

        Args:
            upload: what the client sent.
            layout: names the trainables.
            weight: what ``federation.weighting`` says.
        """
        return weight

    def contribution(self, upload: State, layout: Layout) -> State:
        """What of an upload is averaged: the upload itself, or functions of it beside it."""
        return upload

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """The next global state.

        Args:
            state: the current one.
            mean: the weighted mean of the contributions (the plain mean for keys in
                :attr:`plain_mean`), each unit of ``"shared"`` over those who trained it; a unit
                that nobody trained has its old value there.
            round_: which round, and who took part.
            layout: names the entries of the shared vector by way of :meth:`wire`.
        """
        return dict(mean)

    # 5. What the next broadcast is.
    def broadcast(self, state: State) -> State:
        """What every client of the next cohort receives (the global state by default)."""
        return state

    def download_parameters(self, broadcast: State, cohort: int, layout: Layout) -> int:
        """Numbers one client downloads for this broadcast, as a real deployment would send it.

        By default all of it but ``base/`` and ``constant/`` keys: the simulation sends those
        whole to clients that keep nothing, a deployment only what is new in them. Frozen tensors
        that are sent once are counted by :meth:`setup_parameters`.
        """
        return sum(
            value.numel()
            for key, value in broadcast.items()
            if not key.startswith((BASE, CONSTANT, SURVEY))
        )

    def setup_parameters(self, broadcast: State) -> int:
        """Return the numbers a client downloads once, in the first round it takes part in.

        By default the ``constant/`` keys: frozen tensors that the server computed. Those drawn
        from the seed cost nothing, since every client draws the same.
        """
        return sum(value.numel() for key, value in broadcast.items() if key.startswith(CONSTANT))

    # Helpers that follow from :meth:`wire`.
    def pack(self, layout: Layout, vector: Tensor) -> Tensor:
        """Gather the wire entries of a trainable vector [P] into one new vector [W]."""
        views = layout.views(vector)
        return torch.cat([views[name].reshape(-1) for name in self.wire(layout)])

    def unpack(self, layout: Layout, vector: Tensor, shared: Tensor) -> None:
        """Scatter a wire vector [W] into a trainable vector [P], in place."""
        views = layout.views(vector)
        for name, value in self.named(layout, shared).items():
            views[name].copy_(value)

    def named(self, layout: Layout, shared: Tensor) -> dict[str, Tensor]:
        """The entries of a wire vector [W] by name, as views of their own shapes."""
        found, start = {}, 0
        for entry in (layout.entry(name) for name in self.wire(layout)):
            found[entry.name] = shared[start : start + entry.numel].view(entry.shape)
            start += entry.numel
        return found


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


@cache
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


def build_method(config: MethodConfig, adapter: "AdapterConfig | None" = None) -> Method:
    """The method a configuration asks for.

    Args:
        config: its own section.
        adapter: the experiment's adapter section; needed where the method is to be run.
    """
    method = method_class(config.name)(config)
    if adapter is not None:
        method.lora_alpha = adapter.alpha
    return method
