"""Generated versions of public datasets, with the same columns, classes and groups, 600 / 150 rows.

They only show that a run works. A text consists of random words, one of which depends on the class.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from trishul_ray.data.dataset import Columns, DatasetInfo, Origin, ProgressCallback, Splits
from trishul_ray.data.datasets.glue import MNLI, QNLI, QQP, RTE, SST2
from trishul_ray.data.datasets.mrqa import SUBSETS
from trishul_ray.data.images import pixel_statistics
from trishul_ray.data.public import PublicDataset, TextRows
from trishul_ray.runtime.random_streams import numpy_rng

#: Number of rows per split.
SIZES = MappingProxyType({"train": 600, "test": 150})

_NAMES = ("ann", "bob", "cleo", "dan", "eve", "finn", "gus", "hal")
_THINGS = ("boat", "cup", "drum", "fan", "hat", "lamp", "pen", "rope", "bell", "coat")
#: One word per class.
_SIGNS = (
    *("blue", "gray", "green", "pink", "red", "white", "gold", "teal", "dark", "pale"),
    *("bern", "cork", "lima", "oslo", "rome", "kiel", "turin", "york", "bonn", "nice"),
)

#: Answers to instructions, keyed by group.
_TASKS: dict[str, Callable[[Sequence[str]], str]] = {
    "copy": " ".join,
    "reverse": lambda words: " ".join(reversed(words)),
    "upper case": lambda words: " ".join(words).upper(),
    "first word": lambda words: words[0],
    "last word": lambda words: words[-1],
    "count": lambda words: str(len(words)),
    "sort": lambda words: " ".join(sorted(words)),
    "longest": lambda words: max(words, key=len),
}

_Draw = Callable[[np.random.Generator, int, str], Columns]


@dataclass(frozen=True)
class SyntheticDataset:
    """A dataset whose rows are sampled by a fixed rule.

    Attributes:
        info: The description. Statistics of images are computed from the rows.
        stands_for: Name of the real dataset.
        draw: Returns the columns [N, ...] of a split, given a generator, N and the name of the
            split.
    """

    info: DatasetInfo
    stands_for: str
    draw: _Draw
    splits = tuple(SIZES)
    official = SIZES

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def description(self) -> str:
        """One line for ``trishul list datasets``."""
        train, test = SIZES.values()
        return f"synthetic version of {self.stands_for}, {train} / {test}"

    def key(self, hub: Path | None) -> str:
        """Return a constant. Increment its number when a rule changes: rows are generated again."""
        return f"{self.name} 2"

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Generate the description, and the columns [N, ...] of every split."""
        columns = {s: self.draw(numpy_rng(0, self.name, s), n, s) for s, n in SIZES.items()}
        progress(self.name, 1.0)
        info = replace(self.info, origin=Origin("generated", self.name))
        if info.kind == "image":
            mean, std = pixel_statistics(np.asarray(columns["train"]["pixels"]))
            info = replace(info, mean=mean, std=std)
        return info, columns


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Columns:
    texts = zip(names, zip(*rows, strict=True), strict=True)
    return {name: pa.array(column, pa.large_string()) for name, column in texts}


def _draw_texts(rng: np.random.Generator, count: int, split: str, *, info: DatasetInfo) -> Columns:
    labels = rng.integers(0, info.num_classes, count)
    rows = []
    for label in labels:
        row = [" ".join(rng.choice(_THINGS, 3)) for _ in info.fields[1:]]
        rows.append([*row, " ".join(rng.permutation([_SIGNS[label], *rng.choice(_THINGS, 3)]))])
    columns = _columns(info.fields, rows) | {"label": labels}
    if info.groups and split == "test":  # as in MNLI
        columns["group"] = np.arange(count) * len(info.groups) // count
    return columns


def _draw_questions(rng: np.random.Generator, count: int, split: str) -> Columns:
    rows = []
    for _ in range(count):
        names, things = rng.permutation(_NAMES)[:2], rng.permutation(_THINGS)[:2]
        facts = [f"{name} has a {thing}." for name, thing in zip(names, things, strict=True)]
        asked = rng.integers(0, 2)
        answers = json.dumps([str(things[asked])])
        rows.append((f"what has {names[asked]}?", " ".join(facts), answers))
    groups = rng.integers(0, len(SUBSETS), count)
    return _columns(("question", "context", "answers"), rows) | {"group": groups}


def _draw_instructions(rng: np.random.Generator, count: int, split: str) -> Columns:
    tasks, groups = list(_TASKS.items()), rng.integers(0, len(_TASKS), count)
    rows = []
    for group in groups:
        words = [str(word) for word in rng.permutation(_THINGS)[: int(rng.integers(2, 4))]]
        task, answer = tasks[group]
        rows.append((task, " ".join(words), answer(words)))
    return _columns(("instruction", "input", "output"), rows) | {"group": groups}


def _draw_shapes(rng: np.random.Generator, count: int, split: str) -> Columns:
    shapes = numpy_rng(0, "shapes").integers(0, 2, (10, 8, 8))
    labels = rng.integers(0, len(shapes), count)
    pixels = rng.integers(0, 64, (count, 8, 8)) + 128 * shapes[labels]
    return {"pixels": pixels[:, None].astype(np.uint8), "label": labels}


def _texts(
    name: str, stands_for: str, fields: tuple[str, ...], classes: tuple[str, ...], *groups: str
) -> SyntheticDataset:
    info = DatasetInfo(f"synthetic/{name}", "text", classes, groups, fields)
    return SyntheticDataset(info, stands_for, partial(_draw_texts, info=info))


def _like(dataset: PublicDataset) -> SyntheticDataset:
    """Build a dataset with the fields, classes and groups of a GLUE task."""
    rows, task = dataset.rows, dataset.name.removeprefix("glue/")
    assert isinstance(rows, TextRows)
    return _texts(task, dataset.name, rows.fields, rows.classes, *dataset.groups)


_QUESTIONS = DatasetInfo("synthetic/questions", "qa", groups=SUBSETS)
_INSTRUCTIONS = DatasetInfo(
    "synthetic/instructions", "instruction", groups=tuple(_TASKS), fields=("instruction", "input")
)
_SHAPES = DatasetInfo(
    "synthetic/shapes", "image", tuple(map(str, range(10))), image_shape=(1, 8, 8)
)

#: The synthetic datasets, in the order of the listing.
SYNTHETIC = (
    _texts("topics", "20newsgroups", ("text",), tuple("bcdfghjklmnpqrstvwxz")),
    SyntheticDataset(_QUESTIONS, "mrqa", _draw_questions),
    SyntheticDataset(_INSTRUCTIONS, "dolly", _draw_instructions),
    *map(_like, (MNLI, QNLI, QQP, RTE, SST2)),
    _texts("stsb", "glue/stsb", ("sentence1", "sentence2"), tuple("012345")),
    SyntheticDataset(_SHAPES, "svhn", _draw_shapes),
)
