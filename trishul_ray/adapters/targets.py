"""Selection of the layers to adapt and of the parameters of the classification head."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import nn

#: Linear weights that give a transformer block its score; see :func:`scored_layers`.
BlockScores = Literal["adapted", "attention", "all"]

_ENCODERS = "vit deit beit dinov2 bert roberta xlm-roberta electra camembert"
_DECODERS = "llama mistral qwen2 qwen3 gemma gemma2"

#: Query and value of each model family, as adapted by RAVAN (Table 9) and TRISHUL. Like them, leave
#: out T5's cross-attention (``EncDecAttention``).
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ENCODERS.split(), ("query", "value")),
    **dict.fromkeys(("t5", "mt5"), ("SelfAttention.q", "SelfAttention.v")),
    **dict.fromkeys(_DECODERS.split(), ("q_proj", "v_proj")),
}

#: Names of one layer in the papers and in different releases of transformers. A target that matches
#: no module is looked up under its alias.
ALIASES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
}

#: First path component of the parameters of a classification head.
CLASSIFIER_MODULES = frozenset(
    {
        "classifier",
        "cls_classifier",
        "distillation_classifier",
        "pre_classifier",
        "score",
        "classification_head",
        "qa_outputs",
    }
)

#: Path of BERT's pooler within its base model.
_POOLER = ("pooler", "dense")


def block_of(name: str) -> str:
    """Return the transformer block of a module: its path up to and including the first number.

    A module outside any numbered block forms its own block.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


def spec_of(model: nn.Module, name: str) -> LayerSpec:
    """Return the spec of one linear layer.

    Raises:
        InputError: the module does not exist or is not an ``nn.Linear``.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise InputError(f"adapter layer {name!r}: the model has no such module") from None
    if not isinstance(module, torch.nn.Linear):
        raise InputError(
            f"adapter.targets: {name!r} is a {type(module).__name__}; only nn.Linear can be adapted"
        )
    return LayerSpec(name, block_of(name), module.out_features, module.in_features)


def find_layers(model: nn.Module, targets: Sequence[str] | None = None) -> list[LayerSpec]:
    """Return the linear layers that match the targets, in the model's order.

    A target matches every module whose dotted path equals it or ends with it: ``q_proj``,
    ``SelfAttention.q`` or a full path. None takes query and value of the model's family, and of a
    model that is not of transformers every linear layer but the classification head.

    Raises:
        InputError: a target matches no module (the message lists the nearest names) or a module
            that is not an ``nn.Linear``, or the family has no default.
    """
    if targets is None:
        targets = _default_targets(model)
        if targets is None:
            return _all_linear_layers(model)
    if not targets:
        raise InputError("adapter.targets is empty: name at least one module")
    paths = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for target in targets:
        matches = _matches(paths, target) or _matches(paths, _alias(target))
        if not matches:
            raise InputError(_unknown_target(model, target))
        chosen.update(matches)
    return [spec_of(model, name) for name in paths if name in chosen]


def scored_layers(
    model: nn.Module, adapted: Sequence[LayerSpec], scores: BlockScores
) -> list[LayerSpec]:
    """Return the linear layers whose weights score the blocks of the adapted layers.

    ``adapted`` takes only those layers, ``all`` every linear layer of the same blocks, and
    ``attention`` those of them inside an attention module (``attention``, ``self_attn``,
    ``SelfAttention``, ``EncDecAttention``, ...).

    Raises:
        InputError: a block has no such layer.
    """
    if scores == "adapted":
        return list(adapted)
    blocks = dict.fromkeys(spec.block for spec in adapted)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    layers = [spec_of(model, name) for name in names if block_of(name) in blocks]
    if scores == "attention":
        layers = [s for s in layers if "attn" in s.name.lower().replace("attention", "attn")]
    for block in blocks:
        if not any(spec.block == block for spec in layers):
            raise InputError(
                f"method.block_scores={scores!r}: block {block!r} has no such linear layer; use "
                "adapted or all"
            )
    return layers


def classifier_parameters(model: nn.Module) -> list[str]:
    """Return the names of the classification head's parameters; empty for a model without one.

    A language-model head (``lm_head``) belongs to the pretrained model and is not included. BERT's
    pooler is: it is the dense layer before the classifier, which RoBERTa and ELECTRA have inside
    their heads, and many checkpoints lack it.
    """
    return [name for name, _ in model.named_parameters() if classifier_module(name) is not None]


def classifier_module(name: str) -> str | None:
    """Return the last name of a parameter's classification-head module; None outside the head."""
    parts = name.split(".")
    if parts[0] in CLASSIFIER_MODULES:
        return parts[0]
    return _POOLER[0] if tuple(parts[1:3]) == _POOLER else None


def _all_linear_layers(model: nn.Module) -> list[LayerSpec]:
    from trishul_ray.adapters.quantized import QuantizedLinear  # imports this module

    # Not subclasses: attention of torch reads the weight of its own kind of linear layer.
    kinds = (torch.nn.Linear, QuantizedLinear)
    names = [name for name, module in model.named_modules() if type(module) in kinds]
    inner = [name for name in names if classifier_module(name) is None]
    if not inner:
        raise InputError(
            f"{type(model).__name__} has no linear layer to adapt, apart from a classification head"
        )
    return [spec_of(model, name) for name in inner]


def _default_targets(model: nn.Module) -> tuple[str, ...] | None:
    """Return the targets of the model's family; None for a model that is not of transformers."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family is None:
        return None
    if family not in DEFAULT_TARGETS:
        raise InputError(
            f"adapter.targets must be set for the model family {family!r}; families with defaults: "
            f"{', '.join(sorted(DEFAULT_TARGETS))}"
        )
    return DEFAULT_TARGETS[family]


def _matches(paths: Sequence[str], target: str) -> list[str]:
    return [path for path in paths if path == target or path.endswith("." + target)]


def _alias(target: str) -> str:
    parent, dot, last = target.rpartition(".")
    return parent + dot + ALIASES.get(last, last)


def _unknown_target(model: nn.Module, target: str) -> str:
    names: dict[str, None] = {}  # path suffixes of one and two components, in model order
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            parts = path.split(".")
            names[parts[-1]] = None
            if len(parts) > 1 and not parts[-2].isdigit():
                names[".".join(parts[-2:])] = None
    near = difflib.get_close_matches(target, names, n=4, cutoff=0.5) or list(names)[:8]
    return f"adapter.targets: no module is named {target!r}; nearest: {', '.join(near)}"
