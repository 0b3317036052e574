"""Tasks per dataset and backbone, and the one-line errors of incompatible pairs."""

from pathlib import Path

import pytest

from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import PAD
from trishul_ray.tasks.base import register
from trishul_ray.tasks.build import build_task
from trishul_ray.tasks.image_classification import ImageClassification
from trishul_ray.tasks.question_answering import QuestionAnswering
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.text2text import TextToClass
from trishul_ray.tasks.verbalizer import Verbalizer

#: Metrics of every task with two classes.
OF_CLASSES = ("accuracy", "loss", "macro_f1", "positive_f1", "matthews")
IMAGES = DatasetInfo(
    "pictures", "image", ("a", "b"), image_shape=(1, 8, 8), mean=(0.5,), std=(0.5,)
)
TEXTS = DatasetInfo("mine", "text", ("bad", "good"), ("x", "y"), ("text", "more"))
QUESTIONS = DatasetInfo("asked", "qa", groups=("SQuAD",))
PROMPT = ["task.template='{text} or {more}?'", "task.verbalizers=[good, bad]"]


def build(info, *overrides):
    experiment = load_experiment(None, ["task.max_length=64", *overrides])
    return build_task(
        experiment.task, info, Backbone(experiment.model, StoragePaths(Path("none"), None))
    )


@pytest.mark.parametrize(
    ("info", "overrides", "kind", "model_kind", "metrics"),
    [
        (IMAGES, [], ImageClassification, "image-classification", OF_CLASSES),
        (
            TEXTS,
            ["model=bert-tiny"],
            SequenceClassification,
            "sequence-classification",
            (*OF_CLASSES, "accuracy_x", "accuracy_y"),
        ),
        (
            TEXTS,
            ["model=llama-tiny", "task.kind=classification"],
            SequenceClassification,
            "sequence-classification",
            (*OF_CLASSES, "accuracy_x", "accuracy_y"),
        ),
        (
            TEXTS,
            ["model=llama-tiny", *PROMPT],
            Verbalizer,
            "causal-lm",
            (*OF_CLASSES, "accuracy_x", "accuracy_y"),
        ),
        (
            TEXTS,
            ["model=t5-tiny"],
            TextToClass,
            "seq2seq-lm",
            (*OF_CLASSES, "accuracy_x", "accuracy_y"),
        ),
        (
            QUESTIONS,
            ["model=t5-tiny"],
            QuestionAnswering,
            "seq2seq-lm",
            ("f1", "loss", "exact_match", "f1_squad"),
        ),
    ],
)
def test_the_task_follows_from_rows_and_family(info, overrides, kind, model_kind, metrics):
    task = build(info, *overrides)
    assert type(task) is kind
    assert (task.model_kind, task.metrics.names) == (model_kind, metrics)
    assert (task.encoder is None) == (kind is ImageClassification)
    head = model_kind.endswith("classification")
    assert task.num_classes == (2 if head else None)


def test_unset_fields_follow_from_the_dataset():
    task = build(TEXTS, "model=t5-tiny")
    assert task.template.text == "text: {text} more: {more}"
    assert task.class_texts == ("bad", "good") and task.start_id == PAD
    one = DatasetInfo("mine", "text", ("bad", "good"), (), ("text",))
    assert build(one, "model=t5-tiny").template.text == "{text}"
    assert build(QUESTIONS, "model=t5-tiny").template.text == (
        "question: {question} context: {context}"
    )
    words = build(TEXTS, "model=llama-tiny", "task.template='{text}:'")
    assert (
        words.answer_ids == build(TEXTS, "model=llama-tiny", "task.template='{more}:'").answer_ids
    )


