"""The fields of an experiment, by section, with defaults, ranges and descriptions.

The defaults follow the paper's protocol: 20 clients, 3 per round, 50 local steps, Adam.
"""

import math
import os
import re
import unicodedata
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from trishul_ray.config.paths import StoragePaths
from trishul_ray.config.section import (
    PathText,
    Section,
    not_in_id,
    stored_hash,
)
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.spectral.bases import BasisInit

#: Short names of backbones. Hub names replace them before anything is hashed.
SHORT_MODEL_NAMES = {
    "vit-b16": "google/vit-base-patch16-224-in21k",
    "t5-base": "google-t5/t5-base",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "roberta-large": "FacebookAI/roberta-large",
}


class DataConfig(Section):
    """Dataset of the clients."""

    name: PathText = Field("digits", description="dataset: see `trishul list datasets`")
    path: PathText | None = Field(
        None, description="user data (dataset images, table or hub): folder, file or hub name"
    )
    content: str | None = not_in_id(
        None,
        "set by loading: content hash of data.path, and the path; the hash replaces the path in "
        "the id",
    )
    columns: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="user data: column names, e.g. {text: body, label: topic}",
    )
    test_share: float = Field(
        0.2, gt=0, lt=1, description="user data without test rows: fraction used as test rows"
    )
    skip_broken: bool = Field(
        False,
        description="user data: skip unreadable images, and rows without a label, text or image, "
        "instead of rejecting the data",
    )
    validation_share: float = Field(
        0.0,
        description="fraction of the training rows held out for tuning; the same rows for every "
        "seed, method and partition",
        ge=0,
        lt=1,
    )
    test_groups: tuple[str, ...] = Field(
        (),
        description="groups, such as categories or tasks, of which all rows are test rows",
    )
    drop_repeated: bool = Field(
        False,
        description="instructions: skip training rows that are also test rows; otherwise they are "
        "only counted",
    )
    train_limit: int | None = Field(
        None, ge=1, description="use only the first N training rows of a seeded shuffle"
    )

    @field_validator("columns")
    @classmethod
    def _normalize(cls, columns: dict[str, str]) -> dict[str, str]:
        """Normalize names to the Unicode form in which the columns of the data are read."""
        return {role: unicodedata.normalize("NFC", name) for role, name in columns.items()}

    @property
    def content_hash(self) -> str | None:
        """The stored content hash of ``path``, or None if it belongs to another path."""
        return stored_hash(self.content, self.path)


class PartitionConfig(Section):
    """Split of the training rows across clients."""

    kind: Literal["iid", "dirichlet", "natural"] = Field(
        "dirichlet",
        description="iid: equal random parts; dirichlet: label skew; natural: the dataset's "
        "client column",
    )
    by: Literal["auto", "label", "group"] = Field(
        "auto",
        description="labels that a Dirichlet partition skews: classes or sub-datasets; auto: "
        "classes if the dataset has any",
    )
    alpha: float = Field(0.3, gt=0, description="Dirichlet concentration; smaller is more skewed")
    variant: Literal["per-client", "per-label"] = Field(
        "per-client",
        description="per-client: each client samples class proportions, skipping exhausted "
        "classes, and all clients have equal sizes (as in the paper); per-label: sampled "
        "proportions split each class across the clients, and sizes vary",
    )
    min_size: int = Field(1, ge=1, description="smallest number of rows per client")


def _by_kind(default: int, instruction: int) -> Callable[[dict[str, Any]], int]:
    """Return a default factory for a :class:`TaskConfig` field that depends on the kind."""
    return lambda found: instruction if found.get("kind") == "instruction" else default


