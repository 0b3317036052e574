"""The contract of a federated method, and the registry of methods.

A method defines five things: the adapters that it attaches, the parameters that a client trains and
the end of a local step, the client's upload, how uploads become the next state, and the broadcast.
Sampling, data, optimizers, evaluation, tracking and faults belong to the platform.

Legend: P trainables of a client, W entries of the shared part on the wire, U units of
aggregation (one core head, or one whole tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from pydantic import create_model

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.targets import BlockScores
from trishul_ray.config.section import Section
from trishul_ray.errors import InputError
from trishul_ray.methods.base.messages import (
    LocalRun,
    Round,
    Site,
    State,
    SurveyPlan,
    Tensors,
    count_numbers,
)
from trishul_ray.plugins.loading import Plugin, find_plugin, named
from trishul_ray.plugins.registry import Registry
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.config.fields import AdapterConfig, FederationConfig

#: Shared fields that every kind of adapter reads.
ADAPTED = frozenset({"budget", "targets", "rank", "path"})


class MethodConfig(Section):
    """Base class of a method's hyper-parameters; :func:`register` gives it the method's name."""

    name: str

    @property
    def in_short(self) -> str:
        """A remark next to the method's name in one line on a run; may be empty."""
        return ""


class Settings(Protocol):
    """The part of an experiment that a method may read to reject it."""

    @property
    def adapter(self) -> AdapterConfig:
        """The section ``adapter``."""

    @property
    def federation(self) -> FederationConfig:
        """The section ``federation``."""

    @property
    def remembered(self) -> tuple[str, ...]:
        """The fields, as ``field=value``, that add to a change what earlier rounds left."""

    def is_set(self, section: str) -> bool:
        """Return whether a section of a stage is set."""


