"""One experiment: a frozen, validated description of a federated run, and its identity.

Defaults are the paper's protocol (spec: 20 clients, 3 a round, 50 local steps, Adam). What a
dataset needs instead (its backbone, rounds, batch) stands in ``presets/<dataset>.yaml`` and lies
between these defaults and the user's YAML; see :mod:`trishul_ray.loading`.

The identity of an experiment is the hash of every field that can change its numbers. Fields that
cannot (places, tracking, how many actors) are marked ``_free`` and left out of it.
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from trishul_ray.methods.base import MethodConfig
from trishul_ray.methods.registry import method_class, method_names
from trishul_ray.version import NUMERICS

#: LoRA rank per adapted matrix that a named budget stands for (paper, "Parameter Budget").
BUDGET_RANKS = {"lower": 32, "higher": 64}


def _free(default: Any, description: str, **limits: Any) -> Any:
    """A field that cannot change a run's numbers and so is no part of its identity."""
    return Field(default, description=description, json_schema_extra={"identity": False}, **limits)


class Section(BaseModel):
    """A frozen group of fields; an unknown field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Section):
    """Which dataset the clients hold."""

    name: str = Field("digits", description="dataset: see `trishul datasets`")
    train_limit: int | None = Field(
        None, ge=1, description="use only the first N training rows of a seeded shuffle"
    )


class PartitionConfig(Section):
    """How the training rows are dealt to the clients."""

    kind: Literal["iid", "dirichlet"] = Field(
        "dirichlet", description="iid: equal random parts; dirichlet: label skew"
    )
    alpha: float = Field(0.3, gt=0, description="Dirichlet concentration; smaller is more skewed")
    variant: Literal["per-client", "per-label"] = Field(
        "per-client",
        description="per-client: each client draws its own class proportions and all have equal "
        "sizes (the paper's wording); per-label: each class is dealt out by one draw over "
        "clients, sizes vary",
    )
    min_size: int = Field(1, ge=1, description="fewest rows a client may hold")


class ModelConfig(Section):
    """The frozen backbone."""

    name: str = Field(
        "google/vit-base-patch16-224-in21k",
        description="a built-in, a hub or mirror name owner/model, or a local folder",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: the architecture alone, weights drawn from the seed"
    )
    train_head: bool = Field(
        True, description="train and average the classification head beside the adapter"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="of the frozen backbone; adapters and optimizer stay fp32"
    )
    dropout: bool = Field(False, description="keep the backbone's dropout while training")
    image_size: int | None = Field(
        None, ge=4, description="resize images to this side; default: what the backbone takes"
    )


class AdapterConfig(Section):
    """How a frozen linear layer is adapted; which kind is the method's choice."""

    targets: tuple[str, ...] | None = Field(
        None, description="module names to adapt; default: q and v of the backbone's family"
    )
    heads: int = Field(4, ge=1, le=64, description="mean number of heads per adapted matrix")
    rank: int | None = Field(
        None, ge=1, description="rank of the method's own adapter, instead of the budget's"
    )
    matching: Literal["matched", "published"] = Field(
        "matched",
        description="matched: equal parameters on each matrix; published: the paper's ranks, "
        "which are matched for a 768x768 matrix",
    )
    init: (
        Literal["gram_schmidt", "random_normal", "rv_random_normal", "shared_subspace", "constant"]
        | None
    ) = Field(None, description="how frozen bases are drawn; default: the method's")
    sigma: float | None = Field(
        None, gt=0, description="entry scale of rv_random_normal; default 1/sqrt(width)"
    )
    overflow: Literal["auto", "independent", "cap"] = Field(
        "auto",
        description="where heads x rank exceeds the width: auto lets only heads added by an "
        "allocation fall back to bases of their own; independent lets all; cap limits the "
        "allocation so that none has to",
    )
    path: Literal["auto", "merged", "factored"] = Field(
        "auto", description="how adapted layers compute; auto takes the cheaper for the shape"
    )


class OptimizerConfig(Section):
    """The client's local optimizer; its state is fresh in every round."""

    name: Literal["adam", "sgd"] = Field("adam", description="local optimizer")
    lr: float = Field(
        5e-4, gt=0, description="learning rate η; default by dataset, method, budget, partition"
    )
    lr_source: str = _free("set by hand, or the general default", "where the learning rate is from")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first moment decay")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's second moment decay")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum")
    weight_decay: float = Field(0.0, ge=0, description="L2 (SGD) or decoupled (Adam) decay")


class FederationConfig(Section):
    """Who trains when, and how uploads are weighed."""

    clients: int = Field(20, ge=1, le=1_000_000, description="registered clients")
    clients_per_round: int = Field(3, ge=1, description="clients sampled each round (cohort)")
    rounds: int = Field(50, ge=1, description="communication rounds")
    local_steps: int = Field(50, ge=1, description="mini-batch steps per client and round")
    batch_size: int = Field(32, ge=1, description="examples per step")
    weighting: Literal["uniform", "size"] = Field(
        "uniform", description="aggregation weight of a client: equal, or its number of rows"
    )
    compute: Literal["full", "uniform", "bell", "skewed-right"] = Field(
        "full",
        description="how much of the budget clients can train: all of it, or shares of 1/4 to 1 "
        "drawn once per client",
    )
    clients_per_actor: Annotated[int, Field(ge=1)] | Literal["auto"] = _free(
        "auto", "1: one actor per client; auto: as many actors as slices are free"
    )
    quorum: float = Field(
        0.5, gt=0, le=1, description="least share of the cohort whose uploads must be sound"
    )


