"""Text and question datasets from a mirror: rows, groups and malformed files."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from public_mirror import COLUMNS, write_mirror, write_table

from trishul_ray.data.datasets.dolly import CATEGORIES
from trishul_ray.data.datasets.mrqa import SUBSETS
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.prepare import prepare
from trishul_ray.data.public import DATASETS, ImageRows, PublicDataset, TextRows
from trishul_ray.data.user.python_rows import encode_image
from trishul_ray.errors import CorruptFileError, InputError

PUBLIC = [*DATASETS.all().values()]


def write(hub: Path, where: str, columns: dict[str, list]) -> Path:
    file = hub / f"{where}-00000-of-00001.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


NEWS = {"text": ["caf\u00e9", ""], "label": [19, 0], "label_text": ["x", "y"]}


def test_newsgroups_load_from_parquet_and_json_lines(tmp_path):
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
    assert str(data.info.origin) == "mirror:SetFit/20_newsgroups"
    lines = prepare("20newsgroups", cache=tmp_path, hub=tmp_path / "b")
    assert lines.fingerprint == data.fingerprint


def test_validation_splits_of_mnli_are_groups(tmp_path):
    rows = {"premise": ["p"], "hypothesis": ["h"], "label": [1], "idx": [0]}
    for split in ("train", "validation_matched", "validation_mismatched"):
        write(tmp_path, f"nyu-mll/glue/mnli/{split}", rows | {"premise": [split]})
    # The unlabeled test split is not read.
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


def test_mrqa_subsets_follow_the_official_order(tmp_path):
    write(tmp_path, "mrqa-workshop/mrqa/data/train", QA)
    write(tmp_path, "mrqa-workshop/mrqa/data/validation", {k: v[2:] for k, v in QA.items()})
    data = prepare("mrqa", cache=tmp_path, hub=tmp_path)
    assert data.info.groups == ("SQuAD", "TriviaQA-web", "Mine")
    assert data.train.column("group").tolist() == [1, 2, 0]
    assert data.test.column("group").tolist() == [0]
    answers = [json.loads(text) for text in data.train.texts("answers").to_pylist()]
    assert answers == QA["answers"]
    assert data.info.kind == "qa" and "label" not in data.train.columns


FOLDERS = {"20newsgroups": "SetFit/20_newsgroups/data", "mrqa": "mrqa-workshop/mrqa/data"}


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("20newsgroups", NEWS | {"label": [1, 20]}, "row 1: label is 2"),
        ("20newsgroups", NEWS | {"label": ["sci.med", "Med"]}, "'Med', not a class"),
        ("20newsgroups", NEWS | {"text": ["a", None]}, "row 1: text is"),
        ("20newsgroups", NEWS | {"text": [1, 2]}, "is int64, not text"),
        ("20newsgroups", {"txt": ["a"]}, "no column 'text'; existing columns: txt"),
        ("mrqa", QA | {"answers": [["a"], [], ["b"]]}, "row 1: answers is"),
        ("mrqa", QA | {"answers": [1, 2, 3]}, "not a list of texts"),
        ("mrqa", {"subset": ["x"]}, "no column 'question'"),
    ],
)
def test_malformed_mirror_is_reported(tmp_path, name, columns, message):
    for split in ("train", "test", "validation"):
        write(tmp_path, f"{FOLDERS[name]}/{split}", columns)
    with pytest.raises(CorruptFileError, match=message) as caught:
        prepare(name, cache=tmp_path, hub=tmp_path)
    assert DATASETS.all()[name].repo.repo in str(caught.value) and "\n" not in str(caught.value)


def test_texts_that_are_not_utf8_are_reported(tmp_path):
    bad = pa.array([b"ok", b"\xff\xfe"], pa.binary()).view(pa.string())
    for split in ("train", "test"):
        write(tmp_path, f"SetFit/20_newsgroups/data/{split}", {"text": bad, "label": [0, 1]})
    with pytest.raises(CorruptFileError, match=r"column 'text' is not UTF-8"):
        prepare("20newsgroups", cache=tmp_path, hub=tmp_path)


@pytest.mark.parametrize("source", PUBLIC, ids=lambda source: source.name)
def test_every_dataset_is_pinned(source):
    if source.repo.on_hub:
        assert len(source.repo.revision) == 40 and source.repo.revision in source.key(None)


@pytest.mark.parametrize(
    "source", [s for s in PUBLIC if type(s.rows) in COLUMNS], ids=lambda source: source.name
)
def test_every_dataset_is_read_from_a_mirror(source, tmp_path):
    write_mirror(tmp_path / "hub", source, {"train": 20, "test": 5})
    data = prepare(source.name, cache=tmp_path, hub=tmp_path / "hub")
    if len(source.sizes) > 1:
        assert (len(data.train), len(data.test)) == (20, 5 * len(source.test))
    else:
        assert len(data.train) + len(data.test) == 20 and len(data.test)
    assert data.info.kind == source.rows.kind and set(source.official) == {"train", "test"}
    assert min(source.official.values()) > 0


def dolly_rows(count):
    groups = [CATEGORIES[n % 2] for n in range(count)]
    asked = [str(n) for n in range(count)]
    answers = [" " if n == 4 else f"answer {n}" for n in range(count)]
    return {
        "instruction": asked, "context": [""] * count, "response": answers, "category": groups
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_dolly_test_rows_are_ten_per_category(tmp_path, suffix):
    rows = dolly_rows(60)
    folder = tmp_path / "databricks/databricks-dolly-15k"
    name = "data/train-0.parquet" if suffix == "parquet" else "databricks-dolly-15k.jsonl"
    write_table(folder / name, rows)
    data = prepare("dolly", cache=tmp_path, hub=tmp_path)
    assert data.info.groups == CATEGORIES[:2] and data.info.fields == ("instruction", "input")
    assert np.bincount(data.test.column("group")).tolist() == [10, 10]
    assert len(data.train) == 39 and len(data.info.skipped) == 1, "a blank answer is left out"
    assert data.info.skipped[0].partition(", ")[0] in ("train", "test")
    official = next(source for source in PUBLIC if source.name == "dolly").official
    assert official == {"train": 14_931, "test": 80}


def test_dolly_shards_clients_have_two_shards(tmp_path):
    folder = tmp_path / "databricks/databricks-dolly-15k"
    write_table(folder / "databricks-dolly-15k.jsonl", dolly_rows(420))
    data = prepare("dolly-shards", cache=tmp_path, hub=tmp_path)
    clients = data.train.column("client")
    assert np.bincount(clients).max() - np.bincount(clients).min() <= 2
    assert set(clients) == set(range(10)) and len(data.info.clients) == 10
    categories = data.train.column("group")
    assert len({len(set(categories[clients == c])) for c in range(10)}) == 2, "one, or both"


def published(**fields):
    repo = HubRepo("owner/name", revision="0" * 40)
    rows = TextRows(fields=("sms",), classes=("ham", "spam"))
    return PublicDataset(**{"name": "sms", "description": "d", "repo": repo, "rows": rows} | fields)


def test_one_split_is_split_as_the_dataset_says(tmp_path):
    source = published(sizes={"all": 5_574}, test_share=0.2)
    assert source.official == {"train": 4_459, "test": 1_115}
    write_mirror(tmp_path, source, {"train": 50, "test": 0})

    def read():
        columns = source.read(tmp_path, lambda *_: None)[1]
        return tuple(columns[split]["sms"].to_pylist() for split in ("train", "test"))

    train, test = read()
    assert len(test) == 10 and sorted(train + test) == sorted(f"text {n}" for n in range(50))
    assert test != [f"text {n}" for n in range(40, 50)]  # not simply the last rows
    assert read() == (train, test)
    other = published(sizes={"all": 5_574}, test_share=0.1)
    assert other.key(tmp_path) != source.key(tmp_path)


def test_changed_definition_prepares_the_dataset_again():
    swapped = TextRows(fields=("sms",), classes=("spam", "ham"))
    sizes = {"train": 2, "test": 2}
    assert published(sizes=sizes).key(None) == published(sizes=sizes).key(None)
    assert published(sizes=sizes).key(None) != published(sizes=sizes, rows=swapped).key(None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repo": HubRepo("owner/name")}, r"owner/name is on the hub: set repo\.revision"),
        ({"repo": HubRepo("owner/name", revision="main")}, r"a commit \(40 hex digits\)"),
        ({"sizes": {"train": 5}}, "sizes has no test; for a single split, set test_share"),
        ({"test_share": 0.2}, "test_share requires a single split"),
    ],
)
def test_wrong_definition_is_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        published(**{"sizes": {"train": 2, "test": 2}} | fields)


def test_mirror_only_dataset_needs_no_revision(tmp_path):
    source = published(repo=HubRepo("mine"), sizes={"train": 2, "test": 2})
    write_mirror(tmp_path / "hub", source, {"train": 4, "test": 2})
    info, columns = source.read(tmp_path / "hub", lambda *_: None)
    assert len(columns["train"]["sms"]) == 4 and str(info.origin) == "mirror:mine"
    with pytest.raises(InputError, match=r"not found; set TRISHUL_HUB"):
        source.read(None, lambda *_: None)


HUB = Path(os.environ.get("TRISHUL_HUB", "/nonexistent"))


def real(repo):
    return pytest.mark.skipif(
        not (HUB / repo).is_dir(), reason=f"TRISHUL_HUB is not set or lacks {repo}"
    )


@pytest.mark.parametrize(
    ("name", "rows", "source"),
    [
        pytest.param(name, rows, f"mirror:{repo}", marks=real(repo))
        for name, rows, repo in (
            ("20newsgroups", (11_314, 7_532), "SetFit/20_newsgroups"),
            ("glue/rte", (2_490, 277), "nyu-mll/glue"),
            ("glue/sst2", (67_349, 872), "nyu-mll/glue"),
        )
    ],
)
def test_real_texts(cache, name, rows, source):
    data = prepare(name, cache=cache, hub=HUB)
    assert (len(data.train), len(data.test)) == rows and str(data.info.origin) == source
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


@pytest.mark.parametrize("moved", ["train", "test", "both"])
def test_reordered_class_names_are_rejected(tmp_path, moved):
    """Their labels would be interpreted by the names in the definition, or of another split."""
    texts = TextRows(("text",), ("no", "yes"))
    images = ImageRows(label="label", classes=2, size=(2, 2))
    pixel = {"bytes": encode_image(np.zeros((2, 2, 3), np.uint8)), "path": None}
    kinds = [("t", texts, {"text": ["a"]}), ("i", images, {"img": [pixel]})]
    # image files may have any name
    for kind, rows, values in kinds[:1] if moved == "both" else kinds:
        for split in ("train", "test"):
            names = ["yes", "no"] if moved in (split, "both") else ["no", "yes"]
            features = {"label": {"names": names, "_type": "ClassLabel"}}
            meta = json.dumps({"info": {"features": features}})
            table = pa.table({**values, "label": [0]})
            (tmp_path / kind).mkdir(exist_ok=True)
            pq.write_table(
                table.replace_schema_metadata({"huggingface": meta}),
                tmp_path / kind / f"{split}.parquet",
            )
        repo = HubRepo(kind, file_patterns=("{split}.parquet",))
        source = PublicDataset("mine", "", repo, rows, {"train": 1, "test": 1})
        with pytest.raises(CorruptFileError, match=r"different class names|classes as yes, no"):
            source.read(tmp_path, lambda *_: None)
