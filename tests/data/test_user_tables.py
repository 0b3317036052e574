"""User tables: files, splits, columns, names, and incomplete rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from user_files import encoded, prepare_user, rejected

from trishul_ray.config.fields import ModelConfig, TaskConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.user.cleaning import doubt_labels
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.rows import partition_rows
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.tasks.build import build_task
from trishul_ray.tasks.sequence_classification import SequenceClassification

ROWS = [
    {"body": 'a "quoted",\nbroken line', "topic": "sport", "who": "ann", "part": "x"},
    {"body": "12", "topic": "art", "who": "bob", "part": "y"},
    {"body": " x ", "topic": "sport", "who": "ann", "part": "x"},
    {"body": "null", "topic": "art", "who": "cyd", "part": "y"},
]
COLUMNS = {"text": "body", "label": "topic", "client": "who", "group": "part"}
FORMATS = [".csv", ".tsv", ".json", ".jsonl", ".parquet"]


def stored(data):
    """Return all rows of a dataset as (text, class, client, group), sorted."""
    info, found = data.info, []
    for split in (data.train, data.test):
        numbers = [split.labels, split.column("client"), split.column("group")]
        for text, *row in zip(split.texts("text").to_pylist(), *numbers, strict=True):
            names = zip((info.classes, info.clients, info.groups), row, strict=True)
            found.append((text, *(of[number] for of, number in names)))
    return sorted(found)


@pytest.mark.parametrize("suffix", FORMATS)
def test_each_format_gives_the_same_rows(tmp_path, suffix):
    file = encoded(tmp_path / f"notes{suffix}", ROWS)
    data = prepare_user("table", file, tmp_path, columns=COLUMNS, test_share=0.25)
    assert data.info.kind == "text" and data.info.fields == ("text",)
    assert data.info.classes == ("art", "sport") and data.info.groups == ("x", "y")
    assert stored(data) == sorted(tuple(row.values()) for row in ROWS) and len(data.test) == 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_folder_with_test_rows_and_numbers_as_names(tmp_path, suffix):
    folder, numbers = tmp_path / "data", [2, 10, 1, 10]
    rows = [{"text": f"t{n}", "text_pair": "p", "label": n, "client": 100 - n} for n in numbers]
    encoded(folder / f"train-0{suffix}", rows[:2])
    encoded(folder / f"train-1{suffix}", rows[2:])
    encoded(folder / f"test{suffix}", [{k: v for k, v in rows[0].items() if k != "client"}])
    data = prepare_user("table", folder, tmp_path)
    assert data.info.classes == ("1", "2", "10") and data.info.fields == ("text", "text_pair")
    assert data.train.labels.tolist() == [1, 2, 0, 2] and data.test.labels.tolist() == [1]
    assert data.train.column("client").tolist() == [1, 0, 2, 0]
    assert "client" not in data.test.columns


@pytest.mark.parametrize("answers", [["a", "b"], '["a", "b"]', "a"])
def test_answers_are_lists_or_texts(tmp_path, answers):
    rows = [{"q": f"q{n}?", "context": "c", "gold": answers} for n in range(4)]
    columns = {"question": "q", "answers": "gold"}
    data = prepare_user("table", encoded(tmp_path / "qa.jsonl", rows), tmp_path, columns=columns)
    assert data.info.kind == "qa" and data.info.classes == () and data.info.groups == ()
    found = [json.loads(text) for text in data.train.texts("answers").to_pylist()]
    assert found == [["a"] if answers == "a" else ["a", "b"]] * 3


@pytest.mark.parametrize("suffix", FORMATS)
def test_incomplete_rows_are_named_or_skipped(tmp_path, suffix):
    rows = [
        {"body": f"dish {n}", "topic": ["food", "cars"][n % 2], "who": "ann", "part": "x"}
        for n in range(8)
    ]
    clean = prepare_user("table", encoded(tmp_path / f"a{suffix}", rows), tmp_path, columns=COLUMNS)
    rows[3]["topic"], rows[4]["topic"] = "cars\u00a0", "\tfood"
    data = prepare_user("table", encoded(tmp_path / f"b{suffix}", rows), tmp_path, columns=COLUMNS)
    assert stored(data) == stored(clean)
    assert data.info.origin.name == f"b{suffix}"
    assert data.info.origin.notes == ("2 values of column 'topic' stripped or composed (NFC)",)
    rows[1]["topic"], rows[2]["topic"], rows[4]["body"] = "\u00a0", "", " "
    if suffix != ".csv":
        rows[6]["who"] = None
    file = encoded(tmp_path / f"c{suffix}", rows)
    rejected(
        r"label \(column 'topic'\) is missing in 2 of 8 rows \(train row 1, train row 2\); .*text "
        r"\(column 'body'\) is missing in 1 of 8 rows \(train row 4\); rows count from 0; "
        "correct them, or set", "table", file, tmp_path, columns=COLUMNS,
    )  # fmt: skip
    data = prepare_user("table", file, tmp_path, columns=COLUMNS, skip_broken=True)
    lost = (1, 2, 4) if suffix == ".csv" else (1, 2, 4, 6)
    assert data.info.skipped == tuple(f"train row {n}" for n in lost)
    assert stored(data) == [row for row in stored(clean) if int(row[0][-1]) not in lost]


@pytest.mark.parametrize("suffix", FORMATS)
def test_words_mean_missing_only_in_csv(tmp_path, suffix):
    rows = [{"text": f"t{n}", "label": ["NA", "SA"][n % 2], "client": "null"} for n in range(8)]
    file = encoded(tmp_path / f"x{suffix}", rows)
    if suffix in (".csv", ".tsv"):
        rejected(r"label .* in 4 of 8 rows \(.*; NA means missing in CSV", "table", file, tmp_path)
    else:
        info = prepare_user("table", file, tmp_path).info
        assert info.classes == ("NA", "SA") and info.clients == ("null",)


@pytest.mark.parametrize("skip_broken", [False, True])
def test_columns_without_a_name_are_ignored(tmp_path, skip_broken):
    file = tmp_path / "excel.csv"
    file.write_text("text,label,\n" + "".join(f"t{n},{n % 2},{'x' * (n == 3)}\n" for n in range(8)))
    data = prepare_user("table", file, tmp_path, skip_broken=skip_broken)
    assert len(data.train) + len(data.test) == 8 and data.info.origin.notes == ()


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_texts_of_any_encoding_are_read(tmp_path, kind):
    texts = pa.array([f"t{n}" for n in range(8)], kind)
    table = pa.table({"text": texts, "label": pa.array([0.0, 1.0] * 4, pa.float16())})
    pq.write_table(table, tmp_path / "x.parquet")
    data = prepare_user("table", tmp_path / "x.parquet", tmp_path)
    assert data.info.classes == ("0", "1") and len(data.train) + len(data.test) == 8


def test_one_text_of_a_pair_may_be_blank(tmp_path):
    rows = [{"text": f"t{n}", "text_pair": "" if n else "p", "label": n % 2} for n in range(6)]
    data = prepare_user("table", encoded(tmp_path / "pairs.csv", rows), tmp_path)
    assert len(data.train) + len(data.test) == 6
    rows[3]["text"] = ""
    file = encoded(tmp_path / "pairs.csv", rows)
    rejected(r"text and text_pair .* 1 of 6 rows \(train row 3\)", "table", file, tmp_path)


TEXT = {"text": ["a", "b"], "label": [0, 1]}


@pytest.mark.parametrize(
    ("name", "columns", "mapping", "message"),
    [
        ("x.jsonl", TEXT, {"txt": "text"}, r"data.columns.txt is unknown; known: text"),
        ("x.jsonl", TEXT, {"text": "texts"}, r"which has text, label; did you mean 'text'\?"),
        ("x.csv", {"text": ["a"], "y": [1]}, {}, r"the data's columns are text, y; map them"),
        ("x.parquet", TEXT | {"text": [1, 2]}, {}, r"'text' is int64, not text"),
        ("x.jsonl", TEXT | {"text": ["a", 2]}, {}, r"not a readable jsonl file \(column 'text'"),
        ("x.csv", TEXT | {"label": [3, 3]}, {}, r"all rows have class '3'"),
        ("x.parquet", TEXT | {"label": [[1, 2], [1]]}, {}, r"several labels per row, or labels"),
        ("x.jsonl", {"question": ["q"], "context": ["c"], "answers": [[]]}, {}, r"not a list"),
    ],
)  # fmt: skip
def test_wrong_columns_are_named(tmp_path, name, columns, mapping, message):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rejected(message, "table", encoded(tmp_path / name, rows), tmp_path, columns=mapping)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"text,label\na,0\nb\n", r"x.csv: not a readable csv file \(.*Row #3: Expected"),
        ("x.csv", b"", r"x.csv: not a readable csv file"),
        ("x.csv", b"text,label\n", r"x.csv: the train split has no rows"),
        ("x.csv", b"text,label,text\na,0,b\n", r"several columns are named 'text'"),
        ("x.csv", b"text,label\n\xff\xfe,0\n", r"x.csv: not a readable csv file \(.*UTF8"),
        ("x.jsonl", b'{"text": "a", "label": 1}\n{"text"\n', r"jsonl file \(line 2: "),
        ("x.jsonl", b'["a", 1]\n', r"a row is list, not an object"),
        ("x.json", b'[{"text":\n', r"x.json: not a readable json file"),
        ("x.parquet", b"PAR1 and no more", r"x.parquet: not a readable parquet file"),
        ("x.csv", b"text;label\na,b;0\n", "semicolons separate"),
        ("x.csv", b"BZh91AY&SY", "compressed with bzip2"),
        ("x.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("x.csv", b"version https://git-lfs.github.com/spec/v1\noid 4\n", "git lfs pull"),
        ("x.xlsx", b"PK", r"data.path='.*x.xlsx': the file must be one of .parquet, .jsonl"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    rejected(message, "table", tmp_path / name, tmp_path)


def test_wrong_folders_and_fields_are_named(tmp_path):
    folder = tmp_path / "data"
    encoded(folder / "test.csv", ROWS)
    rejected(r"data' has no train\.\* file", "table", folder, tmp_path)
    encoded(folder / "train.csv", ROWS)
    encoded(folder / "train.jsonl", ROWS)
    rejected(r"contains train.csv, train.jsonl; all must have the same", "table", folder, tmp_path)
    rejected(r"data.path requires user data .*, not dataset digits", "digits", "x", tmp_path)
    rejected(r"data.columns requires user data", "digits", None, tmp_path, columns={"text": "x"})


def label_table(rows, names=None, kind=None):
    """Create a table of texts and labels; ``names`` are the names of the hub's ClassLabel."""
    table = pa.table({"text": [f"t{n}" for n in range(len(rows))], "label": pa.array(rows, kind)})
    if names is None:
        return table
    feature = {"names": names, "_type": "ClassLabel"}
    meta = {"info": {"features": {"label": feature}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(meta)})