class EvaluationConfig(Section):
    """What is measured and how often."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last is always done")
    batch_size: int = Field(64, ge=1, description="examples per evaluation batch")
    limit: int | None = Field(None, ge=1, description="a fixed seeded subset of the test rows")
    diagnostics_every: int = Field(
        1, ge=0, description="rounds between spectral diagnostics; 0: never"
    )
    top_k: int = Field(8, ge=1, description="directions in the principal-angle similarity")


class ResourcesConfig(Section):
    """What the run may use. Only the thread count can change a bit of the result."""

    threads: int = Field(1, ge=1, description="CPU threads of one actor (fixed for determinism)")
    backend: Literal["ray", "inline"] = _free("ray", "ray actors, or one process for debugging")
    device: Literal["auto", "cpu", "cuda"] = _free("auto", "where a client trains")
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = _free(
        "auto", "number of client actors; auto: see federation.clients_per_actor"
    )
    cpus_per_actor: Annotated[float, Field(gt=0)] | Literal["auto"] = _free(
        "auto", "CPUs of one actor's slice; auto: one per thread, less where they do not fit"
    )
    gpus_per_actor: float = _free(1.0, "GPU share of one actor's slice (device cuda)", ge=0, le=8)
    max_restarts: int = _free(3, "restarts of one actor before the run gives up on it", ge=0)


class TrackingConfig(Section):
    """Where the run is told of."""

    mlflow: bool = _free(True, "log to MLflow")
    uri: str | None = _free(None, "MLflow tracking URI; default sqlite:///<runs>/mlflow.db")
    experiment: str = _free("trishul", "MLflow experiment name")
    parent_run: str | None = _free(None, "MLflow run id of the sweep this run belongs to")


class StorageConfig(Section):
    """Places. ``runs`` may be any pyarrow filesystem URI (s3://..., gs://...)."""

    runs: str = _free("runs", "where runs/<id>/ go: a folder or a filesystem URI")
    cache: str | None = _free(None, "prepared data and backbones; default $TRISHUL_CACHE")
    hub: str | None = _free(None, "a local mirror with the hub's layout; default $TRISHUL_HUB")
    keep_checkpoints: int = _free(2, "newest checkpoints kept", ge=1)


def _validated_method(value: Any) -> Any:
    if isinstance(value, MethodConfig):
        return value
    fields = {"name": value} if isinstance(value, str) else dict(value)
    name = fields.get("name", "trishul")
    if name not in method_names():
        raise ValueError(f"unknown method {name!r}; known: {', '.join(method_names())}")
    return method_class(name).Config.model_validate({**fields, "name": name})


class Experiment(Section):
    """One federated run. Every field that can change a number is part of :attr:`id`."""

    name: str = _free("run", "a label for people", max_length=100)
    seed: int = Field(0, ge=0, lt=2**63, description="the one seed; every stream derives from it")
    budget: Literal["lower", "higher"] | Annotated[int, Field(ge=1)] = Field(
        "lower", description="trainable parameters as a LoRA rank per matrix: lower 32, higher 64"
    )
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    method: Annotated[
        SerializeAsAny[MethodConfig], PlainSerializer(lambda m: m.model_dump(mode="json"))
    ] = Field(default_factory=lambda: _validated_method("trishul"), validate_default=True)
    optimizer: OptimizerConfig = OptimizerConfig()
    federation: FederationConfig = FederationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()

    _method = field_validator("method", mode="before")(_validated_method)

    @model_validator(mode="after")
    def _fields_agree(self) -> "Experiment":
        fed = self.federation
        if fed.clients_per_round > fed.clients:
            raise ValueError(
                f"federation.clients_per_round={fed.clients_per_round} exceeds "
                f"federation.clients={fed.clients}"
            )
        if fed.compute != "full" and not method_class(self.method.name).takes_limits:
            able = [name for name in method_names() if method_class(name).takes_limits]
            raise ValueError(
                f"federation.compute={fed.compute!r} needs a method that limited clients can "
                f"train a part of ({', '.join(able)}), not method={self.method.name!r}"
            )
        if self.resources.actors != "auto" and fed.clients_per_actor != "auto":
            raise ValueError(
                "resources.actors and federation.clients_per_actor exclude each other: set one"
            )
        return self

    @property
    def lora_rank(self) -> int:
        """The budget as a LoRA rank per adapted matrix."""
        return BUDGET_RANKS[self.budget] if isinstance(self.budget, str) else self.budget

    def identity(self) -> dict[str, Any]:
        """Every field that can change a number, as plain JSON values."""
        return _identity_of(self)

    @property
    def id(self) -> str:
        """Twelve hex digits: the hash of :meth:`identity` and the numerics version."""
        text = json.dumps({"numerics": NUMERICS, **self.identity()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values; ``Experiment.model_validate`` reads them back."""
        return self.model_dump(mode="json")


def _identity_of(section: BaseModel) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            nested = _identity_of(value)
            if nested:
                kept[name] = nested
        else:
            kept[name] = list(value) if isinstance(value, tuple) else value
    return kept
