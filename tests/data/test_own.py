"""Your own data: folders of images, table files, and any dataset of a mirror or the hub."""

import gzip
import json
import re
import warnings

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hub_cache import COMMIT
from huggingface_hub import close_session
from PIL import Image

from trishul_ray.config.fields import DataConfig, ModelConfig, TaskConfig
from trishul_ray.config.places import Places
from trishul_ray.data.cleaning import question_labels
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.images import resize_images
from trishul_ray.data.own import CustomHubDataset
from trishul_ray.data.passed_rows import encode_image, store_rows
from trishul_ray.data.prepare import find_source, measure_coverage, prepare
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.fit import check_fits
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.experiment.rows import partition_rows
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.runs.prediction import input_columns
from trishul_ray.storage.integrity import sealed_folder
from trishul_ray.tasks.build import build_task
from trishul_ray.tasks.sequence_classification import SequenceClassification

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0)}


def prepare_own(name, path, cache, hub=None, **fields):
    config = DataConfig(name=name, path=None if path is None else str(path), **fields)
    return prepare(config, cache=cache / "cache", hub=hub)


def refused(message, *args, **fields):
    """Check that preparing own data ends with an error of one line."""
    with pytest.raises(InputError, match=message) as caught:
        prepare_own(*args, **fields)
    assert "\n" not in str(caught.value)


def paint(file, color, size=(8, 6), mode="RGB"):
    save(Image.new("RGB", size, color).convert(mode), file)