def write_tables(folder, tables):
    folder.mkdir(parents=True)
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return folder


def by_name(data, split):
    return [data.info.classes[label] for label in data.split(split).labels]


def test_labels_are_read_by_class_names(tmp_path):
    named = label_table([1, 0], ["good", "bad"])
    folder = write_tables(tmp_path / "a", {"train": named, "test": label_table([0, 1])})
    data = prepare_user("table", folder, tmp_path)
    assert (by_name(data, "train"), by_name(data, "test")) == (["bad", "good"], ["good", "bad"])
    other = label_table([1, 0], ["bad", "good"])
    folder = write_tables(tmp_path / "b", {"train-0": named, "train-1": other})
    rejected(r"different class names, \(good, bad\) and \(bad, good\)", "table", folder, tmp_path)
    folder = write_tables(tmp_path / "c", {"train": label_table([0, 2], ["a", "b"])})
    rejected(r"row 1: label is 2, not a class \(a, b\)", "table", folder, tmp_path)


def test_minus_one_marks_a_missing_label(tmp_path):
    table = label_table([0, -1, 1, 0, 1, -1], ["good", "bad"])
    folder = write_tables(tmp_path / "some", {"train": table})
    rejected(
        r"label .* is missing in 2 of 6 rows \(train row 1, train row 5\)",
        "table",
        folder,
        tmp_path,
    )
    data = prepare_user("table", folder, tmp_path, skip_broken=True)
    assert sorted(by_name(data, "train") + by_name(data, "test")) == ["bad", "bad", "good", "good"]
    none = label_table([-1, -1])
    folder = write_tables(tmp_path / "none", {"train": table.slice(2, 3), "test": none})
    data = prepare_user("table", folder, tmp_path)
    assert len(data.train) + len(data.test) == 3
    assert data.info.origin.notes[0] == "test rows have no labels: not used"


