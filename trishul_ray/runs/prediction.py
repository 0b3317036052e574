"""Predict with a trained model, from rows as its dataset has them.

Rows take the way of the test rows of the run: the same columns, image size, prompt and tokens.

Shapes: N rows, K classes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from trishul_ray.adapters.model import Trained
from trishul_ray.data.columns import get_column, read_texts
from trishul_ray.data.conversations import LAYOUTS, plain_messages
from trishul_ray.data.dataset import LABELLED, Column, DatasetInfo, Split, write_split
from trishul_ray.data.images import NamedImage, resize_images
from trishul_ray.data.python_rows import encode_image, is_image, to_table
from trishul_ray.errors import InputError
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.workbench import ModelBench
from trishul_ray.runs.export import TrainedRun
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.tasks.base import Classification

#: Columns of texts that rows of questions must have.
_QUESTIONS = ("question", "context")

_Read = TypeVar("_Read")


def predict(run: TrainedRun, rows: Any, *, batch_size: int = 64) -> list[str]:
    """Return the class of every row, by name; of a question the answer.

    ``rows`` are texts or images alone, or rows with columns, as a dataset would be passed.
    """
    task, classes = run.bench.task, run.bench.info.classes
    parts = _predict(
        run, rows, batch_size, lambda batch: task.respond(run.bench.model, batch, classes)
    )
    return [answer for part in parts for answer in part]


def predict_probabilities(run: TrainedRun, rows: Any, *, batch_size: int = 64) -> np.ndarray:
    """Return the probability of every class, float32 [N, K], in the order of the run's classes.

    Raises:
        InputError: These are no rows of the run's dataset, or the task writes texts.
    """
    task = run.bench.task
    if not isinstance(task, Classification):
        raise InputError(
            f"probabilities: task {type(task).__name__} writes a text, and has no "
            "probabilities of classes"
        )

    def logits_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return task.class_logits(task.predict(run.bench.model, batch)).float().cpu()

    logits = _predict(run, rows, batch_size, logits_of)
    return torch.cat(logits).softmax(dim=1).numpy()


def _predict(
    run: TrainedRun,
    rows: Any,
    batch_size: int,
    read: Callable[[Mapping[str, torch.Tensor]], _Read],
) -> list[_Read]:
    """Return what ``read`` makes of every prepared batch, with the run's model bound."""
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size}: must be at least 1")
    bench, trained = run.bench, run.trained
    task = bench.task
    columns = _encoded(run, input_columns(bench.info, bench.settings.data.columns, rows))
    count = len(next(iter(columns.values())))
    found: list[_Read] = []
    with computing(bench, trained):
        for start in range(0, count, batch_size):
            stored = {
                k: torch.from_numpy(v[start : start + batch_size]) for k, v in columns.items()
            }
            batch = task.prepare_batch(stored, bench.device, bench.dtype)
            found.append(read(batch))
    return found


@contextmanager
def computing(bench: ModelBench, trained: Trained) -> Iterator[None]:
    """Let a model compute as in its run inside, without gradients."""
    with deterministic(bench.settings), torch.inference_mode():
        bench.model.bind(trained)
        try:
            yield
        finally:
            bench.model.unbind()


def input_columns(info: DatasetInfo, names: Mapping[str, str], rows: Any) -> dict[str, Column]:
    """Return the columns of a dataset's rows that a model reads, or raise an InputError.

    ``names`` are ``data.columns``; ``rows`` texts or images alone, or rows with columns.
    """
    wanted = info.fields or {"image": ("image",), "qa": _QUESTIONS}.get(info.kind, ())
    if isinstance(rows, torch.Tensor) or (isinstance(rows, np.ndarray) and info.kind == "image"):
        rows = _batch(rows, info)
    if isinstance(rows, str | bytes | Path) or is_image(rows):
        raise InputError("predict: pass a list of rows, even of one")
    alone = not isinstance(rows, Mapping | pa.Table) and not hasattr(rows, "columns")
    if alone and not hasattr(rows, "features"):
        rows = list(rows)
        if not rows:
            raise InputError("predict: there are no rows")
        if not isinstance(rows[0], Mapping):
            if info.kind == "image":
                return {"pixels": _read_images(rows, info)}
            if info.fields == ("messages",):
                rows = [[{"role": "user", "content": text}] for text in rows]
            rows = {wanted[0]: rows}
    if isinstance(rows, Mapping):
        rows = {name: list(values) for name, values in rows.items()}
    table = to_table(rows)
    if info.kind == "instruction":
        return _instructions(table, info, names)
    found = {c: names.get(c, c) for c in wanted}
    found = {c: name if name in table.column_names else c for c, name in found.items()}
    missing = [c for c in found.values() if c not in table.column_names]
    if missing:
        raise InputError(
            f"predict: rows of dataset {info.name} have the columns {', '.join(wanted)}; these "
            f"have {', '.join(table.column_names)}"
        )
    if info.kind == "image":
        values = get_column(table, found["image"], "predict").to_pylist()
        return {"pixels": _read_images(values, info)}
    return {c: read_texts(table, name, "predict") for c, name in found.items()}


