"""User files: tables in each format, and folders of images."""

import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0)}


def prepare_user(name, path, cache, hub=None, **fields):
    config = DataConfig(name=name, path=None if path is None else str(path), **fields)
    return prepare(config, cache=cache / "cache", hub=hub)


def rejected(message, *args, **fields):
    """Check that preparing user data ends with an error of one line."""
    with pytest.raises(InputError, match=message) as caught:
        prepare_user(*args, **fields)
    assert "\n" not in str(caught.value)


def encoded(file, rows):
    """Write rows in the format of a file's suffix; return the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".jsonl":
        file.write_text("\ufeff" + "\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        options = pa.csv.WriteOptions(delimiter="\t" if file.suffix == ".tsv" else ",")
        pa.csv.write_csv(pa.Table.from_pylist(rows), file, options)
    return file


def save(image, file, **how):
    """Save an image, or an array of pixels, in a folder that need not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, **how)
    return file


def paint(file, color, size=(8, 6), mode="RGB"):
    save(Image.new("RGB", size, color).convert(mode), file)


def paint_classes(root, count=4):
    """Draw some images of each class; return the folder."""
    for name, color in COLORS.items():
        for number in range(count):
            paint(root / name / f"{number}.png", color)
    return root