@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [
        ((["a", "b"], None), ([1, 2], pa.int64()), None),
        (([-10, 2], pa.int8()), ([-9, 2], pa.int64()), ["-10", "-9", "2"]),
        (([1, 2], None), ([1.5, 1.0], pa.float64()), ["1", "1.5", "2"]),
        (([1.0, 10.0], None), ([1, 2], pa.int32()), ["1", "2", "10"]),
        (([True, False], None), ([True, True], None), ["0", "1"]),
    ],
)
def test_numbers_have_one_spelling_in_all_tables(tmp_path, train, test, classes):
    splits = {"train": train, "test": test}
    tables = {s: label_table(labels * 3, kind=kind) for s, (labels, kind) in splits.items()}
    folder = write_tables(tmp_path / "data", tables)
    if classes is None:
        rejected(r"[Uu]nable to merge.*label", "table", folder, tmp_path)
    else:
        assert list(prepare_user("table", folder, tmp_path).info.classes) == classes


def test_names_in_two_unicode_forms_are_one(tmp_path):
    rows = [
        {"b\u00e4r": f"t{n}", "label": "bar" if n < 4 else name, "client": name}
        for n, name in enumerate(["Caf\u00e9", "Cafe\u0301"] * 4)
    ]
    file = encoded(tmp_path / "x.csv", rows)
    for column in ("b\u00e4r", "ba\u0308r"):
        data = prepare_user("table", file, tmp_path, columns={"text": column})
        assert data.info.classes == ("Caf\u00e9", "bar") and data.info.clients == ("Caf\u00e9",)


