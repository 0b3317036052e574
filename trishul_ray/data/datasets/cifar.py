"""CIFAR-10 and CIFAR-100: 32x32 color photos in 10 or 100 classes, 50,000 train and 10,000 test.

CIFAR-100 uses the 100 fine labels; its 20 coarse labels are not read.

The original archives are tar.gz files of pickles written by Python 2. They are read by an
unpickler that can build NumPy arrays, bytes and plain containers only. It refuses a pickle that
refers to any other callable before calling it.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html (``cifar-10-python.tar.gz``,
``cifar-100-python.tar.gz``). A member holds N rows of 3072 bytes each: the red, green and blue
planes of 32x32 pixels.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trishul_ray.data.archives import find_files, tar_members
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.prepared import ProgressCallback
from trishul_ray.data.public import ClassNames, Columns, ImageRows, PublicDataset, Splits
from trishul_ray.data.tables import join
from trishul_ray.errors import CorruptFileError

#: Maximum bytes of a member. The largest, CIFAR-100's training rows, has 155 million.
_MEMBER_LIMIT = 256 * 2**20

#: Bytes of a row.
_ROW = 3 * 32 * 32


@dataclass(frozen=True)
class CifarArchive:
    """The original archive of CIFAR-10 or CIFAR-100.

    Attributes:
        file: file name of the archive.
        folder: folder inside the archive that holds the members.
        members: member name to split, in the order of the rows.
        labels: key of the labels in a member.
        meta: member that holds the class names.
        meta_names: key of the class names in ``meta``.
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
        """File name, for messages."""
        return self.file

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """Return the archive's path in ``folder``, or None if it is not there."""
        return find_files(folder, (self.file,))

    def read(self, files: Sequence[Path], progress: ProgressCallback) -> tuple[Splits, ClassNames]:
        """Return ``pixels`` uint8 [N, 3, 32, 32] and ``label`` int64 [N] by split, and class names.

        Raises:
            CorruptFileError: a member is missing or malformed; the message names file and member.
        """
        file = files[0]
        wanted = {f"{self.folder}/{name}" for name in (*self.members, self.meta)}
        members: dict[str, Columns] = {}
        class_names: ClassNames = None
        for path, data, fraction in tar_members(file, wanted.__contains__, _MEMBER_LIMIT):
            where, name = f"{file}: member {path}", path.rpartition("/")[2]
            content = _unpickle(data, where)
            if name == self.meta:
                class_names = self._class_names(content, where)
            else:
                members[name] = self._columns(content, where)
                progress(self.members[name], fraction)
        missing = [name for name in self.members if name not in members]
        missing += [self.meta] if class_names is None else []
        if missing:
            raise CorruptFileError(f"{file}: no member {self.folder}/{missing[0]}")
        splits = {
            split: join([members[m] for m, of in self.members.items() if of == split])
            for split in dict.fromkeys(self.members.values())
        }
        return splits, class_names

    def _columns(self, content: Mapping[Any, Any], where: str) -> Columns:
        data, labels = content.get(b"data"), content.get(self.labels)
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
        return {"pixels": data.reshape(-1, 3, 32, 32), "label": np.array(labels, dtype=np.int64)}

    def _class_names(self, content: Mapping[Any, Any], where: str) -> tuple[str, ...]:
        names = content.get(self.meta_names)
        valid = isinstance(names, list) and all(isinstance(name, bytes | str) for name in names)
        if not isinstance(names, list) or not valid or len(names) != self.classes:
            key = self.meta_names.decode()
            raise CorruptFileError(f"{where}: {key!r} is not a list of {self.classes} names")
        return tuple(n.decode("ascii", "replace") if isinstance(n, bytes) else n for n in names)


def _unpickle(data: bytes, where: str) -> Mapping[Any, Any]:
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
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
    if not isinstance(content, dict):
        raise CorruptFileError(f"{where} holds a {type(content).__name__}, not a dict")
    # Python 2 writes bytes as keys; a copy written by Python 3 may have str.
    return {k.encode() if isinstance(k, str) else k: value for k, value in content.items()}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickle NumPy arrays and objects that need no callable: numbers, bytes, str, list, dict."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the callable a pickle refers to if it belongs to an array; refuse all others."""
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if (module, name) == ("_codecs", "encode"):
            return _encode_latin1  # how Python 3 pickles bytes for Python 2
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed")


def _empty_array(kind: object, shape: object, code: object) -> np.ndarray:
    """Return the empty array that a pickled array starts as, before its state is set."""
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError("an array does not start as an empty ndarray")
    return np.ndarray((0,), dtype=np.uint8)


def _encode_latin1(text: object, encoding: object) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("bytes are not encoded in Latin-1")
    return text.encode("latin-1")


CIFAR10 = PublicDataset(
    name="cifar10",
    description="32x32 color photos, 10 classes, 50,000 train / 10,000 test",
    repo=HubRepo(
        "uoft-cs/cifar10",
        config="plain_text",
        revision="0b2714987fa478483af9968de7c934580d0bb9a2",
        file_patterns=("plain_text/{split}-*.parquet",),
    ),
    rows=ImageRows(label="label", classes=10),
    sizes={"train": 50_000, "test": 10_000},
    archive=CifarArchive(
        file="cifar-10-python.tar.gz",
        folder="cifar-10-batches-py",
        members={f"data_batch_{n}": "train" for n in range(1, 6)} | {"test_batch": "test"},
        labels=b"labels",
        meta="batches.meta",
        meta_names=b"label_names",
        classes=10,
    ),
)

CIFAR100 = PublicDataset(
    name="cifar100",
    description="32x32 color photos, 100 classes, 50,000 train / 10,000 test",
    repo=HubRepo(
        "uoft-cs/cifar100",
        config="cifar100",
        revision="aadb3af77e9048adbea6b47c21a81e47dd092ae5",
        file_patterns=("cifar100/{split}-*.parquet",),
    ),
    rows=ImageRows(label="fine_label", classes=100),
    sizes={"train": 50_000, "test": 10_000},
    archive=CifarArchive(
        file="cifar-100-python.tar.gz",
        folder="cifar-100-python",
        members={"train": "train", "test": "test"},
        labels=b"fine_labels",
        meta="meta",
        meta_names=b"fine_label_names",
        classes=100,
    ),
)
