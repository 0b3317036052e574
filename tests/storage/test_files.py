"""Files and folders that appear only when complete, and temporary files of killed writers."""

import errno
import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from syncs import Syncs

from trishul_ray.errors import InputError
from trishul_ray.storage import durable
from trishul_ray.storage.durable import (
    LOG_SECONDS,
    UNFINISHED_SECONDS,
    complete_file,
    complete_folder,
    keep_logs,
    remove_abandoned,
    remove_unfinished,
    scratch_folder,
    write_file,
)
from trishul_ray.storage.integrity import (
    KEPT_SECONDS,
    find_corruption,
    make_once,
    record_checksums,
    remove_unused,
    take_remarks,
)


def test_folder_is_complete_or_absent(tmp_path):
    with complete_folder(tmp_path / "new" / "model") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "new/model").exists()
    assert (tmp_path / "new/model/a").read_text() == "1"
    with pytest.raises(RuntimeError), complete_folder(tmp_path / "new" / "other") as folder:
        (folder / "a").write_text("1")
        raise RuntimeError
    with pytest.raises(OSError), complete_folder(tmp_path / "new" / "model") as folder:
        (folder / "a").write_text("2")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    assert (tmp_path / "new/model/a").read_text() == "1"


def test_full_disk_names_the_folder(tmp_path):
    full = "I/O error: No space left on device (os error 28)"
    with pytest.raises(OSError, match="No space left") as error, complete_folder(tmp_path / "new"):
        raise SafetensorError(full)
    assert error.value.filename == str(tmp_path / "new")