def _instructions(
    table: pa.Table, info: DatasetInfo, names: Mapping[str, str]
) -> dict[str, Column]:
    """Return rows to answer as a dataset has them, with a dash for the answer.

    A row needs an instruction; its input may be missing. A conversation ends with the user. Columns
    may have the names of any layout.
    """

    def column(name: str) -> str | None:
        known = (names.get(name), name, *(layout.get(name) for layout in LAYOUTS))
        return next((found for found in known if found in table.column_names), None)

    first = column(info.fields[0])
    if first is None:
        raise InputError(
            f"predict: rows of dataset {info.name} have the columns {', '.join(info.fields)}; "
            f"these have {', '.join(table.column_names)}"
        )
    if info.fields == ("messages",):
        asked = [_with_dash(row) for row in table.column(first).to_pylist()]
        where = [f"predict, row {row}" for row in range(len(asked))]
        return {"messages": plain_messages(asked, where, first)}
    found: dict[str, Column] = {"instruction": read_texts(table, first, "predict")}
    if "input" in info.fields:
        name = column("input")
        blank = pa.array([""] * len(table), pa.large_string())
        found["input"] = blank if name is None else read_texts(table, name, "predict")
    return found | {"output": pa.array(["-"] * len(table), pa.large_string())}


def _with_dash(messages: Any) -> Any:
    """Return a list of messages, or its JSON text, with a dash for the answer; others as it is."""
    with suppress(ValueError):
        messages = json.loads(messages) if isinstance(messages, str) else messages
    answer = {"role": "assistant", "content": "-"}
    return [*messages, answer] if isinstance(messages, list) else messages


def _batch(images: Any, info: DatasetInfo) -> list[np.ndarray]:
    """Return a batch of images as a list of arrays uint8 [H, W] or [H, W, C].

    One image, or anything but images of bytes, is an InputError.
    """
    array = np.asarray(images.detach().cpu() if isinstance(images, torch.Tensor) else images)
    shape = f"{array.dtype} {list(array.shape)}"
    expected = "it must be uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], with values of 0 to 255"
    if info.kind != "image":
        raise InputError(f"predict: an array {shape}, but dataset {info.name} does not hold images")
    if array.dtype == object:
        return list(array)
    if array.ndim == 4 and array.shape[-1] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    one_in_color = array.ndim == 3 and array.shape[-1] == 3
    if array.ndim == 2 or one_in_color:
        raise InputError(f"predict: one image {shape}: pass a list of rows, even of one")
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise InputError(f"predict: an array {shape}; {expected}")
    return list(array)


def _read_images(values: Sequence[Any], info: DatasetInfo) -> np.ndarray:
    """Return images of any form as the dataset has them, uint8 [N, C, H, W]."""
    images = [_encoded_image(value, f"predict, row {row}") for row, value in enumerate(values)]
    return resize_images(images, info.image_shape)


def _encoded_image(value: Any, where: str) -> NamedImage:
    """Return an image as bytes or as the path of its file, and its name in messages."""
    if isinstance(value, Mapping):
        value = value["bytes"]
    if isinstance(value, str | Path):
        return Path(value).expanduser(), str(value)
    if is_image(value):
        value = encode_image(value)
    if not isinstance(value, bytes):
        raise InputError(f"{where}: a {type(value).__name__} is no image")
    return value, where


def _encoded(run: TrainedRun, columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """Return the columns as the task trains on them; what a row is scored by is left empty."""
    info, task = run.bench.info, run.bench.task
    count = len(next(iter(columns.values())))
    labels = np.zeros(count, dtype=np.int64)
    if task.encoder is None:
        return {**{k: np.asarray(v) for k, v in columns.items()}, "label": labels}
    if info.kind == "qa":
        columns = {**columns, "answers": pa.array(['["-"]'] * count, pa.large_string())}
    elif info.kind in LABELLED:
        columns = {**columns, "label": labels}
    with scratch_folder("predict") as scratch:
        file = Path(scratch) / "rows.arrow"
        write_split(file, columns, info)
        split = Split(file)
        encoded = {k: np.array(v) for k, v in task.encoder.encode(split, lambda done: None).items()}
    return encoded | {"label": labels} if info.kind in LABELLED else encoded
