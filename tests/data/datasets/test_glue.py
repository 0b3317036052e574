"""GLUE tasks from original zip files and folders: read back, or refused when malformed."""

import zipfile
from dataclasses import replace

import pytest

from trishul_ray.data.datasets.glue import MNLI, QNLI, QQP, RTE, SST2
from trishul_ray.errors import CorruptFileError, InputError

RTE_TRAIN = (
    "index\tsentence1\tsentence2\tlabel\n"
    '0\tHe said "no.\tHe said yes."\tnot_entailment\n'  # quotes are plain characters
    "1\tA caf\u00e9 opened.\tSomething opened.\tentailment\n"
)
RTE_DEV = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"


def write_zip(folder, name, members):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return folder / name


def write_files(folder, members):
    for member, text in members.items():
        (folder / member).parent.mkdir(parents=True, exist_ok=True)
        (folder / member).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("zipped", [True, False])
def test_round_trip_from_a_zip_file_or_a_folder(tmp_path, zipped):
    members = {"RTE/train.tsv": RTE_TRAIN, "RTE/dev.tsv": RTE_DEV, "RTE/test.tsv": "ignored"}
    if zipped:
        write_zip(tmp_path / "archives", "RTE.zip", members)
    else:
        write_files(tmp_path / "archives", members)
    small = replace(RTE, sizes={"train": 2, "validation": 1})
    info, columns = small.read(tmp_path, lambda *_: None)
    train = columns["train"]
    assert train["sentence1"].to_pylist() == ['He said "no.', "A caf\u00e9 opened."]
    assert train["sentence2"].to_pylist() == ['He said yes."', "Something opened."]
    assert train["label"].tolist() == [1, 0] and columns["test"]["label"].tolist() == [0]
    assert info.fields == ("sentence1", "sentence2")
    assert info.classes == ("entailment", "not_entailment") and info.groups == ()
    assert "group" not in columns["test"]
    with pytest.raises(CorruptFileError, match="glue/rte has 2 rows, not the official 2490"):
        RTE.read(tmp_path, lambda *_: None)


def test_mnli_has_both_development_sets_as_groups(tmp_path):
    parses = "index\tpairID\tsentence1\tsentence2\tlabel1\tgold_label\n"
    write_zip(
        tmp_path / "archives",
        "MNLI.zip",
        {
            "MNLI/train.tsv": parses + "0\t1n\tp0\th0\tneutral\tneutral\n",
            "MNLI/dev_matched.tsv": parses + "0\t1n\tp1\th1\tneutral\tcontradiction\n",
            "MNLI/dev_mismatched.tsv": parses + "0\t1n\tp2\th2\tx\tentailment\n" * 2,
        },
    )
    sizes = {"train": 1, "validation_matched": 1, "validation_mismatched": 2}
    info, columns = replace(MNLI, sizes=sizes).read(tmp_path, lambda *_: None)
    assert info.fields == ("premise", "hypothesis") and info.groups == ("matched", "mismatched")
    assert columns["test"]["premise"].to_pylist() == ["p1", "p2", "p2"]
    assert columns["test"]["group"].tolist() == [0, 1, 1]
    assert columns["test"]["label"].tolist() == [2, 0, 0]
    assert columns["train"]["label"].tolist() == [1] and "group" not in columns["train"]