def save(image, file, **how):
    """Save an image, or an array of pixels, in a folder that need not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, **how)
    return file


def paint_classes(root, count=4):
    """Paint some images of each class, and return the folder."""
    for name, color in COLORS.items():
        for number in range(count):
            paint(root / name / f"{number}.png", color)
    return root


def test_a_folder_of_class_folders(tmp_path):
    root = paint_classes(tmp_path / "photos", 5)
    (root / "red/notes.txt").write_text("not an image")
    (root / ".cache").mkdir()
    data = prepare_own("images", root, tmp_path, test_share=0.3)
    assert data.info.classes == ("green", "red") and data.info.image_shape == (3, 6, 6)
    assert (len(data.train), len(data.test)) == (7, 3)
    for split in (data.train, data.test):
        for pixels, label in zip(split.column("pixels"), split.labels, strict=True):
            assert tuple(pixels[:, 0, 0]) == COLORS[data.info.classes[label]]
    again = prepare_own("images", root, tmp_path / "elsewhere", test_share=0.3)
    assert again.fingerprint == data.fingerprint
    assert prepare_own("images", root, tmp_path, test_share=0.5).folder != data.folder
    paint(root / "red/9.png", COLORS["red"])
    assert prepare_own("images", root, tmp_path, test_share=0.3).folder != data.folder


def test_images_with_test_folders_gray_and_of_several_sizes(tmp_path):
    root = tmp_path / "photos"
    for split, sizes in {"train": [(8, 8), (8, 8), (4, 12)], "test": [(8, 8), (600, 8)]}.items():
        for name, value in {"dark": 10, "light": 200}.items():
            for number, size in enumerate(sizes):
                paint(root / split / name / f"{number}.png", (value,) * 3, size, "L")
    data = prepare_own("images", root, tmp_path)
    assert data.info.image_shape == (1, 8, 8) and (len(data.train), len(data.test)) == (6, 4)
    assert data.info.source.endswith(", 4 of 10 images resized and cropped to 8x8")
    assert np.unique(data.test.column("pixels")[data.test.labels == 1]).tolist() == [200]
    # With one color image, all become RGB.
    paint(root / "train/dark/3.jpg", (10, 10, 10), (8, 8))
    assert prepare_own("images", root, tmp_path).info.image_shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("others", "read"),
    [(["val"], "val"), (["validation"], "validation"), (["val", "test"], "test"), ([], None)],
)
def test_the_folder_of_test_rows_has_one_of_its_usual_names(tmp_path, others, read):
    root = tmp_path / "photos"
    for number, split in enumerate(["train", *others]):
        for name, value in {"dark": 10, "light": 200}.items():
            for image in range(4):
                paint(root / split / name / f"{image}.png", (value + number,) * 3)
    data = prepare_own("images", root, tmp_path)
    assert data.info.classes == ("dark", "light")
    if read is None:
        assert len(data.train) + len(data.test) == 8
    else:
        assert len(data.train) == len(data.test) == 8
        number = 1 + others.index(read)
        assert np.unique(data.test.column("pixels")).tolist() == [10 + number, 200 + number]


def test_large_images_are_stored_smaller(tmp_path):
    for name, color in COLORS.items():
        paint(tmp_path / "photos" / name / "1.png", color, (1000, 500))
    data = prepare_own("images", tmp_path / "photos", tmp_path)
    assert data.info.image_shape == (3, 256, 256)
    assert "2 of 2 images resized and cropped to 256x256" in data.info.source


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_prepared_as_it_is_seen(tmp_path, orientation):
    """A phone stores the sensor's pixels, and says in EXIF how they are turned."""
    seen = np.array([[[200, 0, 0], [0, 200, 0]], [[0, 0, 200], [90, 90, 90]]], np.uint8)
    turned = {
        1: seen, 2: seen[:, ::-1], 3: seen[::-1, ::-1], 4: seen[::-1], 5: seen.transpose(1, 0, 2),
        6: np.rot90(seen), 7: np.rot90(seen, 2).transpose(1, 0, 2), 8: np.rot90(seen, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in ("a", "b"):
        save(np.ascontiguousarray(turned), tmp_path / "photos" / name / "1.png", exif=exif)
    data = prepare_own("images", tmp_path / "photos", tmp_path)
    assert (data.train.column("pixels")[0].transpose(1, 2, 0) == seen).all()


def test_the_aspect_is_kept_and_the_centre_is_cropped(tmp_path):
    """A wide photo with a square in its centre: the square stays one, and fills the image."""
    wide = Image.new("RGB", (80, 40), (255, 0, 0))
    wide.paste((0, 0, 255), (20, 0, 60, 40))
    tall, square = wide.transpose(Image.Transpose.ROTATE_90).reduce(2), wide.crop((20, 0, 60, 40))
    for name in ("a", "b"):
        for number, image in enumerate((wide, tall, square)):
            save(image, tmp_path / "photos" / name / f"{number}.png")
    data = prepare_own("images", tmp_path / "photos", tmp_path)
    assert data.info.image_shape == (3, 40, 40)
    assert data.info.source.endswith(", 4 of 6 images resized and cropped to 40x40")
    assert data.train.column("pixels")[:, 0].max() <= 64  # the filter blends a border pixel


def test_square_images_are_as_before(tmp_path):
    """Pillow's plain resize: images of one aspect keep the pixels that earlier versions stored."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for side in (8, 8, 8, 20)]
    for number, array in enumerate(arrays):
        save(array, tmp_path / "photos" / "ab"[number % 2] / f"{number}.png")
    data = prepare_own("images", tmp_path / "photos", tmp_path)
    arrays[3] = np.asarray(Image.fromarray(arrays[3]).resize((8, 8), Image.Resampling.BILINEAR))
    found = [*data.train.column("pixels"), *data.test.column("pixels")]
    assert sorted(p.tobytes() for p in found) == sorted(
        a.transpose(2, 0, 1).tobytes() for a in arrays
    )


def break_images(root):
    """Add to a folder of 4 + 4 good images one that is no image, and one that is cut off."""
    (root / "red/text.jpg").write_bytes(b"JFIF?")
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    whole = save(noise, root / "green/cut.png").read_bytes()
    (root / "green/cut.png").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize("skip", [True, False])
def test_a_pointer_of_git_lfs_is_no_broken_image(tmp_path, skip):
    root = paint_classes(tmp_path / "photos")
    (root / "red/2.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    message = r"red/2.png is a pointer of Git LFS, not the image: run `git lfs pull`"
    refused(message, "images", root, tmp_path, skip_broken=skip)


def test_all_broken_images_are_named_at_once_or_skipped(tmp_path):
    root = paint_classes(tmp_path / "photos")
    good = prepare_own("images", root, tmp_path)
    break_images(root)
    with pytest.raises(CorruptFileError) as caught:
        prepare_own("images", root, tmp_path)
    assert str(caught.value) == (
        f"2 images cannot be read: {root}/red/text.jpg, {root}/green/cut.png; remove them, or set "
        "data.skip_broken=true"
    )
    data = prepare_own("images", root, tmp_path, skip_broken=True)
    assert data.fingerprint == good.fingerprint
    assert data.info.source.endswith(", 2 broken images skipped")
    assert data.info.skipped == (f"{root}/red/text.jpg", f"{root}/green/cut.png")
    assert measure_coverage(data).to_json()["skipped"] == data.info.skipped
    refused(r"data.skip_broken is for your own data", "digits", None, tmp_path, skip_broken=True)


def test_photos_in_heic_are_named_and_the_files_of_macos_are_passed_over(tmp_path):
    root = paint_classes(tmp_path / "photos")
    good = prepare_own("images", root, tmp_path)
    (root / "red/._1.png").write_bytes(b"Mac OS X")
    assert prepare_own("images", root, tmp_path).fingerprint == good.fingerprint
    (root / "red/IMG_2.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    refused(r"IMG_2.HEIC: .*; convert HEIC to JPEG, remove it", "images", root, tmp_path)


def test_rows_of_broken_images_are_skipped_in_a_table(tmp_path):
    for name, color in COLORS.items():
        paint(tmp_path / f"img/{name}.png", color)
    (tmp_path / "img/broken.png").write_bytes(b"?")
    names = ["red", "broken", "green", "broken", "red"]
    rows = [{"image": f"img/{n}.png", "label": n, "client": str(k)} for k, n in enumerate(names)]
    file = write_rows(
        tmp_path / "table/train.csv", [r | {"image": f"../{r['image']}"} for r in rows]
    )
    write_rows(tmp_path / "table/test.csv", [rows[0] | {"image": "../img/red.png"}])
    refused(r"2 images cannot be read: .*line 3, .*line 5; ", "table", file.parent, tmp_path)
    data = prepare_own("table", file.parent, tmp_path, skip_broken=True)
    kept = [
        (data.info.classes[k], data.info.clients[c])
        for k, c in zip(data.train.labels, data.train.column("client"), strict=True)
    ]
    assert kept == [("red", "0"), ("green", "2"), ("red", "4")]
    assert [tuple(p[:, 0, 0]) for p in data.train.column("pixels")] == [COLORS[n] for n, _ in kept]


def test_pixels_of_an_earlier_preparation_are_not_served(tmp_path, monkeypatch):
    config = DataConfig(name="images", path=str(paint_classes(tmp_path / "photos")))
    data, content = prepare_own("images", config.path, tmp_path), find_source(config).content()
    monkeypatch.setattr("trishul_ray.data.own.PREPARATION_VERSION", 1)
    assert prepare_own("images", config.path, tmp_path).folder != data.folder
    assert find_source(config).content() != content


def test_pillow_warns_of_nothing(tmp_path):
    """A palette with transparency, and broken EXIF data, are readable: there is nothing to do."""
    exif = b"Exif\0\0II*\0\xff\0\0\0\x01"
    for name, color in COLORS.items():
        palette = Image.new("P", (6, 6))
        palette.putpalette([*color, 0, 0, 0])
        save(palette, tmp_path / "photos" / name / "1.png", transparency=b"\xff\x80")
        save(Image.new("RGB", (6, 6), color), tmp_path / "photos" / name / "2.jpg", exif=exif)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(prepare_own("images", tmp_path / "photos", tmp_path).train) == 3
    assert [str(w.message) for w in caught if "PIL" in w.filename] == []


def test_what_is_wrong_with_a_folder_of_images_is_named(tmp_path):
    root = tmp_path / "photos"
    refused(r"data.path is not set: it must be a folder that holds", "images", None, tmp_path)
    refused(r"data.path='.*photos' does not exist", "images", root, tmp_path)
    root.mkdir()
    refused(r"photos' holds .*; it must hold <class>/\*.jpg, or", "images", root, tmp_path)
    paint(root / "a/1.png", COLORS["red"])
    refused(r"the 1 row of .*photos cannot be split", "images", root, tmp_path)
    paint(root / "a/2.png", COLORS["red"])
    refused(r"all rows are of class 'a'; two classes are needed", "images", root, tmp_path)
    (root / "b").mkdir()
    refused(r"class folder .*/b holds no image", "images", root, tmp_path)
    (root / "b/broken.jpg").write_bytes(b"JFIF?")
    refused(r"/b/broken.jpg: not a readable image", "images", root, tmp_path)
    columns = {"label": "x"}
    refused(r"a folder of images has no columns", "images", root, tmp_path, columns=columns)


ROWS = [
    {"body": 'a "quoted",\nbroken line', "topic": "sport", "who": "ann", "part": "x"},
    {"body": "12", "topic": "art", "who": "bob", "part": "y"},
    {"body": " x ", "topic": "sport", "who": "ann", "part": "x"},
    {"body": "null", "topic": "art", "who": "cyd", "part": "y"},
]
COLUMNS = {"text": "body", "label": "topic", "client": "who", "group": "part"}


def write_rows(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        comma = "\t" if file.suffix == ".tsv" else ","
        quoted = [[str(v).replace('"', '""') for v in row.values()] for row in rows]
        lines = [comma.join(rows[0]), *(comma.join(f'"{v}"' for v in row) for row in quoted)]
        file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table_in_a_file(tmp_path, suffix):
    file = write_rows(tmp_path / f"notes{suffix}", ROWS)
    data = prepare_own("table", file, tmp_path, columns=COLUMNS, test_share=0.25)
    assert data.info.kind == "text" and data.info.fields == ("text",)
    assert data.info.classes == ("art", "sport") and data.info.groups == ("x", "y")
    names = [data.info.classes, data.info.clients, data.info.groups]
    found = []
    for split in (data.train, data.test):
        columns = [split.labels, split.column("client"), split.column("group")]
        for text, *numbers in zip(split.texts("text").to_pylist(), *columns, strict=True):
            values = [of[number] for of, number in zip(names, numbers, strict=True)]
            found.append([text, *values])
    assert sorted(found) == sorted(list(row.values()) for row in ROWS)
    assert len(data.test) == 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_folder_with_test_rows_pairs_and_whole_numbers(tmp_path, suffix):
    folder = tmp_path / "data"
    numbers = [2, 10, 1, 10]
    rows = [{"text": f"t{n}", "text_pair": "p", "label": n, "client": 100 - n} for n in numbers]
    write_rows(folder / f"train{suffix}", rows)
    write_rows(folder / f"test{suffix}", rows[:1])
    data = prepare_own("table", folder, tmp_path)
    assert data.info.classes == ("1", "2", "10") and data.info.fields == ("text", "text_pair")
    assert data.train.labels.tolist() == [1, 2, 0, 2] and data.test.labels.tolist() == [1]
    assert data.train.column("client").tolist() == [1, 0, 2, 0]


def test_parquet_shards(tmp_path):
    for number in range(2):
        rows = [{"text": f"{number}{n}", "label": n} for n in range(3)]
        write_rows(tmp_path / "data" / f"train-{number:05d}-of-00002.parquet", rows)
    data = prepare_own("table", tmp_path / "data", tmp_path, test_share=0.01)
    assert len(data.train) == 5 and len(data.test) == 1


@pytest.mark.parametrize("answers", [["a", "b"], '["a", "b"]', "a"])
def test_questions(tmp_path, answers):
    rows = [{"q": f"q{n}?", "context": "c", "gold": answers} for n in range(4)]
    columns = {"question": "q", "answers": "gold"}
    file = write_rows(tmp_path / "qa.jsonl", rows)
    data = prepare_own("table", file, tmp_path, columns=columns)
    assert data.info.kind == "qa" and data.info.classes == () and data.info.groups == ()
    found = [json.loads(text) for text in data.train.texts("answers").to_pylist()]
    assert found == [["a"] if answers == "a" else ["a", "b"]] * 3


def test_images_in_a_table_as_paths_or_bytes(tmp_path):
    for name, color in COLORS.items():
        paint(tmp_path / f"img/{name}.png", color)
    named = [{"image": f"img/{name}.png", "label": name, "client": 7} for name in COLORS]
    rows = [dict(row) for row in named * 3]
    by_path = prepare_own("table", write_rows(tmp_path / "paths.csv", rows), tmp_path)
    encoded = [row | {"image": (tmp_path / row["image"]).read_bytes()} for row in rows]
    by_bytes = prepare_own("table", write_rows(tmp_path / "bytes.parquet", encoded), tmp_path)
    assert by_path.info.image_shape == (3, 6, 6) and by_path.info.classes == ("green", "red")
    assert by_path.fingerprint == by_bytes.fingerprint
    rows[2]["image"] = "img/none.png"
    file = write_rows(tmp_path / "paths.csv", rows)
    refused(r"paths.csv, line 4: not a readable image", "table", file, tmp_path)


TEXT = {"text": ["a", "b"], "label": [0, 1]}
QUESTION = {"question": ["q"], "context": ["c"], "answers": [[]]}
GAP = r"{} \(column '{}'\) is missing in 1 of 2 rows \({} {}\){}; correct"
IN_PARQUET = GAP.format("text", "text", "row", 1, "; rows count from 0")
IN_LINES = GAP.format("label", "label", "line", 2, "")


@pytest.mark.parametrize(
    ("name", "columns", "mapping", "message"),
    [
        ("x.jsonl", TEXT, {"txt": "text"}, r"data.columns.txt: unknown; known are text"),
        ("x.jsonl", TEXT, {"text": "texts"}, r"are text, label; did you mean 'text'\?"),
        ("x.csv", {"text": ["a"], "y": [1]}, {}, r"the data's columns are text, y; set those of"),
        ("x.parquet", TEXT | {"text": ["a", None]}, {}, IN_PARQUET),
        ("x.jsonl", TEXT | {"label": [0, None]}, {}, rf"x.jsonl: {IN_LINES}"),
        ("x.parquet", TEXT | {"text": [1, 2]}, {}, r"'text' is int64, not text"),
        ("x.jsonl", TEXT | {"text": ["a", 2]}, {}, r"different types \('a' in row 0, 2 in row 1\)"),
        ("x.csv", TEXT | {"label": [3, 3]}, {}, r"all rows are of class '3'"),
        ("x.jsonl", QUESTION, {}, r"answers' is list<"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path, name, columns, mapping, message):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    refused(message, "table", write_rows(tmp_path / name, rows), tmp_path, columns=mapping)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"
UTF16 = "text,label\nun été,0\nb,1\n".encode("utf-16")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"text,label\na,0\nb\n", r"x.csv: not a readable CSV file \(.*Row #3: Expected"),
        ("x.csv", b"", r"x.csv: not a readable CSV file"),
        ("x.csv", b"text,label\n", r"x.csv: there are no rows"),
        ("x.csv", b"text;label\na;0\nb;1\n", r"the columns are separated by ';', not by commas"),
        ("x.tsv", b"text,label\na,0\nb,1\n", r"the columns are separated by ',', not by tabs"),
        ("x.csv", UTF16, r"x.csv, line 1: not UTF-8 .*; if it is UTF-16, convert it"),
        ("x.csv", b"text,label,text\na,0,b\n", r"2 columns are called 'text' \(columns 1, 3 of 3"),
        ("x.csv", b"text,l\xffabel\na,0\n", r"line 1: not UTF-8 \(byte 0xff"),
        ("x.csv", b"text,label\n\xff\xfe,0\n", r"line 2: not UTF-8 \(byte 0xff .* LATIN1, convert"),
        ("x.jsonl", b'{"text": "a", "label": 1}\n{"text"\n', r"x.jsonl, line 2: not JSON"),
        ("x.jsonl", b'["a", 1]\n', r"x.jsonl, line 1: not a JSON object"),
        ("x.json", b'[{"text": "a", "label": 1}, 2]', r"x.json, row 1: not a JSON object"),
        ("x.json", b'[{"text":\n', r"x.json, line 2: not JSON \(Expecting value at column 1\)"),
        *((f"x.{kind}", LFS, "git lfs pull") for kind in ("parquet", "csv", "jsonl")),
        ("x.parquet", b"PAR1 and no more", r"an incomplete download: it ends after 16 bytes"),
        (
            "x.csv",
            gzip.compress(b"a", mtime=0),
            r"x.csv: a gzip file, not a CSV file; unpack it: gunzip",
        ),
        ("x.jsonl", b"PK\3\4", r"x.jsonl: a zip file \(as those of Excel are\), not a JSON lines"),
        ("x.parquet", b"<html>", r"x.parquet: not a readable parquet file"),
        ("x.xlsx", b"PK", r"data.path='.*x.xlsx': the file must be one of .parquet, .jsonl"),
    ],
)
def test_malformed_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(message, "table", tmp_path / name, tmp_path)


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    for mark in (b"", b"\xef\xbb\xbf"):
        rows = [json.dumps({"text": "\ufeffa", "label": n}).encode() for n in range(4)]
        (tmp_path / "x.jsonl").write_bytes(mark + b"\n".join(rows))
        data = prepare_own("table", tmp_path / "x.jsonl", tmp_path)
        assert set(data.train.texts("text").to_pylist()) == {"\ufeffa"}


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("x.csv", 'text,label\na,0\nb,1\n"c",\n', "line 4"),
        ("x.csv", "text,label\na,0\nb,1\nc,\n\n\n", "line 4"),
        ("x.csv", 'text,label\n"a\nA",0\nb,1\nc,\n', "row 2"),
        ("x.csv", "text,label\na,0\n\nb,1\nc,\n", "row 2"),
        ("x.tsv", "text\tlabel\r\na\t0\r\nb\t1\r\nc\t\r\n", "line 4"),
        ("x.jsonl", '{"text":"a","label":0}\n\n{"text":"b","label":null}', "row 1"),
    ],
)
def test_a_row_is_called_its_line_where_each_is_one(tmp_path, name, content, where):
    (tmp_path / name).write_text(content, newline="")
    refused(rf"is missing in 1 of \d rows \({where}\)", "table", tmp_path / name, tmp_path)


def test_a_folder_without_train_or_with_mixed_suffixes_is_named(tmp_path):
    folder = tmp_path / "data"
    write_rows(folder / "test.csv", ROWS)
    refused(r"data' has no train\.\* file", "table", folder, tmp_path)
    write_rows(folder / "train.csv", ROWS)
    write_rows(folder / "train.jsonl", ROWS)
    refused(r"holds train.csv, train.jsonl; all must have the same", "table", folder, tmp_path)


def test_fields_for_your_own_data_are_refused_for_other_datasets(tmp_path):
    refused(r"data.path is for your own data .*, not dataset digits", "digits", "x", tmp_path)
    refused(r"data.columns is for your own data", "digits", None, tmp_path, columns={"text": "x"})


def write_split(hub, where, rows):
    (hub / where).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), hub / where)


def test_a_dataset_of_a_mirror_with_mapped_columns(tmp_path):
    hub = tmp_path / "hub"
    rows = [{"review": f"r{n}", "stars": n % 3, "idx": n} for n in range(6)]
    write_split(hub, "me/films/en/train-00000-of-00001.parquet", rows)
    write_split(hub, "me/films/en/validation-00000-of-00001.parquet", rows[:2])
    unlabelled = [row | {"stars": -1} for row in rows]
    write_split(hub, "me/films/en/test-00000-of-00001.parquet", unlabelled)
    columns = {"text": "review", "label": "stars"}
    data = prepare_own("hub", "me/films/en", tmp_path, hub, columns=columns)
    assert data.info.source == "mirror:me/films" and data.info.classes == ("0", "1", "2")
    assert data.test.texts("text").to_pylist() == ["r0", "r1"]  # the validation split
    # If there is only one configuration, its name can be left out.
    same = prepare_own("hub", "me/films", tmp_path, hub, columns=columns)
    assert same.fingerprint == data.fingerprint
    write_split(hub, "me/films/fr/train-00000-of-00001.parquet", rows)
    message = r"use one of me/films/en, me/films/fr"
    refused(message, "hub", "me/films", tmp_path, hub, columns=columns)


def test_a_commit_is_that_of_the_files_in_a_mirror(tmp_path):
    hub, name = tmp_path / "hub", "data/train-00000-of-00001.parquet"
    write_split(hub, f"me/films/{name}", [{"text": f"t{n}", "label": n % 2} for n in range(6)])
    note = hub / f"me/films/.cache/huggingface/download/{name}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\n")
    for path in ("me/films", f"me/films@{COMMIT[:8]}", "me/films@main"):
        assert prepare_own("hub", path, tmp_path, hub).info.source == f"mirror:me/films@{COMMIT}"
    other = COMMIT[::-1]
    refused(f"has its files of commit {COMMIT}; ", "hub", f"me/films@{other}", tmp_path, hub)


def test_columns_of_the_same_name_are_refused_in_a_mirror(tmp_path):
    hub = tmp_path / "hub"
    (hub / "me/films").mkdir(parents=True)
    (hub / "me/films/train.csv").write_text("text,label,text\na,0,b\n")
    refused(r"2 columns are called 'text'", "hub", "me/films", tmp_path, tmp_path / "hub")


def test_a_hub_dataset_that_cannot_be_found_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    message = r"^data.path='me/films@0123abc' not found: no mirror is set \(storage.hub"
    message += r".*set TRISHUL_HUB to a folder with me/films/data/train-\*.parquet"
    refused(message, "hub", "me/films@0123abc", tmp_path)
    refused(r"data.path='films' must be owner/name", "hub", "films", tmp_path)


def test_a_hub_that_does_not_answer_is_asked_once_and_nothing_is_printed(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    # Nothing answers at this proxy, even on a machine with a network.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    close_session()
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    monkeypatch.setattr("trishul_ray.data.network._asked", {})
    for _ in range(2):
        with pytest.raises(InputError, match=r"hub failed: https://huggingface.co does not answer"):
            prepare_own("hub", "me/films", tmp_path)
    close_session()
    assert not waits  # no client retried
    assert not huggingface_hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    assert [r for r in caplog.records if r.name.startswith("huggingface_hub")] == []


def test_hub_and_mirror_give_the_same_rows(tmp_path, monkeypatch):
    """Run `load_dataset` on a folder with the files of a hub repository."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    rows = [{"text": f"t{n}", "label": n % 2} for n in range(6)]
    write_split(tmp_path / "hub", "me/films/data/train-00000-of-00001.parquet", rows)
    write_split(tmp_path / "hub", "me/films/data/test-00000-of-00001.parquet", rows[:3])
    mirrored = prepare_own("hub", "me/films", tmp_path, tmp_path / "hub")
    source = CustomHubDataset("me/films", {}, 0.2)
    folder = HubRepo(str(tmp_path / "hub/me/films"))
    monkeypatch.setattr(CustomHubDataset, "_repo", lambda _: folder)
    _, splits = source.read(None, lambda *_: None)
    for split in ("train", "test"):
        assert splits[split]["text"].to_pylist() == mirrored.split(split).texts("text").to_pylist()
        np.testing.assert_array_equal(splits[split]["label"], mirrored.split(split).labels)


def test_photos_below_a_class_folder_are_of_its_class(tmp_path):
    root = paint_classes(tmp_path / "photos")
    flat = prepare_own("images", root, tmp_path)
    (root / "red/2024/may").mkdir(parents=True)
    (root / "red/3.png").rename(root / "red/2024/may/3.png")
    (root / "red/.thumbnails").mkdir()
    (root / "red/.thumbnails/0.png").write_bytes((root / "red/0.png").read_bytes())
    (root / "red/2024/up").symlink_to(root / "red")
    data = prepare_own("images", root, tmp_path)
    assert data.fingerprint == flat.fingerprint
    assert ", 1 of 8 images in folders below their class's, 8 of 8 images" in data.info.source


def test_a_link_that_leads_nowhere_is_named_or_skipped(tmp_path):
    root = paint_classes(tmp_path / "photos")
    good = prepare_own("images", root, tmp_path)
    (root / "red/gone.png").symlink_to(tmp_path / "nowhere.png")
    refused(r"red/gone.png: not a readable image \(.*No such fi", "images", root, tmp_path)
    data = prepare_own("images", root, tmp_path, skip_broken=True)
    assert data.fingerprint == good.fingerprint and data.info.skipped == (f"{root}/red/gone.png",)
    config = DataConfig(name="images", path=str(root), skip_broken=True)
    assert find_source(config).content() is not None  # in the id, wherever the folder lies
    (root / "blue").symlink_to(tmp_path / "nowhere")
    refused(r"photos/blue is a link that leads nowhere", "images", root, tmp_path, skip_broken=True)


def test_a_folder_of_rows_beside_classes_is_no_class(tmp_path):
    for split in ("train", "holdout"):
        paint_classes(tmp_path / "photos" / split)
    message = r"photos/train holds folders .* beside it there is holdo"
    refused(message, "images", tmp_path / "photos", tmp_path)
    for name, color in {**COLORS, "train": (0, 0, 255)}.items():
        paint(tmp_path / "toys" / name / "1.png", color)
    data = prepare_own("images", tmp_path / "toys", tmp_path)
    assert data.info.classes == ("green", "red", "train")


#: Eight rows; what makes them unclean is put into a copy.
CLEAN = {
    "body": [f"dish {n}" for n in range(8)],
    "topic": ["food", "cars"] * 4,
    "who": [*("ann", "bob") * 3, "cyd", "cyd"],
}
NAMES = {"text": "body", "label": "topic", "client": "who"}


def through(door, rows, folder):
    """Function that prepares rows passed as a file of one kind, or from Python."""
    if door != "pandas":
        as_text = {k: ["" if v is None else v for v in values] for k, values in rows.items()}
        table = pa.table(as_text if door == "csv" else rows)
        return "table", write_rows(folder / f"rows.{door}", table.to_pylist())
    frame = pd.DataFrame(rows).where(lambda frame: frame.notna(), float("nan"))
    return "rows", store_rows(frame, folder / "cache", NAMES)


def stored(data):
    """All rows of a dataset as (text, class, client), sorted."""
    return sorted(
        (text, data.info.classes[label], data.info.clients[client])
        for split in (data.train, data.test)
        for text, label, client in zip(
            split.texts("text").to_pylist(), split.labels, split.column("client"), strict=True
        )
    )


@pytest.mark.parametrize("door", ["csv", "jsonl", "parquet", "pandas"])
def test_unclean_rows_are_treated_alike_in_files_and_from_python(tmp_path, door):
    clean = prepare_own(*through(door, CLEAN, tmp_path / "clean"), tmp_path, columns=NAMES)
    rows = {name: list(values) for name, values in CLEAN.items()}
    rows["topic"][3:6] = ["cars ", "\tfood", "cars\u00a0"]
    data = prepare_own(*through(door, rows, tmp_path / "spaces"), tmp_path, columns=NAMES)
    assert stored(data) == stored(clean)
    assert data.info.source.endswith(", white space around 3 values of column 'topic' removed")

    rows["topic"][1], rows["topic"][2], rows["body"][4], rows["who"][6] = "NA", None, " ", None
    with pytest.raises(CorruptFileError) as caught:
        prepare_own(*through(door, rows, tmp_path / "gaps"), tmp_path, columns=NAMES)
    unit, first = {"csv": ("line", 2), "jsonl": ("line", 1)}.get(door, ("row", 0))
    counted = "" if first else "; rows count from 0"
    where, _, what = str(caught.value).partition(": ")
    assert where == (
        "the rows passed from Python" if door == "pandas" else f"{tmp_path}/gaps/rows.{door}"
    )
    assert what == (
        f"label (column 'topic') is missing in 2 of 8 rows ({unit}s {1 + first}, {2 + first}); "
        f"{where}: client (column 'who') is missing in 1 of 8 rows ({unit} {6 + first}); {where}: "
        f"text (column 'body') is missing in 1 of 8 rows ({unit} {4 + first}){counted}; correct or "
        "remove them, or set data.skip_broken=true to leave them out"
    )
    data = prepare_own(
        *through(door, rows, tmp_path / "gaps"), tmp_path, columns=NAMES, skip_broken=True
    )
    left_out = [CLEAN["body"][n] for n in (1, 2, 4, 6)]
    assert stored(data) == [row for row in stored(clean) if row[0] not in left_out]
    assert data.info.skipped == tuple(f"{where}, {unit} {n + first}" for n in (1, 2, 4, 6))
    assert ", 4 rows without label or client or text skipped" in data.info.source

    rows = {**CLEAN, "topic": ["food", "Food"] * 4}
    data = prepare_own(*through(door, rows, tmp_path / "case"), tmp_path, columns=NAMES)
    assert data.info.source.endswith("warning: the classes 'Food' and 'food' differ in case alone")


@pytest.mark.parametrize("door", ["csv", "jsonl", "parquet", "pandas"])
def test_float_labels_are_the_same_classes_in_files_and_from_python(tmp_path, door):
    for labels, classes in {(0.0, 10.0, 2.0): "0 2 10", (0.5, 1.5, 10.5): "0.5 1.5 10.5"}.items():
        rows = {**CLEAN, "topic": [labels[n % 3] for n in range(8)]}
        data = prepare_own(*through(door, rows, tmp_path / classes), tmp_path, columns=NAMES)
        assert data.info.classes == tuple(classes.split())


def test_one_text_of_a_pair_may_be_blank(tmp_path):
    rows = [{"text": f"t{n}", "text_pair": "" if n else "p", "label": n % 2} for n in range(6)]
    data = prepare_own("table", write_rows(tmp_path / "pairs.csv", rows), tmp_path)
    assert len(data.train) + len(data.test) == 6
    rows[3]["text"] = ""
    file = write_rows(tmp_path / "pairs.csv", rows)
    refused(r"text and text_pair .* 1 of 6 rows \(line 5\)", "table", file, tmp_path)


def test_a_client_whose_rows_are_all_test_rows_is_named(tmp_path):
    rows = {
        "body": [f"dish {n}" for n in range(24)],
        "topic": ["food", "cars"] * 12,
        "who": [*("ann", "bob") * 8, *"cdefghij"],
    }
    data = prepare_own(*through("csv", rows, tmp_path), tmp_path, columns=NAMES, test_share=0.5)
    clients = set(range(10)) - {int(n) for n in data.train.column("client")}
    gone = ", ".join(repr(data.info.clients[n]) for n in sorted(clients))
    assert data.info.source.endswith(f", without training rows: clients {gone}")
    experiment = Experiment(partition={"kind": "natural"}, federation={"clients": 10})
    left = 10 - len(clients)
    named = f"{left} natural clients (all rows of {gone} are test rows); {left} or fewer"
    with pytest.raises(InputError, match=re.escape(named)):
        partition_rows(data, experiment)


@pytest.mark.parametrize("model", ["bert-tiny", "t5-tiny", "llama-tiny"])
def test_built_in_backbones_take_own_texts_by_default_and_without_a_download(tmp_path, model):
    file = write_rows(tmp_path / "notes.csv", [{"text": "a", "label": n} for n in range(4)])
    own = ["dataset=table", f"data.path={file}", f"model={model}"]
    offline = [f"storage.cache={tmp_path / 'cache'}"]
    experiment = load_experiment(None, own + offline)
    check_fits(experiment)
    assert experiment.model.init == "random" and experiment.budget in (4, 8, 16)
    # A budget that fits, or is set, stays as it is; so does a backbone that is pretrained already.
    with sealed_folder(BUILTINS[model].folder(tmp_path / "cache")):
        pass
    for words, budget in ([*own, "method=fedit"], "lower"), ([*own, "budget=64"], 64):
        experiment = load_experiment(None, words + offline)
        assert (experiment.model.init, experiment.budget) == ("pretrained", budget)


def test_an_error_of_the_budget_does_not_hide_one_of_the_data(tmp_path, monkeypatch):
    monkeypatch.delenv("TRISHUL_HUB", raising=False)
    file = write_rows(tmp_path / "notes.csv", [{"text": "a", "label": n} for n in range(4)])
    words = ["dataset=table", "model=bert-tiny", "budget=64", f"storage.cache={tmp_path}"]
    with pytest.raises(InputError, match=r"exceeds the width 128"):
        check_fits(load_experiment(None, [*words, f"data.path={file}"]))
    with pytest.raises(InputError, match=r"data\.path is not set"):
        check_fits(load_experiment(None, words))
    with pytest.raises(InputError, match=r"data\.columns\.lable: unknown; .* did you mean 'label'"):
        check_fits(load_experiment(None, [*words, f"data.path={file}", "data.columns={lable:x}"]))


def test_a_mapping_of_columns_without_blanks_is_understood():
    columns = yaml.safe_load("{text:body, label: topic}")
    assert DataConfig(columns=columns).columns == {"text": "body", "label": "topic"}
    with pytest.raises(ValueError, match=r"columns\.text"):
        DataConfig(columns={"text": None})


def label_table(rows, names=None, kind=None):
    """A table of texts and labels; ``names`` are those of the hub's ClassLabel."""
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


@pytest.mark.parametrize("door", ["table", "hub", "rows"])
def test_the_labels_of_each_table_are_read_by_its_own_class_names(tmp_path, door):
    """Splits and shards may number their classes in any order, and know more or fewer of them."""
    tables = {
        "train-0": label_table([0, 1, 0], ["good", "bad"]),
        "train-1": label_table([0, 1, 2], ["bad", "fair", "good"]),
        "test-0": label_table([0, 1, 2, 3], ["fair", "bad", "good", "worse"]),
    }
    hub = tmp_path / "hub"
    hub.mkdir()
    if door == "rows":
        splits = {"train": tables["train-1"], "test": tables["test-0"]}
        folder = store_rows(splits, tmp_path / "c", {})
        expected = ["bad", "fair", "good"]
    else:
        folder = write_tables(hub / "me/films", tables)
        expected = ["good", "bad", "good", "bad", "fair", "good"]
    data = prepare_own(door, "me/films" if door == "hub" else folder, tmp_path, hub)
    assert by_name(data, "train") == expected
    assert by_name(data, "test") == ["fair", "bad", "good", "worse"]
    assert f", labels read by name: {3 - (door == 'rows')} different lists" in data.info.source
    assert "without training rows: class 'worse' (1 of 4 test rows)" in data.info.source


def test_numbers_without_class_names_are_read_by_the_only_list_or_refused(tmp_path):
    plain, named = label_table([0, 1, 1]), label_table([1, 0], ["good", "bad"])
    words = label_table(["bad", "good", "0"])
    for number, (train, test) in enumerate([(plain, named), (named, plain), (words, named)]):
        folder = write_tables(tmp_path / str(number), {"train": train, "test": test})
        data = prepare_own("table", folder, tmp_path)
        for split, table in (("train", train), ("test", test)):
            spelled = {0: "good", 1: "bad", "0": "good"}
            wanted = [spelled.get(v, v) for v in table.column("label").to_pylist()]
            assert by_name(data, split) == wanted
        assert ", labels of 1 of 2 tables read by the class names of " in data.info.source
    other = label_table([1, 0], ["bad", "good"])
    folder = write_tables(tmp_path / "x", {"train-0": named, "train-1": other, "test": plain})
    refused(
        r"test.parquet: column 'label' holds numbers without class names, and the class names of "
        r"other tables differ: .*train-0.parquet \(good, bad\) and .*train-1.parquet \(bad, good\)",
        "table", folder, tmp_path,
    )  # fmt: skip
    folder = write_tables(tmp_path / "y", {"train": named, "test": label_table([0, 2], ["a", "b"])})
    refused(r"test.parquet, row 1: label is 2, outside 0..1", "table", folder, tmp_path)


def test_minus_one_marks_a_row_without_label_where_the_hub_says_so(tmp_path):
    table = label_table([0, -1, 1, 0, 1, -1], ["good", "bad"])
    folder = write_tables(tmp_path / "some", {"train": table})
    refused(r"label .* is missing in 2 of 6 rows \(rows 1, 5\)", "table", folder, tmp_path)
    data = prepare_own("table", folder, tmp_path, skip_broken=True)
    assert sorted(by_name(data, "train") + by_name(data, "test")) == ["bad", "bad", "good", "good"]
    none = label_table([-1, -1])
    folder = write_tables(tmp_path / "none", {"train": table.slice(2, 3), "test": none})
    refused(r"test.parquet: all labels of the test split are -1", "table", folder, tmp_path)
    validation = label_table([1, 0], ["good", "bad"])
    rows = {"train": table.slice(2, 3), "validation": validation, "test": none}
    data = prepare_own("rows", store_rows(rows, tmp_path / "c", {}), tmp_path)
    assert by_name(data, "test") == ["bad", "good"]


BIG = 2**63


@pytest.mark.parametrize(
    ("labels", "kind", "classes"),
    [
        ([BIG, BIG + 1] * 3, pa.uint64(), [str(BIG), str(BIG + 1)]),
        ([-1, 1] * 3, pa.int64(), ["-1", "1"]),
        ([-10, 2, -9] * 2, pa.int8(), ["-10", "-9", "2"]),
    ],
)
def test_any_integer_is_a_name(tmp_path, labels, kind, classes):
    table = label_table(labels, kind=kind)
    for name in ("client", "group"):
        table = table.append_column(name, table.column("label"))
    file, lines = tmp_path / "x.parquet", tmp_path / "x.jsonl"
    pq.write_table(table, file)
    lines.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    rows = store_rows(table, tmp_path / "c", {})
    for door, path in (("table", file), ("table", lines), ("rows", rows)):
        info = prepare_own(door, path, tmp_path).info
        assert [list(names) for names in (info.classes, info.clients, info.groups)] == [classes] * 3


@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [
        ((["a", "b"], None), ([1, 2], pa.uint64()), None),
        (([1, 2], None), ([BIG, 1], pa.uint64()), ["1", "2", str(BIG)]),
        (([1, 2], None), ([1.5, 1.0], pa.float64()), ["1", "1.5", "2"]),
        (([1.0, 2.0], None), ([1, 2], pa.int32()), ["1", "2"]),
    ],
)
def test_numbers_have_one_spelling_in_all_tables(tmp_path, train, test, classes):
    tables = {"train": label_table(train[0] * 3), "test": label_table(test[0] * 3, kind=test[1])}
    folder = write_tables(tmp_path / "data", tables)
    if classes is None:
        refused(r"column 'label' has different types in the splits", "table", folder, tmp_path)
    else:
        assert list(prepare_own("table", folder, tmp_path).info.classes) == classes


def test_names_in_two_unicode_forms_are_one_name(tmp_path):
    composed, decomposed = "Caf\u00e9", "Cafe\u0301"
    rows = [
        {"b\u00e4r": f"t{n}", "label": n % 2 and name, "client": name, "group": name}
        for n, name in enumerate([composed, decomposed, decomposed, composed] * 2)
    ]
    rows = [row | {"label": row["label"] or "bar"} for row in rows]
    file = write_rows(tmp_path / "x.csv", rows)
    for column in ("b\u00e4r", "ba\u0308r"):
        data = prepare_own("table", file, tmp_path, columns={"text": column})
        assert data.info.classes == ("Caf\u00e9", "bar")
        assert data.info.clients == data.info.groups == ("Caf\u00e9",)
        for name, count in (("label", 2), ("client", 4), ("group", 4)):
            note = f", {count} values of column '{name}' changed to the Unicode form NFC"
            assert note in data.info.source


def test_class_folders_in_two_unicode_forms_are_one_class(tmp_path):
    for split, name in (("train", "Caf\u00e9"), ("test", "Cafe\u0301")):
        for number in range(3):
            paint(tmp_path / "photos" / split / name / f"{number}.png", COLORS["red"])
            paint(tmp_path / "photos" / split / "bar" / f"{number}.png", COLORS["green"])
    data = prepare_own("images", tmp_path / "photos", tmp_path)
    assert data.info.classes == ("Caf\u00e9", "bar")
    assert sorted(data.train.labels) == sorted(data.test.labels)
    assert ", the names of 1 class folder changed to the Unicode form NFC" in data.info.source
    assert "folders below" not in data.info.source


def test_classes_without_training_rows_are_named(tmp_path):
    folder = tmp_path / "data"
    write_rows(folder / "train.csv", [{"text": "t", "label": x} for x in ["good", "bad"] * 3])
    write_rows(folder / "test.csv", [{"text": "t", "label": x} for x in ["good", "meh", "meh"]])
    data = prepare_own("table", folder, tmp_path)
    assert data.info.source.endswith(", without training rows: class 'meh' (2 of 3 test rows)")
    for split, names in {"train": "abc", "test": "acdd"}.items():
        for number, name in enumerate(names):
            paint(tmp_path / "photos" / split / name / f"{number}.png", COLORS["red"])
    data = prepare_own("images", tmp_path / "photos", tmp_path)
    assert ", without training rows: class 'd' (2 of 4 test rows)" in data.info.source


RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("labels", "doubt"),
    [
        (RNG.random(300) * 5, r"300 of them in one row alone, all numbers, such as .* regression"),
        (np.round(RNG.random(900) * 5, 1), r"all numbers, such as \d\.\d: .* regression"),
        (RNG.permutation(10**6)[:300], r"300 different labels in 300 rows, .* regression"),
        (["The answer to this is long. " * 3 + str(n) for n in range(50)], "are texts to write"),
        ([f"id{n}" for n in range(50)], "a class needs several rows to be learned"),
        # These are classes.
        ([f"id{n}" for n in range(15)], ""),
        (np.arange(600) % 10 / 2, ""),  # half stars
        ([f"person {n % 6000}" for n in range(12_000)], ""),
        ([f"person {n}" for n in range(409)] + [f"p {n % 168}" for n in range(916)], ""),  # LFW
        ([f"{n % 30}.{n % 7}.1" for n in range(600)], ""),
        (np.arange(100).repeat(3), ""),
    ],
)
def test_labels_that_are_no_classes_are_doubted(labels, doubt):
    classes, numbers = np.unique(np.array(labels).astype(str), return_inverse=True)
    note, found = question_labels(classes.tolist(), numbers)
    assert bool(found) == bool(doubt) and re.search(doubt, found)
    assert not found or f"{len(classes)} different labels in {len(labels)} rows" in note


