"""Prompts and verbalizers: the token of each class, and the content of a batch."""

import math

import pytest
import torch
from tolerances import forward

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.errors import InputError
from trishul_ray.models.builtin import BOS, FIRST_BYTE, PAD, VOCABULARY
from trishul_ray.tasks.text import Template
from trishul_ray.tasks.verbalizer import Verbalizer


def made(tokens, text="{sentence}\nIs it good?", words=("no", "yes"), **options):
    template = Template(text, ("sentence",), "toy")
    options = {"max_length": 48} | options
    return Verbalizer(tokens, template=template, verbalizers=words, **options)


def letters(text):
    return tuple(FIRST_BYTE + byte for byte in text.encode())


@pytest.mark.parametrize(
    ("words", "bridge", "answers"),
    [
        (("no", "yes"), " ", "ny"),
        ((" no", " yes"), " ", "ny"),
        (("true", "trivial"), " tr", "ui"),
        (("yes", "maybe", "no"), " ", "ymn"),
    ],
)
def test_first_different_token_distinguishes_classes(byte_tokens, words, bridge, answers):
    task = made(byte_tokens("llama"), words=words)
    assert task.common_prefix == letters(bridge) and task.answer_ids == letters(answers)
    # A prompt that ends in white space needs no additional space.
    spaced = made(byte_tokens("llama"), text="{sentence}: ", words=[w.strip() for w in words])
    assert spaced.common_prefix == letters(bridge[1:]) and spaced.answer_ids == letters(answers)


def test_word_with_leading_space_is_one_token(word_tokens):
    task = made(word_tokens, text="{sentence}\nAnswer:")
    assert task.common_prefix == ()
    assert [word_tokens.tokenizer.decode([token]) for token in task.answer_ids] == [" no", " yes"]
    with pytest.raises(InputError, match=r"ends in .*Answer: ', which the tokenizer joins"):
        made(word_tokens, text="{sentence}\nAnswer: ")


def test_prompts_of_words_are_cut_to_the_limit(word_tokens, text_split, encode_split):
    info = DatasetInfo("toy", "text", ("bad", "good"), fields=("sentence",))
    texts = ["a fine film, yes " * n for n in range(1, 40, 3)]
    task = made(word_tokens, text="{sentence}\nAnswer:", max_length=32)
    columns = encode_split(text_split(info, sentence=texts, label=[0] * len(texts)), task)
    tail = word_tokens.ids("\nAnswer:")
    for text, ids, length in zip(texts, columns["input_ids"], columns["length"], strict=True):
        whole = [0, *word_tokens.ids(text + "\nAnswer:")]
        assert ids[:length].tolist()[-len(tail) :] == tail
        if len(whole) <= 32:
            assert ids[:length].tolist() == whole
        else:
            assert 30 <= length <= 32 and ids[:12].tolist() == whole[:12]


def test_batches_are_padded_to_the_left(reviews, encode_split, byte_tokens):
    task = made(byte_tokens("llama"))
    columns = encode_split(reviews, task)
    want = (BOS, *letters("fine\nIs it good? "))
    assert columns["input_ids"][0].tolist() == [*want, *[PAD] * (48 - len(want))]
    assert columns["length"][0] == len(want)
    batch = task.prepare_batch({k: v[:2] for k, v in columns.items()}, "cpu", torch.float32)
    width = int(columns["length"][:2].max())
    gap = width - len(want)
    assert batch["input_ids"].shape == (2, width)
    assert tuple(batch["input_ids"][0, gap:].tolist()) == want
    assert batch["attention_mask"][0].tolist() == [0] * gap + [1] * len(want)
    assert batch["position_ids"][0].tolist() == [0] * gap + list(range(len(want)))
    inputs = task.inputs(batch)
    assert inputs.pop("logits_to_keep") == 1 and inputs.pop("use_cache") is False
    assert set(inputs) == {"input_ids", "attention_mask", "position_ids"}


