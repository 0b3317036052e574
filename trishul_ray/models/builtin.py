"""The built-in backbones: tiny models, recipes of the image models, and a vocabulary of bytes.

Their tokenizer maps each byte of UTF-8 to one token. Ids 0 to 6 are special tokens, 7 to 262 the
bytes, and ids from 263 the sentinels of T5.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trishul_ray.runtime.lazy import transformers
from trishul_ray.storage.integrity import discard_damaged

if TYPE_CHECKING:
    from transformers import PretrainedConfig


#: Ids of the special tokens, and their texts.
PAD, EOS, UNK, CLS, SEP, BOS, MASK = range(7)
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>", "<cls>", "<sep>", "<s>", "<mask>")

#: Id of byte 0.
FIRST_BYTE = len(SPECIAL_TOKENS)

#: Number of sentinels, which mark removed spans as in T5, and the id of the first; ids ascend.
SENTINELS, FIRST_SENTINEL = 16, FIRST_BYTE + 256

#: Size of the vocabulary.
VOCABULARY = FIRST_SENTINEL + SENTINELS

#: Increment it when :mod:`trishul_ray.models.pretraining` changes its results.
RECIPE_VERSION = 2

#: ``model_type`` of a built-in's architecture in transformers.
ModelType = Literal["vit", "bert", "t5", "llama"]


@dataclass(frozen=True)
class Recipe:
    """Pretraining recipe of a built-in backbone: Adam with shuffled epochs."""

    dataset: str
    split: str
    epochs: int
    batch_size: int
    lr: float
    seed: int = 0


@dataclass(frozen=True)
class Builtin:
    """A built-in backbone: its architecture and its pretraining recipe.

    Text models have no recipe: their weights are random.
    """

    name: str
    description: str
    architecture: Mapping[str, Any]
    recipe: Recipe | None = None
    model_type: ModelType = "vit"

    def config(self) -> "PretrainedConfig":
        """Create the configuration of the architecture."""
        config: PretrainedConfig = transformers.AutoConfig.for_model(
            self.model_type, **self.architecture
        )
        return config

    @property
    def hash(self) -> str:
        """Eight hex digits of everything that determines the weights."""
        recipe = None if self.recipe is None else dataclasses.asdict(self.recipe)
        key = [RECIPE_VERSION, dict(self.architecture), recipe]
        if self.model_type != "vit":
            key.append(self.model_type)
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def place(self) -> str:
        """The folder of the pretrained weights in a cache."""
        return f"models/{self.name}-{self.hash}"

    def folder(self, cache: Path) -> Path:
        """Return the folder of the pretrained weights in a cache; remove a damaged folder."""
        folder = cache / self.place
        discard_damaged(folder)
        return folder


# fmt: off
VIT_DIGITS = Builtin(
    name="vit-digits",
    description="ViT for 8x8 digits: 64 wide, 4 blocks, pretrained on 300 digits of no client",
    recipe=Recipe(dataset="digits", split="pretrain", epochs=16, batch_size=30, lr=1e-3),
    architecture={
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "image_size": 8, "patch_size": 2, "num_channels": 1,
        "num_labels": 10, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
)

VIT_TINY = Builtin(
    name="vit-tiny",
    description="ViT for 64x64 color images: 96 wide, 4 blocks, pretrained on the digits, enlarged",
    recipe=Recipe(dataset="digits", split="pretrain", epochs=24, batch_size=30, lr=1e-3),
    architecture={
        "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 192, "image_size": 64, "patch_size": 16, "num_channels": 3,
        "num_labels": 10, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
)

BERT_TINY = Builtin(
    name="bert-tiny",
    description="BERT on bytes: 128 wide, 2 blocks, random weights",
    model_type="bert",
    architecture={
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 1024,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": PAD,
    },
)

T5_TINY = Builtin(
    name="t5-tiny",
    description="T5 on bytes: 128 wide, 2 + 2 blocks, random weights",
    model_type="t5",
    architecture={
        "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 32, "num_heads": 4, "num_layers": 2,
        "d_ff": 512, "dropout_rate": 0.0,
        "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD,
    },
)

LLAMA_TINY = Builtin(
    name="llama-tiny",
    description="LLaMA on bytes: 128 wide, 2 blocks, grouped queries, random weights",
    model_type="llama",
    architecture={
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
        "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
    },
)
# fmt: on

#: The built-in backbones, keyed by name.
BUILTINS = {b.name: b for b in (VIT_DIGITS, VIT_TINY, BERT_TINY, T5_TINY, LLAMA_TINY)}