@pytest.mark.parametrize("model", ["bert-tiny", "t5-tiny", "llama-tiny"])
def test_a_table_of_scores_is_refused_unless_the_task_reads_numbers(tmp_path, model, monkeypatch):
    rows = [{"text": f"t{n}", "label": n / 7} for n in range(60)]
    data = prepare_own("table", write_rows(tmp_path / "x.csv", rows), tmp_path)
    backbone = Backbone.of(ModelConfig(name=model, init="random"), Places(tmp_path, None))
    task = TaskConfig(template="{text} is")
    with pytest.raises(InputError, match=r"^table:.*x\.csv: 60 different labels in 60 rows, 60 of"):
        build_task(task, data.info, backbone)
    if model == "bert-tiny":
        monkeypatch.setattr(SequenceClassification, "any_labels", True)
        assert build_task(task, data.info, backbone).num_classes == 60


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "label": [[1, 2]]}, r"list<.*one value a row; .*\(multi-label\) or one"),
        ({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}, r"chosen hold preferences, for wh"),
        ({"tokens": [["a"]], "ner_tags": [[1]]}, r"ner_tags hold a label for each token, for wh"),
        ({"image": ["a"], "objects": [{"bbox": [1]}]}, r"objects hold objects in images, for whic"),
        ({"text": ["a"], "body": ["b"]}, r"columns are text, body; set those of image and label"),
    ],
)
def test_a_task_that_is_not_there_is_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    refused(message, "table", tmp_path / "x.parquet", tmp_path)


