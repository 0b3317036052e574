"""Models that are passed from Python as objects: any ``nn.Module`` with named linear layers.

Such a model has the name ``python:<class>``, and its content is a hash of its structure, its
weights and its classes' source, so that the same module is the same run. It is kept in this process
and sent to the workers of a run; nothing is written to disk, because code cannot be stored safely.
Another process has to pass it again to continue the run.

If the module's ``forward`` has parameters named like the task's inputs (``pixel_values``;
``input_ids``, ``attention_mask``), the inputs are passed by name. Otherwise they are passed by
position in this order, as many as it accepts. The module returns logits [b, K], or an object with
an attribute ``logits``.
"""

import copy
import hashlib
import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from trishul_ray.config.fields import ModelConfig
from trishul_ray.errors import InputError, first_line
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import cast, configure_compute, quantize_layers, run_dtype
from trishul_ray.models.find_model import (
    PASSED,
    ModelFiles,
    ModelKind,
    Preprocessing,
    image_config,
)
from trishul_ray.models.shared_weights import Resident
from trishul_ray.models.tokenizers import tokenizer_key


@dataclass(frozen=True)
class PassedModel:
    """A model that was passed from Python: a copy on the CPU, in eval mode.

    Attributes:
        name: ``python:<class>``.
        content: Hash of everything that determines its output.
        module: The model.
        tokenizer: The tokenizer of a model for texts; None for images.
    """

    name: str
    content: str
    module: nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None


#: The models that this process was passed, keyed by content.
_passed: dict[str, PassedModel] = {}


