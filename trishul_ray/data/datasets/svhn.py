"""SVHN (cropped digits): 32x32 color photos of house numbers, 73,257 train and 26,032 test.

The original files are ``train_32x32.mat`` and ``test_32x32.mat``. Each holds ``X`` uint8
[32, 32, 3, N] and ``y`` [N, 1] with labels 1..10, where 10 is the digit 0. The 531,131 images of
the ``extra`` split are not read.

A damaged file can crash SciPy's reader, and the whole process with it. Therefore only the official
files, identified by their MD5 sums, are passed to it.

Source: Y. Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning",
2011, http://ufldl.stanford.edu/housenumbers/.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trishul_ray.data.archives import find_files
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.prepared import ProgressCallback
from trishul_ray.data.public import ClassNames, Columns, ImageRows, PublicDataset, Splits
from trishul_ray.errors import CorruptFileError, first_line

_FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}


@dataclass(frozen=True)
class SvhnArchive:
    """The two original files, with the MD5 sums of the train and the test file."""

    md5: tuple[str, str] = ("e26dedcc434d2e4c54c9b2d4a06d8373", "eb5a983be6a315427106f1b164d9cef3")
    title = " and ".join(_FILES.values())

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """Return the paths of both files in ``folder``, or None if neither is there."""
        return find_files(folder, tuple(_FILES.values()))

    def read(self, files: Sequence[Path], progress: ProgressCallback) -> tuple[Splits, ClassNames]:
        """Return ``pixels`` uint8 [N, 3, 32, 32] and the digits ``label`` int64 [N] by split.

        Raises:
            CorruptFileError: a file is not the official one or malformed; the message names it.
        """
        splits = {}
        for split, file, official in zip(_FILES, files, self.md5, strict=True):
            with file.open("rb") as stream:
                md5 = hashlib.file_digest(stream, "md5").hexdigest()
            if md5 != official:
                raise CorruptFileError(
                    f"{file}: damaged or not the official file (MD5 {md5}, not {official})"
                )
            splits[split] = _read_columns(file)
            progress(split, 1.0)
        return splits, None


def _read_columns(file: Path) -> Columns:
    from scipy.io import loadmat  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(file, variable_names=("X", "y"))
    except (MatReadError, OSError, TypeError, ValueError, NotImplementedError) as error:
        reason = first_line(error)
        raise CorruptFileError(f"{file}: not a readable .mat file ({reason})") from error
    pixels, labels = content.get("X"), content.get("y")
    if pixels is None or pixels.dtype != np.uint8 or pixels.shape[:-1] != (32, 32, 3):
        raise CorruptFileError(f"{file}: 'X' is not uint8 of shape [32, 32, 3, N]")
    if labels is None or labels.dtype.kind not in "ui" or labels.size != pixels.shape[-1]:
        raise CorruptFileError(f"{file}: 'y' is not {pixels.shape[-1]} integers")
    labels = labels.reshape(-1).astype(np.int64)
    wrong = np.flatnonzero((labels < 1) | (labels > 10))
    if len(wrong):
        row = int(wrong[0])
        raise CorruptFileError(f"{file}, row {row}: label is {labels[row]}, outside 1..10")
    return {"pixels": np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)), "label": labels % 10}


SVHN = PublicDataset(
    name="svhn",
    description="32x32 house numbers, 10 digits, 73,257 train / 26,032 test",
    repo=HubRepo(
        "ufldl-stanford/svhn",
        config="cropped_digits",
        revision="f9e1717d73324ebbc1ece84267ccd80d0aca0690",
        file_patterns=("cropped_digits/{split}-*.parquet",),
        # Do not fetch the configuration's third split, `extra`: it is five times as large as
        # the other two together.
        fetch="cropped_digits/{split}-*.parquet",
    ),
    rows=ImageRows(label="label", classes=10, image="image"),
    sizes={"train": 73_257, "test": 26_032},
    archive=SvhnArchive(),
)