class TaskConfig(Section):
    """Task: predict labels or answers from the dataset's rows."""

    kind: str = Field(
        "auto",
        description="classification: a classification head; text2text: generate the answer; "
        "verbalizer: score the word of each class after a prompt; instruction: tune a decoder on "
        "answers; auto: from the backbone's family (encoder, encoder-decoder, decoder)",
    )
    max_length: int = Field(
        default_factory=_by_kind(256, 512),
        ge=8,
        le=8192,
        description="maximum number of input tokens; longer inputs are truncated. instruction: "
        "includes the answer, default 512",
    )
    target_length: int = Field(
        default_factory=_by_kind(32, 256),
        ge=2,
        le=1024,
        description="text2text: maximum number of target tokens, in training and generation; "
        "instruction: maximum number of tokens of an answer, default 256",
    )
    template: str | None = Field(
        None,
        description="prompt with the dataset's fields in braces, e.g. '{sentence}\\nSentiment:'; "
        "default: from the dataset; unused with a classification head. instruction: chat, "
        "alpaca, plain, turns, or a .yaml or .jinja file",
    )
    turns: Literal["all", "last"] = Field(
        "all", description="instruction: answers of a conversation to train on"
    )
    loss: Literal["tokens", "rows"] = Field(
        "tokens",
        description="instruction: mean over all answer tokens, or mean of the means per row",
    )
    answer_pattern: str | None = not_in_id(
        None,
        "instruction: regular expression; `trishul eval` compares its last match in a response "
        "with its last match in the reference, without commas",
    )
    verbalizers: tuple[str, ...] | None = Field(
        None, description="word or phrase per class, in order; default: from the dataset"
    )

    @field_validator("answer_pattern")
    @classmethod
    def _compile_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return value

    @field_validator("template")
    @classmethod
    def _read_file(cls, value: str | None) -> str | None:
        """Replace the name of a template file with its text, which is part of the id."""
        if value is None or "\n" in value or not value.endswith((".yaml", ".yml", ".jinja")):
            return value
        try:
            return Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{value!r} cannot be read as a template ({error})") from None


#: Storage formats of the frozen linear weights.
Quantization: TypeAlias = Literal["none", "nf4", "int8"]


class ModelConfig(Section):
    """The frozen backbone."""

    name: PathText = Field(
        "google/vit-base-patch16-224-in21k",
        description="a built-in model, a hub or mirror name owner/model, a local folder, or a "
        "short name: " + ", ".join(SHORT_MODEL_NAMES),
    )
    content: str | None = not_in_id(
        None,
        "set by loading: content hash of a local folder, and its name; the hash replaces the name "
        "in the id",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: initialize the weights from the seed"
    )
    train_head: bool = Field(
        True, description="train and average the classification head in addition to the adapter"
    )
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="precision of the frozen backbone; adapters and optimizer stay fp32. tf32: "
        "fp32 with TensorFloat-32 matrix products on a GPU (on a CPU the same as fp32)",
    )
    quantize: Quantization = Field(
        "none",
        description="storage of the linear weights of the backbone's blocks, with bitsandbytes "
        "(extra `quant`): nf4 (4.1 bits per weight) or int8; computations dequantize them to "
        "model.precision",
    )
    dropout: bool = Field(False, description="keep the backbone's dropout in training")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    image_size: int | None = Field(
        None, ge=4, description="resize images to this side; default: the backbone's image size"
    )

    @property
    def content_hash(self) -> str | None:
        """The stored content hash of the folder ``name``, or None if it belongs to another name."""
        return stored_hash(self.content, self.name)

    @field_validator("name")
    @classmethod
    def _expand_short_name(cls, name: str) -> str:
        return SHORT_MODEL_NAMES.get(name.lower(), name)


