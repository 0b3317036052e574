"""One backbone of an experiment: where its files are, what it is, and how to load it.

This module imports transformers only when a backbone is used. A task holds a backbone, and the
coordinator, which merges metrics, must be able to unpickle a task without loading transformers.
"""

import copy
from collections import OrderedDict
from collections.abc import Hashable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trishul_ray.errors import CorruptFileError, InputError, first_line
from trishul_ray.files import stamp
from trishul_ray.network import hub_fault

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from trishul_ray.config import ModelConfig, Places
    from trishul_ray.models.lookup import Preprocessing
    from trishul_ray.models.shared_weights import Resident


#: The auto class of transformers that a model is built with.
ModelKind = Literal["image-classification", "sequence-classification", "seq2seq-lm", "causal-lm"]


#: Number of backbones to remember.
RECENT = 8


class Backbone:
    """A frozen backbone, resolved once from its configuration and the places of this machine.

    Everything is read at its first use and kept. A backbone pickles as its configuration and
    places (cache and local mirror) alone, so that another process reads its own copy.
    """

    def __init__(self, config: "ModelConfig", places: "Places") -> None:
        self.config, self.places = config, places

    def __init_subclass__(cls, *, prefix: str) -> None:
        """Make :meth:`of` return this kind for names that begin with ``prefix`` and a colon."""
        _kinds[prefix] = cls

    @classmethod
    def of(cls, config: "ModelConfig", places: "Places") -> "Backbone":
        """Return the backbone that a configuration names.

        While the files of a local model stay as they are, it is the same object, with all that it
        has read: the runs of a sweep mostly share one.
        """
        backbone = _kinds.get(config.name.partition(":")[0], cls)(config, places)
        if (key := backbone._files_key()) is None:
            return backbone
        backbone = _recent.pop(key, backbone)
        _recent[key] = backbone
        if len(_recent) > RECENT:
            _recent.popitem(last=False)
        return backbone

    def _files_key(self) -> Hashable | None:
        """Return what everything read depends on; None if the model is on the hub, or nowhere."""
        from trishul_ray.models.lookup import source_files

        try:
            location = self.location
        except InputError:
            return None  # raised again where the model is used
        if isinstance(location, str):
            return None
        files = source_files(location) if location.is_dir() else []
        stamps = tuple((file, stamp(file)) for file in files)
        return self.config.model_dump_json(), self.places, location, stamps

    def __reduce__(self) -> tuple[type["Backbone"], tuple["ModelConfig", "Places"]]:
        return type(self), (self.config, self.places)

    @property
    def name(self) -> str:
        """``model.name``."""
        return self.config.name

    @cached_property
    def location(self) -> Path | str:
        """Folder of the model's files, or its name on the Hugging Face hub.

        The folder of a built-in backbone need not exist yet; see :attr:`checkpoint`.

        Raises:
            InputError: The name matches no model, or its folder has no ``config.json``.
        """
        from trishul_ray.models.lookup import find_model

        return find_model(self.name, self.places)

    @property
    def checkpoint(self) -> Path | str:
        """The :attr:`location`, once it holds weights.

        Raises:
            InputError: The model cannot be found, or is a built-in that is not pretrained yet.
        """
        from trishul_ray.models.builtin import BUILTINS

        location = self.location
        if self.name in BUILTINS and isinstance(location, Path) and not location.is_dir():
            raise InputError(
                f"model.name={self.name!r} is not pretrained yet in {self.places.cache} "
                f"(storage.cache): run `trishul pretrain {self.name}`"
            )
        return location

    @cached_property
    def architecture(self) -> "PretrainedConfig":
        """Configuration of the architecture, as transformers describes it; do not modify it.

        Built-in and well-known models need no network and no files.

        Raises:
            InputError: The model cannot be found; the message says where it was searched.
        """
        from trishul_ray.models.builtin import BUILTINS
        from trishul_ray.models.lookup import KNOWN

        if self.name in BUILTINS:
            return BUILTINS[self.name].config()
        if isinstance(self.location, str) and self.location in KNOWN:
            return KNOWN[self.location]()
        return self._read_architecture()

    @property
    def family(self) -> "ModelKind":
        """The kind of model that the architecture is usually used as."""
        from trishul_ray.models.lookup import usual_kind

        return usual_kind(self.architecture)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The fast tokenizer; without a padding token of its own it pads with its end token.

        Raises:
            InputError: The model cannot be found, takes no text, or has no tokenizer files.
            CorruptFileError: A tokenizer file of a local folder is not readable.
        """
        from trishul_ray.models.tokenizers import load_tokenizer

        return load_tokenizer(self)

    @cached_property
    def tokenizer_key(self) -> str:
        """Hash of everything that determines the tokenizer's output."""
        from trishul_ray.models.tokenizers import tokenizer_key

        return tokenizer_key(self.tokenizer)

    @cached_property
    def preprocessing(self) -> "Preprocessing":
        """The images that the backbone expects, of side ``model.image_size`` where that is set.

        Raises:
            InputError: The model cannot be found, or takes images that are not square.
            CorruptFileError: ``preprocessor_config.json`` is not readable.
        """
        from trishul_ray.models.lookup import Preprocessing, read_normalization

        size = getattr(self.architecture, "image_size", None)
        if isinstance(size, list | tuple):
            if len(set(size)) != 1:
                raise InputError(f"model.name={self.name!r} takes images of {size}: not square")
            size = size[0]
        channels = getattr(self.architecture, "num_channels", None)
        try:
            mean, std = read_normalization(self.location)
        except OSError as error:
            raise self.load_error(error) from error
        return Preprocessing(self.config.image_size or size, channels, mean, std)

    def model_config(self, kind: "ModelKind", num_classes: int | None) -> "PretrainedConfig":
        """Return a new configuration to build a run's model from.

        It is the architecture for random weights, and otherwise the checkpoint's ``config.json``.
        A decoder that classifies finds the end of a row by its padding token. Where the checkpoint
        names none, the tokenizer's is set, because that one fills the rows.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
        """
        from trishul_ray.models.weights import check_kind

        if self.config.init == "random":
            config = copy.deepcopy(self.architecture)
        else:
            config = self._read_architecture()
        check_kind(self, config, kind)
        if num_classes is not None:
            config.num_labels = num_classes
        if kind == "sequence-classification" and config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        return config

    def meta_model(
        self, kind: "ModelKind | None" = None, num_classes: int | None = None
    ) -> "nn.Module":
        """Return the modules on the meta device: shapes and counts, no weights.

        The default ``kind`` is :attr:`family`.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
        """
        import torch

        from trishul_ray.models.weights import build_module

        config = copy.deepcopy(self.architecture)
        if num_classes is not None:
            config.num_labels = num_classes
        with torch.device("meta"):
            return build_module(self, config, kind or self.family).eval()

    @cached_property
    def shapes(self) -> "nn.Module":
        """The :meth:`meta_model` of the usual kind, built once; do not modify it."""
        return self.meta_model()

    def load(self, kind: "ModelKind", num_classes: int | None, *, seed: int) -> "nn.Module":
        """Return the model with its weights: float32, on the CPU, in eval mode, not shared.

        A head of ``num_classes`` outputs in the checkpoint is kept. Otherwise one is drawn from the
        seed: weights N(0, 0.02^2), biases zero, and BERT's pooler likewise where there is none.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
            CorruptFileError: The checkpoint lacks a tensor, or one holds NaN or infinity.
        """
        from trishul_ray.models import weights

        config = self.model_config(kind, num_classes)
        if self.config.init == "random":
            model = weights.build_module(self, config, kind)
            weights.draw_weights(model, seed)
        else:
            model, drawn = weights.load_checkpoint(self, config, kind)
            weights.draw_head(model, drawn, seed)
        return model.eval()

    def load_resident(self, kind: "ModelKind", num_classes: int | None, *, seed: int) -> "Resident":
        """Return the model as a worker keeps it, sharing its weights with other processes.

        It is on the CPU, in the run's precision and in eval mode. The weights have the same bits
        as those of :meth:`load` after a cast.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
            CorruptFileError: The checkpoint is malformed.
        """
        from trishul_ray.models.shared_weights import load_resident

        return load_resident(self, kind, num_classes, seed=seed)

    def resident_key(self, kind: "ModelKind", num_classes: int | None, *, seed: int) -> Hashable:
        """Return what the weights of :meth:`load_resident` depend on, besides a drawn head."""
        from trishul_ray.models.shared_weights import weights_file

        return weights_file(self, self.model_config(kind, num_classes), kind, seed=seed)

    def local_source(self) -> str | None:
        """Return the identity of the weights on this machine, see ``Resident``; None if none are.

        Raises:
            InputError: The name matches no model.
        """
        from trishul_ray.models.lookup import local_weights_source

        return local_weights_source(self)

    def load_error(self, error: Exception) -> InputError:
        """Return the one-line error for files that did not load; it says where they were sought."""
        reason = first_line(error)
        if isinstance(self.location, Path):
            return CorruptFileError(
                f"model.name={self.name!r}: cannot load {self.location}: {reason}"
            )
        reason = hub_fault() or reason
        mirror = self.places.hub
        searched = f"mirror {mirror} does not hold it" if mirror else "no mirror is set"
        return InputError(
            f"model.name={self.name!r} not found: {searched} (storage.hub or TRISHUL_HUB), and the "
            f"Hugging Face hub did not provide it: {reason.rstrip('.')}; set TRISHUL_HUB to a "
            f"folder with {self.location}/config.json and its weights, name their folder, or run "
            "once with internet"
        )

    def _read_architecture(self) -> "PretrainedConfig":
        from trishul_ray.models.lookup import READ_ERRORS, read_architecture

        checkpoint = self.checkpoint
        try:
            return read_architecture(checkpoint)
        except READ_ERRORS as error:
            raise self.load_error(error) from error


#: Other kinds of backbones, by the beginning of their names.
_kinds: dict[str, type[Backbone]] = {}

#: The backbones that :meth:`Backbone.of` returned last, by :meth:`Backbone._files_key`.
_recent: OrderedDict[Hashable, Backbone] = OrderedDict()