def gray_values(bits=8):
    """Twelve gray images of 8x8, the first one all black."""
    values = np.random.default_rng(0).integers(0, 256, (12, 8, 8))
    values[0] = 0
    return (values * 257 if bits == 16 else values).astype(np.uint16 if bits == 16 else np.uint8)


def save_classes(root, arrays, suffix):
    for number, array in enumerate(arrays):
        save(array, root / "abc"[number % 3] / f"{number}.{suffix}")
    return root


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_images_of_16_bits_are_those_of_8(tmp_path, suffix):
    found = [
        prepare_own("images", save_classes(tmp_path / f"{b}", gray_values(b), suffix), tmp_path)
        for b in (8, 16)
    ]
    assert found[0].fingerprint == found[1].fingerprint and found[1].info.image_shape == (1, 8, 8)
    assert "16" not in found[0].info.source.rpartition("/")[2]
    assert ", 12 of 12 images scaled from 16 to 8 bits" in found[1].info.source


@pytest.mark.parametrize("form", ["pillow", "bytes", "datasets"])
def test_images_of_16_bits_in_rows_and_in_predictions_are_those_of_8(tmp_path, form):
    pixels = []
    for bits in (8, 16):
        images = [Image.fromarray(array) for array in gray_values(bits)]
        if form != "pillow":
            images = [encode_image(image) for image in images]
        rows = {"image": images, "label": [n % 3 for n in range(12)]}
        if form == "datasets":
            features = datasets.Features(
                {"image": datasets.Image(), "label": datasets.Value("int64")}
            )
            rows = datasets.Dataset.from_dict(rows, features)
        data = prepare_own("rows", store_rows(rows, tmp_path / "c", {}), tmp_path)
        passed = rows if form == "datasets" else images
        pixels.append([data.fingerprint, input_columns(data.info, {}, passed)["pixels"].tolist()])
    assert pixels[0] == pixels[1]
    assert np.array_equal(np.squeeze(pixels[0][1]), gray_values())


