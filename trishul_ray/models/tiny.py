"""The built-in backbones: small enough to be trained centrally in seconds, on embedded data."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, ViTConfig

#: Raise it when :mod:`trishul_ray.models.pretrain` changes what it computes.
RECIPE_VERSION = 1


@dataclass(frozen=True)
class Recipe:
    """How a built-in backbone is trained centrally (Adam, shuffled epochs)."""

    dataset: str
    split: str
    epochs: int
    batch_size: int
    lr: float
    seed: int = 0


@dataclass(frozen=True)
class Builtin:
    """A built-in backbone: its architecture and its training."""

    name: str
    description: str
    recipe: Recipe
    architecture: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        """A fresh transformers configuration."""
        return ViTConfig(**self.architecture)

    @property
    def hash(self) -> str:
        """Eight hex digits of everything that decides the weights."""
        decides = [RECIPE_VERSION, dict(self.architecture), dataclasses.asdict(self.recipe)]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]

    def folder(self, cache: Path) -> Path:
        """Where the pretrained weights lie under ``cache``."""
        return cache / "models" / f"{self.name}-{self.hash}"


VIT_DIGITS = Builtin(
    name="vit-digits",
    description="ViT for 8x8 digits: 64 wide, 4 blocks, pretrained on 300 digits nobody holds",
    recipe=Recipe(dataset="digits", split="pretrain", epochs=24, batch_size=30, lr=1e-3),
    architecture={
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "num_labels": 10,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
)

BUILTINS: dict[str, Builtin] = {VIT_DIGITS.name: VIT_DIGITS}


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in backbones."""
    return tuple(BUILTINS)
