"""Text and question datasets from a mirror: rows, groups and malformed files."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trishul_ray.data.datasets import PUBLIC
from trishul_ray.data.datasets.mrqa import SUBSETS
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import CorruptFileError, InputError


def write(hub: Path, where: str, columns: dict[str, list]) -> Path:
    file = hub / f"{where}-00000-of-00001.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


NEWS = {"text": ["caf\u00e9", ""], "label": [19, 0], "label_text": ["x", "y"]}


def test_newsgroups_are_read_from_parquet_and_from_json_lines(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / "a", f"SetFit/20_newsgroups/data/{split}", NEWS)
        lines = [
            json.dumps(dict(zip(NEWS, row, strict=True)))
            for row in zip(*NEWS.values(), strict=True)
        ]
        file = tmp_path / f"b/SetFit/20_newsgroups/{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines))
    data = prepare("20newsgroups", cache=tmp_path, hub=tmp_path / "a")
    assert data.train.texts("text").to_pylist() == ["caf\u00e9", ""]
    assert data.train.labels.tolist() == [19, 0] and data.info.num_classes == 20
    assert data.info.source == "mirror:SetFit/20_newsgroups"
    lines = prepare("20newsgroups", cache=tmp_path, hub=tmp_path / "b")
    assert lines.fingerprint == data.fingerprint


def test_both_validation_splits_of_mnli_are_groups_of_test_rows(tmp_path):
    rows = {"premise": ["p"], "hypothesis": ["h"], "label": [1], "idx": [0]}
    for split in ("train", "validation_matched", "validation_mismatched"):
        write(tmp_path, f"nyu-mll/glue/mnli/{split}", rows | {"premise": [split]})
    # The unlabelled test split is not read.
    write(tmp_path, "nyu-mll/glue/mnli/test_matched", rows | {"label": [-1]})
    data = prepare("glue/mnli", cache=tmp_path, hub=tmp_path)
    assert data.test.texts("premise").to_pylist() == ["validation_matched", "validation_mismatched"]
    assert data.test.column("group").tolist() == [0, 1]
    assert data.info.groups == ("matched", "mismatched") and "group" not in data.train.columns
    assert data.info.classes == ("entailment", "neutral", "contradiction")


QA = {
    "subset": ["TriviaQA-web", "Mine", "SQuAD"],
    "question": ["q1", "q2", "q3"],
    "context": ["c1", "c2", "c3"],
    "answers": [["a"], ["b", "c"], ["d"]],
}


def test_subsets_of_mrqa_are_groups_in_the_official_order(tmp_path):
    write(tmp_path, "mrqa-workshop/mrqa/data/train", QA)
    write(tmp_path, "mrqa-workshop/mrqa/data/validation", {k: v[2:] for k, v in QA.items()})
    data = prepare("mrqa", cache=tmp_path, hub=tmp_path)
    assert data.info.groups == ("SQuAD", "TriviaQA-web", "Mine")
    assert data.train.column("group").tolist() == [1, 2, 0]
    assert data.test.column("group").tolist() == [0]
    answers = [json.loads(text) for text in data.train.texts("answers").to_pylist()]
    assert answers == QA["answers"]
    assert data.info.kind == "qa" and "label" not in data.train.columns


@pytest.mark.parametrize(
    ("name", "where", "columns", "message"),
    [
        (
            "20newsgroups",
            "SetFit/20_newsgroups/data",
            NEWS | {"label": [1, 20]},
            "row 1: label is 2",
        ),
        (
            "20newsgroups",
            "SetFit/20_newsgroups/data",
            NEWS | {"text": ["a", None]},
            "row 1: text is",
        ),
        (
            "20newsgroups",
            "SetFit/20_newsgroups/data",
            NEWS | {"text": [1, 2]},
            "is int64, not text",
        ),
        (
            "20newsgroups",
            "SetFit/20_newsgroups/data",
            {"txt": ["a"]},
            "no column 'text'; it has txt",
        ),
        (
            "mrqa",
            "mrqa-workshop/mrqa/data",
            QA | {"answers": [["a"], [], ["b"]]},
            "row 1: answers is",
        ),
        ("mrqa", "mrqa-workshop/mrqa/data", QA | {"answers": [1, 2, 3]}, "not a list of texts"),
        ("mrqa", "mrqa-workshop/mrqa/data", {"subset": ["x"]}, "no column 'question'"),
    ],
)
def test_a_malformed_mirror_is_reported_with_file_and_row(tmp_path, name, where, columns, message):
    file = write(tmp_path, f"{where}/train", columns)
    for split in ("test", "validation"):
        write(tmp_path, f"{where}/{split}", columns)
    with pytest.raises(CorruptFileError, match=message) as caught:
        prepare(name, cache=tmp_path, hub=tmp_path)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_texts_that_are_not_utf8_are_reported(tmp_path):
    bad = pa.array([b"ok", b"\xff\xfe"], pa.binary()).view(pa.string())
    for split in ("train", "test"):
        write(tmp_path, f"SetFit/20_newsgroups/data/{split}", {"text": bad, "label": [0, 1]})
    with pytest.raises(CorruptFileError, match=r"column 'text' is not UTF-8"):
        prepare("20newsgroups", cache=tmp_path, hub=tmp_path)


@pytest.mark.parametrize("source", PUBLIC, ids=lambda source: source.name)
def test_every_dataset_is_pinned_and_reported_with_its_sources_if_not_found(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    assert len(source.repo.revision) == 40 and source.repo.revision in source.key(None)
    assert source.archive is not None and source.archive.title
    (tmp_path / "hub").mkdir()
    with pytest.raises(InputError) as caught:
        prepare(source.name, cache=tmp_path, hub=tmp_path / "hub")
    message = str(caught.value)
    for part in (source.repo.repo, source.archive.title, "TRISHUL_HUB", "trishul datasets"):
        assert part in message
    assert "\n" not in message and "OfflineModeIsEnabled" in message


HUB = Path(os.environ.get("TRISHUL_HUB", "/nonexistent"))


def real(repo):
    return pytest.mark.skipif(
        not (HUB / repo).is_dir(), reason=f"TRISHUL_HUB is not set or lacks {repo}"
    )


@pytest.mark.parametrize(
    ("name", "rows", "source"),
    [
        pytest.param(
            "20newsgroups",
            (11_314, 7_532),
            "mirror:SetFit/20_newsgroups",
            marks=real("SetFit/20_newsgroups"),
        ),
        pytest.param("glue/rte", (2_490, 277), "mirror:nyu-mll/glue", marks=real("nyu-mll/glue")),
        pytest.param("glue/sst2", (67_349, 872), "mirror:nyu-mll/glue", marks=real("nyu-mll/glue")),
    ],
)
def test_real_texts(cache, name, rows, source):
    data = prepare(name, cache=cache, hub=HUB)
    assert (len(data.train), len(data.test)) == rows and data.info.source == source
    for split in (data.train, data.test):
        counts = np.bincount(split.labels, minlength=data.info.num_classes)
        assert len(counts) == data.info.num_classes and counts.min() > 0
        lengths = [len(text) for text in split.texts(data.info.fields[0]).to_pylist()]
        assert 0 < np.median(lengths) < 2000


@real("mrqa-workshop/mrqa")
def test_real_questions(cache):
    data = prepare("mrqa", cache=cache, hub=HUB)
    assert data.info.groups[0] == "SQuAD" and set(data.info.groups) & set(SUBSETS)
    counts = np.bincount(data.train.column("group"), minlength=len(data.info.groups))
    assert counts.min() > 0 and len(counts) == len(data.info.groups)
    for split in (data.train, data.test):
        answers = split.texts("answers").to_pylist()
        contexts = split.texts("context").to_pylist()
        # Extractive: the context contains an answer.
        extractive = [
            any(answer in context for answer in json.loads(text))
            for text, context in zip(answers, contexts, strict=True)
        ]
        assert np.mean(extractive) > 0.99