def pass_model(module: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> PassedModel:
    """Copy a model, compute its content, and register it in this process.

    Raises:
        InputError: A layer has no weights yet, the model cannot be copied, or the tokenizer is not
            a fast tokenizer of transformers.
    """
    name = f"{PASSED}:{type(module).__name__}"
    fast = isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.is_fast
    if tokenizer is not None and not fast:
        raise InputError(
            f"tokenizer of type {type(tokenizer).__name__} is not a fast tokenizer of "
            "transformers, such as AutoTokenizer.from_pretrained(...)"
        )
    for layer, part in module.named_modules():
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise InputError(
                f"model {name}: layer {layer!r} ({type(part).__name__}) has no weights yet; call "
                "the model once on a batch before you pass it"
            )
    try:
        own = copy.deepcopy(module).cpu().eval()
    except Exception as error:  # Attributes of the module may not support copying.
        raise InputError(f"model {name} cannot be copied ({first_line(error)})") from error
    return remember(PassedModel(name, content_of(own, tokenizer), own, tokenizer))


def remember(passed: PassedModel) -> PassedModel:
    """Register a model in this process; workers register the model that they receive."""
    return _passed.setdefault(passed.content, passed)


def passed_model(config: ModelConfig) -> PassedModel | None:
    """Return the passed model of a configuration, or None for other kinds of models.

    Raises:
        InputError: The model was not passed to this process.
    """
    if not config.name.startswith(f"{PASSED}:"):
        return None
    if config.content_hash in _passed:
        return _passed[config.content_hash]
    raise InputError(
        f"model.name={config.name!r} is a model that was passed from Python, and is not stored: "
        "pass the same model again, as trishul_ray.run(..., model=...) or "
        "trishul_ray.load(..., model=...)"
    )


def content_of(module: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Hash structure, simple attributes, source and tensors, as ``sha256:<hex>``."""
    digest = hashlib.sha256(f"{type(module).__qualname__}\n{module!r}\n".encode())
    for name, part in module.named_modules():
        simple = {
            k: v for k, v in vars(part).items() if isinstance(v, bool | int | float | str | tuple)
        }
        simple.pop("training", None)
        digest.update(f"{name} {sorted(simple.items())!r}\n".encode())
    for kind in sorted({type(part) for part in module.modules()}, key=lambda k: k.__qualname__):
        if kind.__module__.partition(".")[0] not in ("torch", "transformers"):
            try:
                digest.update(inspect.getsource(kind).encode())
            except (OSError, TypeError):
                digest.update(kind.__qualname__.encode())  # The class was typed at a prompt.
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if tokenizer is not None:
        digest.update(tokenizer_key(tokenizer).encode())
    return f"sha256:{digest.hexdigest()}"


class PythonConfig(PretrainedConfig):
    """Placeholder for the architecture of a model that is passed from Python."""

    model_type = "python"


class PythonBackbone(Backbone):
    """A backbone that was passed from Python."""

    @cached_property
    def passed(self) -> PassedModel:
        """The model; an InputError if it was not passed to this process."""
        passed = passed_model(self.config)
        assert passed is not None  # The name starts with ``python:``.
        return passed

    @property
    def files(self) -> ModelFiles:
        """The name as location, without files."""
        return ModelFiles(self.name, self.name, None)

    @cached_property
    def architecture(self) -> PretrainedConfig:
        """The model's configuration, or an empty configuration if it has none."""
        own = getattr(self.passed.module, "config", None)
        if isinstance(own, PretrainedConfig):
            return own
        config = PythonConfig()
        if self.passed.tokenizer is not None:
            config.vocab_size = len(self.passed.tokenizer)
        return config

    @property
    def family(self) -> ModelKind:
        """Images, or texts if it was passed with a tokenizer."""
        return (
            "image-classification" if self.passed.tokenizer is None else "sequence-classification"
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that was passed with the model."""
        if self.passed.tokenizer is None:
            raise InputError(f"model.name={self.name!r} was passed without a tokenizer=...")
        return self.passed.tokenizer

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The images of the dataset, unchanged or with side ``model.image_size`` if it is set."""
        own = image_config(self.architecture)
        size = self.config.image_size or getattr(own, "image_size", None)
        return Preprocessing(size, getattr(own, "num_channels", None), None, None)

    def meta_model(
        self, kind: ModelKind | None = None, num_classes: int | None = None
    ) -> nn.Module:
        """Build the modules on the meta device."""
        module = self.passed.module
        # ``.to()`` would separate the modules that share a weight.
        memo: dict[int, Any] = {
            id(each): nn.Parameter(each.to("meta"), each.requires_grad)
            for each in module.parameters()
        }
        return copy.deepcopy(module, memo).to("meta")

    def load(self, kind: ModelKind, num_classes: int | None, *, seed: int) -> nn.Module:
        """Copy the model in float32; the seed has no effect."""
        return self._copy(kind, torch.float32)

    def load_resident(self, kind: ModelKind, num_classes: int | None, *, seed: int) -> Resident:
        """Copy the model in the run's precision."""
        model = self._copy(kind, run_dtype(self.config))
        quantize_layers(model, self.config.quantize, run_dtype(self.config))
        if isinstance(getattr(model, "config", None), PretrainedConfig):
            configure_compute(model, self.config)
        return Resident(model, self.passed.content, ())

    def resident_key(self, kind: ModelKind, num_classes: int | None, *, seed: int) -> Hashable:
        """Return the content hash as a key of the weights."""
        return self.passed.content

    def _copy(self, kind: ModelKind, dtype: torch.dtype) -> nn.Module:
        if kind != self.family:
            raise InputError(
                f"model.name={self.name!r} was passed from Python and supports {self.family}, not "
                f"{kind}; set task.kind=classification"
            )
        model = copy.deepcopy(self.passed.module)
        cast(model, dtype)
        model.register_forward_pre_hook(_PassInputs(model), with_kwargs=True)
        return model


class _PassInputs:
    """Hook that converts a task's named inputs to the signature of the module's ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        kinds = [p.kind for p in parameters]
        self.takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        self.names = frozenset(p.name for p in parameters)
        self.positional = sum(
            kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for kind in kinds
        )

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return args, inputs
        if self.takes_any:
            return (), inputs
        if named := {name: value for name, value in inputs.items() if name in self.names}:
            return (), named
        return tuple(inputs.values())[: self.positional], {}


def as_passed(model: nn.Module) -> nn.Module:
    """Restore the signature of a model that was passed from Python; others are unchanged."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _PassInputs):
            del model._forward_pre_hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
    return model