class AdapterConfig(Section):
    """Adapters of frozen linear layers; the method chooses their kind."""

    targets: tuple[str, ...] | None = Field(
        None,
        description="names of modules to adapt, or all-linear: every linear layer except heads; "
        "default: query and value",
    )
    heads: int = Field(4, ge=1, le=64, description="mean number of heads per adapted matrix")
    rank: int | None = Field(
        None, ge=1, description="rank of the method's adapter; default: from the budget"
    )
    matching: Literal["matched", "published"] = Field(
        "matched",
        description="matched: ranks that match the budget on each matrix; published: the paper's "
        "ranks, which match the budget on a 768x768 matrix",
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="LoRA's α: the update is α/r B A, where r is the full rank even if a client "
        "trains a lower one; default r, so the update is B A",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="LoRA's dropout: probability that B A ignores an entry of a layer's input in "
        "a training step",
    )
    init: BasisInit | None = Field(
        None, description="initialization of the frozen bases; default: from the method"
    )
    sigma: float | None = Field(
        None, gt=0, description="entry scale of rv_random_normal; default 1/sqrt(width)"
    )
    overflow: Literal["auto", "independent", "cap"] = Field(
        "auto",
        description="if heads x rank exceeds the width. auto: only heads added by an allocation "
        "use independent bases; independent: all heads may; cap: the allocation is limited so that "
        "no head has to (auto does the same if the allocation is measured)",
    )
    path: Literal["auto", "merged", "factored"] = Field(
        "auto",
        description="computation of adapted layers; auto: the cheaper one for the shape; in bf16, "
        "training is always factored",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _list_of_one(cls, targets: Any) -> Any:
        return (targets,) if isinstance(targets, str) else targets


class RateSource(StrEnum):
    """Source of a learning rate that comes from neither a table nor a file of tuned rates."""

    USER = "set by hand"
    GENERAL = (
        "general default: no rate is known for this method, and it names no method to take rates "
        "from (rates_like)"
    )


class OptimizerConfig(Section):
    """The clients' local optimizer, whose state is reset every round."""

    name: Literal["adam", "sgd"] = Field("adam", description="local optimizer")
    lr: float = Field(
        5e-4, gt=0, description="learning rate η; default: from dataset, method, budget, partition"
    )
    lr_source: RateSource | str = not_in_id(
        RateSource.GENERAL, "source of the learning rate", union_mode="left_to_right"
    )
    rates: PathText | None = not_in_id(
        None,
        "file of `trishul sweep rates --rates FILE`; if it has a rate for the run, it replaces lr",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first moment decay")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's second moment decay")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum")
    weight_decay: float = Field(0.0, ge=0, description="L2 (SGD) or decoupled (Adam) decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="decay of η to zero; the prox threshold λη decays with it"
    )
    schedule_over: Literal["run", "round"] = Field(
        "run", description="span of the schedule: all local steps of the run, or of each round"
    )
    warmup: float = Field(
        0.0, ge=0, lt=1, description="fraction of the schedule's steps with linear warmup"
    )
    clip_norm: float | None = Field(
        None, gt=0, description="maximum gradient norm; larger gradients are scaled down"
    )

    @model_validator(mode="before")
    @classmethod
    def _add_source(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "lr" in fields and "lr_source" not in fields:
            return fields | {"lr_source": RateSource.USER}
        return fields

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "OptimizerConfig":
        unread = {"adam": ["momentum"], "sgd": ["beta1", "beta2"]}
        self.reject_unused(unread[self.name], f"with name={self.name!r}")
        return self


#: Capacities of clients, as fractions of the full budget.
COMPUTE_LEVELS = (0.25, 0.5, 0.75, 1.0)

#: Proportion of clients at each level, keyed by ``federation.compute``.
COMPUTE_PROFILES = {
    "full": (0.0, 0.0, 0.0, 1.0),
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "bell": (0.1, 0.4, 0.4, 0.1),
    "skewed-right": (0.5, 0.3, 0.15, 0.05),
}


class FederationConfig(Section):
    """Clients, cohorts, rounds, and the weights of the average."""

    clients: int = Field(20, ge=1, le=1_000_000, description="registered clients")
    clients_per_round: int = Field(3, ge=1, description="clients sampled per round (the cohort)")
    rounds: int = Field(50, ge=1, le=1_000_000, description="communication rounds")
    local_steps: int = Field(50, ge=1, description="mini-batch steps per client and round")
    local_epochs: int | None = Field(
        None,
        ge=1,
        description="replaces local_steps: passes of a client over its rows per round, in batches "
        "of at most all its rows",
    )
    batch_size: int = Field(32, ge=1, description="examples per step")
    weighting: Literal["uniform", "size", "tokens"] = Field(
        "uniform",
        description="aggregation weights: equal, number of rows, or number of label tokens, with "
        "which task.loss=tokens averages over the tokens of all clients",
    )
    compute: Literal["full", "uniform", "bell", "skewed-right", "custom"] = Field(
        "full",
        description="fraction of the budget that clients can train: full, or 1/4 to 1 in the "
        "proportions of the profile; `draw` seeds the assignment",
    )
    compute_shares: tuple[float, float, float, float] | None = Field(
        None,
        description="compute=custom: proportions of clients that train 1/4, 1/2, 3/4 and all of "
        "the budget; must sum to 1",
    )
    clients_per_actor: Annotated[int, Field(ge=1)] | Literal["auto"] = not_in_id(
        "auto", "clients per actor; auto: one actor per free slice"
    )
    quorum: float = Field(
        0.5, gt=0, le=1, description="minimum fraction of the cohort with valid uploads"
    )
    stacked: int = Field(
        1,
        description="number of clients that train together on an actor: the frozen backbone "
        "computes for all of them at once. The last bits of results differ, and activations need "
        "a multiple of the memory",
        ge=1,
        le=1024,
    )
    held_out: float = Field(
        0.0,
        description="fraction of the clients, rounded up, that `draw` excludes from training: the "
        "difference in scores is the participation gap (requires evaluation.per_client)",
        ge=0,
        le=0.5,
    )

    def steps_of(self, rows: int) -> tuple[int, int]:
        """Return the steps per round and the batch size of a client with this number of rows."""
        if self.local_epochs is None:
            return self.local_steps, self.batch_size
        size = min(self.batch_size, rows)
        return -(-self.local_epochs * rows // size), size

    @property
    def participants(self) -> int:
        """The number of clients that may take part, which excludes held-out clients."""
        return self.clients - math.ceil(exact_fraction(self.clients, self.held_out))

    @field_validator("compute_shares")
    @classmethod
    def _check_proportions(cls, shares: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if shares is not None and (min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"{list(shares)} must be four proportions, 0 or more, that sum to 1")
        return shares

    @model_validator(mode="after")
    def _check_custom_shares(self) -> "FederationConfig":
        if (self.compute == "custom") != (self.compute_shares is not None):
            raise ValueError(
                f"federation.compute={self.compute!r} and federation.compute_shares="
                f"{self.compute_shares}: set shares if and only if compute=custom"
            )
        return self


class EvaluationConfig(Section):
    """Measurements and their frequency."""

    every: int = not_in_id(
        1,
        "rounds between scores on the test rows; 0: score only the untuned model and the last "
        "round, which are always scored",
        ge=0,
    )
    batch_size: int = Field(64, ge=1, description="examples per evaluation batch")
    limit: int | None = Field(
        None,
        ge=1,
        description="number of test rows to evaluate on: a random subset that is the same for "
        "every seed, method and backbone",
    )
    diagnostics_every: int = Field(
        1,
        ge=0,
        description="rounds between spectral diagnostics, which include the first and the last "
        "round; 0: never",
    )
    diagnostics_cohort: Literal["round", "all"] = Field(
        "round",
        description="updates that diagnostics compare. round: updates of the round's clients; all: "
        "in the last round, all other clients (at most 100) also train, only for this comparison",
    )
    top_k: int = Field(8, ge=1, description="directions in the principal-angle similarity")
    per_client: bool = Field(
        False,
        description="also score every client: on its test rows if they have a client column, "
        "otherwise on all test rows, weighted by the client's class proportions. With a "
        "personalized method, also score the personalized models (one evaluation per client)",
    )

    def diagnoses(self, round_number: int, rounds: int) -> bool:
        """Return whether the uploads of a round, counted from 1, are diagnosed."""
        every = self.diagnostics_every
        return every > 0 and (round_number % every == 0 or round_number in (1, rounds))

    def scored_rounds(self, rounds: int) -> frozenset[int]:
        """Return the rounds after which a run of ``rounds`` is scored; 0 is the untuned model.

        The choice of scored rounds does not affect the model of any round.
        """
        return frozenset({*range(0, rounds, self.every or rounds), rounds})

    def scores(self, round_number: int, rounds: int) -> bool:
        return round_number == rounds or round_number % (self.every or rounds) == 0


class ResourcesConfig(Section):
    """Resources of the run. Only ``threads`` can affect the bits of a result."""

    threads: int = Field(1, ge=1, description="CPU threads of one actor (fixed for determinism)")
    backend: Literal["ray", "inline"] = not_in_id(
        "ray", "ray: client actors; inline: one process, for debugging"
    )
    device: Literal["auto", "cpu", "cuda"] = not_in_id("auto", "where clients train")
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = not_in_id(
        "auto", "number of client actors; auto: from federation.clients_per_actor"
    )
    cpus_per_actor: Annotated[float, Field(gt=0)] | Literal["auto"] = not_in_id(
        "auto", "CPUs per actor; auto: one per thread, fewer if they do not fit"
    )
    gpus_per_actor: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = not_in_id(
        "auto",
        "GPUs per actor: a fraction also limits its device memory, and any number requires a GPU; "
        "auto: 1 if clients train on a GPU",
    )
    cuda_graphs: bool = not_in_id(
        False, "replay local steps as CUDA graphs: one launch for hundreds, with identical results"
    )
    max_restarts: int = not_in_id(
        3, "number of times per round that a dead actor is replaced before the run fails", ge=0
    )
    mixed_stack: bool = not_in_id(
        False, "allow different versions of torch, or devices, in one run; its last bits may differ"
    )

    @property
    def needs_gpu(self) -> bool:
        """Whether clients must train on a GPU."""
        return self.device == "cuda" or (self.device == "auto" and self.gpus_per_actor != "auto")


class TrackingConfig(Section):
    """Destination of metrics."""

    mlflow: bool = not_in_id(True, "log to MLflow")
    uri: str | None = not_in_id(None, "MLflow tracking URI; default sqlite:///<runs>/mlflow.db")
    experiment: str = not_in_id("trishul", "MLflow experiment name", min_length=1)
    parent_run: str | None = not_in_id(None, "MLflow run id of the sweep that contains this run")


class StorageConfig(Section):
    """Storage paths. ``runs`` may be any pyarrow filesystem URI (s3://..., gs://...)."""

    runs: PathText = Field(
        default_factory=lambda: os.environ.get("TRISHUL_RUNS") or "runs",
        description="folder or filesystem URI of all runs (<id>/); default $TRISHUL_RUNS",
        json_schema_extra={"identity": False},
    )
    cache: PathText | None = not_in_id(None, "prepared data and backbones; default $TRISHUL_CACHE")
    hub: PathText | None = not_in_id(
        None, "a local mirror with the hub's layout; default $TRISHUL_HUB"
    )
    keep_checkpoints: int = not_in_id(2, "number of newest checkpoints to keep", ge=1)
    retry_seconds: float = not_in_id(
        60.0, "seconds to retry failing storage before the run stops", ge=0
    )

    @property
    def paths(self) -> StoragePaths:
        """The storage paths of this machine, with the defaults of :meth:`StoragePaths.at`."""
        return StoragePaths.at(self.cache, self.hub)