def test_classes_and_clients_without_training_rows_are_noted(tmp_path):
    folder = tmp_path / "data"
    encoded(folder / "train.csv", [{"text": "t", "label": x} for x in ["good", "Good"] * 3])
    encoded(folder / "test.csv", [{"text": "t", "label": x} for x in ["good", "meh", "meh"]])
    notes = prepare_user("table", folder, tmp_path).info.origin.notes
    assert notes[0] == "classes without training rows: 'meh'" and "differ only in case" in notes[1]
    for twin in ("good\u200b", "\uff47ood"):  # zero width, full width
        encoded(folder / "train.csv", [{"text": "t", "label": x} for x in ["good", twin] * 3])
        assert "invisible" in prepare_user("table", folder, tmp_path).info.origin.notes[-1]
    who = [*("ann", "bob") * 8, *"cdefghij"]
    rows = [{"text": f"t{n}", "label": n % 2, "client": name} for n, name in enumerate(who)]
    file = encoded(tmp_path / "rows.csv", rows)
    data = prepare_user("table", file, tmp_path, test_share=0.5)
    lost = set(range(10)) - {int(n) for n in data.train.column("client")}
    assert data.info.origin.notes[0].startswith("clients without training rows: ")
    experiment = Experiment(partition={"kind": "natural"}, federation={"clients": 10})
    with pytest.raises(InputError, match=rf"{10 - len(lost)} natural clients"):
        partition_rows(data, experiment)


@pytest.mark.parametrize(
    ("labels", "doubted"),
    [
        (np.random.default_rng(0).random(300) * 5, True),
        ([f"id{n}" for n in range(50)], True),
        ([f"id{n}" for n in range(15)], False),
        (np.arange(600) % 10 / 2, False),  # half stars
        ([f"person {n}" for n in range(409)] + [f"p {n % 168}" for n in range(916)], False),  # LFW
    ],
)
def test_labels_of_single_rows_are_doubted(labels, doubted):
    classes, numbers = np.unique(np.array(labels).astype(str), return_inverse=True)
    assert bool(doubt_labels(classes.tolist(), numbers)) == doubted


def test_training_rows_that_are_test_rows_are_counted(small, tmp_path):
    rows = [{"text": f"t{n % 4}", "label": n % 2} for n in range(40)]
    file = encoded(tmp_path / "x.csv", rows)
    words = ["dataset=table", f"data.path={file}", "model.name=bert-tiny", "partition.kind=iid"]
    assert prepare_run(small(*words)).cut == ("32 of 32 train rows are also test rows",)


def test_scores_need_a_task_that_reads_numbers(tmp_path, monkeypatch):
    rows = [{"text": f"t{n}", "label": n / 7} for n in range(60)]
    data = prepare_user("table", encoded(tmp_path / "x.csv", rows), tmp_path)
    backbone = backbone_of(
        ModelConfig(name="bert-tiny", init="random"), StoragePaths(tmp_path, None)
    )
    with pytest.raises(InputError, match=r"^file:.*x\.csv: 60 distinct labels in 60 rows, 60 of"):
        build_task(TaskConfig(), data.info, backbone)
    monkeypatch.setattr(SequenceClassification, "any_labels", True)
    assert build_task(TaskConfig(), data.info, backbone).num_classes == 60
