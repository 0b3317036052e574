"""Base class and registry of federated methods.

A method defines five parts: the adapters that it attaches, the local training step, the client's
upload, the aggregation of uploads into the next state, and the broadcast. The platform provides
sampling, data, optimizers, evaluation, tracking and fault tolerance.

Legend: P trainables of a client, W entries of the shared part in an upload, U units of aggregation
(one core head, or one whole tensor).
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
    State,
    SurveyPlan,
    TargetLayers,
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
    """Base class of a method's hyper-parameters; :func:`register` sets the method's name.

    Example:
        >>> class MineConfig(MethodConfig):
        ...     mu: float = 0.1
    """

    name: str

    @property
    def label(self) -> str:
        """Text next to the method's name in a one-line run summary, or an empty string."""
        return ""


class Settings(Protocol):
    """Settings of an experiment that a method can read to validate it."""

    @property
    def adapter(self) -> AdapterConfig:
        """The section ``adapter``."""

    @property
    def federation(self) -> FederationConfig:
        """The section ``federation``."""

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """Fields, as ``field=value``, whose effect on a change depends on earlier rounds."""

    def is_set(self, section: str) -> bool:
        """Return whether the section of a stage is set."""


class Method:
    """Base class of federated methods.

    Subclasses set the class attributes and override the hooks that they need. Instances store only
    their configuration, because one instance serves every client. Store tensors of a round with
    :meth:`LocalRun.set_state`, and return tensors that a client keeps between rounds from
    :meth:`upload`.

    Args:
        config: The hyper-parameters, an instance of ``Config``.
        lora_alpha: ``adapter.alpha`` of the experiment, for methods whose server multiplies LoRA
            factors; None until the experiment is known.

    Example:
        A method that clips every gradient of FedIT, in a file that ``--plugin`` loads::

            class ClippedConfig(MethodConfig):
                bound: float = Field(1.0, gt=0, description="largest norm of a gradient")

            @register("clipped")
            class Clipped(FedIT):
                "FedIT with clipped local gradients."
                Config = ClippedConfig
                summary = "FedIT with clipped gradients"
                reference = "none"
                communication = "r (d_in + d_out) per matrix up and down"

                def before_step(self, run: LocalRun) -> None:
                    run.grad.mul_((self.config.bound / run.grad.norm()).clamp(max=1.0))
    """

    #: Class of the hyper-parameters, if the method adds any to the inherited ones.
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    #: One line for ``trishul list methods``.
    summary: ClassVar[str]
    #: Publication of the method.
    reference: ClassVar[str]
    #: Number of parameters that a client sends per round, as a formula.
    communication: ClassVar[str]

    #: One-sentence caveat that tables show next to the method's rows.
    caveat: ClassVar[str] = ""
    #: Whether to train every parameter of the backbone (full fine-tuning).
    train_all: ClassVar[bool] = False
    #: Whether resource-constrained clients can train a part of the budget.
    takes_limits: bool = False
    #: Whether the next global model differs from the clients' mean (momentum, a correction, or a
    #: model per cluster). If not, training with one client equals central training, which the tests
    #: of all methods and ``trishul check`` verify.
    alters_mean: ClassVar[bool] = False
    #: Whether clients keep a part of the model: the trainables that are not in :meth:`wire`, which
    #: :meth:`upload` returns by name and :meth:`start` restores from ``run.client_state``. The
    #: metrics then score the global model without this part. With ``evaluation.per_client``, the
    #: personalized model of every client is also scored (``personal_mean``).
    personal: bool = False
    #: Whether the next state is a function of the mean of the uploads, weighted only by
    #: ``federation.weighting``, and the broadcast has the ``shared`` of the state. Stages that
    #: transform changes require it, and reject other methods; ``trishul check`` tests it.
    #: Subclasses that change the average or the broadcast, or need all uploads, do not inherit it.
    #: An instance may override the class attribute depending on its configuration; the same
    #: applies to ``needs_uploads``.
    aggregates_mean_only: bool = False
    #: Whether :meth:`aggregate` reads each upload instead of only their mean, such as for a median
    #: or a clustering. The server then stores all uploads of a round, m W numbers, instead of
    #: running sums.
    needs_uploads: bool = False
    #: Names in ``extra`` of a contribution that are averaged without weights, regardless of
    #: ``federation.weighting`` and :meth:`weight`. Their sum over the cohort is then
    #: ``round_.accepted`` times the mean.
    plain_mean: ClassVar[frozenset[str]] = frozenset()
    #: Names in ``extra`` of an upload that are the change of the client state of the same name
    #: (initially zero), so that the server can track the sum over all clients. If a stage alters
    #: the change, the client stores its previous tensors plus the change that the server receives.
    mirrored: ClassVar[frozenset[str]] = frozenset()
    #: Whether clients read rows with :attr:`LocalRun.gradient`, with every configuration, in
    #: addition to the gradients of local steps. Stages that replace the gradients of local steps do
    #: not support it, and reject the method.
    reads_rows: bool = False
    #: Whether :meth:`weight` also applies to the classification head. If not, the classification
    #: head is averaged only with ``federation.weighting``.
    weighs_classifier: ClassVar[bool] = True

    #: Default learning rates, keyed by row of ``learning_rates.yaml``, for rows without the method.
    #: They were tuned like the other rates of the row, and are not inherited.
    rates: ClassVar[Mapping[str, float]] = {}
    #: Method whose default learning rates apply if this method has none; inherited by subclasses.
    #: None means the general default, with a warning.
    rates_like: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Otherwise a method with another average would inherit a false declaration.
        changed = {"contribution", "weight", "broadcast", "needs_uploads"}
        if vars(cls).keys() & changed:
            cls.aggregates_mean_only = vars(cls).get("aggregates_mean_only", False)

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
        """Validate the experiment; by default, accept it.

        Args:
            settings: Settings of the experiment.

        Raises:
            ValueError: The method does not support the experiment. The message names the field, its
                value and the allowed values.
        """

    @property
    def fields_read(self) -> frozenset[str] | None:
        """Shared fields that the method reads: ``budget`` and fields of the section ``adapter``.

        Other fields cannot affect the results of its runs, and are not part of their ids. If
        ``rank`` is set, it replaces ``budget`` and ``matching``. None (the default) means all
        fields.
        """
        return None

    @property
    def block_scores(self) -> BlockScores:
        """Kind of linear layers in :attr:`TargetLayers.scored`; by default the adapted layers."""
        return "adapted"

    # 1. Adapters.
    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Return the adapter of each layer.

        Args:
            targets: The targeted layers, the budget and the section ``adapter``.

        Returns:
            The adapters, keyed by layer name.

        Raises:
            InputError: The budget does not fit the backbone.
        """
        raise InputError(
            f"method={self.config.name!r}: {named(type(self))} defines no adapters(): "
            "define it, or extend a method that does, such as FedIT or FedAvg"
        )

    @property
    def survey_plan(self) -> SurveyPlan | None:
        """Survey that clients respond to before round 1, or None (the default)."""
        return None

    def survey(self, gradients: Iterator[Tensors]) -> Tensors:
        """Compute a client's response to the survey, its upload of round 0.

        The server averages the responses.

        Args:
            gradients: For each mini-batch, the dense gradients [d_out, d_in] of the adapted layers'
                weights at the pretrained model, keyed by layer name.

        Returns:
            The response, keyed by layer name.
        """
        raise NotImplementedError(f"{type(self).__name__} has a survey_plan but no survey()")

    # 2. Local training.
    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Initialize ``run.vector`` before the first step.

        By default, load the shared part from the broadcast and, if :attr:`personal`, the client's
        part from ``run.client_state``.

        Args:
            run: The round of the client.
            initial: [P] float32, the untrained vector.
        """
        run.vector.copy_(initial)
        self.unpack(run.layout, run.vector, run.broadcast.shared)
        if self.personal:
            views = run.layout.views(run.vector)
            for name, own in run.client_state.items():
                views[name].copy_(own)

    def before_step(self, run: LocalRun) -> None:
        """Modify ``run.grad`` in place before the optimizer reads it; by default, do nothing.

        Args:
            run: The round of the client.
        """

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """Modify ``run.vector`` in place after the optimizer's step; by default, do nothing.

        Args:
            run: The round of the client.
            step: The local step, from 1.
            steps: Number of local steps.
        """

    def after_steps(self, runs: Sequence[LocalRun], step: int, steps: int) -> None:
        """Call :meth:`after_step` for each client that trains in the same forward.

        Override it to process all clients at once.

        Args:
            runs: The rounds of the clients.
            step: The local step, from 1.
            steps: Number of local steps.
        """
        for run in runs:
            self.after_step(run, step, steps)

    @property
    def steps_per_prox(self) -> int:
        """Local steps between two proximal maps of the core heads, for cost estimates.

        0 (the default) means that clients compute no proximal maps.
        """
        return 0

    @property
    def units_by_data(self) -> str:
        """Setting that makes the trained units depend on a client's data, or an empty string."""
        return ""

    def unit_shares(self, layout: Layout, capacities: Sequence[float]) -> np.ndarray:
        """Return the average fraction of clients that train each unit; by default all clients.

        It must depend on the configuration, not on data: a mean that hides who participated divides
        a sum by the expected number of clients. Units that :meth:`round_wire` excludes from a round
        do not count.

        Args:
            layout: Names of the trainables; the units are the units of :meth:`wire`.
            capacities: :attr:`LocalRun.capacity` of every client.

        Returns:
            [U] float64.
        """
        return np.ones(sum(1 for _ in layout.units(self.wire(layout))))

    # 3. Upload.
    def wire(self, layout: Layout) -> tuple[str, ...]:
        """Return the names of the uploaded trainables; by default all.

        Args:
            layout: Names of the trainables.

        Returns:
            The names in the order of ``shared``.
        """
        return tuple(entry.name for entry in layout.entries)

    def round_wire(self, layout: Layout, round_number: int) -> tuple[str, ...]:
        """Return the names that clients train and send in a round; by default all of :meth:`wire`.

        Other trainables keep the server's value. In the simulation, ``shared`` has all W entries in
        every round, but only these names are averaged and counted as uploaded.

        Args:
            layout: Names of the trainables.
            round_number: The round, from 1.

        Returns:
            The names.
        """
        return self.wire(layout)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Return a client's upload after local training, and the state that it keeps.

        Args:
            run: The round of the client.
            steps: Number of local steps.

        Returns:
            The upload, and the client state for :attr:`LocalRun.client_state` of its next round,
            keyed by name.
        """
        memory: Tensors = {}
        if self.personal:
            sent, views = self.wire(run.layout), run.layout.views(run.vector)
            memory = {name: view.clone() for name, view in views.items() if name not in sent}
        return State(self.pack(run.layout, run.vector)), memory

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Return the length of each array in an upload; the server rejects any other upload.

        Args:
            layout: Names of the trainables.

        Returns:
            The lengths of ``shared`` and of each tensor in ``extra``, keyed by name.
        """
        return {"shared": sum(layout.entry(name).numel for name in self.wire(layout))}

    # 4. Aggregation.
    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Return the global state before round 1.

        Args:
            layout: Names of the trainables.
            initial: [P] float32, the untrained vector.
            survey: The mean response to the survey, keyed by layer name; empty without a survey.
        """
        return State(self.pack(layout, initial))

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Return a warning to report after round 1, or an empty string.

        See also :attr:`caveat`.

        Args:
            metrics: :attr:`Round.metrics` of round 1.
        """
        return ""

    def weight(self, upload: State, layout: Layout, weight: float) -> float:
        """Return the weight of an upload in the mean; by default, the given weight.

        :attr:`plain_mean` and :attr:`weighs_classifier` exempt parts of the upload.

        Args:
            upload: The upload.
            layout: Names of the trainables.
            weight: The weight according to ``federation.weighting``.
        """
        return weight

    def contribution(self, upload: State, layout: Layout) -> State:
        """Return the tensors to average: by default the upload, or functions of it.

        Args:
            upload: The upload.
            layout: Names of the trainables.
        """
        return upload

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Compute the next global state; by default, the mean.

        Args:
            state: The current global state.
            mean: The weighted mean of the contributions (unweighted for :attr:`plain_mean`). Each
                unit of ``shared`` is averaged over the clients that trained it; a unit that no
                client trained keeps its previous value.
            round_: The round, its participants and, if :attr:`needs_uploads`, their uploads.
            layout: Names of the trainables; :meth:`wire` gives the names in ``shared``.

        Returns:
            The next global state.
        """
        return mean

    # 5. Broadcast.
    def broadcast(self, state: State) -> State:
        """Return the state to send to every client of the next cohort; by default the global state.

        Args:
            state: The global state.
        """
        return state

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, missed: Sequence[Sequence[int]]
    ) -> int:
        """Return how many numbers one client downloads for this broadcast in a real deployment.

        By default, this excludes ``base`` and ``constants``: the simulation sends them in full to
        clients that store nothing, but a deployment would send only their changes. A method that
        folds changes into ``base`` counts the changes of all rounds that the client missed, or
        ``base`` itself if it is smaller. :meth:`setup_parameters` counts tensors that are sent
        once.

        Args:
            broadcast: Broadcast of the simulation.
            layout: Names of the trainables.
            unsent: :attr:`LocalRun.unsent` of the client.
            missed: For each earlier round whose aggregate the client has not received, the numbers
                that each accepted client sent in it. For a client that participates for the first
                time, these are all earlier rounds; there is always at least the previous round.
        """
        return broadcast.shared.numel() + count_numbers(broadcast.extra) - unsent

    def setup_parameters(self, broadcast: State, layout: Layout) -> int:
        """Return how many numbers a client downloads once, in its first round.

        By default, these are ``constants``, frozen tensors computed by the server, and the
        responses of a survey that decides the adapters. Tensors drawn from the seed cost nothing,
        because every client draws the same values.

        Args:
            broadcast: Broadcast of the simulation.
            layout: Names of the trainables.
        """
        constants = sum(map(count_numbers, broadcast.constants.values()))
        return constants + count_numbers(broadcast.survey)

    # Helpers that depend only on :meth:`wire`.
    def pack(self, layout: Layout, vector: Tensor) -> Tensor:
        """Gather the shared part of a trainable vector.

        Args:
            layout: Names of the trainables.
            vector: [P] float32.

        Returns:
            A new vector [W] in the order of :meth:`wire`.
        """
        views = layout.views(vector)
        return torch.cat([views[name].reshape(-1) for name in self.wire(layout)])

    def unpack(self, layout: Layout, vector: Tensor, shared: Tensor) -> None:
        """Scatter a shared part into a trainable vector, in place.

        Args:
            layout: Names of the trainables.
            vector: [P] float32, modified in place.
            shared: [W] float32.
        """
        views = layout.views(vector)
        for name, value in self.named_tensors(layout, shared).items():
            views[name].copy_(value)

    def named_tensors(self, layout: Layout, shared: Tensor) -> dict[str, Tensor]:
        """Split a shared part into its tensors.

        Args:
            layout: Names of the trainables.
            shared: [W].

        Returns:
            Views of ``shared`` in the tensors' shapes, keyed by name.
        """
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
    """Register a method as ``method=<name>``.

    Args:
        name: Name of the method.

    Returns:
        A class decorator.
    """

    def add(cls: _M) -> _M:
        METHODS.add(name, cls)
        if cls.Config.model_fields["name"].default != name:
            cls.Config = create_model(
                f"{cls.__name__}Config",
                __base__=cls.Config,
                __doc__=f"Hyper-parameters of {cls.__name__}.",
                __module__=cls.__module__,
                # Pickle looks up the class under this name.
                __qualname__=f"{cls.__qualname__}.Config",
                name=(Literal[name], name),  # type: ignore[arg-type]
            )
        return cls

    return add


#: Names of all methods, lookup of a class by name, and all classes keyed by name.
method_names, method_class, method_classes = METHODS.names, METHODS.__getitem__, METHODS.all


def read_method(value: Any) -> MethodConfig:
    """Validate the section ``method``.

    Args:
        value: A method's name, its fields as a mapping, or the section.

    Returns:
        The section, of the method's class.

    Raises:
        ValueError: The method is unknown, or a field is invalid.
    """
    if isinstance(value, MethodConfig):
        return value
    if not isinstance(value, str | Mapping):
        # Display only scalars: the representation of other objects may contain addresses.
        shown = repr(value) if isinstance(value, bool | int | float) else type(value).__name__
        raise ValueError(
            f"{shown}: must be a method's name, or a section such as {{name: trishul}}"
        )
    fields = {"name": value} if isinstance(value, str) else dict(value)
    name = fields.get("name", "trishul")
    if name not in method_names():
        raise ValueError(METHODS.unknown(str(name)))
    fields, config = {**fields, "name": name}, method_class(name).Config
    return config.model_validate(fields)


def build_method(config: MethodConfig, adapter: AdapterConfig | None = None) -> Method:
    """Create the method of a section.

    Args:
        config: The section ``method``.
        adapter: The section ``adapter``; the method cannot run without it.
    """
    return method_class(config.name)(config, None if adapter is None else adapter.alpha)


def _restored(needed: frozenset[Plugin], fields: Json, alpha: Any) -> Method:
    """Create a method in the process that receives it, and load its plug-ins first."""
    for plugin in needed:
        find_plugin(plugin)
    cls = method_class(fields["name"])
    return cls(cls.Config.model_validate(fields), alpha)