class Method:
    """Base class of federated methods: set the class attributes, override hooks.

    Instances hold only their configuration: one object serves every client.
    """

    #: Its hyper-parameters, if it has any in addition to inherited ones.
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    #: One line for ``trishul list methods``.
    summary: ClassVar[str]
    #: Publication of the method.
    reference: ClassVar[str]
    #: Parameters a client sends each round, as a formula.
    communication: ClassVar[str]

    #: Caveat next to its rows in a table, in a sentence.
    caveat: ClassVar[str] = ""
    #: Train every parameter of the backbone itself (full fine-tuning).
    train_all: ClassVar[bool] = False
    #: Whether a client of limited compute can train a part of the budget.
    takes_limits: bool = False
    #: Whether the next global model is another than the clients' mean (momentum, a correction, a
    #: model for each cluster). If not, training with one client is central training, which the
    #: tests of all methods and ``trishul check`` check.
    moves_beyond_mean: ClassVar[bool] = False
    #: Whether clients keep a part of the model: the trainables that are not in :meth:`wire`, which
    #: :meth:`upload` returns by name and :meth:`start` restores from ``run.client_state``. The
    #: metrics are then those of the global model, without such a part; with
    #: ``evaluation.per_client`` every client's own model is scored as well (``personal_mean``).
    personal: bool = False
    #: Whether the next state is a function of the mean of what clients upload, with weights by
    #: ``federation.weighting`` alone, and the broadcast's ``shared`` is the state's. Stages that
    #: act on changes need it, and reject other methods; ``trishul check`` tries it. A subclass that
    #: changes the average or the broadcast, or needs all uploads, does not inherit it. An instance
    #: may override its class, depending on its configuration; so it may ``needs_uploads``.
    mean_is_enough: bool = False
    #: Whether :meth:`aggregate` reads each upload, not only their mean: a median, a clustering. The
    #: server then holds all uploads of a round at once, m W numbers; otherwise only running sums.
    needs_uploads: bool = False
    #: Names in ``extra`` of a contribution that are averaged without weights, whatever
    #: ``federation.weighting`` and :meth:`weight` are. Their sum over the cohort is then
    #: ``round_.accepted`` times the mean.
    plain_mean: ClassVar[frozenset[str]] = frozenset()
    #: Names in ``extra`` of an upload that are the change of what the client keeps under the same
    #: name (zero at first), so that the server can add up what all clients keep. If a stage alters
    #: the change, the client keeps its earlier tensors, plus the change that the server reads.
    mirrored: ClassVar[frozenset[str]] = frozenset()
    #: Whether :meth:`weight` also applies to the classification head. If not, the classification
    #: head is averaged by ``federation.weighting`` alone.
    weighs_classifier: ClassVar[bool] = True

    #: Its default learning rates by row of ``learning_rates.yaml``, if the row has none. They were
    #: chosen as the rates of the row; not inherited.
    rates: ClassVar[Mapping[str, float]] = {}
    #: The method whose default learning rates this one uses if it has none; inherited by
    #: subclasses. None: the general default, with a warning.
    rates_like: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Else a method that averages something else would keep a promise that it never made.
        changed = {"contribution", "weight", "broadcast", "needs_uploads"}
        if vars(cls).keys() & changed:
            cls.mean_is_enough = vars(cls).get("mean_is_enough", False)

    def __init__(self, config: MethodConfig, lora_alpha: float | None = None) -> None:
        self.config: Any = config
        #: ``adapter.alpha`` of the experiment, for methods whose server multiplies LoRA factors;
        #: None until the experiment is known.
        self.lora_alpha = lora_alpha

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (
            METHODS.plugins_of(self.config.name),
            self.config.model_dump(),
            self.lora_alpha,
        )

    def check(self, settings: Settings) -> None:
        """Reject an experiment that the method cannot run (default: accept all).

        Raises:
            ValueError: Names the field, its value, and the allowed values.
        """

    @property
    def fields_read(self) -> frozenset[str] | None:
        """The shared fields that it reads: ``budget``, and fields of the section ``adapter``.

        Others cannot change a number of its runs and are not part of their ids. Where ``rank`` is
        set, it takes the place of ``budget`` and ``matching``. None (the default): all, at any
        rank.
        """
        return None

    @property
    def block_scores(self) -> BlockScores:
        """Return the kind of linear weights in :attr:`Site.scored`; the adapted ones by default."""
        return "adapted"

    # 1. Which adapters.
    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """Return the adapter of each layer, by layer name.

        Raises:
            InputError: The budget does not fit the backbone.
        """
        raise InputError(
            f"method={self.config.name!r}: {named(type(self))} defines no adapters(): "
            "define it, or extend a method that does, such as FedIT or FedAvg"
        )

    @property
    def survey_plan(self) -> SurveyPlan | None:
        """Return the survey that clients answer before round 1; None (the default) for none."""
        return None

    def survey(self, gradients: Iterator[Tensors]) -> Tensors:
        """Return one client's answer by layer, its upload of round 0; the server takes the mean.

        Args:
            gradients: For each mini-batch, the dense gradient [d_out, d_in] of each adapted
                layer's weight at the pretrained model.
        """
        raise NotImplementedError(f"{type(self).__name__} has a survey_plan but no survey()")

    # 2. What a client trains and how its local step ends.
    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Fill ``run.vector`` before the first step; ``initial`` [P] is the untrained vector."""
        run.vector.copy_(initial)
        self.unpack(run.layout, run.vector, run.broadcast.shared)
        if self.personal:
            views = run.layout.views(run.vector)
            for name, own in run.client_state.items():
                views[name].copy_(own)

    def before_step(self, run: LocalRun) -> None:
        """Correct ``run.grad`` in place before the optimizer reads it (default: do nothing)."""

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """End local step ``step`` of 1..``steps``, e.g. by a prox or a clip (default: nothing)."""

    def after_steps(self, runs: Sequence[LocalRun], step: int, steps: int) -> None:
        """End it for the clients that train together (default: :meth:`after_step` of each)."""
        for run in runs:
            self.after_step(run, step, steps)

    @property
    def steps_per_prox(self) -> int:
        """Local steps from one proximal map of the core heads to the next, for cost estimates.

        0 (the default): clients compute none.
        """
        return 0

    @property
    def units_by_data(self) -> str:
        """The setting by which a client's data decide which units it trains; empty if none."""
        return ""

    def unit_shares(self, layout: Layout, capacities: Sequence[float]) -> np.ndarray:
        """Return [U] float64, the share of clients that train a unit, on average (default: all).

        It must follow from the configuration, not from data: a mean that hides who came is a sum
        over the expected number of clients. Units that :meth:`round_wire` leaves out of a
        round do not count.

        Args:
            layout: Names of the trainables; the units are the units of :meth:`wire`.
            capacities: :attr:`LocalRun.capacity` of every client.
        """
        return np.ones(sum(1 for _ in layout.units(self.wire(layout))))

    # 3. What it uploads.
    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return the names of the trainables in ``shared``, in order (default: all)."""
        return tuple(entry.name for entry in layout.entries)

    def round_wire(self, layout: Layout, round_number: int) -> tuple[str, ...]:
        """Return which of :meth:`wire` clients train and send in a round (default: all).

        The rest keeps the server's value. The simulation's ``shared`` has all W entries in every
        round; only these are averaged and counted as uploaded.
        """
        return self.wire(layout)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Return a client's upload after ``steps`` steps, and its new state."""
        memory: Tensors = {}
        if self.personal:
            sent, views = self.wire(run.layout), run.layout.views(run.vector)
            memory = {name: view.clone() for name, view in views.items() if name not in sent}
        return State(self.pack(run.layout, run.vector)), memory

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Return the length of ``shared`` and, by name, of each tensor in an upload's ``extra``.

        The server rejects any other upload.
        """
        return {"shared": sum(layout.entry(name).numel for name in self.wire(layout))}

    # 4. How uploads become the next global state.
    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Return the global state before round 1, given the untrained vector [P]."""
        return State(self.pack(layout, initial))

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Return what a run must say after round 1, given :attr:`Round.metrics` of it; or nothing.

        See also :attr:`caveat`.
        """
        return ""

    def weight(self, upload: State, layout: Layout, weight: float) -> float:
        """Return the weight of an upload in the mean, given that by ``federation.weighting``.

        :attr:`plain_mean` and :attr:`weighs_classifier` exempt parts of it.
        """
        return weight

    def contribution(self, upload: State, layout: Layout) -> State:
        """Return the averaged tensors: the upload (default), or also functions of it."""
        return upload

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the next global state.

        Args:
            state: The current global state.
            mean: The weighted mean of the contributions (unweighted for :attr:`plain_mean`), each
                unit of ``shared`` over the clients that trained it. A unit that no client
                trained keeps its old value.
            round_: The round, its participants and, if :attr:`needs_uploads`, what each sent.
            layout: Names of the trainables; those of ``shared`` are given by :meth:`wire`.
        """
        return mean

    # 5. What the next broadcast is.
    def broadcast(self, state: State) -> State:
        """Return what every client of the next cohort receives (default: the global state)."""
        return state

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Return how many numbers one client downloads for this broadcast in a real deployment.

        By default this leaves out ``base`` and ``constants``: the simulation sends them in
        full to clients that store nothing, a deployment only their changes. A method that folds
        changes into ``base`` counts the changes of all rounds that the client missed, or ``base``
        itself if it is smaller. :meth:`setup_parameters` counts tensors that are sent once.

        Args:
            broadcast: Broadcast of the simulation.
            layout: Names of the trainables.
            unsent: :attr:`LocalRun.unsent` of the client.
            missed: For each earlier round whose aggregate the client has not received, the numbers
                that each accepted client sent in it. These are all earlier rounds for a client that
                takes part for the first time, and never fewer than the last round.
        """
        return broadcast.shared.numel() + count_numbers(broadcast.extra) - unsent

    def setup_parameters(self, broadcast: State, layout: Layout) -> int:
        """Return how many numbers a client downloads once, in its first round.

        By default these are ``constants``, frozen tensors computed by the server, and the answers
        of a survey that decides the adapters. Tensors drawn from the seed cost nothing, since every
        client draws the same.

        Args:
            broadcast: Broadcast of the simulation.
            layout: Names of the trainables.
        """
        constants = sum(map(count_numbers, broadcast.constants.values()))
        return constants + count_numbers(broadcast.survey)

    # Helpers that follow from :meth:`wire`.
    def pack(self, layout: Layout, vector: Tensor) -> Tensor:
        """Gather the wire entries of a trainable vector [P] into one new vector [W]."""
        views = layout.views(vector)
        return torch.cat([views[name].reshape(-1) for name in self.wire(layout)])

    def unpack(self, layout: Layout, vector: Tensor, shared: Tensor) -> None:
        """Scatter a wire vector [W] into a trainable vector [P], in place."""
        views = layout.views(vector)
        for name, value in self.named_tensors(layout, shared).items():
            views[name].copy_(value)

    def named_tensors(self, layout: Layout, shared: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a wire vector [W] by name, as views in their shapes."""
        tensors, start = {}, 0
        for entry in map(layout.entry, self.wire(layout)):
            tensors[entry.name] = shared[start : start + entry.numel].view(entry.shape)
            start += entry.numel
        return tensors


