"""The default learning rate of a method on a dataset, and where it comes from."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from trishul_ray.spectral.bases import BasisInit

#: Sources of a rate that was not looked up.
HAND = "set by hand"


GENERAL = (
    "general default: no rate is known for this method, and it names no other whose rates it takes "
    "(rates_like)"
)


#: Short names of the paper's backbones. They stand for the hub's name before anything is hashed.
SHORT_MODEL_NAMES = {
    "vit-b16": "google/vit-base-patch16-224-in21k",
    "t5-base": "google-t5/t5-base",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
}


def free(default: Any, description: str, **limits: Any) -> Any:
    """A field that cannot change a run's numbers and so is no part of its identity."""
    return Field(default, description=description, json_schema_extra={"identity": False}, **limits)


def _usable_path(text: str) -> str:
    """Refuse what no file system takes for a path; a name or URI passes the same test."""
    parts = text.encode(errors="surrogateescape").split(b"/")
    if not text.strip() or "\0" in text or max(map(len, parts)) > 255 or len(text) > 4000:
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        raise ValueError(
            f"{shown} cannot be a name or path: not empty, no NUL, at most 255 bytes a part"
        )
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r}: there is no such user") from None
    return text


#: A name or a path that the file system can be asked for.
PathText = Annotated[str, AfterValidator(_usable_path)]


class Section(BaseModel):
    """A frozen group of fields; an unknown field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Section):
    """Which dataset the clients hold."""

    name: PathText = Field("digits", description="dataset: see `trishul datasets`")
    path: PathText | None = Field(
        None, description="your own data (dataset images, table or hub): folder, file or hub name"
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="your own data: what its columns are called, e.g. {text: body, label: topic}",
    )
    test_share: float = Field(
        0.2, gt=0, lt=1, description="your own data without test rows: share set aside for them"
    )
    train_limit: int | None = Field(
        None, ge=1, description="use only the first N training rows of a seeded shuffle"
    )


class PartitionConfig(Section):
    """How the training rows are dealt to the clients."""

    kind: Literal["iid", "dirichlet", "natural"] = Field(
        "dirichlet",
        description="iid: equal random parts; dirichlet: label skew; natural: by the dataset's "
        "own column of clients",
    )
    by: Literal["auto", "label", "group"] = Field(
        "auto",
        description="what a Dirichlet partition is skewed in: classes or sub-datasets; auto: "
        "classes where there are any",
    )
    alpha: float = Field(0.3, gt=0, description="Dirichlet concentration; smaller is more skewed")
    variant: Literal["per-client", "per-label"] = Field(
        "per-client",
        description="per-client: each client draws its own class proportions and all have equal "
        "sizes (the paper's wording); per-label: each class is dealt out by one draw over "
        "clients, sizes vary",
    )
    min_size: int = Field(1, ge=1, description="fewest rows a client may hold")


class TaskConfig(Section):
    """What the model is trained for on the dataset's rows."""

    kind: Literal["auto", "classification", "text2text", "verbalizer"] = Field(
        "auto",
        description="classification: a head over classes; text2text: generate the answer; "
        "verbalizer: the language model's word for each class after a prompt; auto: by the "
        "backbone's family (encoder, encoder-decoder, decoder)",
    )
    max_length: int = Field(256, ge=8, le=8192, description="input tokens; longer is cut")
    target_length: int = Field(
        32, ge=2, le=1024, description="target tokens of text2text, in training and generation"
    )
    template: str | None = Field(
        None,
        description="prompt with the dataset's fields in braces, e.g. '{sentence}\\nSentiment:'; "
        "default: by dataset; a classification head reads the fields alone",
    )
    verbalizers: tuple[str, ...] | None = Field(
        None, description="a word or phrase for each class, in order; default: by dataset"
    )


class ModelConfig(Section):
    """The frozen backbone."""

    name: PathText = Field(
        "google/vit-base-patch16-224-in21k",
        description="a built-in, a hub or mirror name owner/model, a local folder, or short: "
        + ", ".join(SHORT_MODEL_NAMES),
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: the architecture alone, weights drawn from the seed"
    )
    train_head: bool = Field(
        True, description="train and average the classification head beside the adapter"
    )
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="of the frozen backbone; adapters and optimizer stay fp32. tf32: fp32 whose "
        "matrix products use TensorFloat-32 on a GPU (on a CPU the same as fp32)",
    )
    dropout: bool = Field(False, description="keep the backbone's dropout while training")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    image_size: int | None = Field(
        None, ge=4, description="resize images to this side; default: what the backbone takes"
    )

    @field_validator("name")
    @classmethod
    def _whole_name(cls, name: str) -> str:
        return SHORT_MODEL_NAMES.get(name.lower(), name)


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
    alpha: float | None = Field(
        None,
        gt=0,
        description="LoRA's α: the update is α/r B A, with r the full rank also where a client "
        "trains a lower one; default r, that is B A itself",
    )
    init: BasisInit | None = Field(
        None, description="how frozen bases are drawn; default: the method's"
    )
    sigma: float | None = Field(
        None, gt=0, description="entry scale of rv_random_normal; default 1/sqrt(width)"
    )
    overflow: Literal["auto", "independent", "cap"] = Field(
        "auto",
        description="where heads x rank exceeds the width: auto lets only heads added by an "
        "allocation fall back to bases of their own; independent lets all; cap limits the "
        "allocation so that none has to (auto, too, where an allocation is measured)",
    )
    path: Literal["auto", "merged", "factored"] = Field(
        "auto",
        description="how adapted layers compute; auto takes the cheaper for the shape; in bf16 "
        "forwards that train are always factored",
    )


