"""Classes as generated texts: targets, loss per token, greedy answers."""

import math

import pytest
import torch
from tolerances import between, forward

from trishul_ray.errors import InputError
from trishul_ray.models.builtin import EOS, FIRST_BYTE, PAD, VOCABULARY
from trishul_ray.tasks.text import Template
from trishul_ray.tasks.text2text import Generated, TextToClass


def made(tokens, texts=("bad", "good"), **options):
    template = Template("film: {sentence}", ("sentence",), "toy")
    options = {"max_length": 32, "target_length": 6, "start_id": PAD} | options
    return TextToClass(tokens, template=template, class_texts=texts, **options)


def letters(text):
    return [FIRST_BYTE + byte for byte in text.encode()]


def test_rows_become_inputs_and_targets(reviews, encode_split, byte_tokens):
    task = made(byte_tokens("t5"))
    columns = encode_split(reviews, task)
    assert columns["target_ids"].dtype == columns["target_length"].dtype == torch.int32
    bad, good = [*letters("bad"), EOS], [*letters("good"), EOS]
    assert columns["target_ids"].tolist()[1:3] == [good, [*bad, PAD]]
    assert columns["target_length"].tolist() == [5, 5, 4, 4, 5, 4]
    batch = task.prepare_batch({k: v[1:3] for k, v in columns.items()}, "cpu", torch.float32)
    assert batch["labels"].tolist() == [good, [*bad, -100]]
    assert batch["decoder_input_ids"].tolist() == [[PAD, *good[:-1]], [PAD, *bad]]
    want = [*letters("film: a fine film"), EOS]
    assert batch["input_ids"][0].tolist() == want
    assert batch["attention_mask"][1].tolist() == [1] * 11 + [0] * (len(want) - 11)
    assert set(task.inputs(batch)) == {
        "input_ids", "attention_mask", "decoder_input_ids", "use_cache",
    }  # fmt: skip
    # A batch with only short texts has no superfluous columns.
    short = task.prepare_batch({k: v[2:4] for k, v in columns.items()}, "cpu", torch.float32)
    assert short["labels"].shape == (2, 4)


def test_the_loss_falls_and_answers_are_generated(
    reviews, encode_split, byte_tokens, tiny_model, train_steps
):
    task = made(byte_tokens("t5"))
    columns = encode_split(reviews, task)
    batch = task.prepare_batch(columns, "cpu", torch.float32)
    model = tiny_model("t5")
    losses = train_steps(task, model, batch, steps=80, lr=1e-2)
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.5) and losses[-1] < 0.1
    with torch.inference_mode():
        found = task.predict(model, batch)
        for row in range(6):
            one = {k: v[row : row + 1] for k, v in columns.items()}
            alone = task.predict(model, task.prepare_batch(one, "cpu", torch.float32))
            size = alone.logits.shape[1]
            torch.testing.assert_close(
                alone.logits[0], found.logits[row, :size], rtol=0, atol=forward(2, 64, found.logits)
            )
            assert alone.texts[0] == found.texts[row]
        plain = model.forward(**task.inputs(batch)).logits
    assert torch.equal(found.logits, plain)  # The encoder runs once for both.
    assert found.texts == ["good", "good", "bad", "bad", "good", "bad"]
    merged = task.metrics.merge([task.evaluate(found, batch)])
    assert merged["accuracy"] == 1.0
    # log sum exp over the vocabulary less one logit, at each token; the mean keeps the bound.
    allowed = between(VOCABULARY) + between(4, plain.abs().max())
    assert merged["loss"] == pytest.approx(float(task.loss(plain, batch)), rel=0, abs=allowed)


def test_a_checkpoints_own_generation_settings_have_no_say(
    reviews, encode_split, byte_tokens, tiny_model
):
    task = made(byte_tokens("t5"))
    batch = task.prepare_batch(encode_split(reviews, task), "cpu", torch.float32)
    model = tiny_model("t5")
    with torch.inference_mode():
        want = task.predict(model, batch).texts
        settings = model.model.generation_config
        settings.do_sample, settings.temperature, settings.num_beams = True, 5.0, 3
        settings.max_length, settings.min_new_tokens, settings.repetition_penalty = 3, 6, 2.0
        settings.bad_words_ids, settings.suppress_tokens = [[FIRST_BYTE]], list(range(100))
        settings.forced_eos_token_id, settings.num_return_sequences = FIRST_BYTE, 3
        assert task.predict(model, batch).texts == want


def test_metrics_by_hand(byte_tokens):
    task = made(byte_tokens("t5"), groups=("x", "y"))
    labels = torch.tensor([[7, 8, 1], [9, 1, -100]])
    logits = torch.zeros(2, 3, VOCABULARY)
    logits[0, 0, 7] = 3.0
    logits[1, 2, 5] = float("nan")  # on padding, which the loss ignores
    batch = {"labels": labels, "classes": torch.tensor([1, 0]), "group": torch.tensor([1, 1])}
    first = math.log(math.exp(3) + VOCABULARY - 1) - 3
    want = (first + 4 * math.log(VOCABULARY)) / 5
    sums = task.evaluate(Generated(logits, ["  GOOD\n", "bad one"]), batch)
    assert sums.terms == 5.0 and sums.count == 2.0
    merged = task.metrics.merge([sums])
    assert merged["loss"] == pytest.approx(want, rel=1e-6)
    assert merged["accuracy"] == merged["accuracy_y"] == 0.5 and "accuracy_x" not in merged
    assert task.metrics.names == (
        "accuracy",
        "loss",
        "macro_f1",
        "positive_f1",
        "matthews",
        "accuracy_x",
        "accuracy_y",
    )
    assert float(task.loss(logits, batch)) == pytest.approx(want, rel=1e-6)
    assert task.loss(logits.bfloat16(), batch).dtype == torch.float32
    # Two batches of unequal tokens: still the mean over tokens.
    parts = [
        task.evaluate(
            Generated(logits[i : i + 1], [text]), {k: v[i : i + 1] for k, v in batch.items()}
        )
        for i, text in enumerate(["good", "bad"])
    ]
    assert task.metrics.merge(parts)["loss"] == pytest.approx(want, rel=1e-6)
    assert task.metrics.merge(parts)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (("Bad", "bad "), "'bad ' is the same as 'Bad'"),
        (("bad", " "), "' ' is empty"),
    ],
)
def test_class_texts_that_are_indistinguishable(byte_tokens, texts, says):
    with pytest.raises(InputError, match=says):
        made(byte_tokens("t5"), texts=texts)


def test_class_texts_longer_than_a_target(reviews, byte_tokens):
    task = made(byte_tokens("t5"), target_length=4)
    with pytest.raises(InputError, match=r"target_length=4 .*'good', which takes 5 tokens"):
        task.encoder.encode(reviews, lambda done: None)


def test_what_decides_the_numbers_is_in_the_key(byte_tokens):
    tokens = byte_tokens("t5")
    keys = {
        made(tokens, **options).encoder.key
        for options in ({}, {"texts": ("bad", "fine")}, {"max_length": 31}, {"target_length": 7})
    }
    assert len(keys) == 4