METHODS = Registry[type[Method]](
    "method",
    "method",
    "trishul_ray.methods",
    advice={"lora": "method=fedit is LoRA with plain averaging", "dora": "DoRA is not supported"},
)

_M = TypeVar("_M", bound=type[Method])


def register(name: str) -> Callable[[_M], _M]:
    """Return a class decorator that makes a method available as ``method=<name>``."""

    def add(cls: _M) -> _M:
        METHODS.add(name, cls)
        if cls.Config.model_fields["name"].default != name:
            cls.Config = create_model(
                f"{cls.__name__}Config",
                __base__=cls.Config,
                __doc__=f"Hyper-parameters of {cls.__name__}.",
                __module__=cls.__module__,
                __qualname__=f"{cls.__qualname__}.Config",  # where pickle finds it
                name=(Literal[name], name),  # type: ignore[arg-type]
            )
        return cls

    return add


#: The names of all methods, the class of a name, and all classes by name.
method_names, method_class, method_classes = METHODS.names, METHODS.__getitem__, METHODS.all


def read_method(value: Any) -> MethodConfig:
    """Return the section ``method``, given a method's name, its fields, or the section.

    Raises:
        ValueError: There is no such method, or a field is wrong.
    """
    if isinstance(value, MethodConfig):
        return value
    if not isinstance(value, str | Mapping):
        # Only scalars are shown unchanged: other objects may have addresses in their texts.
        shown = repr(value) if isinstance(value, bool | int | float) else type(value).__name__
        raise ValueError(
            f"{shown}: it must be a method's name, or a section such as {{name: trishul}}"
        )
    fields = {"name": value} if isinstance(value, str) else dict(value)
    name = fields.get("name", "trishul")
    if name not in method_names():
        raise ValueError(METHODS.unknown(str(name)))
    fields, config = {**fields, "name": name}, method_class(name).Config
    return config.model_validate(fields)


def build_method(config: MethodConfig, adapter: AdapterConfig | None = None) -> Method:
    """Build the method of a method section; with the adapter section, such that it can run."""
    return method_class(config.name)(config, None if adapter is None else adapter.alpha)


def _restored(needed: frozenset[Plugin], fields: Json, alpha: Any) -> Method:
    """Return a method in the process that it was sent to, which may not know its plug-in yet."""
    for plugin in needed:
        find_plugin(plugin)
    cls = method_class(fields["name"])
    return cls(cls.Config.model_validate(fields), alpha)
