"""Predict with a trained model on rows with the columns of its dataset.

Rows are processed like the run's test rows: the same columns, image size, prompt and tokens.

Shapes: N rows, K classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from trishul_ray.adapters.model import Trained
from trishul_ray.data.columns import get_column, read_texts
from trishul_ray.data.conversations import LAYOUTS, plain_messages
from trishul_ray.data.dataset import LABELED, Column, DatasetInfo, Split, write_split
from trishul_ray.data.images import NamedImage, resize_images
from trishul_ray.data.user.python_rows import is_image, to_table
from trishul_ray.errors import InputError
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.worker.context import ModelContext
from trishul_ray.runs.export import TrainedRun
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.tasks.base import Classification

#: Text columns that question answering requires.
_QUESTIONS = ("question", "context")

_Read = TypeVar("_Read")


def predict(run: TrainedRun, rows: Any, *, batch_size: int = 64) -> list[str]:
    """Predict the class name, or generate the answer, of every row.

    ``rows`` are only texts, only images, or rows with columns in any form that a dataset may have.
    """
    task, classes = run.context.task, run.context.info.classes
    parts = _predict(
        run, rows, batch_size, lambda batch: task.respond(run.context.model, batch, classes)
    )
    return [answer for part in parts for answer in part]


def predict_probabilities(run: TrainedRun, rows: Any, *, batch_size: int = 64) -> np.ndarray:
    """Predict class probabilities, float32 [N, K], in the order of the run's classes.

    Raises:
        InputError: The rows do not fit the run's dataset, or the task generates text.
    """
    task = run.context.task
    if not isinstance(task, Classification):
        raise InputError(
            f"probabilities: task {type(task).__name__} generates text and has no class "
            "probabilities"
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
    """Apply ``read`` to every prepared batch, with the run's model bound."""
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size}: must be at least 1")
    context, trained = run.context, run.trained
    task = context.task
    columns = _encoded(run, input_columns(context.info, context.settings.data.columns, rows))
    count = len(next(iter(columns.values())))
    found: list[_Read] = []
    with computing(context, trained):
        for start in range(0, count, batch_size):
            stored = {
                k: torch.from_numpy(v[start : start + batch_size]) for k, v in columns.items()
            }
            batch = task.prepare_batch(stored, context.device, context.dtype)
            found.append(read(batch))
    return found


@contextmanager
def computing(context: ModelContext, trained: Trained) -> Iterator[None]:
    """Bind a trained model, and compute as in its run, without gradients."""
    with deterministic(context.settings), torch.inference_mode():
        context.model.bind(trained)
        try:
            yield
        finally:
            context.model.unbind()


def input_columns(info: DatasetInfo, names: Mapping[str, str], rows: Any) -> dict[str, Column]:
    """Select the columns of ``rows`` that the model reads, or raise an InputError.

    ``names`` is ``data.columns``. Rows of instructions may lack an input, and their columns may use
    the names of any layout. A dash replaces the missing response.
    """
    fields = info.fields or {"image": ("image",), "qa": _QUESTIONS}.get(info.kind, ())
    table = _table_of(rows, fields)
    instruction = info.kind == "instruction"

    def column(field: str) -> str | None:
        layouts = [layout.get(field) for layout in LAYOUTS] if instruction else []
        known = (names.get(field), field, *layouts)
        return next((name for name in known if name in table.column_names), None)

    parts = ("instruction", "input", "system", "history") if fields == ("messages",) else ()
    found = {field: name for field in (*fields, *parts) if (name := column(field)) is not None}
    optional = {"input", "output"} if instruction else set()
    if parts and "instruction" in found:
        optional.add("messages")
    if {*fields} - optional - found.keys():
        raise InputError(
            f"predict: dataset {info.name} requires the columns {', '.join(fields)}; these rows "
            f"have {', '.join(table.column_names)}"
        )
    if info.kind == "image":
        images = get_column(table, found["image"], "predict").to_pylist()
        named = [_named_image(image, f"predict, row {row}") for row, image in enumerate(images)]
        return {"pixels": resize_images(named, info.image_shape)}
    if fields == ("messages",):
        asked = table.select(list(found.values())).rename_columns(list(found)).to_pylist()
        where = [f"predict, row {row}" for row in range(len(asked))]
        return {"messages": plain_messages(list(map(_with_dash, asked)), where, "messages")[0]}
    read: dict[str, Column] = {
        field: read_texts(table, name, "predict")
        for field, name in found.items()
        if field != "output" or not instruction
    }
    for field, text in (("input", ""), ("output", "-")):
        if field in optional & {*fields, "output"} - read.keys():
            read[field] = pa.array([text] * len(table), pa.large_string())
    return read


def _table_of(rows: Any, fields: Sequence[str]) -> pa.Table:
    """Convert rows to a table. Rows without columns become the values of the first field."""
    if isinstance(rows, torch.Tensor):
        rows = rows.numpy(force=True)
    if isinstance(rows, np.ndarray) and (rows.ndim == 4 or (rows.ndim == 3 and rows.shape[2] != 3)):
        rows = list(rows)  # a batch of images
    if isinstance(rows, str | bytes | Path) or is_image(rows):
        raise InputError("predict: pass a list of rows, even for a single row")
    has_columns = isinstance(rows, Mapping) or hasattr(rows, "columns") or hasattr(rows, "features")
    if not has_columns:
        rows = list(rows)
        if not rows:
            raise InputError("predict: the list of rows is empty")
        if not isinstance(rows[0], Mapping):
            values = [str(each) if isinstance(each, Path) else each for each in rows]
            if fields == ("messages",):
                values = [[{"role": "user", "content": value}] for value in values]
            rows = {fields[0]: values}
    return to_table(rows)


def _named_image(value: Any, where: str) -> NamedImage:
    """Convert an image for :func:`resize_images`, from the bytes or the path of a file."""
    content = value["bytes"] if isinstance(value, dict) else value
    if isinstance(content, str):
        return Path(content).expanduser(), content
    if not isinstance(content, bytes):
        raise InputError(f"{where}: {type(content).__name__} is not an image")
    return content, where


def _with_dash(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a conversation, with a dash as the response."""
    text = "messages" not in row and isinstance(row["instruction"], str)
    return {**row, "output": "-" if text else [{"role": "assistant", "content": "-"}]}


def _encoded(run: TrainedRun, columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """Encode the columns as for training, with empty labels and answers."""
    info, task = run.context.info, run.context.task
    count = len(next(iter(columns.values())))
    labels = np.zeros(count, dtype=np.int64)
    if task.encoder is None:
        return {**{k: np.asarray(v) for k, v in columns.items()}, "label": labels}
    if info.kind == "qa":
        columns = {**columns, "answers": pa.array(['["-"]'] * count, pa.large_string())}
    elif info.kind in LABELED:
        columns = {**columns, "label": labels}
    with scratch_folder("predict") as scratch:
        file = Path(scratch) / "rows.arrow"
        write_split(file, columns, info)
        split = Split(file)
        encoded = {k: np.array(v) for k, v in task.encoder.encode(split, lambda done: None).items()}
    return encoded | {"label": labels} if info.kind in LABELED else encoded
