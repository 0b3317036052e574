"""Files of a run on a pyarrow filesystem."""

import pytest
from pyarrow import fs

from trishul_ray.errors import InputError
from trishul_ray.storage import Store


def test_local_round_trip(tmp_path):
    store = Store.open(str(tmp_path)).child("run")
    assert not store.exists()
    store.write("a.txt", b"one")
    store.write("a.txt", b"two")
    assert store.read("a.txt") == b"two"
    assert store.names() == ["a.txt"]
    store.remove("a.txt")
    assert store.names() == []
    store.remove_all()
    assert not store.exists()


def test_any_pyarrow_filesystem_will_do(tmp_path):
    inner = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store = Store(inner, "bucket/run", "sub://bucket/run")
    store.write("a.bin", b"\0\1")
    assert store.read("a.bin") == b"\0\1"
    assert (tmp_path / "bucket/run/a.bin").read_bytes() == b"\0\1"


def test_folders_are_copied_whole(tmp_path):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "x.txt").write_text("x")
    (source / "inner" / "y.txt").write_text("y")
    store = Store.open(str(tmp_path / "target"))
    store.upload_folder(source)
    assert store.read("x.txt") == b"x"
    assert store.child("inner").read("y.txt") == b"y"


def test_a_failed_write_leaves_nothing(tmp_path):
    store = Store.open(str(tmp_path))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("in the way")
    with pytest.raises(OSError):
        store.write("taken", b"data")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]


def test_an_unknown_scheme_is_named():
    with pytest.raises(InputError, match="nosuch"):
        Store.open("nosuch://bucket/runs")