class OptimizerConfig(Section):
    """The client's local optimizer; its state is fresh in every round."""

    name: Literal["adam", "sgd"] = Field("adam", description="local optimizer")
    lr: float = Field(
        5e-4, gt=0, description="learning rate η; default by dataset, method, budget, partition"
    )
    lr_source: str = free(GENERAL, "where the learning rate is from")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first moment decay")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's second moment decay")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum")
    weight_decay: float = Field(0.0, ge=0, description="L2 (SGD) or decoupled (Adam) decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how η falls towards zero; a prox's threshold λη falls with it"
    )
    schedule_over: Literal["run", "round"] = Field(
        "run", description="over all local steps of the run, or over those of each round anew"
    )
    warmup: float = Field(
        0.0, ge=0, lt=1, description="share of the schedule's steps in which η rises linearly"
    )
    clip_norm: float | None = Field(
        None, gt=0, description="largest norm of a client's gradient; a larger one is scaled down"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_source(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "lr" in fields and "lr_source" not in fields:
            return fields | {"lr_source": HAND}
        return fields


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
    compute: Literal["full", "uniform", "bell", "skewed-right", "custom"] = Field(
        "full",
        description="how much of the budget clients can train: all of it, or shares of 1/4 to 1 "
        "drawn once per client",
    )
    compute_shares: tuple[float, float, float, float] | None = Field(
        None,
        description="compute=custom: proportions of clients that train 1/4, 1/2, 3/4 and all of "
        "the budget; they sum to 1",
    )
    clients_per_actor: Annotated[int, Field(ge=1)] | Literal["auto"] = free(
        "auto", "1: one actor per client; auto: as many actors as slices are free"
    )
    quorum: float = Field(
        0.5, gt=0, le=1, description="least share of the cohort whose uploads must be sound"
    )

    @field_validator("compute_shares")
    @classmethod
    def _are_proportions(cls, shares: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if shares is not None and (min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"{list(shares)} must be four proportions, 0 or more, that sum to 1")
        return shares

    @model_validator(mode="after")
    def _shares_are_custom(self) -> "FederationConfig":
        if (self.compute == "custom") != (self.compute_shares is not None):
            raise ValueError(
                f"federation.compute={self.compute!r} and federation.compute_shares="
                f"{self.compute_shares}: the shares are set with compute=custom, and only then"
            )
        return self


class EvaluationConfig(Section):
    """What is measured and how often."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last is always done")
    batch_size: int = Field(64, ge=1, description="examples per evaluation batch")
    limit: int | None = Field(
        None,
        ge=1,
        description="measure on a subset of the test rows, drawn by the data: the same for every "
        "seed, method and backbone",
    )
    diagnostics_every: int = Field(
        1, ge=0, description="rounds between spectral diagnostics; 0: never"
    )
    top_k: int = Field(8, ge=1, description="directions in the principal-angle similarity")


class ResourcesConfig(Section):
    """What the run may use. Only the thread count can change a bit of the result."""

    threads: int = Field(1, ge=1, description="CPU threads of one actor (fixed for determinism)")
    backend: Literal["ray", "inline"] = free("ray", "ray actors, or one process for debugging")
    device: Literal["auto", "cpu", "cuda"] = free("auto", "where a client trains")
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = free(
        "auto", "number of client actors; auto: see federation.clients_per_actor"
    )
    cpus_per_actor: Annotated[float, Field(gt=0)] | Literal["auto"] = free(
        "auto", "CPUs of one actor's slice; auto: one per thread, less where they do not fit"
    )
    gpus_per_actor: float = free(1.0, "GPU share of one actor's slice (device cuda)", ge=0, le=8)
    max_restarts: int = free(3, "restarts of one actor before the run gives up on it", ge=0)


class TrackingConfig(Section):
    """Where the run is told of."""

    mlflow: bool = free(True, "log to MLflow")
    uri: str | None = free(None, "MLflow tracking URI; default sqlite:///<runs>/mlflow.db")
    experiment: str = free("trishul", "MLflow experiment name")
    parent_run: str | None = free(None, "MLflow run id of the sweep this run belongs to")


class StorageConfig(Section):
    """Places. ``runs`` may be any pyarrow filesystem URI (s3://..., gs://...)."""

    runs: PathText = free("runs", "where runs/<id>/ go: a folder or a filesystem URI")
    cache: PathText | None = free(None, "prepared data and backbones; default $TRISHUL_CACHE")
    hub: PathText | None = free(None, "a local mirror with the hub's layout; default $TRISHUL_HUB")
    keep_checkpoints: int = free(2, "newest checkpoints kept", ge=1)
    retry_seconds: float = free(
        60.0, "seconds for which a storage that fails is tried again before the run stops", ge=0
    )
