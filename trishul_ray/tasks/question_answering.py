"""Extractive question answering as text to text; exact match and F1 as SQuAD defines them.

Answers are compared after lower-casing and without punctuation, articles and extra white space;
of several reference answers the one that fits best counts (Rajpurkar et al. 2016). F1 is the mean
over all questions, whatever sub-dataset they are from.

Legend of shapes: N rows, b rows of a batch, T tokens of the target, R bytes of references.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trishul_ray.errors import CorruptFileError
from trishul_ray.tasks.text import CHUNK, text_slice
from trishul_ray.tasks.text2text import Text2Text, Text2TextEncoder

if TYPE_CHECKING:
    from trishul_ray.data.prepare import Encoder
    from trishul_ray.data.prepared import Split


class QuestionAnswering(Text2Text):
    """A question and its context in, the answer out. Arguments as of :class:`Text2Text`."""

    headline = "f1"
    shares = ("f1", "exact_match")

    @property
    def encoder(self) -> "Encoder":
        """Inputs and first answers to token ids; of test rows all answers as they are."""
        return AnswerEncoder(self)

    def judge(self, texts: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``f1`` and ``exact_match``, each the largest over a row's references."""
        # It takes seconds to import, and is needed only where answers are judged.
        from torchmetrics.functional.text import squad

        scores = np.zeros((2, len(texts)))
        truths: dict[str, Any]
        for row, (text, packed) in enumerate(zip(texts, batch["references"], strict=True)):
            truths = {"answers": {"text": unpack(packed.numpy())}, "id": "0"}
            found = squad({"prediction_text": text, "id": "0"}, truths)
            scores[:, row] = float(found["f1"]) / 100, float(found["exact_match"]) / 100
        return {"f1": torch.from_numpy(scores[0]), "exact_match": torch.from_numpy(scores[1])}


class AnswerEncoder(Text2TextEncoder):
    """Targets are the first answers.

    Args:
        task: what decides the numbers.
    """

    def encode(self, split: "Split", progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Inputs, ``target_ids`` int32 [N, T], ``target_length`` int32 [N], ``references``.

        A longer answer is cut, and still ends with the end token. ``references`` uint8 [N, R] are
        the answers as JSON in UTF-8, padded with zeros; training rows, which nobody judges, and of
        which there are many, have none.

        Raises:
            CorruptFileError: a row's answers are not a list of texts, or an empty one.
        """
        task, tokens = self.task, self.task.tokens

        def rows(start: int, stop: int) -> list[list[int]]:
            first = [answers[0] for answers in answers_of(split, start, stop)]
            found = tokens.ids(first, add_special_tokens=False)["input_ids"]
            return [[*ids[: task.target_length - 1], tokens.eos_id] for ids in found]

        targets, lengths = tokens.padded(
            len(split), task.target_length, rows, lambda done: progress(done / 4)
        )
        columns = super().encode(split, lambda done: progress(0.25 + 0.75 * done))
        columns |= {"target_ids": targets, "target_length": lengths}
        if split.path.stem != "train":
            columns["references"] = pack(split)
        return columns


def answers_of(split: "Split", start: int, stop: int) -> list[list[str]]:
    """The answers of rows ``start`` up to ``stop``.

    Raises:
        CorruptFileError: a row's answers are not a list of texts, or an empty one.
    """
    found = []
    for row, text in enumerate(text_slice(split, "answers", start, stop), start):
        try:
            answers = json.loads(text)
        except ValueError:
            answers = None
        if not (isinstance(answers, list) and answers and all(isinstance(a, str) for a in answers)):
            raise CorruptFileError(
                f"dataset {split.info.name!r}, {split.path.stem} row {row}: answers={text[:40]!r} "
                "is no list of at least one text"
            )
        found.append(answers)
    return found


def pack(split: "Split") -> np.ndarray:
    """The answers of every row as JSON in UTF-8, zero padded: uint8 [N, R]."""
    count = len(split)
    packed = [
        json.dumps(list(dict.fromkeys(answers)), ensure_ascii=False).encode()
        for start in range(0, count, CHUNK)
        for answers in answers_of(split, start, min(start + CHUNK, count))
    ]
    table = np.zeros((count, max(map(len, packed), default=1)), dtype=np.uint8)
    for row, text in enumerate(packed):
        table[row, : len(text)] = np.frombuffer(text, dtype=np.uint8)
    return table


def unpack(row: np.ndarray) -> list[str]:
    """The answers of one row of :func:`pack`, uint8 [R]."""
    answers: list[str] = json.loads(row.tobytes().rstrip(b"\0"))
    return answers
