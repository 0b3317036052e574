"""The backbone of an experiment: location of its files, description, and loading."""

import copy
import math
from collections.abc import Hashable
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import InputError
from trishul_ray.models import shared_weights, weights
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.find_model import (
    KNOWN,
    ModelFiles,
    ModelKind,
    Preprocessing,
    default_kind,
    find_model,
    image_config,
    read_normalization,
)
from trishul_ray.models.shared_weights import Resident
from trishul_ray.models.tokenizers import load_tokenizer, tokenizer_key

#: Model types whose positions start after the id of the padding token.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl"})


class Backbone:
    """A frozen backbone, resolved from its configuration and the storage paths of this machine.

    Every property is read on first use and cached. A backbone pickles only as its configuration and
    storage paths (cache and local mirror), so that another process reads a separate copy.
    """

    def __init__(self, config: ModelConfig, paths: StoragePaths) -> None:
        self.config, self.paths = config, paths

    def __reduce__(self) -> tuple[type["Backbone"], tuple[ModelConfig, StoragePaths]]:
        return type(self), (self.config, self.paths)

    @property
    def name(self) -> str:
        """``model.name``."""
        return self.config.name

    @cached_property
    def files(self) -> ModelFiles:
        """Location of the model's files.

        Raises:
            InputError: As for :func:`find_model`.
        """
        return find_model(self.name, self.paths)

    @property
    def location(self) -> Path | str:
        """Folder of the model's files, or its name on the hub; see :class:`ModelFiles`."""
        return self.files.location

    @cached_property
    def architecture(self) -> PretrainedConfig:
        """Configuration of the architecture from transformers; do not modify it.

        Built-in and well-known models need no network and no files.

        Raises:
            InputError: The model cannot be found; the message lists the searched locations.
        """
        if self.name in BUILTINS:
            return BUILTINS[self.name].config()
        if isinstance(self.location, str) and self.location in KNOWN:
            return KNOWN[self.location]()
        return self._read_architecture()

    @property
    def family(self) -> ModelKind:
        """The usual kind of model of the architecture."""
        return default_kind(self.architecture)

    @property
    def positions(self) -> float:
        """Maximum number of tokens per row; infinite with relative positions (T5, XLNet)."""
        own = self.architecture
        count = getattr(own, "max_position_embeddings", None)
        if count is None or count < 0:
            return math.inf
        begins_late = own.model_type in _OFFSET_POSITIONS
        return int(count) - ((own.pad_token_id or 0) + 1 if begins_late else 0)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The fast tokenizer; raise as :func:`load_tokenizer`."""
        tokenizer = load_tokenizer(self.files)
        rows = getattr(self.architecture, "vocab_size", None) or 0
        if rows <= tokenizer.pad_token_id and (tokenizer.eos_token_id or rows) < rows:
            # A padding token that exists only in the tokenizer has no row in the embedding.
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @cached_property
    def tokenizer_key(self) -> str:
        """Hash of everything that determines the tokenizer's output."""
        return tokenizer_key(self.tokenizer)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The images that the backbone expects, with side ``model.image_size`` if it is set.

        Raises:
            InputError: The model cannot be found, or takes images that are not square.
            CorruptFileError: ``preprocessor_config.json`` is not readable.
        """
        images = image_config(self.architecture)
        size = getattr(images, "image_size", None)
        if isinstance(size, list | tuple):
            if len(set(size)) != 1:
                raise InputError(
                    f"model.name={self.name!r} has an image size of {size}; images must be square"
                )
            size = size[0]
        channels = getattr(images, "num_channels", None)
        with self.files.reading():
            mean, std = read_normalization(self.location)
        return Preprocessing(self.config.image_size or size, channels, mean, std)

    def model_config(self, kind: ModelKind, num_classes: int | None) -> PretrainedConfig:
        """Create the configuration to build a run's model from.

        It is the architecture for random weights, and otherwise the checkpoint's ``config.json``. A
        decoder that classifies finds the end of a row by its padding token. If the checkpoint does
        not define one, the tokenizer's is set, because the tokenizer pads the rows.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
        """
        if self.config.init == "random":
            config = copy.deepcopy(self.architecture)
        else:
            config = self._read_architecture()
        weights.check_kind(self.name, config, kind)
        if num_classes is not None:
            config.num_labels = num_classes
        if kind == "sequence-classification" and config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        return config

    def meta_model(
        self, kind: ModelKind | None = None, num_classes: int | None = None
    ) -> nn.Module:
        """Build the modules on the meta device: shapes and counts, without weights.

        The default ``kind`` is :attr:`family`.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
        """
        config = copy.deepcopy(self.architecture)
        if num_classes is not None:
            config.num_labels = num_classes
        with torch.device("meta"):
            return weights.build_module(self.config, config, kind or self.family).eval()

    @cached_property
    def shapes(self) -> nn.Module:
        """The :meth:`meta_model` of the usual kind, built only once; do not modify it."""
        return self.meta_model()

    def load(self, kind: ModelKind, num_classes: int | None, *, seed: int) -> nn.Module:
        """Load the model with its weights: float32, on the CPU, in eval mode, not shared.

        A head of ``num_classes`` outputs in the checkpoint is kept. Otherwise a head is drawn from
        the seed: weights N(0, 0.02^2), biases zero, and BERT's pooler likewise if it is missing.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
            CorruptFileError: The checkpoint lacks a tensor, or one contains NaN or infinity.
        """
        model, drawn = weights.build_weights(self._plan(kind, num_classes, seed))
        weights.draw_head(model, drawn, seed)
        return model.eval()

    def load_resident(self, kind: ModelKind, num_classes: int | None, *, seed: int) -> Resident:
        """Load the model for a worker, sharing its weights with other processes.

        It is on the CPU, in the run's precision and in eval mode. The weights are bitwise identical
        to those of :meth:`load` after a cast.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
            CorruptFileError: The checkpoint is malformed.
        """
        return shared_weights.load_resident(self._plan(kind, num_classes, seed), self.paths.cache)

    def resident_key(self, kind: ModelKind, num_classes: int | None, *, seed: int) -> Hashable:
        """Return a key of the weights of :meth:`load_resident`, except a drawn head."""
        return shared_weights.weights_key(self._plan(kind, num_classes, seed))

    def _plan(self, kind: ModelKind, num_classes: int | None, seed: int) -> weights.Plan:
        architecture = self.model_config(kind, num_classes)
        return weights.Plan(self.config, self.files, architecture, kind, seed)

    def _read_architecture(self) -> PretrainedConfig:
        """Read ``config.json``, without executing code from its folder."""
        location = self.location
        if self.name in BUILTINS and isinstance(location, Path) and not location.is_dir():
            raise InputError(
                f"model.name={self.name!r} is not pretrained yet in {self.paths.cache} "
                f"(storage.cache): `trishul run model={self.name}` pretrains it"
            )
        with self.files.reading():
            config: PretrainedConfig = AutoConfig.from_pretrained(location, trust_remote_code=False)
        if (quantized := getattr(config, "quantization_config", None)) is not None:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else None
            raise InputError(
                f"model.name={self.name!r}: its weights are quantized ({method or 'see its '}"
                f"{'' if method else 'quantization_config'}): allowed: a checkpoint of unquantized "
                "weights, which model.quantize quantizes for a run"
            )
        return config
