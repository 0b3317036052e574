"""Tiny random backbones of every supported family, and their inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.adapters.targets import find_layers

TEXT: dict[str, Any] = {"vocab_size": 40, "pad_token_id": 0}
ENCODER: dict[str, Any] = {
    **TEXT,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "num_labels": 3,
}


def build(family: str) -> nn.Module:
    """Build a tiny random model, the same in every call, without zero-initialized parameters."""
    torch.manual_seed(0)
    model: nn.Module
    if family == "vit":
        model = hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=24,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=8,
                patch_size=4,
                num_labels=5,
            )
        )
    elif family == "bert":
        model = hf.BertForSequenceClassification(hf.BertConfig(**ENCODER))
    elif family == "roberta":
        model = hf.RobertaForSequenceClassification(hf.RobertaConfig(**ENCODER))
    elif family == "t5":
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(
                **TEXT,
                d_model=24,
                d_kv=8,
                num_heads=2,
                num_layers=2,
                d_ff=32,
                decoder_start_token_id=0,
            )
        )
    else:
        config = hf.LlamaConfig(
            **TEXT,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            num_labels=3,
        )
        kinds = {
            "llama": hf.LlamaForCausalLM,
            "llama-classifier": hf.LlamaForSequenceClassification,
        }
        model = kinds[family](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def inputs(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
    tokens = torch.randint(1, 40, (3, 7), generator=generator)
    if family == "t5":
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}
    return {"input_ids": tokens}


def uneven_heads(specs: list[LayerSpec]) -> dict[str, LayerAdapter]:
    """Create multi-head adapters whose heads and rank differ by layer; the first has no heads."""
    return {
        spec.name: MultiHead(heads=i % 4, rank=2 + i % 2, init="random_normal")
        for i, spec in enumerate(specs)
    }


def heads(specs: list[LayerSpec]) -> dict[str, LayerAdapter]:
    """Create multi-head adapters of one rank with different heads; the first has no heads."""
    return {
        s.name: MultiHead(heads=i % 4, rank=3, init="random_normal") for i, s in enumerate(specs)
    }


def lora(specs: list[LayerSpec]) -> dict[str, LayerAdapter]:
    return {spec.name: LoRA(rank=2, scale=0.5) for spec in specs}


def mixed(specs: list[LayerSpec]) -> dict[str, LayerAdapter]:
    """Create multi-head adapters with and without trainable scalars, and LoRA, in one model."""
    kinds: list[LayerAdapter] = [
        MultiHead(heads=2, rank=3),
        MultiHead(heads=3, rank=2, train_scale=False),
        LoRA(rank=2),
        LoRA(rank=4, train_A=False),
    ]
    return {spec.name: kinds[i % len(kinds)] for i, spec in enumerate(specs)}


ADAPTERS: dict[str, Callable[[list[LayerSpec]], dict[str, LayerAdapter]]] = {
    "uneven-heads": uneven_heads,
    "heads": heads,
    "lora": lora,
    "mixed": mixed,
}


@dataclass
class Bench:
    """An adapted tiny model and its unchanged twin."""

    family: str
    model: nn.Module
    twin: nn.Module
    adapted: AdaptedModel
    inputs: dict[str, Tensor]

    def random_state(self, seed: int = 3) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        start = self.adapted.initial()
        return start + 0.3 * torch.randn(start.shape, generator=generator)


FAMILIES = ("vit", "bert", "roberta", "t5", "llama", "llama-classifier")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make() -> Callable[..., Bench]:
    """Attach adapters to a fresh tiny model."""

    def attach(family: str, adapters: str = "uneven-heads", **options: Any) -> Bench:
        dtype = options.pop("dtype", torch.float32)
        model, twin = build(family).to(dtype), build(family).to(dtype)
        options = {"seed": 5, "train_head": True, **options}
        adapted = AdaptedModel(model, ADAPTERS[adapters](find_layers(model)), **options)
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(family).items()}
        return Bench(family, model, twin, adapted, given)

    return attach


@pytest.fixture
def backbone() -> Callable[[str], nn.Module]:
    return build
