"""The products of a backbone, and how many tokens each of them sees, from its shapes alone.

Legend: n tokens of a row, m tokens of a generated target, d width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trishul_ray.adapters.targets import classifier_module
from trishul_ray.config.fields import ModelConfig, TaskConfig
from trishul_ray.config.places import Places
from trishul_ray.runtime.lazy import torch

#: Beginning of the names of a decoder's layers, beside an encoder.
DECODER = "decoder."

#: Last names of the layers that compute an attention's queries, and its keys and values.
QUERIES = ("q", "q_proj", "query")
KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")


@dataclass(frozen=True)
class Shape:
    """The products of a model.

    Attributes:
        module: The model on the meta device.
        widths: ``d_out * d_in`` of its linear layers, by name.
        queries: ``d_out`` of those that compute an attention's queries, by name.
        last_block: Name of the block of which one token is read; empty if all are.
        image_tokens: Tokens of an image; None for texts.
        patch: Multiplications that embed one patch of an image.
    """

    module: "torch.nn.Module"
    widths: Mapping[str, int]
    queries: Mapping[str, int]
    last_block: str
    image_tokens: int | None
    patch: int

    def lengths(self, task: TaskConfig) -> tuple[int, int]:
        """Return n and m of a row of a task, at most."""
        config: Any = self.module.config
        generates = config.is_encoder_decoder or task.kind == "instruction"
        # Otherwise a decoder's head scores the label words at one position.
        return self.image_tokens or task.max_length, task.target_length if generates else 1

    def tokens_through(self, name: str, n: int, m: int) -> int:
        """Return how many tokens of a row a layer sees."""
        if classifier_module(name) is not None:
            return 1
        if name == "lm_head":
            return m
        if name.startswith(DECODER):
            return n if name.endswith(("EncDecAttention.k", "EncDecAttention.v")) else m
        return 1 if self._is_read_once(name) else n

    def _is_read_once(self, name: str) -> bool:
        own = bool(self.last_block) and name.startswith(self.last_block + ".")
        return own and name.rpartition(".")[2] not in KEYS_AND_VALUES

    def products(self, n: int, m: int, *, generated: bool = False) -> float:
        """Return the operations of the layers for a row; only the decoder's if ``generated``."""
        used = {
            name: size
            for name, size in self.widths.items()
            if not generated or name.startswith((DECODER, "lm_head"))
        }
        patches = self.patch * (n - 1) if not generated else 0
        return 2.0 * (
            sum(size * self.tokens_through(name, n, m) for name, size in used.items()) + patches
        )

    def attention(self, n: int, m: int) -> float:
        """Return the operations of scores and means of one row."""
        total = 0
        for name, width in self.queries.items():
            queries = self.tokens_through(name, n, m)
            keys = n if "EncDecAttention" in name or self._is_read_once(name) else queries
            total += 4 * queries * keys * width
        return float(total)


def shape_of(model: ModelConfig, places: Places) -> Shape:
    """Return the shape of a backbone; no weights are read.

    Raises:
        InputError: The model is not on this machine.
    """
    return _of(model.model_copy(update={"content": None}), places)


@lru_cache(maxsize=32)
def _of(model: ModelConfig, places: Places) -> Shape:
    from trishul_ray.models.backbone import Backbone  # imports torch
    from trishul_ray.models.last_block import last_block

    module = Backbone(model, places).meta_model()
    config: Any = module.config
    linear = {n: x for n, x in module.named_modules() if isinstance(x, torch.nn.Linear)}
    widths = {name: layer.weight.numel() for name, layer in linear.items()}
    queries = {
        name: layer.out_features
        for name, layer in linear.items()
        if name.rpartition(".")[2] in QUERIES
    }
    last = last_block(module) or ""
    patch_size = getattr(config, "patch_size", None)
    if patch_size is None:
        return Shape(module, widths, queries, last, None, 0)
    grid = (model.image_size or config.image_size) // patch_size
    patch = config.hidden_size * config.num_channels * patch_size**2
    return Shape(module, widths, queries, last, grid**2 + 1, patch)
