"""What a checkpoint does not give is drawn from the experiment's seed, name by name."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from trishul_ray.rng import torch_rng

#: Standard deviation of drawn weights where the architecture names none.
INIT_STD = 0.02


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw every weight anew, in place, each from its own stream ``(seed, "init", name)``.

    Linear, convolution and embedding weights are N(0, s^2) with the architecture's
    ``initializer_range`` s (0.02 if it has none), biases 0, normalization 1 and 0; further
    tensors of two or more dimensions (class tokens, position embeddings) N(0, s^2) as well, and
    further vectors keep the constants the architecture gives them. T5, whose attention does not
    divide by the head's width, has standard deviations of its own. A tensor shared by several
    modules is drawn once, under its first name.
    """
    settings: Any = model.config
    usual = float(getattr(settings, "initializer_range", None) or INIT_STD)
    is_t5 = settings.model_type in ("t5", "mt5")
    drawn: set[nn.Parameter] = set()
    with torch.no_grad():
        for prefix, module in model.named_modules():
            norm = "Norm" in type(module).__name__
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in drawn:
                    continue
                drawn.add(parameter)
                if name == "bias":
                    parameter.zero_()
                elif norm:
                    parameter.fill_(1.0)
                elif parameter.ndim >= 2:
                    generator = torch_rng(seed, "init", f"{prefix}.{name}")
                    std = _t5_std(settings, module, prefix) if is_t5 else usual
                    parameter.normal_(0.0, std, generator=generator)


def _t5_std(settings: Any, module: nn.Module, path: str) -> float:
    """Standard deviation of a T5 weight: 1 for tokens, 1/sqrt(fan in) else, queries smaller.

    Raffel et al. 2020's initialization, with the factor that the configuration names.
    """
    factor = float(settings.initializer_factor)
    last = path.rpartition(".")[2]
    if last == "relative_attention_bias":
        return factor / math.sqrt(settings.d_model)
    if not isinstance(module, nn.Linear) or last == "lm_head":
        return factor
    std = factor / math.sqrt(module.in_features)
    return std / math.sqrt(settings.d_kv) if last == "q" else std


def head_to_draw(model: nn.Module, lacking: Collection[str]) -> list[str]:
    """Which parameters are drawn when a checkpoint lacks some: the head, whole.

    Args:
        model: of transformers.
        lacking: names that the checkpoint lacks.

    Returns:
        Nothing where it lacks nothing; else everything outside the base model and, within it, the
        pooler where that is lacking, in the model's order.
    """
    settings: Any = model
    base = f"{settings.base_model_prefix}."
    if not lacking:
        return []
    return [
        name for name, _ in model.named_parameters() if not name.startswith(base) or name in lacking
    ]


def draw_head(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Draw the parameters ``names``, in place: weights N(0, 0.02^2), vectors zero."""
    generator = torch_rng(seed, "head")
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            if parameter.ndim >= 2:
                parameter.normal_(0.0, INIT_STD, generator=generator)
            else:
                parameter.zero_()
