"""MRQA 2019 as published: ``mrqa/train/<subset>.jsonl.gz`` and ``mrqa/dev/<subset>.jsonl.gz``.

A file's first line is a header; every other line is a context with its questions. The six
in-domain sub-datasets are read.

Source: A. Fisch et al., "MRQA 2019 Shared Task", https://github.com/mrqa/MRQA-Shared-Task-2019.
"""

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trishul_ray.data.archives_files import DAMAGE, all_or_none
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import Columns, PublicDataset, QaLayout
from trishul_ray.data.tables import dump_answers, json_lines
from trishul_ray.errors import CorruptFileError

#: The sub-datasets that clients train on, in the order of their numbers.
SUBSETS = ("SQuAD", "NewsQA", "TriviaQA-web", "SearchQA", "HotpotQA", "NaturalQuestionsShort")


_FOLDERS = {"train": "train", "validation": "dev"}


class MrqaArchive:
    """The twelve files."""

    names = tuple(f"mrqa/{folder}/{s}.jsonl.gz" for folder in _FOLDERS.values() for s in SUBSETS)
    title = "mrqa/train/*.jsonl.gz and mrqa/dev/*.jsonl.gz"

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """All files below ``folder``, if they are there."""
        return all_or_none(folder, self.names)

    def read(
        self, files: Sequence[Path], tell: Callable[[str, float], None]
    ) -> tuple[Mapping[str, Columns], tuple[str, ...] | None]:
        """``question``, ``context``, ``answers`` (JSON lists) and ``group``, texts [N], by split.

        Raises:
            CorruptFileError: names the file, the line and the fault.
        """
        splits: dict[str, Columns] = {}
        for number, split in enumerate(_FOLDERS):
            rows: list[tuple[str, str, str, str]] = []
            for place, subset in enumerate(SUBSETS):
                file = files[number * len(SUBSETS) + place]
                rows += ((*row, subset) for row in _questions(file))
                tell(split, (place + 1) / len(SUBSETS))
            names = ("question", "context", "answers", "group")
            texts = zip(*rows, strict=True) if rows else ([] for _ in names)
            splits[split] = {
                name: pa.array(column, pa.large_string())
                for name, column in zip(names, texts, strict=True)
            }
        return splits, None


def _questions(file: Path) -> Iterator[tuple[str, str, str]]:
    """Question, context and answers of every question of a file."""
    try:
        with gzip.open(file) as lines:
            for line, row in json_lines(lines, str(file)):
                where = f"{file}, line {line}"
                if line == 1:
                    if "header" not in row:
                        raise CorruptFileError(f"{where}: no header, which MRQA files begin with")
                    continue
                context = _text(row, "context", where)
                asked = row.get("qas")
                if not isinstance(asked, list) or not all(isinstance(q, dict) for q in asked):
                    raise CorruptFileError(f"{where}: 'qas' is not a list of questions")
                for question in asked:
                    answers = dump_answers(question.get("answers"), where)
                    yield _text(question, "question", where), context, answers
    except (*DAMAGE, OSError) as error:
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
        layouts=("data/{split}-*.parquet", "plain_text/{split}-*.parquet"),
    ),
    layout=QaLayout(subsets=SUBSETS),
    sizes={"train": 516_819, "validation": 58_221},
    test=("validation",),
    archive=MrqaArchive(),
)
