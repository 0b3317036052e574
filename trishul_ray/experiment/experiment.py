"""The experiment: a frozen, validated description of a federated run, and its id.

:mod:`trishul_ray.config.fields` defines the fields, and :mod:`trishul_ray.experiment.loading` reads
them from files and the command line. The id of an experiment is the hash of every field that can
change its results. Other fields (folders, tracking, number of actors) are not in the id.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    SerializeAsAny,
    create_model,
    field_validator,
    model_validator,
)

from trishul_ray.config.fields import (
    AdapterConfig,
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    ModelConfig,
    OptimizerConfig,
    PartitionConfig,
    ResourcesConfig,
    StorageConfig,
    TaskConfig,
    TrackingConfig,
)
from trishul_ray.config.paths import LOCAL_FIELDS
from trishul_ray.config.section import Section, identifies, not_in_id
from trishul_ray.experiment.checks import (
    check_actors,
    check_cohort,
    check_dropout,
    check_gradients,
    check_method,
    check_task,
)
from trishul_ray.methods.base import (
    MethodConfig,
    build_method,
    method_class,
    method_classes,
    read_method,
)
from trishul_ray.plugins.loading import Plugin, find_plugin, find_stored
from trishul_ray.stages import STAGES, Stages, noted_hashes, stage_names
from trishul_ray.storage.durable import Json
from trishul_ray.version import NUMERICS

#: LoRA rank per adapted matrix of each named budget (paper, "Parameter Budget").
BUDGET_RANKS = {"lower": 32, "higher": 64}

#: Hex digits of an experiment's id.
ID_LENGTH = 12

_S = TypeVar("_S", bound=Section)

#: The YAML writer. The one in C, which every wheel of PyYAML contains, is four times faster.
_YAML = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def id_of(identity: Mapping[str, Any]) -> str:
    """Compute the id of an experiment from its :meth:`Experiment.identity`."""
    text = json.dumps({"numerics": NUMERICS, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


@cache
def _model_of(sections: tuple[tuple[str, type[Section]], ...]) -> type[BaseModel]:
    """Build a model with a field per section of stages, so that errors name the section first."""
    fields: dict[str, Any] = {name: (section, ...) for name, section in sections}
    return create_model("Stages", **fields)


class Experiment(Section):
    """A federated experiment. Every field that can change a result is part of :attr:`id`."""

    name: str = not_in_id("run", "label of the run", max_length=100)
    preset: str | None = not_in_id(
        None, "name of a protocol, such as `dolly`, that replaces the dataset's protocol"
    )
    plugins: tuple[Plugin, ...] = not_in_id(
        (), "Python files with custom methods, tasks or datasets; the id contains a hash of the "
        "files that the run uses"
    )  # fmt: skip
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed of every random stream that `draw` does not seed"
    )
    draw: int | None = Field(
        None, ge=0, lt=2**63, description="seed of the partition, the cohorts and the clients' "
        "properties; default: `seed`"
    )  # fmt: skip
    budget: Literal["lower", "higher"] | Annotated[int, Field(ge=1)] = Field(
        "lower", description="trainable parameters as a LoRA rank per matrix: lower 32, higher 64"
    )
    data: DataConfig = DataConfig()
    task: TaskConfig = TaskConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    method: Annotated[
        SerializeAsAny[MethodConfig], PlainSerializer(lambda m: m.model_dump(mode="json"))
    ] = Field(default_factory=lambda: read_method("trishul"), validate_default=True)
    optimizer: OptimizerConfig = OptimizerConfig()
    federation: FederationConfig = FederationConfig()
    stages: dict[str, SerializeAsAny[Section]] = not_in_id(
        {}, "sections of stages that are set; files list them next to the other sections"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()

    _method = field_validator("method", mode="before")(read_method)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, fields: Any) -> Any:
        # Plug-ins first, since they may define the names of other fields. A stored configuration
        # never contains code: it names plug-ins that this process has loaded.
        if not isinstance(fields, dict):
            return fields
        if fields.get("plugins"):
            fields = fields | {"plugins": tuple(map(find_stored, fields["plugins"]))}
        if "stages" in fields:
            raise ValueError("stages: set the section of a stage itself, such as server.lr=0.1")
        unknown = fields.keys() - cls.model_fields.keys()
        if not unknown or not (given := unknown & {*stage_names()}):
            return fields
        stages = {name: fields[name] for name in sorted(given)}
        return {k: v for k, v in fields.items() if k not in given} | {"stages": stages}

    @field_validator("stages", mode="before")
    @classmethod
    def _read_stages(cls, given: dict[str, Any]) -> dict[str, Section]:
        """Validate the sections of stages, and drop those at their defaults."""
        kinds = tuple((name, STAGES[name].Config) for name in given)
        found = vars(_model_of(kinds).model_validate(given))
        return {name: found[name] for name, kind in kinds if found[name] != kind()}

    @model_validator(mode="after")
    def _check_across_sections(self) -> "Experiment":
        check_task(self.task)
        check_cohort(self.federation, self.evaluation)
        check_method(self.method, self.method_as_set, self.federation, self.model)
        check_dropout(self.federation, self.model, self.adapter, self.resources)
        check_actors(self.federation, self.resources)
        sections = [stage.name for stage in Stages.of(self) if stage.computes_gradients]
        check_gradients(
            sections, self.method, self.federation, self.model, self.adapter, self.resources
        )
        self._check_stages()
        build_method(self.method).check(self)
        return self

    def _check_stages(self) -> None:
        method, stages = build_method(self.method), Stages.of(self)
        for stage in stages:
            stage.check(method)
        section = next((stage.name for stage in stages if stage.transforms_changes), None)
        if section is not None and not method.aggregates_mean_only:
            fitting = [name for name, cls in method_classes().items() if cls.aggregates_mean_only]
            raise ValueError(
                f"{section}: needs a method whose next state is a function of the mean upload "
                f"({', '.join(fitting)}), not {self.method_as_set}"
            )

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """Fields, as ``field=value``, with which a client's change depends on earlier rounds."""
        return tuple(field for stage in Stages.of(self) for field in stage.stateful_fields)

    def is_set(self, section: str) -> bool:
        """Return whether the section of a stage, which is off by default, is set."""
        return section in self.stages

    def section(self, kind: type[_S]) -> _S:
        """Return the section of a stage by its class, with defaults if it is not set."""
        return next((each for each in self.stages.values() if isinstance(each, kind)), kind())

    @property
    def draw_seed(self) -> int:
        """The seed of the partition, the cohorts and the clients' properties, such as speed."""
        return self.seed if self.draw is None else self.draw

    @property
    def method_as_set(self) -> str:
        """The method for messages, with the fields that decide what it supports."""
        text, fields = f"method={self.method.name!r}", type(self.method).model_fields
        if method_class(self.method.name).aggregates_mean_only:
            for name, field in fields.items():
                if (value := getattr(self.method, name)) != field.default:
                    text += f" method.{name}={value!r}"
        return text

    @property
    def lora_rank(self) -> int:
        """The budget as a LoRA rank per adapted matrix."""
        return BUDGET_RANKS[self.budget] if isinstance(self.budget, str) else self.budget

    def identity(self) -> Json:
        """Return every field that can change a result and is not at its default, as JSON values.

        Fields that the method does not read are omitted; see
        :attr:`trishul_ray.methods.base.Method.fields_read`. A content hash replaces the path of
        user data and models; see :mod:`trishul_ray.experiment.identity`.
        """
        kept = super().identity()
        kept["method"] = {"name": self.method.name} | kept.get("method", {})
        for name, section in self.stages.items():
            kept[name] = section.identity()
        for stage in Stages.of(self):
            if hashes := noted_hashes(stage):
                kept[stage.name] |= hashes
        if self.data.content_hash is not None:
            kept["data"]["path"] = self.data.content_hash
        if self.model.content_hash is not None:
            kept["model"]["name"] = self.model.content_hash
        if self.plugins:
            kept["plugins"] = sorted(plugin.content for plugin in self.plugins)
        read = self.fields_read
        adapter = {name: v for name, v in kept.pop("adapter", {}).items() if name in read}
        if adapter:
            kept["adapter"] = adapter
        if "budget" not in read:
            kept.pop("budget", None)
        return kept

    @classmethod
    def may_identify(cls, field: str) -> bool:
        """Return whether a field, given its dotted name, can be part of an id."""
        first, _, rest = field.partition(".")
        section: Any = cls
        if rest:
            is_stage = first in stage_names()
            section = STAGES[first].Config if is_stage else cls.model_fields[first].annotation
        info = section.model_fields.get(rest.partition(".")[0] or first)
        return info is None or identifies(info)  # fields of a method depend on its class

    @property
    def fields_read(self) -> frozenset[str]:
        """The fields of ``adapter`` that the method reads, and ``budget`` if it reads that."""
        read = build_method(self.method).fields_read
        if read is None:
            return frozenset({"budget", *type(self.adapter).model_fields})
        return read - {"budget", "matching"} if self.adapter.rank else read

    @cached_property
    def id(self) -> str:
        """The hash of :meth:`identity` and the numerics version, as 12 hex digits."""
        return id_of(self.identity())

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.__dict__.pop("id", None)  # the copy has other fields
        return copied

    @property
    def surveys(self) -> int:
        """The number of surveys before round 1, 0 or 1."""
        return int(build_method(self.method).survey_plan is not None)

    @property
    def scored_rounds(self) -> frozenset[int]:
        """The rounds after which the model is scored on the test rows; 0 is the untuned model."""
        return self.evaluation.scored_rounds(self.federation.rounds)

    def with_all_scores_of(self, other: "Experiment") -> "Experiment":
        """Return a copy that scores every round that this experiment or ``other`` scores."""
        every = math.gcd(self.evaluation.every, other.evaluation.every)
        if every == self.evaluation.every:
            return self
        evaluation = self.evaluation.model_copy(update={"every": every})
        return self.model_copy(update={"evaluation": evaluation})

    def to_dict(self, *, sources: bool = False) -> Json:
        """Return all fields as plain JSON values, for ``Experiment.model_validate``.

        Storage paths of this machine are omitted, since files and reports contain these values.
        With ``sources``, which is meant for another process, the paths and the texts of plug-ins
        are included.
        """
        fields = self.model_dump(mode="json", exclude=None if sources else LOCAL_FIELDS)
        fields |= fields.pop("stages")
        for plugin in fields["plugins"] if not sources else ():
            del plugin["source"]
        return fields

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.plugins:
            return super().__reduce_ex__(protocol)
        return received, (self.to_dict(sources=True),)

    def to_yaml(self) -> bytes:
        """Serialize all fields except storage paths as YAML for ``trishul run``."""
        fields = self.to_dict()
        text: str = yaml.dump(fields, Dumper=_YAML, sort_keys=False, allow_unicode=True)
        return text.encode()


STAGES.reserve(Experiment.model_fields)


def received(fields: Json) -> Experiment:
    """Load the plug-ins of an experiment from another process, and validate the experiment.

    Raises:
        InputError: A plug-in cannot be loaded here.
    """
    for plugin in fields["plugins"]:
        find_plugin(Plugin(**plugin))
    return Experiment.model_validate(fields)
