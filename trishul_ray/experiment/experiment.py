"""An experiment: a frozen, validated description of a federated run, and its identity.

:mod:`trishul_ray.config` defines the fields, :mod:`trishul_ray.experiment.loading` reads them
from files and the command line. The id of an experiment is the hash of every field that can change
its numbers. Fields that cannot (folders, tracking, number of actors) are left out.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from trishul_ray import plugins
from trishul_ray.config import (
    AdapterConfig,
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    ModelConfig,
    OptimizerConfig,
    PartitionConfig,
    ResourcesConfig,
    Section,
    StorageConfig,
    TaskConfig,
    TrackingConfig,
    in_id_if_set,
    not_in_id,
)
from trishul_ray.edge.codecs.base import NONE
from trishul_ray.edge.cohorts import CohortConfig
from trishul_ray.edge.devices import DevicesConfig
from trishul_ray.edge.fleet import check_fleet
from trishul_ray.edge.privacy.config import PrivacyConfig, refusal
from trishul_ray.edge.server_optimizer import ServerConfig
from trishul_ray.edge.traffic import DownloadsConfig, UploadsConfig
from trishul_ray.errors import did_you_mean
from trishul_ray.files import Json
from trishul_ray.methods.base import (
    MethodConfig,
    build_method,
    method_class,
    method_classes,
    method_names,
)
from trishul_ray.plugins import Plugin, find_noted, find_plugin
from trishul_ray.redaction import redact_fields
from trishul_ray.tasks.base import task_kinds
from trishul_ray.version import AUDIT_NUMERICS, EDGE_NUMERICS, NUMERICS

#: LoRA rank per adapted matrix of each named budget (paper, "Parameter Budget").
BUDGET_RANKS = {"lower": 32, "higher": 64}

#: Hex digits of an experiment's id.
ID_LENGTH = 12

#: Sections that are off by default, and then left out of files.
EDGE_SECTIONS = ("uploads", "downloads", "privacy", "devices", "cohort", "server")

#: Sections that act on what clients send, and so need a method that allows it.
ON_CHANGES = ("uploads", "downloads", "privacy", "server")

#: Clients that ``evaluation.diagnostics_cohort=all`` compares at most: every pair, in memory.
MOST_COMPARED = 100

#: Writes YAML; the one in C, which every wheel of PyYAML has, is four times faster.
_YAML = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _validated_method(value: Any) -> Any:
    if isinstance(value, MethodConfig):
        return value
    if not isinstance(value, str | Mapping):
        # Only scalars are shown as they are: other objects may have addresses in their texts.
        shown = repr(value) if isinstance(value, bool | int | float) else type(value).__name__
        raise ValueError(
            f"{shown}: it must be a method's name, or a section such as {{name: trishul}}"
        )
    fields = {"name": value} if isinstance(value, str) else dict(value)
    name = fields.get("name", "trishul")
    if name not in method_names():
        hint = did_you_mean(str(name), method_names())
        hint += "".join(f"; {fault}" for fault in plugins.faults())
        raise ValueError(f"unknown method {name!r}; known: {', '.join(method_names())}{hint}")
    fields, config = {**fields, "name": name}, method_class(name).Config
    try:
        return config.model_validate(fields)
    except ValidationError:
        if (today := plugins.of_today("method", fields)) == fields:
            raise
        return config.model_validate(today)


class Experiment(Section):
    """A federated run. Every field that can change a number is part of :attr:`id`."""

    name: str = not_in_id("run", "a label", max_length=100)
    plugins: tuple[Plugin, ...] = not_in_id(
        (), "Python files with methods, tasks or datasets of your own; those that the run uses are "
        "noted, with their content, which is in the id"
    )  # fmt: skip
    seed: int = Field(
        0, ge=0, lt=2**63, description="the only seed; every random stream derives from it"
    )
    budget: Literal["lower", "higher"] | Annotated[int, Field(ge=1)] = Field(
        "lower", description="trainable parameters as a LoRA rank per matrix; lower 32, higher 64"
    )
    data: DataConfig = DataConfig()
    task: TaskConfig = TaskConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    method: Annotated[
        SerializeAsAny[MethodConfig], PlainSerializer(lambda m: m.model_dump(mode="json"))
    ] = Field(default_factory=lambda: _validated_method("trishul"), validate_default=True)
    optimizer: OptimizerConfig = OptimizerConfig()
    federation: FederationConfig = FederationConfig()
    uploads: UploadsConfig = in_id_if_set(UploadsConfig(), "how what clients send is encoded")
    downloads: DownloadsConfig = in_id_if_set(
        DownloadsConfig(), "how what the server sends is encoded"
    )
    privacy: PrivacyConfig = in_id_if_set(
        PrivacyConfig(), "client-level differential privacy of what clients send"
    )
    devices: DevicesConfig = in_id_if_set(DevicesConfig(), "what clients compute on: the clock")
    cohort: CohortConfig = in_id_if_set(CohortConfig(), "who is asked, and who of them counts")
    server: ServerConfig = in_id_if_set(ServerConfig(), "what the server does with a round's mean")
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()

    _method = field_validator("method", mode="before")(_validated_method)

    @model_validator(mode="before")
    @classmethod
    def _load_plugins(cls, fields: Any) -> Any:
        # First of all: the names of other fields may be a plug-in's. A stored configuration never
        # brings code: a note is looked for among the plug-ins that this process has loaded.
        if not isinstance(fields, dict) or not fields.get("plugins"):
            return fields
        return fields | {"plugins": tuple(map(find_noted, fields["plugins"]))}

    @model_validator(mode="after")
    def _check_across_sections(self) -> "Experiment":
        if self.task.kind != "auto" and self.task.kind not in task_kinds():
            raise ValueError(
                f"task.kind: {self.task.kind!r} is unknown; known: {', '.join(task_kinds())}"
            )
        fed = self.federation
        if fed.clients_per_round > fed.clients:
            raise ValueError(
                f"federation.clients_per_round={fed.clients_per_round} exceeds "
                f"federation.clients={fed.clients}"
            )
        if fed.clients_per_round > fed.participants:
            raise ValueError(
                f"federation.held_out={fed.held_out:g} leaves {fed.participants} of "
                f"federation.clients={fed.clients}, fewer than "
                f"federation.clients_per_round={fed.clients_per_round}"
            )
        if fed.held_out and not self.evaluation.per_client:
            raise ValueError(
                f"federation.held_out={fed.held_out:g} needs evaluation.per_client=true, which "
                "scores those clients, too"
            )
        if fed.compute != "full" and not build_method(self.method).takes_limits:
            supported = [name for name, cls in method_classes().items() if cls.takes_limits]
            raise ValueError(
                f"federation.compute={fed.compute!r} needs a method that supports limited clients "
                f"({', '.join(supported)}), not {self._method_as_set()}"
            )
        if self.evaluation.diagnostics_cohort == "all" and fed.clients > MOST_COMPARED:
            raise ValueError(
                f"evaluation.diagnostics_cohort='all' compares at most {MOST_COMPARED} clients, "
                f"not federation.clients={fed.clients}"
            )
        if self.model.quantize != "none" and method_class(self.method.name).train_all:
            raise ValueError(
                f"model.quantize={self.model.quantize!r} stores frozen weights, and method="
                f"{self.method.name!r} trains them: use none, or a method with adapters"
            )
        if fed.stacked > 1 and method_class(self.method.name).train_all:
            fitting = [name for name, cls in method_classes().items() if not cls.train_all]
            raise ValueError(
                f"federation.stacked={fed.stacked} needs a method with adapters "
                f"({', '.join(fitting)}), not method={self.method.name!r}, whose clients share no "
                "frozen backbone"
            )
        if fed.stacked > 1 and self.model.dropout:
            raise ValueError(
                f"federation.stacked={fed.stacked}: model.dropout=true draws from a random stream "
                "of each client, which those who train together cannot have; set only one"
            )
        self._check_edge()
        build_method(self.method).check(self)
        if self.resources.actors != "auto" and fed.clients_per_actor != "auto":
            raise ValueError(
                "resources.actors and federation.clients_per_actor exclude each other; set only one"
            )
        return self

    def _check_edge(self) -> None:
        """Check that the method allows what acts on changes.

        Raises:
            ValueError: A section of the edge is on and breaks a promise of its own or the method's.
        """
        if self.uploads.codec != NONE and self.server.sum == "ring":
            raise ValueError(
                f"uploads.codec={self.uploads.codec!r} saves nothing with server.sum='ring', which "
                "adds what clients send as it is, eight bytes a number; set only one"
            )
        least, size = self.server.min_clients, self.federation.clients_per_round
        if self.server.sum == "ring" and not self.privacy.on and size < least:
            raise ValueError(
                f"server.min_clients={least} exceeds federation.clients_per_round={size}: no sum "
                "in the ring would ever be used"
            )
        if self.privacy.on and least != type(self.server).model_fields["min_clients"].default:
            raise ValueError(
                f"server.min_clients={least} has no effect with privacy, whose noise hides what "
                "single clients have trained; set only one"
            )
        check_fleet(self.devices, self.cohort, self.federation, private=self.privacy.on)
        method, fed = build_method(self.method), self.federation
        if self.privacy.on:
            refused = refusal(
                self.privacy,
                clients=fed.participants,
                cohort=fed.clients_per_round,
                weighting=fed.weighting,
                server=self.server.optimizer,
            )
            if refused is not None:
                raise ValueError(refused)
            if (plan := method.survey_plan) is not None and plan.decides_adapters:
                raise ValueError(
                    f"privacy: {self._method_as_set()} lets what clients measure before round 1 "
                    "decide the adapters, in clear; allowed for trishul: method.allocation="
                    "waterfill or uniform"
                )
        section = next(filter(self.is_set, ON_CHANGES), None)
        if section is not None and not method.mean_is_enough:
            fitting = [name for name, cls in method_classes().items() if cls.mean_is_enough]
            raise ValueError(
                f"{section}: needs a method whose next state is a function of the mean upload "
                f"({', '.join(fitting)}), not {self._method_as_set()}"
            )

    @property
    def remembered(self) -> tuple[str, ...]:
        """The fields, as ``field=value``, that add to a change what earlier rounds left."""
        found = {
            f"server.optimizer={self.server.optimizer!r}": self.server.remembers,
            "uploads.error_feedback=true": self.uploads.error_feedback,
        }
        return tuple(field for field, on in found.items() if on)

    def is_set(self, section: str) -> bool:
        """Return whether a section that is off by default, such as ``privacy``, is on."""
        return bool(getattr(self, section) != type(self).model_fields[section].default)

    def _method_as_set(self) -> str:
        """Return the method and, if its class alone would do, how it differs from the default."""
        text, fields = f"method={self.method.name!r}", type(self.method).model_fields
        if method_class(self.method.name).mean_is_enough:
            values = {name: getattr(self.method, name) for name in fields}
            changed = {n: value for n, value in values.items() if value != fields[n].default}
            text += "".join(f" method.{name}={value!r}" for name, value in changed.items())
        return text

    @property
    def lora_rank(self) -> int:
        """The budget as a LoRA rank per adapted matrix."""
        return BUDGET_RANKS[self.budget] if isinstance(self.budget, str) else self.budget

    def identity(self) -> Json:
        """Return every field that can change a number, as plain JSON values.

        Fields that the method does not read are left out; see
        :attr:`trishul_ray.methods.base.Method.fields_read`. The noted content of own data or of
        an own model is in the place of its path; see :mod:`trishul_ray.experiment.identity`.
        """
        kept = _identity_of(self)
        if kept.keys() & EDGE_SECTIONS:
            kept["edge_numerics"] = EDGE_NUMERICS
        if self.privacy.canaries:
            kept["audit_numerics"] = AUDIT_NUMERICS
        for folder, number in plugins.numerics(method_class(self.method.name)).items():
            kept[f"{folder}_numerics"] = number
        if self.data.content_hash is not None:
            kept["data"]["path"] = self.data.content_hash
        if self.model.content_hash is not None:
            kept["model"]["name"] = self.model.content_hash
        for name, hash_ in self.devices.content_hashes.items():
            kept["devices"][name] = hash_
        if self.plugins:
            kept["plugins"] = sorted(plugin.content for plugin in self.plugins)
        if (read := build_method(self.method).fields_read) is not None:
            if self.adapter.rank:
                read -= {"budget", "matching"}
            adapter = {name: value for name, value in kept.pop("adapter").items() if name in read}
            kept |= {"adapter": adapter} if adapter else {}
            if "budget" not in read:
                del kept["budget"]
        return kept

    @cached_property
    def id(self) -> str:
        """The hash of :meth:`identity` and the numerics version, as 12 hex digits."""
        return id_of(self.identity())

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.__dict__.pop("id", None)  # that of the fields before
        return copied

    @property
    def surveys(self) -> int:
        """Number of surveys before round 1: one or none."""
        return int(build_method(self.method).survey_plan is not None)

    @property
    def scored_rounds(self) -> frozenset[int]:
        """The rounds after which the model is scored on the test rows; 0 is before the first."""
        return self.evaluation.scored_rounds(self.federation.rounds)

    def scored_as(self, other: "Experiment") -> "Experiment":
        """Return the run that serves this and another one of its id: scored where either is."""
        every = math.gcd(self.evaluation.every, other.evaluation.every)
        if every == self.evaluation.every:
            return self
        evaluation = self.evaluation.model_copy(update={"every": every})
        return self.model_copy(update={"evaluation": evaluation})

    def to_dict(self, *, sources: bool = False) -> Json:
        """Return all fields as plain JSON values, for ``Experiment.model_validate``.

        Credentials in addresses of stores are masked, since files and pages show these values. With
        ``sources``, for another process, they are not, and the texts of plug-ins are there, too.
        """
        fields = self.model_dump(mode="json")
        if not sources:
            fields |= redact_fields({name: fields[name] for name in ("storage", "tracking")})
        for section in EDGE_SECTIONS:
            if not self.is_set(section):
                del fields[section]
        if self.model.quantize == "none":
            del fields["model"]["quantize"]
        if not self.plugins:
            del fields["plugins"]
        for plugin in fields.get("plugins", ()) if not sources else ():
            del plugin["source"]
        return fields

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.plugins:
            return super().__reduce_ex__(protocol)
        return received, (self.to_dict(sources=True),)

    def to_yaml(self) -> bytes:
        """Return all fields as YAML, which ``trishul run`` reads."""
        fields = self.to_dict()
        text: str = yaml.dump(fields, Dumper=_YAML, sort_keys=False, allow_unicode=True)
        return text.encode()


def received(fields: Json) -> Experiment:
    """Return an experiment in the process that it was sent to; its plug-ins are loaded first.

    Raises:
        InputError: A plug-in cannot be loaded here.
    """
    for plugin in fields.get("plugins", ()):
        find_plugin(Plugin(**plugin))
    return Experiment.model_validate(fields)


def id_of(identity: Mapping[str, Any]) -> str:
    """Return the id of an experiment with this identity."""
    text = json.dumps({"numerics": NUMERICS, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


@cache
def _identifying(section: type[BaseModel]) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, way and default of each field that is, or may be, part of an identity."""
    found = []
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        how = extra.get("identity") if isinstance(extra, dict) else None
        if how is not False:
            found.append((name, how, field.default))
    return tuple(found)


def may_identify(field: str) -> bool:
    """Return whether a field, by its dotted name, can be part of an experiment's id at all."""
    section: Any = Experiment
    for name in field.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break  # a method or task knows its own
        if name in section.model_fields and name not in {n for n, _, _ in _identifying(section)}:
            return False
        info = section.model_fields.get(name)
        section = info.annotation if info is not None else None
    return True


def _identity_of(section: BaseModel) -> Json:
    kept: Json = {}
    values = vars(section)
    for name, how, default in _identifying(type(section)):
        value = values[name]
        if how == "if set" and value == default:
            continue
        if how == "default":
            value = default
        if isinstance(value, BaseModel):
            nested = _identity_of(value)
            if nested:
                kept[name] = nested
        else:
            kept[name] = list(value) if isinstance(value, tuple) else value
    return kept