def test_content_is_synced_before_its_name(tmp_path, monkeypatch):
    for name in ("fsync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, getattr(os, name))  # Syncs replaces them
    syncs = Syncs(str(tmp_path))
    write_file(tmp_path / "runs" / "a" / "b", b"1")
    with complete_folder(tmp_path / "cache" / "c") as folder:
        (folder / "d").mkdir()
        (folder / "d" / "e").write_bytes(b"1")
    assert syncs.end() == []
    monkeypatch.setattr(durable, "_sync", lambda path: None)
    write_file(tmp_path / "runs" / "f" / "g", b"1")
    (tmp_path / "cache" / "h").touch()
    renamed, *others = syncs.end()
    assert "/runs/f/.g." in renamed and renamed.endswith(" is renamed and not synced")
    assert set(others) == {
        f"{tmp_path}/cache/h is not synced",
        f"{tmp_path}/runs/f/g is not synced",
        f"the name of {tmp_path}/runs/f is not synced",
        f"the name of {tmp_path}/runs/f/g is not synced",
    }


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_tensors_have_the_folders_read_permissions(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with complete_folder(tmp_path / "model") as folder:
            (folder / "backbone").mkdir()
            for place in (folder, folder / "backbone"):
                save_file({"w": torch.zeros(2)}, place / "model.safetensors")
    finally:
        os.umask(before)
    for file in (tmp_path / "model").rglob("*.safetensors"):
        assert file.stat().st_mode & 0o777 == mode


def test_unfinished_files_are_removed_after_a_day(tmp_path):
    old, foreign = tmp_path / "a" / ".model.01234567.tmp", tmp_path / ".notes.saturday.tmp"
    old.mkdir(parents=True)
    foreign.touch()
    for path in (old, foreign):
        os.utime(path, (path.stat().st_mtime - 2 * UNFINISHED_SECONDS,) * 2)
    with complete_file(tmp_path / "b") as new:
        new.touch()
        assert remove_unfinished(tmp_path) == [old]
    assert {*tmp_path.iterdir()} == {tmp_path / "a", tmp_path / "b", foreign}


def test_changed_files_of_a_folder_are_named(tmp_path):
    (tmp_path / "backbone").mkdir()
    for name in ("a", "backbone/b"):
        (tmp_path / name).write_bytes(b"1234")
    assert find_corruption(tmp_path) == "checksums are missing"
    record_checksums(tmp_path)
    assert find_corruption(tmp_path) == ""
    (tmp_path / "new").touch()
    assert find_corruption(tmp_path) == "new has changed"
    (tmp_path / "new").unlink()
    (tmp_path / "backbone/b").write_bytes(b"1235")
    assert find_corruption(tmp_path) == "backbone/b has changed"
    (tmp_path / "backbone/b").unlink()
    assert find_corruption(tmp_path) == "backbone/b is missing"


def test_folder_is_made_once_without_leftovers(tmp_path):
    (tmp_path / ".rows.01234567.tmp").mkdir()  # of a killed process
    for _ in range(2):
        make_once(tmp_path, "rows", lambda new: (new / "a").touch(exist_ok=False))
    assert {path.name for path in tmp_path.iterdir()} == {"CACHEDIR.TAG", "rows", "rows.lock"}


def test_only_a_separate_cache_is_marked(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    write_file(tmp_path / "new/.CACHEDIR.TAG.01234567.tmp", b"")  # of a killed process
    for cache in (tmp_path / "mine", tmp_path / "new"):
        make_once(cache, "rows/a", lambda new: (new / "b").touch())
    assert not (tmp_path / "mine/CACHEDIR.TAG").exists()
    assert (tmp_path / "new/CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172")


def test_only_unused_folders_of_the_cache_are_removed(tmp_path):
    def age(*paths):
        for path in paths:
            os.utime(path, (time.time() - 2 * KEPT_SECONDS,) * 2)

    key, data = "0123456789abcdef", "data/raw/table-0123456789ab"
    names = f"weights/{key}", f"rows/{4 * key}", data, "weights/mine"
    made = [make_once(tmp_path, name, lambda new: (new / "a").touch()) for name in names]
    foreign = [tmp_path / name for name in (f"weights/{key[::-1]}", "rows/thesis.json", "x")]
    foreign[0].mkdir()
    foreign[1].touch()
    foreign[2].mkdir()
    age(*made, *foreign)
    with FileLock(f"{made[1]}.lock"):  # Another process uses it.
        assert remove_unused(tmp_path) == [made[0], made[2]]
    take_remarks()
    make_once(tmp_path, f"weights/{key}", lambda new: (new / "a").touch())
    assert take_remarks() == (f"removed {made[1]}, which was not used for a month",)
    assert made[3].is_dir() and all(path.exists() for path in foreign)


@pytest.mark.timeout(20)
def test_cache_without_locks_is_rejected(tmp_path, monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    (tmp_path / "rows.lock").touch()
    monkeypatch.setattr("fcntl.flock", missing)
    with pytest.raises(InputError, match=r"rows: .*not implemented; set TRISHUL_CACHE"):
        make_once(tmp_path, "rows", Path.mkdir)


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Return the only folder for temporary files."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(durable, "_SHORT", ())
    return tmp_path


@pytest.mark.timeout(20)
def test_only_own_abandoned_folders_are_removed(temporary):
    def named(name):
        return temporary / f".trishul-{name}.01234567.tmp"

    mine, locked, foreign, pipe, link = map(named, ("mine", "locked", "foreign", "pipe", "link"))
    for folder in (mine, locked, foreign, temporary / "elsewhere"):
        folder.mkdir()
        os.utime(folder, (0, 0))
    os.mkfifo(pipe)
    link.symlink_to(temporary / "elsewhere")
    if os.getuid() == 0:
        os.chown(foreign, 12345, 12345)
    lock = os.open(locked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    removed = remove_abandoned()
    os.close(lock)
    assert {*removed} == ({mine} if os.getuid() == 0 else {mine, foreign})
    assert locked.exists() and pipe.exists() and (temporary / "elsewhere").exists()


def test_scratch_folder_is_removed_except_for_logs(temporary):
    with scratch_folder("ray") as folder:
        assert os.stat(folder).st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == []
    with scratch_folder("ray") as folder:
        log = temporary / folder / "r/session_1/logs/raylet.out"
        log.parent.mkdir(parents=True)
        log.touch()
        keep_logs(folder)
    os.utime(folder, (0, 0))
    assert log.exists() and remove_abandoned() == []
    os.utime(log, (0, log.stat().st_mtime - 2 * LOG_SECONDS))
    assert [str(path) for path in remove_abandoned()] == [folder]
    assert list(temporary.iterdir()) == []