def test_qqp_skips_rows_with_too_few_cells_as_the_hub_does(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    torn = "1\t2\t3\tHow do I\nask?\tHow?\t1\n"
    write_zip(
        tmp_path / "archives",
        "QQP-clean.zip",
        {
            "QQP/train.tsv": header + "0\t1\t2\tWhy?\tHow?\t0\n" + torn + "2\t1\t2\ta\tb\t1\r\n",
            "QQP/dev.tsv": header + "0\t1\t2\tWhy?\tWhy so?\t1\n",
        },
    )
    _, columns = replace(QQP, sizes={"train": 2, "validation": 1}).read(tmp_path, lambda *_: None)
    assert columns["train"]["question1"].to_pylist() == ["Why?", "a"]
    assert columns["train"]["label"].tolist() == [0, 1]


def test_qnli_and_sst2(tmp_path):
    header = "index\tquestion\tsentence\tlabel\n"
    rows = {"QNLI/train.tsv": header + "0\tq\ts\tentailment\n", "QNLI/dev.tsv": header + "1\tr\tt"}
    rows["QNLI/dev.tsv"] += "\tnot_entailment"  # without a final newline
    write_zip(tmp_path / "archives", "QNLIv2.zip", rows)
    _, columns = replace(QNLI, sizes={"train": 1, "validation": 1}).read(tmp_path, lambda *_: None)
    assert columns["test"]["question"].to_pylist() == ["r"]
    assert columns["test"]["label"].tolist() == [1]
    text = "\ufeffsentence\tlabel\nit 's fine \t1\n"
    write_zip(tmp_path / "archives", "SST-2.zip", {"SST-2/train.tsv": text, "SST-2/dev.tsv": text})
    info, columns = replace(SST2, sizes={"train": 1, "validation": 1}).read(
        tmp_path, lambda *_: None
    )
    assert columns["train"]["sentence"].to_pylist() == ["it 's fine "]
    assert columns["train"]["label"].tolist() == [1] and info.classes[1] == "positive"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RTE_TRAIN + "2\ta\n", r"line 4: 2 cells; the header has 4"),
        (
            RTE_TRAIN + "2\ta\tb\tmaybe\n",
            r"line 4: label is 'maybe'; it must be one of entailment, not",
        ),
        (
            "index\tsentence1\tlabel\n",
            r"no column 'sentence2'; it has index, sentence1, label",
        ),
        ("", "no column 'sentence1'; it has none"),
    ],
)
def test_malformed_rows_are_named(tmp_path, text, message):
    file = write_zip(
        tmp_path / "archives", "RTE.zip", {"RTE/train.tsv": text, "RTE/dev.tsv": RTE_DEV}
    )
    with pytest.raises(CorruptFileError, match=message) as caught:
        RTE.read(tmp_path, lambda *_: None)
    assert f"{file}: member RTE/train.tsv" in str(caught.value)


def test_malformed_files_are_named(tmp_path):
    folder = tmp_path / "archives"
    file = write_zip(folder, "RTE.zip", {"RTE/train.tsv": RTE_TRAIN})
    with pytest.raises(CorruptFileError, match=r"RTE.zip: no member RTE/dev.tsv"):
        RTE.read(tmp_path, lambda *_: None)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CorruptFileError, match=r"RTE.zip: an incomplete download: it has 100"):
        RTE.read(tmp_path, lambda *_: None)
    file.write_bytes(b"<html>")
    with pytest.raises(CorruptFileError, match=r"RTE.zip: not a readable zip file"):
        RTE.read(tmp_path, lambda *_: None)
    file.unlink()
    write_files(folder, {"RTE/train.tsv": RTE_TRAIN})
    with pytest.raises(
        InputError,
        match=r"archives: RTE/dev.tsv is missing, but other files of the dataset are there",
    ):
        RTE.key(tmp_path)
    write_files(folder, {"RTE/dev.tsv": RTE_DEV})
    (folder / "RTE/train.tsv").write_bytes(RTE_TRAIN.encode("latin-1"))
    with pytest.raises(CorruptFileError, match=r"RTE/train.tsv, line 3: not UTF-8"):
        RTE.read(tmp_path, lambda *_: None)


def test_a_cut_zip_is_an_incomplete_download_with_sizes(tmp_path):
    folder = tmp_path / "archives"
    folder.mkdir(parents=True)
    file = folder / "RTE.zip"
    with zipfile.ZipFile(file, "w") as archive:  # stored: the sizes are known
        archive.writestr("RTE/train.tsv", "x" * 1000)
        archive.writestr("RTE/dev.tsv", "y" * 1000)
    whole = file.read_bytes()
    first_end, second_end = 30 + 13 + 1000, 2 * (30 + 1000) + 13 + 11
    for size, reason in {
        500: f"it has 500 bytes, but member RTE/train.tsv ends at byte {first_end:,}",
        1500: f"it has 1,500 bytes, but member RTE/dev.tsv ends at byte {second_end:,}",
        second_end + 5: f"it has {second_end + 5:,} bytes and ends after member RTE/dev.tsv",
    }.items():
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError) as caught:
            RTE.archive.read((file,), lambda *_: None)
        message = f"{file}: an incomplete download: {reason}; download it again"
        assert str(caught.value) == message
