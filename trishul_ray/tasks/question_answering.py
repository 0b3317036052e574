"""Extractive question answering as text to text, scored by SQuAD's exact match and F1.

Answers are compared in lower case, without punctuation, articles and extra white space. The best
match among several reference answers counts (Rajpurkar et al. 2016). F1 is the mean over all
questions, regardless of their sub-dataset.

Legend: N rows, b rows of a batch, T tokens of the target, R bytes of references.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trishul_ray.errors import CorruptFileError
from trishul_ray.runtime.lazy import torch, torchmetrics
from trishul_ray.tasks.base import register
from trishul_ray.tasks.text import CHUNK, read_texts
from trishul_ray.tasks.text2text import Text2Text

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.data.dataset import Split


@register("text2text")
class QuestionAnswering(Text2Text):
    """Generate the answer to a question from its context; see :class:`Text2Text` for arguments."""

    reads = "qa"
    fields_read = frozenset({"max_length", "target_length", "template"})
    encoding = "AnswerEncoder"
    row_metrics = ("f1", "exact_match")

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode the inputs, the first answer of each row as its target, and ``references``.

        An answer that is too long is truncated and still ends with the end token. ``references``
        uint8 [N, R] has all answers as JSON in UTF-8, padded with zeros. Training rows, which are
        many and never scored, have no references.
        """
        tokens, limit = self.tokens, self.target_length

        def rows(start: int, stop: int) -> list[list[int]]:
            first = [answers[0] for answers in read_answers(split, start, stop)]
            encoded = tokens.encode(first, add_special_tokens=False)["input_ids"]
            return [[*ids[: limit - 1], tokens.eos_id] for ids in encoded]

        targets, lengths = tokens.padded_columns(
            len(split), limit, rows, lambda done: progress(done / 4)
        )
        columns = super().encode(split, lambda done: progress(0.25 + 0.75 * done))
        columns |= {"target_ids": targets, "target_length": lengths}
        if split.path.stem != "train":
            columns["references"] = pack_answers(split)
        return columns

    def score_texts(self, texts: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute ``f1`` and ``exact_match`` [b], each the maximum over a row's references."""
        scores = np.zeros((2, len(texts)))
        for row, (text, packed) in enumerate(zip(texts, batch["references"], strict=True)):
            answers = {"text": unpack_answers(packed.numpy())}
            target: dict[str, Any] = {"answers": answers, "id": "0"}
            result = torchmetrics.functional.text.squad(
                {"prediction_text": text, "id": "0"}, target
            )
            scores[:, row] = float(result["f1"]) / 100, float(result["exact_match"]) / 100
        return {"f1": torch.from_numpy(scores[0]), "exact_match": torch.from_numpy(scores[1])}


def read_answers(split: Split, start: int, stop: int) -> list[list[str]]:
    """Read all answers of rows ``start`` up to ``stop``; raise CorruptFileError on other rows."""
    rows = []
    for row, text in enumerate(read_texts(split, "answers", start, stop), start):
        try:
            answers = json.loads(text)
        except ValueError:
            answers = None
        if not (isinstance(answers, list) and answers and all(isinstance(a, str) for a in answers)):
            raise CorruptFileError(
                f"dataset {split.info.name!r}, {split.path.stem} row {row}: answers={text[:40]!r} "
                "is not a list of at least one text"
            )
        rows.append(answers)
    return rows


def pack_answers(split: Split) -> np.ndarray:
    """Encode the answers of every row as JSON in UTF-8, padded with zeros: uint8 [N, R]."""
    count = len(split)
    packed = [
        json.dumps(list(dict.fromkeys(answers)), ensure_ascii=False).encode()
        for start in range(0, count, CHUNK)
        for answers in read_answers(split, start, min(start + CHUNK, count))
    ]
    table = np.zeros((count, max(map(len, packed), default=1)), dtype=np.uint8)
    for row, text in enumerate(packed):
        table[row, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    return table


def unpack_answers(row: np.ndarray) -> list[str]:
    """Decode the answers in one row of :func:`pack_answers`, uint8 [R]."""
    answers: list[str] = json.loads(row.tobytes().rstrip(b"\0"))
    return answers
