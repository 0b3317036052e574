"""The tokenizer of the built-in text models: one token a byte of UTF-8, made here, without files.

Legend: ids 0..6 are the marks below, 7..262 the bytes, from 263 on the sentinels of T5.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PAD, EOS, UNK, CLS, SEP, BOS, MASK = range(7)


_MARKS = ("<pad>", "</s>", "<unk>", "<cls>", "<sep>", "<s>", "<mask>")


#: Id of byte 0.
FIRST_BYTE = len(_MARKS)


#: Marks of cut out spans, as T5's, in ascending ids.
SENTINELS = 16


FIRST_SENTINEL = FIRST_BYTE + 256


VOCABULARY = FIRST_SENTINEL + SENTINELS


#: What stands around one text, and around a pair, by family.
_TEMPLATES = {
    "bert": ("<cls> $A <sep>", "<cls> $A <sep> $B <sep>"),
    "t5": ("$A </s>", "$A </s> $B </s>"),
    "llama": ("<s> $A", "<s> $A $B"),
}


def _letters() -> list[str]:
    """The visible character by which byte-level tokenizers write each byte, in byte order.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 and on (Radford
    et al. 2019).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def byte_tokenizer(family: str) -> "PreTrainedTokenizerBase":
    """The byte-level tokenizer with the marks a family puts around its texts.

    Args:
        family: ``bert``, ``t5`` or ``llama``.
    """
    sentinels = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    pieces = [*_MARKS, *_letters(), *sentinels]
    fast = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = ByteLevelDecoder()
    single, pair = _TEMPLATES[family]
    marks = [(mark, i) for i, mark in enumerate(_MARKS)]
    fast.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token=_MARKS[PAD],
        eos_token=_MARKS[EOS],
        unk_token=_MARKS[UNK],
        cls_token=_MARKS[CLS],
        sep_token=_MARKS[SEP],
        bos_token=_MARKS[BOS],
        mask_token=_MARKS[MASK],
        additional_special_tokens=sentinels,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


#: Raise it when :mod:`trishul_ray.pretrain.training` changes what it computes.
RECIPE_VERSION = 1


#: What a text model learns: to fill in masked bytes (BERT), to continue a text (LLaMA), to
#: restore spans that were cut out (T5).
Objective = Literal["masked", "causal", "denoise"]


Family = Literal["vit", "bert", "t5", "llama"]


_CONFIGS: dict[Family, type[PretrainedConfig]] = {
    "vit": ViTConfig,
    "bert": BertConfig,
    "t5": T5Config,
    "llama": LlamaConfig,
}


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
class TextRecipe(Recipe):
    """How a built-in text model is trained: Adam, the rate falling linearly to zero.

    Attributes:
        objective: what is learned.
        length: tokens of a row.
        steps: batches of an epoch, drawn at random places of the text.
    """

    objective: Objective = "causal"
    length: int = 128
    steps: int = 50


@dataclass(frozen=True)
class Builtin:
    """A built-in backbone: its architecture and its training."""

    name: str
    description: str
    recipe: Recipe
    architecture: Mapping[str, Any] = field(default_factory=dict)
    family: Family = "vit"

    def config(self) -> PretrainedConfig:
        """A fresh transformers configuration."""
        return _CONFIGS[self.family](**self.architecture)

    @property
    def hash(self) -> str:
        """Eight hex digits of everything that decides the weights."""
        decides = [RECIPE_VERSION, dict(self.architecture), dataclasses.asdict(self.recipe)]
        if self.family != "vit":
            decides.append(self.family)
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]

    def folder(self, cache: Path) -> Path:
        """Where the pretrained weights lie under ``cache``."""
        return cache / "models" / f"{self.name}-{self.hash}"

    def on(self, dataset: str) -> "Builtin":
        """The same model trained on another dataset's training split."""
        recipe = dataclasses.replace(self.recipe, dataset=dataset, split="train")
        return dataclasses.replace(self, recipe=recipe)


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


def _text_recipe(objective: Objective, lr: float = 2e-3) -> TextRecipe:
    return TextRecipe(
        dataset="20newsgroups",
        split="train",
        epochs=12,
        batch_size=16,
        lr=lr,
        objective=objective,
    )


BERT_TINY = Builtin(
    name="bert-tiny",
    description="BERT on bytes: 128 wide, 2 blocks, pretrained to fill in masked bytes",
    # At 2e-3 it never learns more than how frequent a byte is (loss 3.5; at 1e-3, 3.0).
    recipe=_text_recipe("masked", lr=1e-3),
    family="bert",
    architecture={
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 1024,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": PAD,
    },
)


T5_TINY = Builtin(
    name="t5-tiny",
    description="T5 on bytes: 128 wide, 2 + 2 blocks, pretrained to restore spans cut out",
    recipe=_text_recipe("denoise"),
    family="t5",
    architecture={
        "vocab_size": VOCABULARY,
        "d_model": 128,
        "d_kv": 32,
        "num_heads": 4,
        "num_layers": 2,
        "d_ff": 512,
        "dropout_rate": 0.0,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
    },
)


LLAMA_TINY = Builtin(
    name="llama-tiny",
    description="LLaMA on bytes: 128 wide, 2 blocks, grouped queries, pretrained to continue text",
    recipe=_text_recipe("causal"),
    family="llama",
    architecture={
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    },
)


BUILTINS: dict[str, Builtin] = {
    builtin.name: builtin for builtin in (VIT_DIGITS, BERT_TINY, T5_TINY, LLAMA_TINY)
}


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in backbones."""
    return tuple(BUILTINS)
