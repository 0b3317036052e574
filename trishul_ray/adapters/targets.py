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

#: Linear weights that score a transformer block; see :func:`scored_layers`.
BlockScores = Literal["adapted", "attention", "all"]

#: Target for every linear layer, except heads and layers that share their weight.
ALL_LINEAR = "all-linear"

#: Query and value, as adapted by RAVAN (Table 9) and TRISHUL. Like them, exclude T5's
#: cross-attention (``EncDecAttention``).
_QUERY_AND_VALUE = (("query", "value"), ("SelfAttention.q", "SelfAttention.v"))

#: Names of the same layer in the papers and in different releases of transformers. A target that
#: matches no module is looked up under its alias.
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

    A module outside any numbered block forms a separate block.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


def spec_of(model: nn.Module, name: str) -> LayerSpec:
    """Return the spec of a linear layer.

    Raises:
        InputError: The module does not exist or is not an ``nn.Linear``.
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
    ``SelfAttention.q`` or a full path. ``all-linear`` matches every linear layer, except the heads
    and the layers that share their weight. None means query and value, or every linear layer of a
    model that is not from transformers.

    Raises:
        InputError: A target matches no module (the message lists the nearest names), a module that
            is not an ``nn.Linear``, or a module that shares its weight with another one; or no
            query and value are found.
    """
    if targets is None:
        targets = _default_targets(model)
    if not targets:
        raise InputError("adapter.targets is empty; name at least one module")
    paths = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for target in targets:
        all_linear = target == ALL_LINEAR
        matches = _all_linear_layers(model) if all_linear else _matches(paths, target)
        if not matches:
            raise InputError(_unknown_target(model, target))
        chosen.update(matches)
    for name in sorted(chosen & _shared_weights(model)):
        raise InputError(
            f"adapter.targets: {name!r} shares its weight with another module, which the adapter "
            "would not change (tied embeddings); remove it"
        )
    return [spec_of(model, name) for name in paths if name in chosen]


def scored_layers(
    model: nn.Module, adapted: Sequence[LayerSpec], scores: BlockScores
) -> list[LayerSpec]:
    """Return the linear layers whose weights score the blocks of the adapted layers.

    ``adapted`` selects only those layers, ``all`` every linear layer of the same blocks, and
    ``attention`` the layers inside an attention module (``attention``, ``self_attn``,
    ``SelfAttention``, ``EncDecAttention``, ...).

    Raises:
        InputError: A block has no such layer.
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
    """Return the names of the classification head's parameters, if the model has a head.

    A language-model head (``lm_head``) belongs to the pretrained model and is not included. BERT's
    pooler is included: it is the dense layer before the classifier, which RoBERTa and ELECTRA have
    inside their heads, and many checkpoints lack it.
    """
    return [name for name, _ in model.named_parameters() if classifier_module(name) is not None]


def classifier_module(name: str) -> str | None:
    """Return the name of the head's module that contains a parameter, or None outside the head."""
    parts = name.split(".")
    if parts[0] in CLASSIFIER_MODULES:
        return parts[0]
    return _POOLER[0] if tuple(parts[1:3]) == _POOLER else None


def _shared_weights(model: nn.Module) -> set[str]:
    """Return the modules that share their weight with another module."""
    places: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            places.setdefault(weight, []).append(path)
    return {path for paths in places.values() if len(paths) > 1 for path in paths}


def _all_linear_layers(model: nn.Module) -> list[str]:
    from trishul_ray.adapters.quantized import QuantizedLinear  # circular import

    # Exclude subclasses: attention in torch reads the weight of a special linear layer.
    kinds = (torch.nn.Linear, QuantizedLinear)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    shared = _shared_weights(model)
    names = [
        name
        for name, module in model.named_modules()
        if type(module) in kinds and module is not head and name not in shared
    ]
    inner = [name for name in names if classifier_module(name) is None]
    if not inner:
        raise InputError(
            f"{type(model).__name__} has no linear layer to adapt, apart from a classification head"
        )
    return inner


def _default_targets(model: nn.Module) -> tuple[str, ...]:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family is None:
        return (ALL_LINEAR,)
    paths = [name for name, _ in model.named_modules()]
    for names in _QUERY_AND_VALUE:
        if all(_matches(paths, name) for name in names):
            return names
    linear = [path for path, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    known = dict.fromkeys(path.rpartition(".")[2] for path in linear)
    raise InputError(
        f"adapter.targets has no default for the model family {family!r}; allowed: "
        f"{ALL_LINEAR}, or names of its linear layers: {', '.join(known)}"
    )


def _matches(paths: Sequence[str], target: str) -> list[str]:
    parent, dot, last = target.rpartition(".")
    for name in (target, parent + dot + ALIASES.get(last, last)):
        if found := [path for path in paths if path == name or path.endswith("." + name)]:
            return found
    return []


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
