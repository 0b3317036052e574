"""SVHN from its original files: read back, or refused when malformed."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from scipy.io import savemat

from trishul_ray.data.datasets.svhn import SVHN, SvhnArchive
from trishul_ray.errors import CorruptFileError, InputError


def pixels_of(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)


def published(pixels, labels):
    """Return pixels [N, C, H, W] and labels in the format of the files."""
    return {"X": pixels.transpose(2, 3, 1, 0), "y": np.array(labels)[:, None]}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "hub/archives"
    folder.mkdir(parents=True)
    train, test = folder / "train_32x32.mat", folder / "test_32x32.mat"
    savemat(train, published(pixels_of(4), np.uint8([1, 9, 10, 2])), do_compression=True)
    savemat(test, published(pixels_of(2, 1), np.uint8([10, 5])), do_compression=True)
    return folder


def archive(folder):
    """Return an archive that takes the files in ``folder`` for the official ones."""
    files = [folder / "train_32x32.mat", folder / "test_32x32.mat"]
    return SvhnArchive(tuple(hashlib.md5(file.read_bytes()).hexdigest() for file in files))


def read(folder):
    ours = archive(folder)
    return ours.read(ours.find(folder), lambda *_: None)


def test_round_trip_with_ten_for_zero(folder):
    small = replace(SVHN, sizes={"train": 4, "test": 2}, archive=archive(folder))
    info, columns = small.read(folder.parent, lambda *_: None)
    assert columns["train"]["label"].tolist() == [1, 9, 0, 2]
    assert columns["test"]["label"].tolist() == [0, 5]
    np.testing.assert_array_equal(columns["train"]["pixels"], pixels_of(4))
    assert info.image_shape == (3, 32, 32) and info.classes == tuple("0123456789")
    assert info.source == "archives:train_32x32.mat, test_32x32.mat"
    whole = replace(SVHN, archive=archive(folder))
    with pytest.raises(CorruptFileError, match="train of svhn has 4 rows, not the official 73257"):
        whole.read(folder.parent, lambda *_: None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (published(pixels_of(2), [1, 11]), "row 1: label is 11, outside 1..10"),
        (published(pixels_of(2), [0, 1]), "row 0: label is 0, outside 1..10"),
        (published(pixels_of(2), [1]), "'y' is not 2 integers"),
        (published(pixels_of(2), [0.5, 1]), "'y' is not 2 integers"),
        ({"X": published(pixels_of(2), [1])["X"]}, "'y' is not 2 integers"),
        ({"X": pixels_of(2), "y": [[1], [2]]}, "'X' is not uint8 of shape"),
        (published(pixels_of(2) / 255, [1, 2]), "'X' is not uint8"),
        ({"y": [[1]]}, "'X' is not uint8"),
    ],
)
def test_malformed_files_are_named(folder, fields, message):
    file = folder / "test_32x32.mat"
    savemat(file, fields)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read(folder)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"MATLAB 5.0", b"MATLAB 7.3".ljust(400, b" ")])
def test_a_file_that_is_not_a_mat_file_is_named(folder, content):
    (folder / "train_32x32.mat").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"train_32x32.mat: not a readable .mat file"):
        read(folder)


def test_a_damaged_file_is_never_passed_to_scipy(folder):
    file = folder / "test_32x32.mat"
    ours, whole = archive(folder), file.read_bytes()
    for damaged in (whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        file.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=r"test_32x32.mat: damaged or not the official"):
            ours.read(ours.find(folder), lambda *_: None)


def test_a_missing_file_is_named(folder):
    (folder / "test_32x32.mat").unlink()
    with pytest.raises(
        InputError,
        match=r"archives: test_32x32.mat is missing, but other files of the dataset are there",
    ):
        SVHN.key(folder.parent)
