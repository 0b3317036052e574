"""Encoders and decoders with a head: their inputs from a text or a pair, and their metrics."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing
from transformers import BertConfig, PreTrainedTokenizerFast

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BOS, CLS, FIRST_BYTE, PAD, SEP
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.text import TokenizerRef


def one_field(tokens, **options):
    options = {"fields": ("sentence",), "num_classes": 2, "max_length": 40} | options
    return SequenceClassification(tokens, **options)


@pytest.fixture
def word_tokens(tmp_path):
    """Write a BERT tokenizer with a few words, as files next to a model's config."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e"]
    fast = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = Whitespace()
    fast.post_processor = BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        unk_token="[UNK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    BertConfig(vocab_size=9).save_pretrained(folder)
    backbone = Backbone(ModelConfig(name=str(folder)), StoragePaths(tmp_path, None))
    return TokenizerRef(backbone, vocabulary_size=9)


def test_a_text_is_bytes_between_marks(reviews, encode_split, byte_tokens):
    task = one_field(byte_tokens("bert"), max_length=10)
    columns = encode_split(reviews, task)
    assert columns["input_ids"].dtype == columns["length"].dtype == torch.int32
    assert columns["length"].tolist() == [6, 10, 6, 10, 10, 9]
    want = [CLS, *(FIRST_BYTE + byte for byte in b"fine"), SEP]
    assert columns["input_ids"][0].tolist() == want + [PAD] * 4
    # truncated inside the special tokens
    assert columns["input_ids"][3, [0, -1]].tolist() == [CLS, SEP]
    batch = task.prepare_batch({k: v[[0, 2]] for k, v in columns.items()}, "cpu", torch.bfloat16)
    assert batch["input_ids"].shape == (2, 6) and batch["input_ids"].dtype == torch.int64
    assert bool(batch["attention_mask"].all()) and batch["labels"].tolist() == [1, 0]
    assert set(task.inputs(batch)) == {"input_ids", "attention_mask"}


def test_longer_text_of_a_pair_is_truncated(word_tokens, text_split, encode_split):
    info = DatasetInfo("pairs", "text", ("no", "yes"), fields=("one", "two"))
    split = text_split(info, one=["a b", "a b c d e"], two=["c", "c d"], label=[0, 1])
    task = one_field(word_tokens, fields=("one", "two"), max_length=8)
    columns = encode_split(split, task)
    assert columns["input_ids"].tolist() == [[1, 4, 5, 2, 6, 2, 0, 0], [1, 4, 5, 6, 2, 6, 7, 2]]
    batch = task.prepare_batch(columns, "cpu", torch.float32)
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8]


def test_special_tokens_spelled_in_a_text_are_letters(byte_tokens, text_split, encode_split):
    info = DatasetInfo("odd", "text", ("a", "b"), fields=("sentence",))
    split = text_split(info, sentence=["<pad></s>", ""], label=[0, 1])
    ids = encode_split(split, one_field(byte_tokens("llama"), decoder=True))["input_ids"]
    assert ids[0].tolist() == [BOS, *(FIRST_BYTE + byte for byte in b"<pad></s>")]
    assert ids[1].tolist() == [BOS] + [PAD] * 9


@pytest.mark.parametrize(("name", "family"), [("bert", "bert"), ("llama-head", "llama")])
def test_the_loss_falls(name, family, reviews, encode_split, byte_tokens, tiny_model, train_steps):
    task = one_field(byte_tokens(family), decoder=name != "bert")
    batch = task.prepare_batch(encode_split(reviews, task), "cpu", torch.float32)
    model = tiny_model(name)
    losses = train_steps(task, model, batch)
    assert losses[0] == pytest.approx(math.log(2), abs=0.1) and losses[-1] < 0.2
    with torch.inference_mode():
        sums = task.evaluate(task.predict(model, batch), batch)
    assert task.metrics.merge([sums])["accuracy"] == 1.0


def test_metrics_of_hand_made_logits_in_groups(byte_tokens):
    task = one_field(byte_tokens("bert"), groups=("Matched", "mis-matched", "none"))
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [float("nan"), 0.0]])
    batch = {"labels": torch.tensor([0, 0, 0, 0]), "group": torch.tensor([0, 1, 1, 1])}
    first = task.evaluate(logits[:2], {k: v[:2] for k, v in batch.items()})
    second = task.evaluate(logits[2:3], {k: v[2:3] for k, v in batch.items()})
    merged = task.metrics.merge([first, second])
    # Losses: log(1 + e^-2), log(1 + e), log(1 + e^-3).
    want = (math.log1p(math.exp(-2)) + math.log1p(math.e) + math.log1p(math.exp(-3))) / 3
    assert merged == {
        "loss": pytest.approx(want, rel=1e-6),
        "accuracy": pytest.approx(2 / 3),
        "macro_f1": pytest.approx((4 / 5 + 0) / 2),
        "matthews": 0.0,
        "positive_f1": 0.0,
        "accuracy_matched": 1.0,
        "accuracy_mis_matched": 0.5,
    }
    assert set(merged) < set(task.metrics.names) and "accuracy_none" in task.metrics.names
    bad = task.evaluate(logits[3:], {k: v[3:] for k, v in batch.items()})
    assert bad.scores["accuracy"] == 0.0 and np.isnan(bad.loss)


def test_the_loss_is_float32_whatever_the_model_is(byte_tokens):
    logits = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    batch = {"labels": torch.tensor([0, 1, 0, 1, 1])}
    loss = one_field(byte_tokens("bert")).loss(logits, batch)
    assert loss.dtype == torch.float32
    want = torch.nn.functional.cross_entropy(logits.double(), batch["labels"])
    assert float(loss) == pytest.approx(float(want), rel=1e-6)


def test_what_decides_the_tokens_is_in_the_key(byte_tokens):
    key = one_field(byte_tokens("bert")).encoder.key
    assert one_field(byte_tokens("bert"), max_length=41).encoder.key != key
    assert one_field(byte_tokens("llama")).encoder.key != key


def test_rejected_options(reviews, byte_tokens):
    with pytest.raises(InputError, match=r"one or two fields of text, not 3 \(a, b, c\)"):
        one_field(byte_tokens("bert"), fields=("a", "b", "c"))
    with pytest.raises(InputError, match="its embedding has 100 rows"):
        one_field(byte_tokens("bert", 100)).encoder.encode(reviews, lambda done: None)
