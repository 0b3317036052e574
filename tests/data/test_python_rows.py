"""Rows passed from Python: one dataset in any form."""

import io
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from user_files import prepare_user, rejected

from trishul_ray.data.user.python_rows import encode_image, store_rows, to_splits, to_table
from trishul_ray.errors import InputError

COLUMNS = {"text": ["b", "a", "c"], "label": [1, 0, 1]}
NAMED = datasets.Features(
    {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
)


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": t, "label": n} for t, n in zip(*COLUMNS.values(), strict=True)],
        pd.DataFrame(COLUMNS),
        pa.table(COLUMNS),
        pa.concat_tables([pa.table(COLUMNS).slice(0, 1), pa.table(COLUMNS).slice(1)]),
        datasets.Dataset.from_dict({k: [v[1], v[0], v[2]] for k, v in COLUMNS.items()}).select(
            [1, 0, 2]
        ),
        {"train": COLUMNS},
        {"text": np.array(COLUMNS["text"]), "label": np.array(COLUMNS["label"])},
    ],
)
def test_equal_rows_have_one_folder(rows, tmp_path):
    folder = store_rows(rows, tmp_path, {})
    assert folder == store_rows(COLUMNS, tmp_path, {})
    assert pq.read_table(folder / "train.parquet").to_pydict() == COLUMNS


def test_different_rows_have_different_folders(tmp_path):
    others = [
        COLUMNS,
        {**COLUMNS, "label": [1, 0, 0]},
        {k: v[::-1] for k, v in COLUMNS.items()},
        {"words": COLUMNS["text"], "label": COLUMNS["label"]},
        {"train": COLUMNS, "test": COLUMNS},
        datasets.Dataset.from_dict(COLUMNS, NAMED),
    ]
    assert len({store_rows(rows, tmp_path, {}) for rows in others}) == len(others)


def test_class_names_and_validation_rows_are_read(tmp_path):
    named = datasets.Dataset.from_dict(COLUMNS, NAMED)
    hidden = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [-1, -1]}, NAMED)
    folder = store_rows({"train": named, "validation": named, "test": hidden}, tmp_path, {})
    data = prepare_user("rows", folder, tmp_path)
    assert data.info.classes == ("no", "yes") and data.test.labels.tolist() == [1, 0, 1]


def test_images_become_bytes_from_any_form(tmp_path):
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    (tmp_path / "a.png").write_bytes(encode_image(pixels))
    image = Image.fromarray(pixels)
    forms = [[pixels], [image], [encode_image(pixels)], [str(tmp_path / "a.png")]]
    folders = {store_rows({"picture": f}, tmp_path / "c", {"image": "picture"}) for f in forms}
    (folder,) = folders
    (stored,) = pq.read_table(folder / "train.parquet").column("picture").to_pylist()
    assert stored == encode_image(pixels)
    features = datasets.Features({"picture": datasets.Image()})
    dataset = datasets.Dataset.from_dict({"picture": [str(tmp_path / "a.png")]}, features)
    (row,) = to_table(dataset).column("picture").to_pylist()
    assert row["bytes"] == encode_image(pixels)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "HSV", "PA", "1"])
def test_images_of_any_mode_are_encoded(mode):
    with Image.open(io.BytesIO(encode_image(Image.new(mode, (4, 4))))) as image:
        assert image.format == "PNG" and image.size == (4, 4)


def test_scalars_of_torch_are_labels():
    assert to_table({"label": torch.tensor([1, 0])}).column("label").to_pylist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (3, "of type int, or empty; pass a Hugging Face Dataset"),
        ([], "of type list, or empty"),
        ([{"text": "a"}, 3], "the rows passed from Python: 'int' object"),
        ({"a": [1, 2], "b": [1]}, r"expected length 2 but got length 1"),
        ({"a": "word"}, "column 'a' is a str, not a list of values"),
        ({"label": [None, 1, float("nan"), "b"]}, r"column 'label': .*'b'"),
        (pd.DataFrame([["a", 0, 1]], columns=["text", "label", "label"]), r"named 'label'"),
        ({"test": COLUMNS}, "have the splits test; pass train and"),
        (
            datasets.DatasetDict({k: datasets.Dataset.from_dict(COLUMNS) for k in ("train", "x")}),
            "have the splits train, x; pass train and",
        ),
        (datasets.IterableDataset.from_generator(lambda: COLUMNS), "without streaming=True"),
        ({"image": [Image.new("F", (4, 4))]}, "32-bit"),
        ({"image": [Image.new("RGB", (0, 4))]}, "an image cannot be read"),
        ({"image": [np.zeros((4, 4, 2), np.uint8)]}, r"uint8 \(4, 4, 2\); it must be uint8"),
    ],
)
def test_rows_without_a_table_are_rejected(rows, message):
    with pytest.raises(InputError, match=message):
        to_splits(rows)


def test_missing_images_are_named_or_skipped(tmp_path):
    with pytest.raises(InputError, match=r"image '.*none\.png' cannot be read: No such file"):
        store_rows({"image": [str(tmp_path / "none.png")], "label": ["a"]}, tmp_path, {})
    paths = []
    for n in range(4):
        paths.append(str(tmp_path / f"{n}.png"))
        Path(paths[-1]).write_bytes(encode_image(np.full((4, 4), n, np.uint8)))
    rows = pd.DataFrame({"image": [*paths, float("nan")], "label": [0, 1, 0, 1, 1]})
    folder = store_rows(rows, tmp_path, {})
    rejected(r"image \(column 'image'\) is missing in 1 of 5 rows", "rows", folder, tmp_path)
    data = prepare_user("rows", folder, tmp_path, skip_broken=True)
    assert len(data.train) + len(data.test) == 4
    assert data.info.skipped == ("train row 4",)