@pytest.mark.parametrize(
    ("info", "overrides", "says"),
    [
        (IMAGES, ["model=bert-tiny"], "'pictures' has images, but .*'bert-tiny' .* an encoder"),
        (IMAGES, ["task.kind=verbalizer"], "task.kind='verbalizer' needs texts, but .*images"),
        (TEXTS, ["model=vit-digits"], "'mine' has texts, but .*'vit-digits' .* model of images"),
        (
            TEXTS,
            ["model=bert-tiny", "task.kind=text2text"],
            r"'text2text' needs an encoder-decoder, but .*bert.* set task\.kind=classification",
        ),
        (
            TEXTS,
            ["model=t5-tiny", "task.kind=classification"],
            r"needs an encoder or a decoder, but .*t5.* set task\.kind=text2text",
        ),
        (
            TEXTS,
            ["model=t5-tiny", "task.kind=verbalizer"],
            "'verbalizer' needs a decoder, but .*'t5-tiny'",
        ),
        (TEXTS, ["model=llama-tiny", "task.kind=text2text"], r"set task\.kind=verbalizer"),
        (QUESTIONS, ["model=bert-tiny"], "'asked' has questions, .*t5.* here .*bert"),
        (QUESTIONS, ["model=llama-tiny"], "'asked' has questions"),
        (QUESTIONS, ["model=t5-tiny", "task.kind=classification"], "'asked' has questions"),
        (QUESTIONS, ["model=t5-tiny", "task.template='{text}'"], "it has {question}, {context}"),
        (TEXTS, ["model=llama-tiny"], r"task\.template is not set.*'mine'.*'{text}\\nAnswer:'"),
        (
            TEXTS,
            ["model=llama-tiny", PROMPT[0], "task.verbalizers=[a, b, c]"],
            "task.verbalizers has 3 entries, but dataset 'mine' has 2 classes: bad, good",
        ),
        (TEXTS, ["model=t5-tiny", "task.verbalizers=[a]"], "verbalizers has 1 entries"),
        (
            TEXTS,
            ["model=bert-tiny", "task.max_length=4096"],
            r"task\.max_length=4096 exceeds the 1024 positions of model\.name='bert-tiny'",
        ),
    ],
)
def test_unsuitable_tasks_are_rejected_in_one_line(info, overrides, says):
    with pytest.raises(InputError, match=says) as caught:
        build(info, *overrides)
    assert "\n" not in str(caught.value)


def test_unknown_kind_is_rejected():
    with pytest.raises(InputError, match=r"task\.kind: 'ranking' is unknown; known: auto, class"):
        load_experiment(None, ["task.kind=ranking"])


def test_kind_is_registered_once_per_rows():
    with pytest.raises(ValueError, match="'verbalizer:text' is taken"):
        register("verbalizer")(SequenceClassification)


def test_positions_of_roberta_begin_after_its_padding(tmp_path):
    from transformers import RobertaConfig

    RobertaConfig(max_position_embeddings=66, vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"max_length=65 exceeds the 64 positions"):
        build(TEXTS, f"model={tmp_path}", "task.max_length=65")
    assert build(TEXTS, f"model={tmp_path}").max_length == 64


def test_relative_positions_have_no_limit(tmp_path):
    from transformers import XLNetConfig

    from trishul_ray.models.tokenizers import byte_tokenizer

    byte_tokenizer("llama").save_pretrained(tmp_path)
    XLNetConfig(vocab_size=300, pad_token_id=PAD).save_pretrained(tmp_path)
    task = build(TEXTS, f"model={tmp_path}", "task.max_length=4096", "task.kind=classification")
    assert task.max_length == 4096


def test_decoder_with_head_pads_like_its_tokenizer(tmp_path):
    from transformers import LlamaConfig

    from trishul_ray.models.tokenizers import byte_tokenizer

    byte_tokenizer("llama").save_pretrained(tmp_path)
    asked = [f"model={tmp_path}", "task.kind=classification"]
    LlamaConfig(vocab_size=300, pad_token_id=PAD + 1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"pad_token_id=1, but its tokenizer pads with 0"):
        build(TEXTS, *asked)
    for right in (PAD, None):
        LlamaConfig(vocab_size=300, pad_token_id=right).save_pretrained(tmp_path)
        assert build(TEXTS, *asked).decoder


def test_an_answer_must_begin_with_something(tmp_path):
    from transformers import T5Config

    T5Config(vocab_size=300, pad_token_id=None, decoder_start_token_id=None).save_pretrained(
        tmp_path
    )
    with pytest.raises(InputError, match="has neither decoder_start_token_id nor pad_token_id"):
        build(TEXTS, f"model={tmp_path}")