def test_a_value_between_two_levels_is_rounded(tmp_path):
    image = Image.fromarray(np.full((8, 8), 32768, np.uint16))
    turned = encode_image(Image.frombytes("I;16B", (8, 8), b"\x80\x00" * 64))
    pixels = resize_images([(encode_image(image), "a"), (turned, "b")], (1, 8, 8))
    assert np.unique(pixels).tolist() == [128]


def test_pixels_of_unknown_range_are_refused_by_name(tmp_path):
    floats, wide = gray_values().astype(np.float32) / 255, gray_values().astype(np.int32) * 300
    root = save_classes(tmp_path / "floats", floats[:1], "tif")
    save_classes(root, gray_values()[1:], "png")
    message = r"floats/a/0.tif: pixels of 32-bit floats, of which .*; write 8 or 16 bits; remove it"
    refused(message, "images", root, tmp_path)
    assert len(prepare_own("images", root, tmp_path, skip_broken=True).info.skipped) == 1
    root = save_classes(tmp_path / "wide", wide, "tif")
    message = r"12 images cannot be read: .*wide/a/0.tif.*; write 8 or 16 bits where pixels are 32"
    refused(message, "images", root, tmp_path)
    root = save_classes(tmp_path / "12bits", gray_values().astype(np.uint16) * 16, "png")
    message = r"12 images of 16 bits have values of at most 4,080 of 65,535, .* 16 would be left"
    refused(message, "images", root, tmp_path)
    for array in (floats, wide):
        with pytest.raises(InputError, match=r"an image: pixels of 32-bit"):
            store_rows({"image": [Image.fromarray(array[0])], "label": [0]}, tmp_path, {})
