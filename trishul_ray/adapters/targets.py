"""Which layers of a model are adapted, and which parameters are its classification head."""

import difflib
from collections.abc import Sequence
from typing import Literal

from torch import nn

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.errors import InputError

#: Which linear weights score a transformer block; see :func:`scored_layers`.
BlockScores = Literal["adapted", "attention", "all"]

_QUERY_VALUE = ("query", "value")
_PROJECTIONS = ("q_proj", "v_proj")
_T5 = ("SelfAttention.q", "SelfAttention.v")

#: Query and value of each family, as RAVAN (Table 9) and TRISHUL adapt them. T5's
#: cross-attention (``EncDecAttention``) is left out there and here.
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "vit": _QUERY_VALUE,
    "deit": _QUERY_VALUE,
    "beit": _QUERY_VALUE,
    "dinov2": _QUERY_VALUE,
    "bert": _QUERY_VALUE,
    "roberta": _QUERY_VALUE,
    "xlm-roberta": _QUERY_VALUE,
    "electra": _QUERY_VALUE,
    "camembert": _QUERY_VALUE,
    "t5": _T5,
    "mt5": _T5,
    "llama": _PROJECTIONS,
    "mistral": _PROJECTIONS,
    "qwen2": _PROJECTIONS,
    "qwen3": _PROJECTIONS,
    "gemma": _PROJECTIONS,
    "gemma2": _PROJECTIONS,
}

#: Names of one layer in the papers and in newer or older releases of transformers. A target that
#: names no module is looked up under its other name.
ALIASES = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
}

#: First path component of the parameters that make up a classification head.
HEAD_MODULES = frozenset(
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
    """The transformer block of a module: its path up to and including the first number.

    A module outside any numbered block is a block of its own.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return name


def spec_of(model: nn.Module, name: str) -> LayerSpec:
    """The spec of one linear layer.

    Raises:
        InputError: there is no such module, or it is not an ``nn.Linear``.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise InputError(f"adapter layer {name!r}: the model has no such module") from None
    if not isinstance(module, nn.Linear):
        raise InputError(
            f"adapter.targets: {name!r} is a {type(module).__name__}; only nn.Linear can be adapted"
        )
    return LayerSpec(name, block_of(name), module.out_features, module.in_features)


def find_layers(model: nn.Module, targets: Sequence[str] | None = None) -> list[LayerSpec]:
    """The linear layers that the targets name, in the model's order.

    A target names every module whose dotted path is it or ends with it: ``q_proj``,
    ``SelfAttention.q`` or a full path.

    Args:
        model: a Hugging Face model (on any device, meta included).
        targets: names; None takes query and value of the model's family.

    Raises:
        InputError: a target names nothing (the nearest names are given) or no ``nn.Linear``, or
            the family has no default.
    """
    if targets is None:
        targets = _default_targets(model)
    if not targets:
        raise InputError("adapter.targets is empty: name at least one module")
    paths = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for target in targets:
        found = _matches(paths, target) or _matches(paths, _alias(target))
        if not found:
            raise InputError(_unknown_target(model, target))
        chosen.update(found)
    return [spec_of(model, name) for name in paths if name in chosen]


def scored_layers(
    model: nn.Module, adapted: Sequence[LayerSpec], scores: BlockScores
) -> list[LayerSpec]:
    """Return the linear layers whose weights score the blocks of the adapted ones.

    Args:
        model: a Hugging Face model (on any device, meta included).
        adapted: the layers that get an adapter.
        scores: ``adapted`` for those alone; ``attention`` for every linear layer of the same
            blocks that lies in a module named for attention (``attention``, ``self_attn``,
            ``SelfAttention``, ``EncDecAttention``, ...); ``all`` for every linear layer of them.

    Raises:
        InputError: a block has no layer of that kind.
    """
    if scores == "adapted":
        return list(adapted)
    blocks = dict.fromkeys(spec.block for spec in adapted)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = [spec_of(model, name) for name in names if block_of(name) in blocks]
    if scores == "attention":
        found = [spec for spec in found if "attn" in spec.name.lower().replace("attention", "attn")]
    for block in blocks:
        if not any(spec.block == block for spec in found):
            raise InputError(
                f"method.block_scores={scores!r}: block {block!r} has no such linear layer; use "
                "adapted or all"
            )
    return found


def head_parameters(model: nn.Module) -> list[str]:
    """Names of the classification head's parameters; none for a model without one.

    A language-model head (``lm_head``) is part of the pretrained model and does not count. BERT's
    pooler does: it is the dense layer in front of the classifier that RoBERTa's and ELECTRA's
    heads have within, and many checkpoints lack it.
    """
    return [name for name, _ in model.named_parameters() if head_module(name) is not None]


def head_module(name: str) -> str | None:
    """The last name of the head's module that a parameter is part of; None outside the head."""
    parts = name.split(".")
    if parts[0] in HEAD_MODULES:
        return parts[0]
    return _POOLER[0] if tuple(parts[1:3]) == _POOLER else None


def _default_targets(model: nn.Module) -> tuple[str, ...]:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in DEFAULT_TARGETS:
        raise InputError(
            f"adapter.targets must be set for the model family {family!r}; there are defaults "
            f"for {', '.join(sorted(DEFAULT_TARGETS))}"
        )
    return DEFAULT_TARGETS[family]


def _matches(paths: Sequence[str], target: str) -> list[str]:
    return [path for path in paths if path == target or path.endswith("." + target)]


def _alias(target: str) -> str:
    parent, dot, last = target.rpartition(".")
    return parent + dot + ALIASES.get(last, last)


def _unknown_target(model: nn.Module, target: str) -> str:
    names: dict[str, None] = {}  # suffixes of one and two components, in order of appearance
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parts = path.split(".")
            names[parts[-1]] = None
            if len(parts) > 1 and not parts[-2].isdigit():
                names[".".join(parts[-2:])] = None
    near = difflib.get_close_matches(target, names, n=4, cutoff=0.5) or list(names)[:8]
    return f"adapter.targets: no module is named {target!r}; nearest: {', '.join(near)}"
