"""CIFAR-10 and CIFAR-100 as published: pickles of Python 2 in a tar.gz file.

The pickles are read by an unpickler that can build NumPy arrays, bytes and plain containers, and
nothing else: a pickle that asks for any other callable is refused before it is called.

Source: A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html (``cifar-10-python.tar.gz``,
``cifar-100-python.tar.gz``). Shapes: N rows, each of 3072 bytes: red, green, blue planes of 32x32.
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trishul_ray.data.archives_files import all_or_none, tar_members
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import Columns, ImageLayout, PublicDataset
from trishul_ray.data.tables import join
from trishul_ray.errors import CorruptFileError

#: The largest member, CIFAR-100's training rows, has 155 million bytes.
_LIMIT = 256 * 2**20


_ROW = 3 * 32 * 32


@dataclass(frozen=True)
class CifarArchive:
    """One of the two archives.

    Attributes:
        file: its name.
        folder: the folder inside that holds the members.
        members: member to split, in the order of the rows.
        labels: key of the labels in a member.
        meta: the member with class names.
        meta_names: key of the class names in it.
        classes: number of classes.
    """

    file: str
    folder: str
    members: Mapping[str, str]
    labels: bytes
    meta: str
    meta_names: bytes
    classes: int

    @property
    def title(self) -> str:
        """The archive's name."""
        return self.file

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """The archive in ``folder``, if it is there."""
        return all_or_none(folder, (self.file,))

    def read(
        self, files: Sequence[Path], tell: Callable[[str, float], None]
    ) -> tuple[Mapping[str, Columns], tuple[str, ...] | None]:
        """``pixels`` uint8 [N, 3, 32, 32] and ``label`` int64 [N] by split, and class names.

        Raises:
            CorruptFileError: names the file, the member and the fault.
        """
        file = files[0]
        wanted = {f"{self.folder}/{name}" for name in (*self.members, self.meta)}
        members: dict[str, Columns] = {}
        names: tuple[str, ...] | None = None
        for name, data, done in tar_members(file, wanted.__contains__, _LIMIT):
            where, short = f"{file}: member {name}", name.rpartition("/")[2]
            found = _unpickle(data, where)
            if short == self.meta:
                names = self._class_names(found, where)
            else:
                members[short] = self._rows(found, where)
                tell(self.members[short], done)
        lacking = [name for name in self.members if name not in members]
        lacking += [self.meta] if names is None else []
        if lacking:
            raise CorruptFileError(f"{file}: no member {self.folder}/{lacking[0]}")
        splits = {
            split: join([members[m] for m, of in self.members.items() if of == split])
            for split in dict.fromkeys(self.members.values())
        }
        return splits, names

    def _rows(self, found: Mapping[Any, Any], where: str) -> Columns:
        data, labels = found.get(b"data"), found.get(self.labels)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (_ROW,):
            raise CorruptFileError(f"{where}: 'data' is not uint8 of shape [N, {_ROW}]")
        if not isinstance(labels, list) or len(labels) != len(data):
            raise CorruptFileError(
                f"{where}: {self.labels.decode()!r} is not a list of {len(data)} labels"
            )
        for row, label in enumerate(labels):
            if not isinstance(label, int | np.integer) or not 0 <= label < self.classes:
                raise CorruptFileError(
                    f"{where}, row {row}: label is {label!r}, outside 0..{self.classes - 1}"
                )
        return {
            "pixels": data.reshape(-1, 3, 32, 32),
            "label": np.array(labels, dtype=np.int64),
        }

    def _class_names(self, found: Mapping[Any, Any], where: str) -> tuple[str, ...]:
        names = found.get(self.meta_names)
        sound = isinstance(names, list) and all(isinstance(name, bytes | str) for name in names)
        if not isinstance(names, list) or not sound or len(names) != self.classes:
            key = self.meta_names.decode()
            raise CorruptFileError(f"{where}: {key!r} is not a list of {self.classes} names")
        return tuple(n.decode("ascii", "replace") if isinstance(n, bytes) else n for n in names)


class _ArraysOnly(pickle.Unpickler):
    """Builds NumPy arrays and what needs no callable: numbers, bytes, texts, lists, dicts."""

    def find_class(self, module: str, name: str) -> Any:
        """The callable a pickle asks for, if it is one of those that make an array."""
        package = module.partition(".")[0]
        if package == "numpy" and name in ("ndarray", "dtype") and module == "numpy":
            return getattr(np, name)
        if name == "_reconstruct" and module in (
            "numpy.core.multiarray",
            "numpy._core.multiarray",
        ):
            return _empty_array
        if (module, name) == ("_codecs", "encode"):
            return _latin1  # how Python 3 writes bytes for Python 2
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR pickle needs")


def _empty_array(kind: object, shape: object, code: object) -> np.ndarray:
    """What a pickled array begins as; its state follows."""
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError("an array begins otherwise than as an empty ndarray")
    return np.ndarray((0,), dtype=np.uint8)


def _latin1(text: object, encoding: object) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes are encoded otherwise than in Latin 1")
    return text.encode("latin-1")


def _unpickle(data: bytes, where: str) -> Mapping[Any, Any]:
    try:
        found = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        TypeError,
        ValueError,
    ) as error:
        raise CorruptFileError(f"{where} is not a pickle of arrays ({error})") from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"{where} holds a {type(found).__name__}, not a dict")
    # Written by Python 2, keys are bytes; by Python 3, maybe texts.
    return {k.encode() if isinstance(k, str) else k: value for k, value in found.items()}


CIFAR10_ARCHIVE = CifarArchive(
    file="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    members={f"data_batch_{n}": "train" for n in range(1, 6)} | {"test_batch": "test"},
    labels=b"labels",
    meta="batches.meta",
    meta_names=b"label_names",
    classes=10,
)


CIFAR100_ARCHIVE = CifarArchive(
    file="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    members={"train": "train", "test": "test"},
    labels=b"fine_labels",
    meta="meta",
    meta_names=b"fine_label_names",
    classes=100,
)


CIFAR100 = PublicDataset(
    name="cifar100",
    description="32x32 color photos, 100 classes, 50,000 train / 10,000 test",
    repo=HubRepo(
        "uoft-cs/cifar100",
        config="cifar100",
        revision="aadb3af77e9048adbea6b47c21a81e47dd092ae5",
        layouts=("cifar100/{split}-*.parquet",),
    ),
    layout=ImageLayout(label="fine_label", classes=100),
    sizes={"train": 50_000, "test": 10_000},
    archive=CIFAR100_ARCHIVE,
)


CIFAR10 = PublicDataset(
    name="cifar10",
    description="32x32 color photos, 10 classes, 50,000 train / 10,000 test",
    repo=HubRepo(
        "uoft-cs/cifar10",
        config="plain_text",
        revision="0b2714987fa478483af9968de7c934580d0bb9a2",
        layouts=("plain_text/{split}-*.parquet",),
    ),
    layout=ImageLayout(label="label", classes=10),
    sizes={"train": 50_000, "test": 10_000},
    archive=CIFAR10_ARCHIVE,
)
