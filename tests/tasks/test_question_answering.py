"""Questions answered with text: exact match and F1 by hand, the best of several references."""

import json

import pytest
import torch

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.errors import CorruptFileError
from trishul_ray.models.builtin import EOS, FIRST_BYTE, PAD
from trishul_ray.tasks.question_answering import QuestionAnswering, pack_answers, unpack_answers
from trishul_ray.tasks.text import Template
from trishul_ray.tasks.text2text import Generated

GROUPS = ("SQuAD", "Natural-Questions")


def made(tokens, **options):
    template = Template("question: {question} context: {context}", ("question", "context"), "toy")
    options = {"max_length": 64, "target_length": 8, "start_id": PAD, "groups": GROUPS} | options
    return QuestionAnswering(tokens, template=template, **options)


def scored(task, text, *references):
    line = json.dumps(list(references)).encode()
    packed = torch.zeros(1, len(line) + 5, dtype=torch.uint8)
    packed[0, : len(line)] = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    scores = task.score_texts([text], {"references": packed})
    return float(scores["exact_match"][0]), float(scores["f1"][0])


@pytest.mark.parametrize(
    ("text", "references", "exact", "f1"),
    [
        ("The Blue, house!", ["blue house"], 1, 1),  # case, article, punctuation
        ("a  blue\nhouse", ["the blue house."], 1, 1),
        ("blue", ["blue house"], 0, 2 / 3),  # precision 1, recall 1/2
        ("the big blue house", ["blue house"], 0, 4 / 5),  # precision 2/3, recall 1
        ("blue blue", ["blue house"], 0, 1 / 2),  # A word counts as often as it occurs in both.
        ("house blue", ["blue house"], 0, 1),  # Order does not affect F1.
        ("red", ["blue house", "red roof", "a red"], 1, 1),  # the best reference
        ("red wall", ["blue house", "red roof"], 0, 1 / 2),
        ("", ["blue"], 0, 0),
        ("the", ["blue"], 0, 0),
        ("1,976", ["1976"], 1, 1),
        ("Žižkov", ["žižkov"], 1, 1),
    ],
)
def test_exact_match_and_f1_by_hand(byte_tokens, text, references, exact, f1):
    found = scored(made(byte_tokens("t5")), text, *references)
    assert found == (exact, pytest.approx(f1, abs=1e-6))


def test_rows_become_inputs_targets_and_references(questions, encode_split, byte_tokens):
    task = made(byte_tokens("t5"))
    columns = encode_split(questions, task)
    blue = [FIRST_BYTE + byte for byte in b"blue"]
    assert columns["target_ids"][0].tolist() == [*blue, EOS, *[PAD] * 3]
    # The first answer, truncated, and still ended.
    cut = [FIRST_BYTE + byte for byte in b"a red o"]
    assert columns["target_ids"][1].tolist() == [*cut, EOS]
    assert columns["references"].dtype == torch.uint8
    assert unpack_answers(columns["references"][3].numpy()) == ["Žižkov", "zizkov"]
    start = b"question: which? context: a red one"
    assert columns["input_ids"][1, : len(start)].tolist() == [FIRST_BYTE + b for b in start]
    batch = task.prepare_batch(columns, "cpu", torch.float32)
    assert batch["references"] is columns["references"]
    assert set(task.inputs(batch)) == {
        "input_ids", "attention_mask", "decoder_input_ids", "use_cache",
    }  # fmt: skip


def test_training_rows_carry_no_references(text_split, byte_tokens):
    info = DatasetInfo("toyqa", "qa")
    rows = {"question": ["q"], "context": ["c"], "answers": ['["c", "c"]']}
    split = text_split(info, "train", **rows)
    assert "references" not in made(byte_tokens("t5")).encoder.encode(split, lambda done: None)
    assert unpack_answers(pack_answers(split)[0]) == ["c"]


def test_loss_falls_and_groups_are_distinguished(
    questions, encode_split, byte_tokens, tiny_model, train_steps
):
    task = made(byte_tokens("t5"), target_length=12)
    batch = task.prepare_batch(encode_split(questions, task), "cpu", torch.float32)
    model = tiny_model("t5")
    losses = train_steps(task, model, batch, steps=120, lr=1e-2)
    assert losses[-1] < 0.1 < losses[0]
    with torch.inference_mode():
        found = task.predict(model, batch)
    assert found.texts == ["blue", "a red one", "in 1976", "Žižkov"]
    merged = task.metrics.merge([task.evaluate(found, batch)])
    assert tuple(merged) and set(merged) == set(task.metrics.names)
    assert merged["f1"] == merged["exact_match"] == 1.0
    assert task.metrics.names == ("f1", "loss", "exact_match", "f1_squad", "f1_natural_questions")
    other = Generated(found.logits, ["blue", "no", "1976", "Žižkov"])
    merged = task.metrics.merge([task.evaluate(other, batch)])
    assert merged["f1"] == pytest.approx((1 + 0 + 2 / 3 + 1) / 4)
    assert merged["exact_match"] == 0.5
    assert merged["f1_squad"] == pytest.approx((1 + 2 / 3) / 2)
    assert merged["f1_natural_questions"] == pytest.approx(0.5)


@pytest.mark.parametrize("answers", ["blue", "[]", '"blue"', "[1]", '{"text": ["blue"]}'])
def test_answers_must_be_lists_of_texts(text_split, byte_tokens, answers):
    info = DatasetInfo("toyqa", "qa")
    split = text_split(info, question=["q", "q"], context=["c", "c"], answers=['["c"]', answers])
    with pytest.raises(CorruptFileError, match="'toyqa', test row 1: answers="):
        made(byte_tokens("t5")).encoder.encode(split, lambda done: None)


def test_long_context_is_truncated_before_the_question(text_split, encode_split, byte_tokens):
    info = DatasetInfo("toyqa", "qa")
    rows = {"question": ["who is it?"], "context": ["word " * 50], "answers": ['["x"]']}
    columns = encode_split(text_split(info, **rows), made(byte_tokens("t5")))
    text = bytes((columns["input_ids"][0, :-1] - FIRST_BYTE).tolist()).decode()
    assert text.startswith("question: who is it? context: word word")
    assert columns["length"][0] == 64 and columns["input_ids"][0, -1] == EOS
