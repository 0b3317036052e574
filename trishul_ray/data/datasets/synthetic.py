"""Synthetic stand-ins for the paper's datasets: small, drawn in memory, nothing to download.

Each has the kind, columns, groups and number of classes of the dataset that it stands for, and a
rule that a model can learn. Scores on it say that a run works, and nothing about the real dataset.

Rows of a split are drawn from ``numpy_rng(0, name, split)``, labels uniformly. The rules:

- ``synthetic/topics``: each of five words has, with probability 3/4, the consonant of the row's
  topic, otherwise that of a random one.
- ``synthetic/questions``: two facts of the row's group in random order, and a question for one.
- ``synthetic/mnli`` and the other GLUE tasks: a pattern of the row's class, filled with random
  words. Some words occur in the patterns of one class only.
- ``synthetic/instructions``: one of eight tasks on a few random words, with its answer.
- ``synthetic/shapes``: a shape of the row's class at one of nine positions, on noise.

Legend of shapes: N rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import dump_answers
from trishul_ray.data.dataset import Column, Columns, DatasetInfo, ProgressCallback, Splits
from trishul_ray.data.datasets.glue import MNLI, QNLI, QQP, RTE, SST2
from trishul_ray.data.datasets.mrqa import SUBSETS
from trishul_ray.data.images import pixel_statistics
from trishul_ray.data.public import PublicDataset, TextRows
from trishul_ray.runtime.random_streams import numpy_rng

#: Rows of each split.
SIZES = MappingProxyType({"train": 600, "test": 150})

#: A consonant for each topic.
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"

#: Origin of the rows, for reports.
_SOURCE = "synthetic"

_NAMES = ("ann", "bob", "cleo", "dan", "eve", "finn", "gus", "hal")

#: Words by the two slots of a pattern that they fill, always with different ones.
_WORDS = {
    ("name", "other"): _NAMES,
    ("thing", "item"): ("boat", "cup", "drum", "fan", "hat", "lamp", "pen", "rope"),
    ("color", "hue"): ("blue", "gray", "green", "pink", "red", "white"),
    ("place", "town"): ("bern", "cork", "lima", "oslo", "rome", "kiel", "turin", "york"),
    ("age", "years"): ("4", "7", "12", "19", "36", "58"),
}
#: Names in the mismatched rows of MNLI.
_MISMATCHED = ("the cat", "the dog", "the fox", "the hen", "the owl", "the pig")

#: Question, fact and accepted answers for each group of questions, in the order of ``SUBSETS``.
_FACTS = (
    ("where is {name}?", "{name} is in {place}.", ("{place}", "in {place}")),
    ("what has {name}?", "{name} has a {thing}.", ("{thing}", "a {thing}")),
    ("whose {thing}?", "{name}'s {thing}.", ("{name}",)),
    ("what color {thing}?", "{color} {thing}.", ("{color}",)),
    ("who saw {place}?", "{name} saw {place}.", ("{name}",)),
    ("how old is {name}?", "{name} is {age}.", ("{age}",)),
)

#: Groups of instructions.
_TASKS = ("copy", "reverse", "upper case", "first word", "count", "name", "yes or no", "sort")

#: Classes of shapes, in the order of their labels.
_SHAPES = ("bar", "post", "falling", "rising", "plus", "cross", "frame", "block", "ring", "checks")

#: For each class, patterns of the fields, in the order of the dataset's fields.
_Patterns = tuple[tuple[tuple[str, ...], ...], ...]

_MNLI: _Patterns = (
    (
        ("{name} has a {color} {thing}", "the {thing} is {color}"),
        ("{name} is in {place}", "{place} is where {name} is"),
    ),
    (
        ("{name} has a {color} {thing}", "{name} may like the {thing}"),
        ("{name} is in {place}", "maybe {name} saw {town}"),
    ),
    (
        ("{name} has a {color} {thing}", "the {thing} is not {color}"),
        ("{name} is in {place}", "{name} is not in {place}"),
    ),
)
_QNLI: _Patterns = (
    (("who has the {thing}?", "{name} has the {thing}"), ("where is {name}?", "in {place}")),
    (("who has the {thing}?", "the {thing} is {color}"), ("where is {name}?", "{name} is {color}")),
)
_QQP: _Patterns = (
    (
        ("where is {name}?", "how old is {name}?"),
        ("who has the {thing}?", "how big is the {thing}?"),
    ),
    (
        ("where is {name}?", "in what town is {name}?"),
        ("who has the {thing}?", "what person has the {thing}?"),
    ),
)
_RTE: _Patterns = (
    (
        ("{name} has the {color} {thing}", "the {thing} is {color}"),
        ("{name} came from {town} to {place}", "{name} is in {place}"),
    ),
    (
        ("{name} has the {color} {thing}", "the {thing} was sold to {other}"),
        ("{name} came from {town} to {place}", "{name} was born in {place}"),
    ),
)
_SST2: _Patterns = (
    (
        ("a dull film on a {thing}",),
        ("bad and flat, said {name}",),
        ("the {color} {thing} is bad",),
    ),
    (
        ("a lovely film on a {thing}",),
        ("great and fun, said {name}",),
        ("the {color} {thing} is good",),
    ),
)


@dataclass(frozen=True)
class SyntheticDataset:
    """A dataset of rows drawn at random by a fixed rule.

    Attributes:
        info: the description; an image dataset's statistics are computed from its rows.
        stands_for: the real dataset.
        draw: returns the columns [N, ...] of a split from a generator, N and the split's name.
    """

    info: DatasetInfo
    stands_for: str
    draw: Callable[[np.random.Generator, int, str], Columns]
    splits = tuple(SIZES)
    official = SIZES

    @property
    def name(self) -> str:
        """Name in the registry."""
        return self.info.name

    @property
    def description(self) -> str:
        """One line for the list of datasets."""
        train, test = SIZES.values()
        return f"synthetic stand-in for {self.stands_for}, {train} / {test}"

    def key(self, hub: Path | None) -> str:
        """Return a constant. Raise its number when a rule changes, so that rows are drawn anew."""
        return f"{self.name} 1"

    def read(self, hub: Path | None, progress: ProgressCallback) -> tuple[DatasetInfo, Splits]:
        """Return the description, and the columns [N, ...] of every split."""
        columns = {
            split: self.draw(numpy_rng(0, self.name, split), size, split)
            for split, size in SIZES.items()
        }
        progress(self.name, 1.0)
        if self.info.kind != "image":
            return self.info, columns
        mean, std = pixel_statistics(np.asarray(columns["train"]["pixels"]))
        return DatasetInfo(**vars(self.info) | {"mean": mean, "std": std}), columns


def _texts(rows: Sequence[Sequence[str]], names: Sequence[str]) -> dict[str, Column]:
    """Return the texts of rows as columns [N]."""
    columns = zip(*rows, strict=True)
    return {
        name: pa.array(column, pa.large_string())
        for name, column in zip(names, columns, strict=True)
    }


def _draw_words(rng: np.random.Generator, names: Sequence[str] = _NAMES) -> dict[str, str]:
    """Return a word for every slot of a pattern; ``names`` are the words of two of them."""
    words: dict[str, str] = {}
    for slots, options in (_WORDS | {("name", "other"): names}).items():
        chosen = rng.permutation(len(options))
        words |= {slot: options[index] for slot, index in zip(slots, chosen, strict=False)}
    return words


def _draw_topics(rng: np.random.Generator, count: int, split: str) -> Columns:
    labels = rng.integers(0, len(_CONSONANTS), count)
    random = rng.integers(0, len(_CONSONANTS), (count, 5))
    topics = np.where(rng.integers(0, 4, (count, 5)) < 3, labels[:, None], random)
    vowels = rng.integers(0, len(_VOWELS), (count, 5, 2))
    rows = [
        [
            " ".join(
                _CONSONANTS[t] + _VOWELS[v] + _CONSONANTS[t] + _VOWELS[w]
                for t, (v, w) in zip(topics[row], vowels[row], strict=True)
            )
        ]
        for row in range(count)
    ]
    return _texts(rows, ("text",)) | {"label": labels}


def _draw_questions(rng: np.random.Generator, count: int, split: str) -> Columns:
    groups = rng.integers(0, len(_FACTS), count)
    rows = []
    for group in groups:
        question, fact, answers = _FACTS[group]
        words = _draw_words(rng)
        others = {slot: words[second] for slot, second in _WORDS}
        facts = [fact.format(**words), fact.format(**others)]
        if rng.integers(0, 2):
            facts.reverse()
        accepted = dump_answers([answer.format(**words) for answer in answers], "questions")
        rows.append((question.format(**words), " ".join(facts), accepted))
    return _texts(rows, ("question", "context", "answers")) | {"group": groups}


def _instruct(rng: np.random.Generator, task: str) -> tuple[str, str, str]:
    """Return instruction, input and answer of a task on random words."""
    words = _draw_words(rng)
    drawn = [words[slot] for slot in ("color", "thing", "place")][: int(rng.integers(2, 4))]
    text = " ".join(drawn)
    name, place = words["name"], words["place"]
    asked = drawn[0] if rng.integers(0, 2) else words["hue"]
    return {
        "copy": ("repeat it", text, text),
        "reverse": ("reverse the words", text, " ".join(drawn[::-1])),
        "upper case": ("write it in capitals", text, text.upper()),
        "first word": ("say the first word", text, drawn[0]),
        "count": ("count the words", text, str(len(drawn))),
        "name": ("who is it?", f"{name} is in {place}", name),
        "yes or no": (f"is {asked} in it?", text, "yes" if asked in drawn else "no"),
        "sort": ("sort the words", text, " ".join(sorted(drawn))),
    }[task]


def _draw_instructions(rng: np.random.Generator, count: int, split: str) -> Columns:
    groups = rng.integers(0, len(_TASKS), count)
    rows = [_instruct(rng, _TASKS[group]) for group in groups]
    return _texts(rows, ("instruction", "input", "output")) | {"group": groups}


def _draw_patterns(
    rng: np.random.Generator, count: int, split: str, *, info: DatasetInfo, patterns: _Patterns
) -> Columns:
    labels = rng.integers(0, len(patterns), count)
    # As in MNLI, only test rows have groups.
    groups = np.arange(count) * len(info.groups) // count
    grouped = bool(info.groups) and split == "test"
    rows = []
    for label, group in zip(labels, groups, strict=True):
        pattern = patterns[label][rng.integers(0, len(patterns[label]))]
        words = _draw_words(rng, _MISMATCHED if grouped and group else _NAMES)
        rows.append([text.format(**words) for text in pattern])
    columns = _texts(rows, info.fields) | {"label": labels}
    return columns | {"group": groups} if grouped else columns


def _draw_shapes(rng: np.random.Generator, count: int, split: str) -> Columns:
    labels = rng.integers(0, len(_SHAPES), count)
    # Twice the distance from the center of the shape, which is moved by up to one pixel.
    center = 7 + 2 * rng.integers(-1, 2, (2, count, 1, 1))
    y = 2 * np.arange(8)[:, None] - center[0]  # [N, 8, 1]
    x = 2 * np.arange(8) - center[1]  # [N, 1, 8]
    covered = np.stack(
        [
            (abs(y) < 2) & (abs(x) < 8),  # bar
            (abs(x) < 2) & (abs(y) < 8),  # post
            abs(y - x) < 3,  # falling
            abs(y + x) < 3,  # rising
            (abs(y) < 2) | (abs(x) < 2),  # plus
            (abs(y - x) < 3) | (abs(y + x) < 3),  # cross
            np.maximum(abs(y), abs(x)) == 5,  # frame
            np.maximum(abs(y), abs(x)) < 4,  # block
            abs(y * y + x * x - 26) < 10,  # ring
            (y + x) % 4 == 0,  # checks
        ]
    )
    brightness = rng.integers(96, 192, (count, 1, 1))
    noise = rng.integers(0, 64, (count, 8, 8))
    pixels = noise + brightness * covered[labels, np.arange(count)]
    return {"pixels": pixels[:, None].astype(np.uint8), "label": labels}


def _like(dataset: PublicDataset, patterns: _Patterns) -> SyntheticDataset:
    """Return a stand-in with the fields, classes and groups of a task of GLUE."""
    rows = dataset.rows
    assert isinstance(rows, TextRows)
    name = f"synthetic/{dataset.name.removeprefix('glue/')}"
    info = DatasetInfo(name, "text", _SOURCE, rows.classes, dataset.groups, rows.fields)
    draw = partial(_draw_patterns, info=info, patterns=patterns)
    return SyntheticDataset(info, dataset.name, draw)


#: The stand-ins, in the order in which they are listed.
SYNTHETIC = (
    SyntheticDataset(
        DatasetInfo("synthetic/topics", "text", _SOURCE, tuple(_CONSONANTS), fields=("text",)),
        "20newsgroups",
        _draw_topics,
    ),
    SyntheticDataset(
        DatasetInfo("synthetic/questions", "qa", _SOURCE, groups=SUBSETS), "mrqa", _draw_questions
    ),
    SyntheticDataset(
        DatasetInfo(
            *("synthetic/instructions", "instruction", _SOURCE),
            groups=_TASKS,
            fields=("instruction", "input"),
        ),
        "dolly",
        _draw_instructions,
    ),
    _like(MNLI, _MNLI),
    _like(QNLI, _QNLI),
    _like(QQP, _QQP),
    _like(RTE, _RTE),
    _like(SST2, _SST2),
    SyntheticDataset(
        DatasetInfo("synthetic/shapes", "image", _SOURCE, _SHAPES, image_shape=(1, 8, 8)),
        "svhn",
        _draw_shapes,
    ),
)
