"""Texts as prepared rows, byte-level tokenizers, and tiny models of the real classes."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from trishul_ray.adapters.model import AdaptedModel
from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.dataset import DatasetInfo, Split, write_split
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import EOS, PAD, VOCABULARY
from trishul_ray.tasks.text import TokenizerRef

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
REVIEWS = [
    "fine",
    "a fine film",
    "dull",
    "dull and long, and then it went on",
    "fine fun",
    "so dull",
]
LABELS = [1, 1, 0, 0, 1, 0]


@pytest.fixture(scope="session")
def byte_tokens():
    """``byte_tokens("t5")`` returns the tokenizer of a built-in model, one token per byte."""

    def make(family, vocabulary=VOCABULARY):
        backbone = Backbone(ModelConfig(name=f"{family}-tiny"), StoragePaths(Path("none"), None))
        return TokenizerRef(backbone, vocabulary_size=vocabulary)

    return make


@pytest.fixture(scope="session")
def word_tokens():
    """Create a tokenizer of words with the space before them, like LLaMA's."""
    fast = Tokenizer(BPE())
    fast.pre_tokenizer, fast.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    letters = ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=letters,
        show_progress=False,
    )  # fmt: skip
    fast.train_from_iterator(["a fine film, yes yes no no maybe\nAnswer: Answer:"] * 9, trainer)
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backbone = Backbone(ModelConfig(name="none"), StoragePaths(Path("none"), None))
    backbone.__dict__["tokenizer"] = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    return TokenizerRef(backbone, vocabulary_size=400)


@pytest.fixture
def text_split(tmp_path):
    """``text_split(info, label=[...], sentence=[...])`` returns rows as a source prepares them."""

    def make(info, name="test", **columns):
        columns = {
            key: pa.array(values, pa.large_string())
            if isinstance(values[0], str)
            else np.array(values, dtype=np.int64)
            for key, values in columns.items()
        }
        write_split(tmp_path / f"{name}.arrow", columns, info)
        return Split(tmp_path / f"{name}.arrow")

    return make


@pytest.fixture
def reviews(text_split):
    """Return six one-field rows of two classes, with very different lengths."""
    info = DatasetInfo("toy", "text", ("bad", "good"), fields=("sentence",))
    return text_split(info, sentence=REVIEWS, label=LABELS)


@pytest.fixture
def questions(text_split):
    """Return four rows of questions, in two groups."""
    info = DatasetInfo("toyqa", "qa", groups=("SQuAD", "Natural-Questions"))
    answers = [["blue"], ["a red one", "red"], ["in 1976"], ["Žižkov", "zizkov"]]
    return text_split(
        info,
        question=["what is the sky?", "which?", "when?", "where is it?"],
        context=["the sky is blue", "a red one and no other", "it was in 1976", "far up in Žižkov"],
        answers=[json.dumps(a) for a in answers],
        group=[0, 1, 0, 1],
    )


def encoded(split, task):
    """Encode a split with the task, including the columns that are copied."""
    columns = dict(task.encoder.encode(split, lambda done: None))
    kept = {k: np.array(split.column(k)) for k in ("label", "group") if k in split.columns}
    return {k: torch.from_numpy(v) for k, v in (columns | kept).items()}


@pytest.fixture(scope="session")
def encode_split():
    """See :func:`encoded`."""
    return encoded


def build(name, seed=0):
    torch.manual_seed(seed)  # transformers draws from the global stream; the caller has forked it.
    common = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
    if name == "bert":
        config = BertConfig(**common, **WIDE, intermediate_size=64, hidden_dropout_prob=0.0)
        config.attention_probs_dropout_prob = 0.0
        model = BertForSequenceClassification(config)
    elif name == "t5":
        config = T5Config(
            **common, d_model=32, d_kv=16, num_heads=2, num_layers=2, d_ff=64, dropout_rate=0.0,
            decoder_start_token_id=PAD,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
    else:
        config = LlamaConfig(**common, **WIDE, intermediate_size=64, num_key_value_heads=1)
        model = {"llama": LlamaForCausalLM, "llama-head": LlamaForSequenceClassification}[name](
            config
        )
    return AdaptedModel(model.eval(), {}, seed=0, train_head=False)


@pytest.fixture
def tiny_model():
    """``tiny_model("t5")`` returns a random model of a real class, without adapters."""
    with torch.random.fork_rng():
        yield build


def trained(task, model, batch, steps=40, lr=3e-3):
    """Return the losses of some steps on all parameters of the model."""
    model.model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = task.loss(model.forward(**task.inputs(batch)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="session")
def train_steps():
    """See :func:`trained`."""
    return trained
