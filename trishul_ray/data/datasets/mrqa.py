"""MRQA 2019: extractive question answering, 516,819 train and 58,221 test questions.

The six in-domain sub-datasets are read. The test rows are their development sets.

The original files are ``mrqa/train/<subset>.jsonl.gz`` and ``mrqa/dev/<subset>.jsonl.gz``. The
first line of a file is a header; every other line holds a context with its questions.

Source: A. Fisch et al., "MRQA 2019 Shared Task", https://github.com/mrqa/MRQA-Shared-Task-2019.
"""

import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trishul_ray.data.archives import DAMAGED_FILE_ERRORS, find_files
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.prepared import ProgressCallback
from trishul_ray.data.public import ClassNames, Columns, PublicDataset, QuestionRows, Splits
from trishul_ray.data.tables import dump_answers, json_lines
from trishul_ray.errors import CorruptFileError

#: The sub-datasets, in the order of their group numbers.
SUBSETS = ("SQuAD", "NewsQA", "TriviaQA-web", "SearchQA", "HotpotQA", "NaturalQuestionsShort")

#: Split on the hub to folder of the original files.
_FOLDERS = {"train": "train", "validation": "dev"}


class MrqaArchive:
    """The twelve original files."""

    names = tuple(f"mrqa/{folder}/{s}.jsonl.gz" for folder in _FOLDERS.values() for s in SUBSETS)
    title = "mrqa/train/*.jsonl.gz and mrqa/dev/*.jsonl.gz"

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """Return the paths of all files below ``folder``, or None if none is there."""
        return find_files(folder, self.names)

    def read(self, files: Sequence[Path], progress: ProgressCallback) -> tuple[Splits, ClassNames]:
        """Return both splits, one row for each question, as text columns [N]; no class names.

        These are ``question``, ``context``, ``answers`` (JSON lists) and ``group`` (names).

        Raises:
            CorruptFileError: a file is malformed; the message names file and line.
        """
        splits: dict[str, Columns] = {}
        remaining = iter(files)
        for split in _FOLDERS:
            rows: list[tuple[str, str, str, str]] = []
            for count, subset in enumerate(SUBSETS, start=1):
                rows += ((*row, subset) for row in _read_questions(next(remaining)))
                progress(split, count / len(SUBSETS))
            names = ("question", "context", "answers", "group")
            texts = zip(*rows, strict=True) if rows else ([] for _ in names)
            splits[split] = {
                name: pa.array(column, pa.large_string())
                for name, column in zip(names, texts, strict=True)
            }
        return splits, None


def _read_questions(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield question, context and answers (a JSON list) of every question in a file."""
    try:
        with gzip.open(file) as lines:
            for line, row in json_lines(lines, str(file)):
                where = f"{file}, line {line}"
                if line == 1:
                    if "header" not in row:
                        raise CorruptFileError(f"{where}: no header; an MRQA file starts with one")
                    continue
                context = _text(row, "context", where)
                questions = row.get("qas")
                if not isinstance(questions, list) or not all(
                    isinstance(question, dict) for question in questions
                ):
                    raise CorruptFileError(f"{where}: 'qas' is not a list of questions")
                for question in questions:
                    answers = dump_answers(question.get("answers"), where)
                    yield _text(question, "question", where), context, answers
    except (*DAMAGED_FILE_ERRORS, OSError) as error:
        raise CorruptFileError(f"{file}: not a readable gzip file ({error})") from error


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise CorruptFileError(f"{where}: {name!r} is not a text")
    return value


MRQA = PublicDataset(
    name="mrqa",
    description="extractive QA, six sub-datasets, 516,819 / 58,221",
    repo=HubRepo(
        "mrqa-workshop/mrqa",
        config="plain_text",
        revision="f3178d9888471dfb2b67c93de14f0ddf499a8d9f",
        file_patterns=("data/{split}-*.parquet", "plain_text/{split}-*.parquet"),
    ),
    rows=QuestionRows(subsets=SUBSETS),
    sizes={"train": 516_819, "validation": 58_221},
    test=("validation",),
    archive=MrqaArchive(),
)
