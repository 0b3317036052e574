"""A mirror with a few rows of public datasets, in the columns of their formats."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from PIL import Image

from trishul_ray.data.public import ImageRows, InstructionRows, QuestionRows, TextRows
from trishul_ray.runtime.random_streams import numpy_rng


def texts(rows):
    return [f"text {n}" for n in range(rows)]


def image_columns(rows, count, split):
    shape = (*rows.size, 3)
    pixels = numpy_rng(0, split).integers(0, 256, shape, np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).convert(rows.mode).save(sink, "PNG")
    picture = {"bytes": sink.getvalue(), "path": None}
    return {rows.image: [picture] * count, rows.label: [n % rows.classes for n in range(count)]}


def question_columns(rows, count, split):
    return {
        rows.subset: [rows.subsets[n % len(rows.subsets)] for n in range(count)],
        "question": texts(count),
        "context": texts(count),
        "answers": [["text"]] * count,
    }


def text_columns(rows, count, split):
    columns = {name: texts(count) for name in rows.fields}
    return columns | {rows.label: [n % len(rows.classes) for n in range(count)]}


def instruction_columns(rows, count, split):
    columns = {column: texts(count) for column in rows.names.values()}
    if rows.groups:
        columns[rows.names["group"]] = [rows.groups[n % len(rows.groups)] for n in range(count)]
    return columns


#: Supported formats of rows; tests of a dataset with another format write it themselves.
COLUMNS = {
    ImageRows: image_columns,
    InstructionRows: instruction_columns,
    QuestionRows: question_columns,
    TextRows: text_columns,
}


def write_table(file, columns):
    """Write a table in the format of the file's suffix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif file.suffix == ".json":
        file.write_text(json.dumps(table.to_pylist(), indent=2))
    elif file.suffix in (".csv", ".tsv"):
        delimiter = "\t" if file.suffix == ".tsv" else ","
        pa.csv.write_csv(table, file, pa.csv.WriteOptions(delimiter=delimiter))
    else:
        pq.write_table(table, file)


def write_mirror(folder, source, counts):
    """Write every split of a public dataset, with ``counts["train"]`` or ``counts["test"]`` rows.

    All splits except ``train`` are test splits.
    """
    for split in source.sizes:
        count = counts["train" if split == "train" or len(source.sizes) == 1 else "test"]
        columns = COLUMNS[type(source.rows)](source.rows, count, split)
        where = source.repo.file_patterns[0].format(split=split).replace("*", "00000-of-00001")
        write_table(folder / source.repo.repo / where, columns)