def test_a_long_row_loses_text_never_the_instruction(reviews, encode_split, byte_tokens):
    task = made(byte_tokens("llama"), max_length=24)
    columns = encode_split(reviews, task)
    assert columns["input_ids"].shape == (6, 24)
    want = (BOS, *letters("dull and l\nIs it good? "))
    row = columns["input_ids"][3, : columns["length"][3]].tolist()
    assert tuple(row) == want and len(want) == 24


def test_the_loss_falls_and_padding_changes_nothing(
    reviews, encode_split, byte_tokens, tiny_model, train_steps
):
    task = made(byte_tokens("llama"))
    columns = encode_split(reviews, task)
    batch = task.prepare_batch(columns, "cpu", torch.float32)
    model = tiny_model("llama")
    losses = train_steps(task, model, batch, lr=1e-2)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.1) and losses[-1] < 0.3
    with torch.inference_mode():
        outputs = task.predict(model, batch)
        assert outputs.logits.shape == (6, 1, VOCABULARY)
        # The same as the output at the last token of an unpadded row.
        ids = columns["input_ids"][:1, : columns["length"][0]].long()
        plain = model.model(input_ids=ids).logits[0, -1]
        torch.testing.assert_close(
            outputs.logits[0, 0], plain, rtol=0, atol=forward(2, 64, outputs.logits)
        )
    assert task.metrics.merge([task.evaluate(outputs, batch)])["accuracy"] == 1.0


def test_loss_covers_vocabulary_and_choice_covers_verbalizers(byte_tokens):
    task = made(byte_tokens("llama"))
    no, yes = task.answer_ids
    logits = torch.zeros(3, 1, VOCABULARY)
    logits[0, 0, yes], logits[0, 0, PAD] = 1.0, 9.0  # The likeliest token is not a verbalizer.
    logits[1, 0, no] = 2.0
    logits[2, 0, yes] = float("nan")
    batch = {"labels": torch.tensor([1, 1, 1])}
    two = {"labels": batch["labels"][:2]}
    rest = VOCABULARY - 2
    losses = [
        math.log(math.exp(9) + math.e + rest) - 1,
        math.log(math.exp(2) + 1 + rest),
    ]
    sums = task.evaluate(logits[:2], two)
    assert sums.scores["accuracy"] == 1.0 and sums.count == 2.0
    assert sums.loss == pytest.approx(sum(losses), rel=1e-6)
    assert float(task.loss(logits[:2], two)) == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert task.loss(logits[:2].bfloat16(), two).dtype == torch.float32
    assert task.evaluate(logits, batch).scores["accuracy"] == 1.0


def test_the_prompt_is_in_the_key(byte_tokens):
    one, other = (made(byte_tokens("llama"), text=t) for t in ("{sentence}:", "{sentence}?"))
    assert one.encoder.key != other.encoder.key


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"words": ("yes", "yes")}, "'yes' and .* start with the same token"),
        ({"words": ("yes", "yes sir")}, "'yes' and 'the others' start with the same token"),
        ({"words": ("no", "yes", "nope")}, "'nope' and 'no' start with the same token"),
        ({"text": "no field"}, "has no field; 'toy' has {sentence}"),
        ({"text": "{text}"}, "{text} is not a field of dataset 'toy'; it has {sentence}"),
        ({"text": "{}"}, "{} is not a field"),
        ({"text": "{sentence!r}"}, "{sentence!r} is not a field"),
        ({"text": "{sentence:>9}"}, "{sentence:>9} is not a field"),
        ({"text": "{sentence} {sentence}"}, "{sentence} occurs twice"),
        ({"text": "{sentence"}, r"expected '}' .*a literal brace is doubled"),
    ],
)
def test_rejected_options(byte_tokens, options, says):
    with pytest.raises(InputError, match=says) as caught:
        made(byte_tokens("llama"), **options)
    assert "\n" not in str(caught.value)


def test_a_template_that_leaves_no_room_is_rejected(reviews, byte_tokens):
    task = made(byte_tokens("llama"), max_length=14)
    with pytest.raises(InputError, match=r"leaves 12 tokens .* without fields takes 12"):
        task.encoder.encode(reviews, lambda done: None)
