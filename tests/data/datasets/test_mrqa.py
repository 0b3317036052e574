"""MRQA from its original files: read back, or refused when malformed."""

import gzip
import json
from dataclasses import replace

import pytest

from trishul_ray.data.datasets.mrqa import MRQA, SUBSETS
from trishul_ray.errors import CorruptFileError, InputError


def context(text, *questions):
    qas = [
        {
            "qid": question,
            "question": question,
            "answers": answers,
            "detected_answers": [{"text": answers[0], "char_spans": [[0, 1]]}],
        }
        for question, answers in questions
    ]
    return {"id": text, "context": text, "qas": qas}


def write(file, rows, header=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    subset = file.name.removesuffix(".jsonl.gz")
    first = [{"header": {"dataset": subset, "split": file.parent.name}}] if header else []
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for row in (*first, *rows):
            lines.write((row if isinstance(row, str) else json.dumps(row)) + "\n")


@pytest.fixture
def hub(tmp_path):
    for number, subset in enumerate(SUBSETS):
        rows = [context(f"in {subset}", ("who?", ["me", "I"]), ("when \u2013?", ["now"]))]
        write(tmp_path / f"archives/mrqa/train/{subset}.jsonl.gz", rows * (number + 1))
        write(tmp_path / f"archives/mrqa/dev/{subset}.jsonl.gz", rows)
    return tmp_path


def test_round_trip_with_a_row_for_each_question(hub):
    info, columns = replace(MRQA, sizes={"train": 42, "validation": 12}).read(hub, lambda *_: None)
    assert info.kind == "qa" and info.groups == SUBSETS and info.classes == ()
    train = columns["train"]
    assert train["question"].to_pylist()[:2] == ["who?", "when \u2013?"]
    assert [json.loads(text) for text in train["answers"].to_pylist()[:2]] == [["me", "I"], ["now"]]
    assert train["context"].to_pylist()[-1] == "in NaturalQuestionsShort"
    sizes = [int((train["group"] == group).sum()) for group in range(6)]
    assert sizes == [2, 4, 6, 8, 10, 12] and len(columns["test"]["group"]) == 12
    with pytest.raises(
        CorruptFileError, match="train of mrqa has 42 rows, not the official 516819"
    ):
        MRQA.read(hub, lambda *_: None)


GOOD = context("c", ("q?", ["a"]))
BAD = {
    "not JSON": (["{"], True, "line 2: not JSON"),
    "not an object": (["[]"], True, "line 2: not a JSON object"),
    "no header": ([GOOD], False, "line 1: no header"),
    "no context": ([GOOD, {"qas": []}], True, "line 3: 'context' is not a text"),
    "no questions": ([{"context": "c", "qas": "q"}], True, "line 2: 'qas' is not a list"),
    "no question": ([{"context": "c", "qas": [{"answers": ["a"]}]}], True, "'question' is not a"),
    "no answers": ([context("c", ("q?", [None]))], True, "line 2: answers is not a list of texts"),
    "empty": (
        [{"context": "c", "qas": [{"question": "q?", "answers": []}]}],
        True,
        "line 2: answers is empty",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_lines_are_named(hub, case):
    rows, header, message = BAD[case]
    file = hub / "archives/mrqa/dev/SearchQA.jsonl.gz"
    write(file, rows, header)
    with pytest.raises(CorruptFileError, match=message) as caught:
        MRQA.read(hub, lambda *_: None)
    assert str(file) in str(caught.value)


def test_malformed_files_are_named(hub):
    file = hub / "archives/mrqa/train/NewsQA.jsonl.gz"
    whole = file.read_bytes()
    for broken in (whole[:-30], b"plain", whole[:40] + bytes(20) + whole[60:]):
        file.write_bytes(broken)
        with pytest.raises(CorruptFileError, match=r"NewsQA.jsonl.gz: not a readable gzip file"):
            MRQA.read(hub, lambda *_: None)
    file.unlink()
    with pytest.raises(InputError, match=r"archives: mrqa/train/NewsQA.jsonl.gz is missing"):
        MRQA.key(hub)
