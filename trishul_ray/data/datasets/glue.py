"""Five GLUE tasks: MNLI, QNLI, QQP, SST-2 and RTE, each with one or two texts and a label.

The test rows are the development sets, since the labels of the official test sets are not public.
MNLI has two development sets, ``matched`` and ``mismatched``, which are groups of its test rows.

The original archive of a task is a zip file, or the folder unpacked from it, with ``train.tsv``
and ``dev.tsv``.

Source: A. Wang et al., "GLUE", ICLR 2019, https://gluebenchmark.com/tasks.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from trishul_ray.data.archives import find_files, zip_member
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.prepared import ProgressCallback
from trishul_ray.data.public import ClassNames, Columns, PublicDataset, Splits, TextRows
from trishul_ray.errors import CorruptFileError

#: Maximum bytes of a member, above the largest, MNLI's training rows.
_MEMBER_LIMIT = 2**30


@dataclass(frozen=True)
class GlueArchive:
    """The original files of one task.

    Attributes:
        folder: the folder that holds the ``.tsv`` files, inside the zip file or unpacked.
        zips: the names under which the zip file has been published.
        fields: text columns, named as on the hub.
        labels: the labels as spelled in the files, in the order of their numbers.
        label: label column.
        columns: names of the text columns in the files, where they differ from ``fields``.
        members: pairs of a split on the hub and its ``.tsv`` file.
        skip_short: skip rows with too few cells. QQP has three such training rows, which the
            hub's version skips as well.
    """

    folder: str
    zips: tuple[str, ...]
    fields: tuple[str, ...]
    labels: tuple[str, ...]
    label: str = "label"
    columns: tuple[str, ...] = ()
    members: tuple[tuple[str, str], ...] = (("train", "train.tsv"), ("validation", "dev.tsv"))
    skip_short: bool = False

    @property
    def title(self) -> str:
        """Names of the zip file and the folder, for messages."""
        return f"{self.zips[0]} or {self.folder}/"

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """Return the path of the zip file in ``folder``, else of the unpacked files, else None."""
        for name in self.zips:
            if (folder / name).is_file():
                return (folder / name,)
        return find_files(folder, tuple(f"{self.folder}/{name}" for _, name in self.members))

    def read(self, files: Sequence[Path], progress: ProgressCallback) -> tuple[Splits, ClassNames]:
        """Return the text columns and ``label`` int64 [N] by split; no class names.

        Raises:
            CorruptFileError: a file is malformed; the message names file, member and line.
        """
        splits = {}
        for index, (split, name) in enumerate(self.members):
            with ExitStack() as stack:
                if len(files) == 1:
                    member = f"{self.folder}/{name}"
                    where = f"{files[0]}: member {member}"
                    stream = stack.enter_context(zip_member(files[0], member, _MEMBER_LIMIT))
                else:
                    where = str(files[index])
                    stream = stack.enter_context(files[index].open("rb"))
                splits[split] = self._read_columns(stream, where)
            progress(split, 1.0)
        return splits, None

    def _read_columns(self, stream: IO[bytes], where: str) -> Columns:
        lines = _split_lines(stream, where)
        header = next(lines, (0, []))[1]
        wanted = (*(self.columns or self.fields), self.label)
        missing = [name for name in wanted if name not in header]
        if missing:
            names = ", ".join(header) or "none"
            raise CorruptFileError(f"{where}: no column {missing[0]!r}; it has {names}")
        indices = [header.index(name) for name in wanted]
        numbers = {spelling: label for label, spelling in enumerate(self.labels)}
        texts: list[list[str]] = [[] for _ in self.fields]
        labels = []
        for line, cells in lines:
            if len(cells) <= max(indices):
                if self.skip_short:
                    continue
                raise CorruptFileError(
                    f"{where}, line {line}: {len(cells)} cells; the header has {len(header)}"
                )
            *row, spelling = (cells[index] for index in indices)
            if spelling not in numbers:
                raise CorruptFileError(
                    f"{where}, line {line}: {self.label} is {spelling[:40]!r}; it must be one of "
                    f"{', '.join(self.labels)}"
                )
            labels.append(numbers[spelling])
            for column, text in zip(texts, row, strict=True):
                column.append(text)
        columns: Columns = {
            field: pa.array(column, pa.large_string())
            for field, column in zip(self.fields, texts, strict=True)
        }
        return columns | {"label": np.array(labels, dtype=np.int64)}


def _split_lines(stream: IO[bytes], where: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line number (from 1) and cells of each line. Quotes are plain characters here."""
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{where}, line {number}: not UTF-8 ({error})") from error
        if text.strip():
            yield number, text.rstrip("\r\n").split("\t")


#: The commit of the hub's repository that is read.
_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"

_ENTAILMENT = ("entailment", "not_entailment")


def _glue(
    task: str,
    description: str,
    fields: tuple[str, ...],
    classes: tuple[str, ...],
    sizes: dict[str, int],
    archive: GlueArchive,
    groups: tuple[str, ...] = (),
) -> PublicDataset:
    """Return the definition of a task; its test rows are the development sets."""
    return PublicDataset(
        name=f"glue/{task}",
        description=description,
        repo=HubRepo(
            "nyu-mll/glue",
            config=task,
            revision=_REVISION,
            file_patterns=(f"{task}/{{split}}-*.parquet",),
        ),
        rows=TextRows(fields=fields, classes=classes),
        sizes=sizes,
        test=tuple(split for split in sizes if split != "train"),
        groups=groups,
        archive=archive,
    )


MNLI = _glue(
    "mnli",
    "entailment, 3 classes, 392,702 train / 9,815 + 9,832 test",
    ("premise", "hypothesis"),
    ("entailment", "neutral", "contradiction"),
    {"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
    GlueArchive(
        folder="MNLI",
        zips=("MNLI.zip",),
        fields=("premise", "hypothesis"),
        columns=("sentence1", "sentence2"),
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        members=(
            ("train", "train.tsv"),
            ("validation_matched", "dev_matched.tsv"),
            ("validation_mismatched", "dev_mismatched.tsv"),
        ),
    ),
    groups=("matched", "mismatched"),
)

QNLI = _glue(
    "qnli",
    "does a sentence answer a question, 104,743 / 5,463",
    ("question", "sentence"),
    _ENTAILMENT,
    {"train": 104_743, "validation": 5_463},
    GlueArchive("QNLI", ("QNLI.zip", "QNLIv2.zip"), ("question", "sentence"), _ENTAILMENT),
)

QQP = _glue(
    "qqp",
    "do two questions mean the same, 363,846 / 40,430",
    ("question1", "question2"),
    ("not_duplicate", "duplicate"),
    {"train": 363_846, "validation": 40_430},
    GlueArchive(
        folder="QQP",
        zips=("QQP.zip", "QQP-clean.zip"),
        fields=("question1", "question2"),
        labels=("0", "1"),
        label="is_duplicate",
        skip_short=True,
    ),
)

SST2 = _glue(
    "sst2",
    "sentiment of phrases in film reviews, 67,349 / 872",
    ("sentence",),
    ("negative", "positive"),
    {"train": 67_349, "validation": 872},
    GlueArchive("SST-2", ("SST-2.zip",), ("sentence",), ("0", "1")),
)

RTE = _glue(
    "rte",
    "does a text entail a sentence, 2,490 / 277",
    ("sentence1", "sentence2"),
    _ENTAILMENT,
    {"train": 2_490, "validation": 277},
    GlueArchive("RTE", ("RTE.zip",), ("sentence1", "sentence2"), _ENTAILMENT),
)
