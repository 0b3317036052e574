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
from trishul_ray.data.user.python_rows import encode_image, is_image, to_table
from trishul_ray.errors import InputError
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.worker.context import ModelContext
from trishul_ray.runs.export import TrainedRun
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.tasks.base import Classification

#: Columns of texts that rows of questions must have.
_QUESTIONS = ("question", "context")

_Read = TypeVar("_Read")


def predict(run: TrainedRun, rows: Any, *, batch_size: int = 64) -> list[str]:
    """Return the class of every row, by name; of a question the answer.

    ``rows`` are only texts or only images, or rows with columns, as a dataset would be passed.
    """
    task, classes = run.context.task, run.context.info.classes
    parts = _predict(
        run, rows, batch_size, lambda batch: task.respond(run.context.model, batch, classes)
    )
    return [answer for part in parts for answer in part]


def predict_probabilities(run: TrainedRun, rows: Any, *, batch_size: int = 64) -> np.ndarray:
    """Return the probability of every class, float32 [N, K], in the order of the run's classes.

    Raises:
        InputError: The rows do not fit the run's dataset, or the task writes texts.
    """
    task = run.context.task
    if not isinstance(task, Classification):
        raise InputError(
            f"probabilities: task {type(task).__name__} writes a text, and has no "
            "probabilities of classes"
        )

    def logits_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return task.class_logits(task.predict(run.context.model, batch)).float().cpu()

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
    bench, trained = run.context, run.trained
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
def computing(bench: ModelContext, trained: Trained) -> Iterator[None]:
    """Let a model compute as in its run inside, without gradients."""
    with deterministic(bench.settings), torch.inference_mode():
        bench.model.bind(trained)
        try:
            yield
        finally:
            bench.model.unbind()


def input_columns(info: DatasetInfo, names: Mapping[str, str], rows: Any) -> dict[str, Column]:
    """Return the columns of a dataset's rows that a model reads, or raise an InputError.

    ``names`` are ``data.columns``. A row of instructions may have no input, its columns may have
    the names of any layout, and a dash stands for the answer.
    """
    fields = info.fields or {"image": ("image",), "qa": _QUESTIONS}.get(info.kind, ())
    table = rows
    if isinstance(rows, torch.Tensor) or (isinstance(rows, np.ndarray) and info.kind == "image"):
        table = rows = _batch(rows, info)
    if isinstance(rows, str | bytes | Path) or is_image(rows):
        raise InputError("predict: pass a list of rows, even of one")
    if isinstance(rows, Mapping):
        table = {name: list(values) for name, values in rows.items()}
    elif not (isinstance(rows, pa.Table) or hasattr(rows, "columns") or hasattr(rows, "features")):
        table = list(rows)
        if not table:
            raise InputError("predict: there are no rows")
        if not isinstance(table[0], Mapping):
            if info.kind == "image":
                return {"pixels": _read_images(table, info)}
            chats = [[{"role": "user", "content": text}] for text in table]
            table = {fields[0]: chats if fields == ("messages",) else table}
    table = to_table(table)
    layouts = LAYOUTS if info.kind == "instruction" else ()

    def column(field: str) -> str | None:
        known = (names.get(field), field, *(layout.get(field) for layout in layouts))
        return next((found for found in known if found in table.column_names), None)

    found = {field: name for field in fields if (name := column(field)) is not None}
    optional = {"input", "output"} if info.kind == "instruction" else set()
    if {*fields} - optional - found.keys():
        raise InputError(
            f"predict: rows of dataset {info.name} have the columns {', '.join(fields)}; these "
            f"have {', '.join(table.column_names)}"
        )
    if info.kind == "image":
        values = get_column(table, found["image"], "predict").to_pylist()
        return {"pixels": _read_images(values, info)}
    if fields == ("messages",):
        asked = [_with_dash(row) for row in table.column(found["messages"]).to_pylist()]
        where = [f"predict, row {row}" for row in range(len(asked))]
        return {"messages": plain_messages(asked, where, found["messages"])}
    read: dict[str, Column] = {
        field: read_texts(table, name, "predict")
        for field, name in found.items()
        if field != "output" or not optional
    }
    for field, text in (("input", ""), ("output", "-")):
        if field in optional & {*fields, "output"} - read.keys():
            read[field] = pa.array([text] * len(table), pa.large_string())
    return read


def _with_dash(messages: Any) -> Any:
    """Return a list of messages, or its JSON text, with a dash for the answer; others unchanged."""
    with suppress(ValueError):
        messages = json.loads(messages) if isinstance(messages, str) else messages
    answer = {"role": "assistant", "content": "-"}
    return [*messages, answer] if isinstance(messages, list) else messages


def _batch(images: Any, info: DatasetInfo) -> list[np.ndarray]:
    """Return a batch of images as a list of arrays uint8 [H, W] or [H, W, C]."""
    array = np.asarray(images.detach().cpu() if isinstance(images, torch.Tensor) else images)
    shape = f"{array.dtype} {list(array.shape)}"
    if info.kind != "image":
        raise InputError(f"predict: an array {shape}, but dataset {info.name} does not hold images")
    if array.dtype == object:
        return list(array)
    if array.ndim == 4 and array.shape[-1] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim == 2 or (array.ndim == 3 and array.shape[-1] == 3):
        raise InputError(f"predict: one image {shape}: pass a list of rows, even of one")
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        expected = "uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], with values of 0 to 255"
        raise InputError(f"predict: an array {shape}; it must be {expected}")
    return list(array)


def _read_images(values: Sequence[Any], info: DatasetInfo) -> np.ndarray:
    """Return images of any form as the dataset has them, uint8 [N, C, H, W]."""
    images: list[NamedImage] = []
    for row, value in enumerate(values):
        where, content = f"predict, row {row}", value["bytes"] if isinstance(value, dict) else value
        if isinstance(content, str | Path):
            images.append((Path(content).expanduser(), str(content)))
            continue
        content = encode_image(content) if is_image(content) else content
        if not isinstance(content, bytes):
            raise InputError(f"{where}: a {type(content).__name__} is not an image")
        images.append((content, where))
    return resize_images(images, info.image_shape)


def _encoded(run: TrainedRun, columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """Return the columns as the task trains on them; what a row is scored by is left empty."""
    info, task = run.context.info, run.context.task
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
