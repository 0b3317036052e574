"""Rows passed from Python: one dataset, whatever form they come in."""

import io
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import DAMAGE
from PIL import Image

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.passed_rows import encode_image, store_rows, to_splits, to_table
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError
from trishul_ray.storage.integrity import SEAL, take_remarks

COLUMNS = {"text": ["b", "a", "c"], "label": [1, 0, 1]}


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": t, "label": n} for t, n in zip(*COLUMNS.values(), strict=True)],
        pd.DataFrame(COLUMNS),
        pa.table(COLUMNS),
        datasets.Dataset.from_dict({k: [v[1], v[0], v[2]] for k, v in COLUMNS.items()}).select(
            [1, 0, 2]
        ),
        {"train": COLUMNS},
        {"text": np.array(COLUMNS["text"]), "label": np.array(COLUMNS["label"])},
    ],
)
def test_the_same_rows_have_one_folder(rows, tmp_path):
    folder = store_rows(rows, tmp_path, {})
    assert folder == store_rows(COLUMNS, tmp_path, {})
    assert pq.read_table(folder / "train.parquet").to_pydict() == COLUMNS
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_damaged_rows_are_written_again(tmp_path):
    folder = store_rows(COLUMNS, tmp_path, {})
    for name in ("train.parquet", SEAL):
        content = (folder / name).read_bytes()
        for damage in DAMAGE:
            (folder / name).write_bytes(DAMAGE[damage](content))
            assert store_rows(COLUMNS, tmp_path, {}) == folder
            assert (folder / name).read_bytes() == content
            (said,) = take_remarks()
            assert f"{folder} is damaged (" in said


def test_other_values_orders_names_and_splits_are_other_folders(tmp_path):
    others = [
        COLUMNS,
        {**COLUMNS, "label": [1, 0, 0]},
        {k: v[::-1] for k, v in COLUMNS.items()},
        {"words": COLUMNS["text"], "label": COLUMNS["label"]},
        {"train": COLUMNS, "test": COLUMNS},
        datasets.Dataset.from_dict(
            COLUMNS,
            datasets.Features(
                {
                    "text": datasets.Value("string"),
                    "label": datasets.ClassLabel(names=["no", "yes"]),
                }
            ),
        ),
    ]
    assert len({store_rows(rows, tmp_path, {}) for rows in others}) == len(others)


def test_images_are_stored_as_bytes_wherever_they_came_from(tmp_path):
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    (tmp_path / "a.png").write_bytes(encode_image(pixels))
    image = Image.fromarray(pixels)
    forms = [[pixels], [image], [encode_image(pixels)], [str(tmp_path / "a.png")]]
    tables = [
        pq.read_table(
            store_rows({"picture": f}, tmp_path / "c", {"image": "picture"}) / "train.parquet"
        )
        for f in forms
    ]
    assert {table.column("picture")[0].as_py() for table in tables} == {encode_image(pixels)}
    features = datasets.Features({"picture": datasets.Image()})
    dataset = datasets.Dataset.from_dict({"picture": [str(tmp_path / "a.png")]}, features)
    (stored,) = to_table(dataset).column("picture").to_pylist()
    assert stored["bytes"] == encode_image(pixels)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "rows of type int: pass a Hugging Face Dataset"),
        ([], "the rows passed from Python: there are none, the list is empty"),
        ({"a": [1, 2], "b": [1]}, r"different numbers of rows \('a' 2, 'b' 1\)"),
        ({"a": "word"}, "column 'a' is of type str, not a list of values"),
        (
            {"label": [None, 1, float("nan"), "b"]},
            r"column 'label' has values of different types \(1 in row 1, 'b' in row 3\)",
        ),
        (
            pd.DataFrame([["a", 0, 1]], columns=["text", "label", "label"]),
            r"Python: 2 columns are called 'label' \(columns 2, 3 of 3\); rename or remove all but",
        ),
        ({"test": COLUMNS}, "have the splits test; a train split is needed"),
        ({"image": [np.zeros((4, 4, 2), np.uint8)]}, r"uint8 \(4, 4, 2\); it must be uint8"),
        ({"image": [np.zeros((4, 4))]}, r"float64 \(4, 4\)"),
    ],
)
def test_what_is_no_table_is_refused(rows, message):
    with pytest.raises(InputError, match=message):
        to_splits(rows)


def test_an_image_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"image '.*none\.png' cannot be read: No such file"):
        store_rows({"image": [str(tmp_path / "none.png")], "label": ["a"]}, tmp_path, {})


def test_a_row_without_an_image_is_named_or_skipped(tmp_path):
    paths = []
    for n in range(4):
        paths.append(str(tmp_path / f"{n}.png"))
        Path(paths[-1]).write_bytes(encode_image(np.full((4, 4), n, np.uint8)))
    rows = pd.DataFrame({"image": [*paths, float("nan")], "label": [0, 1, 0, 1, 1]})
    config = DataConfig(name="rows", path=str(store_rows(rows, tmp_path, {})))
    with pytest.raises(InputError, match=r"image \(column 'image'\) is missing in 1 of 5 rows"):
        prepare(config, cache=tmp_path, hub=None)
    config = config.model_copy(update={"skip_broken": True})
    data = prepare(config, cache=tmp_path, hub=None)
    assert len(data.train) + len(data.test) == 4
    assert data.info.skipped == ("the rows passed from Python, row 4",)


@pytest.mark.parametrize("suffix", ["PNG", "TIFF"])
def test_a_photo_is_encoded_as_it_is_seen(suffix):
    """A phone says in EXIF how the sensor's pixels are turned, which a PNG file would lose."""
    seen = np.array([[10, 20, 30], [40, 50, 60]], np.uint8)
    sink = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(seen))).save(sink, suffix, exif=exif)
    with Image.open(sink) as photo, Image.open(io.BytesIO(encode_image(photo))) as stored:
        assert np.asarray(stored).tolist() == seen.tolist()
