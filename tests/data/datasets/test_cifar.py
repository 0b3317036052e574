"""CIFAR-10 and CIFAR-100 from original archives: read back, or refused when malformed."""

import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trishul_ray.data.datasets.cifar import CIFAR10, CIFAR100
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import CorruptFileError, InputError


def rows_of(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, 3072), dtype=np.uint8)


def write_tar(file: Path, members: dict[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return file


def pickled(**fields: object) -> bytes:
    # Python 2 wrote protocol 2, with bytes as keys.
    return pickle.dumps({key.encode(): value for key, value in fields.items()}, protocol=2)


def cifar100(**replaced: bytes) -> dict[str, bytes]:
    meta = pickled(fine_label_names=[f"class{n}".encode() for n in range(100)])
    members = {
        "train": pickled(data=rows_of(6, 0), fine_labels=[0, 1, 2, 3, 98, 99], filenames=[b"x"]),
        "test": pickled(data=rows_of(3, 1), fine_labels=[5, 6, 7]),
        "meta": meta,
    }
    return {f"cifar-100-python/{name}": data for name, data in (members | replaced).items()}


def test_cifar100_round_trip(tmp_path):
    file = write_tar(tmp_path / "cifar-100-python.tar.gz", cifar100())
    assert CIFAR100.archive.find(tmp_path) == (file,)
    reported = []
    splits, names = CIFAR100.archive.read((file,), lambda *step: reported.append(step))
    np.testing.assert_array_equal(splits["train"]["pixels"].reshape(6, -1), rows_of(6, 0))
    assert splits["train"]["pixels"].shape == (6, 3, 32, 32)
    assert splits["train"]["label"].tolist() == [0, 1, 2, 3, 98, 99]
    assert splits["test"]["label"].tolist() == [5, 6, 7]
    assert names is not None and names[99] == "class99"
    assert {split for split, _ in reported} == {"train", "test"}
    assert all(0 <= done <= 1 for _, done in reported)


def test_cifar10_joins_its_five_batches_in_order(tmp_path):
    members = {
        f"cifar-10-batches-py/data_batch_{n}": pickled(data=rows_of(2, n), labels=[n, n])
        for n in (3, 1, 2, 5, 4)  # in any order in the file
    }
    members["cifar-10-batches-py/test_batch"] = pickled(data=rows_of(1, 9), labels=[9])
    members["cifar-10-batches-py/batches.meta"] = pickled(label_names=[b"n"] * 10)
    members["cifar-10-batches-py/readme.html"] = b"not a pickle"
    file = write_tar(tmp_path / "cifar-10-python.tar.gz", members)
    splits, _ = CIFAR10.archive.read((file,), lambda *_: None)
    assert splits["train"]["label"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    np.testing.assert_array_equal(splits["train"]["pixels"][2:4].reshape(2, -1), rows_of(2, 2))


def test_the_archive_is_read_if_the_mirror_has_no_parquet(tmp_path):
    write_tar(tmp_path / "hub/archives/cifar-100-python.tar.gz", cifar100())
    small = replace(CIFAR100, sizes={"train": 6, "test": 3})
    info, columns = small.read(tmp_path / "hub", lambda *_: None)
    assert info.source == "archives:cifar-100-python.tar.gz"
    assert info.classes[0] == "class0" and info.image_shape == (3, 32, 32)
    assert columns["test"]["label"].tolist() == [5, 6, 7]
    assert small.key(tmp_path / "hub") != small.key(None)
    with pytest.raises(
        CorruptFileError, match=r"train of cifar100 has 6 rows, not the official 50"
    ):
        prepare("cifar100", cache=tmp_path, hub=tmp_path / "hub")


class Evil:
    """Run a command when unpickled by an unrestricted unpickler."""

    def __reduce__(self):
        import os

        return os.system, ("touch /nonexistent/was-run",)


MALFORMED = {
    "a callable": (
        {"train": pickle.dumps({b"data": Evil()}, protocol=2)},
        r"member cifar-100-python/train is not a pickle of arrays \(it refers to \w+\.system",
    ),
    "eval": (
        {"train": b"c__builtin__\neval\n(S'1+1'\ntR."},
        r"refers to __builtin__\.eval",
    ),
    "a numpy function": (
        {"train": b"cnumpy\nload\n(S'x'\ntR."},
        r"refers to numpy\.load",
    ),
    "not a pickle": ({"train": b"\x80\x02garbage"}, "train is not a pickle of arrays"),
    "cut": ({"train": pickled(data=rows_of(4, 0))[:-900]}, "train is not a pickle of arrays"),
    "empty": ({"train": b""}, "train is not a pickle of arrays"),
    "a list": ({"train": pickle.dumps([1], protocol=2)}, "holds a list, not a dict"),
    "no data": ({"train": pickled(fine_labels=[1])}, "'data' is not uint8 of shape"),
    "floats": (
        {"train": pickled(data=rows_of(2, 0) / 255, fine_labels=[1, 2])},
        "'data' is not uint8 of shape",
    ),
    "too narrow": (
        {"train": pickled(data=rows_of(2, 0)[:, 1:], fine_labels=[1, 2])},
        "'data' is not uint8 of shape",
    ),
    "too few labels": (
        {"test": pickled(data=rows_of(2, 0), fine_labels=[1])},
        "test: 'fine_labels' is not a list of 2 labels",
    ),
    "label above": (
        {"test": pickled(data=rows_of(2, 0), fine_labels=[1, 100])},
        r"test, row 1: label is 100, outside 0\.\.99",
    ),
    "label of text": (
        {"test": pickled(data=rows_of(1, 0), fine_labels=[b"cat"])},
        "test, row 0: label is b'cat'",
    ),
    "too few names": (
        {"meta": pickled(fine_label_names=[b"a"])},
        "meta: 'fine_label_names' is not a list of 100 names",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_member_is_named(tmp_path, case):
    replaced, message = MALFORMED[case]
    file = write_tar(tmp_path / "cifar-100-python.tar.gz", cifar100(**replaced))
    with pytest.raises(CorruptFileError, match=message) as caught:
        CIFAR100.archive.read((file,), lambda *_: None)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_member_a_link_and_a_cut_file_are_named(tmp_path):
    members = cifar100()
    del members["cifar-100-python/test"]
    file = write_tar(tmp_path / "cifar-100-python.tar.gz", members)
    with pytest.raises(CorruptFileError, match="no member cifar-100-python/test"):
        CIFAR100.archive.read((file,), lambda *_: None)

    with tarfile.open(file, "w:gz") as tar:
        entry = tarfile.TarInfo("cifar-100-python/train")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(CorruptFileError, match="member cifar-100-python/train is not a plain file"):
        CIFAR100.archive.read((file,), lambda *_: None)

    write_tar(file, cifar100())
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CorruptFileError, match="incomplete download: it ends after 2,000 bytes"):
        CIFAR100.archive.read((file,), lambda *_: None)
    file.write_bytes(b"not compressed at all")
    with pytest.raises(CorruptFileError, match=r"tar.gz: not a readable tar.gz file"):
        CIFAR100.archive.read((file,), lambda *_: None)


def test_parquet_comes_before_the_archive(tmp_path):
    write_tar(tmp_path / "archives/cifar-10-python.tar.gz", {"x": b""})
    folder = tmp_path / "uoft-cs/cifar10/plain_text"
    folder.mkdir(parents=True)
    (folder / "train-00000-of-00001.parquet").write_bytes(b"")
    with pytest.raises(InputError, match="lacks plain_text/test-"):
        CIFAR10.key(tmp_path)
