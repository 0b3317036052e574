"""Files and folders that appear when they are complete, and what is left of killed writers."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from syncs import Syncs

from trishul_ray.storage import durable as files
from trishul_ray.storage.durable import (
    KEPT_SECONDS,
    complete_file,
    complete_folder,
    keep_logs,
    remove_abandoned,
    scratch_folder,
    write_file,
)
from trishul_ray.storage.integrity import fault_in, seal


def test_a_folder_is_complete_or_not_there(tmp_path):
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


def test_a_name_appears_when_what_it_names_is_on_the_disk(tmp_path, monkeypatch):
    for name in ("fsync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, getattr(os, name))  # Syncs replaces them
    syncs = Syncs(str(tmp_path))
    write_file(tmp_path / "runs" / "a" / "b", b"1")
    with complete_folder(tmp_path / "cache" / "c") as folder:
        (folder / "d").mkdir()
        (folder / "d" / "e").write_bytes(b"1")
    assert syncs.end() == []
    monkeypatch.setattr(files, "_sync", lambda path: None)
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
def test_who_may_read_the_folder_may_read_its_tensors(tmp_path, umask, mode):
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


def test_what_a_killed_writer_leaves_is_removed_by_the_next_one(tmp_path):
    code = """
        import os, signal
        from pathlib import Path
        from trishul_ray.storage.durable import complete_file, complete_folder
        with complete_folder(Path("model")) as folder, complete_file(Path("result")) as file:
            (folder / "weights").write_bytes(b"half")
            file.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, check=False)
    assert len(left := list(tmp_path.iterdir())) == 2 and all(p.suffix == ".tmp" for p in left)
    elsewhere = tmp_path / ".result.000000-00000000.tmp"  # of another machine
    old = tmp_path / ".model.000000-00000001.tmp"
    foreign = tmp_path / ".mine.tmp"
    for path in (elsewhere, old, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (path.stat().st_mtime - 2 * KEPT_SECONDS,) * 2)
    with complete_file(tmp_path / "a") as file:
        file.write_bytes(b"a")
        write_file(tmp_path / "b", b"b")
        assert file.exists()
    assert {*tmp_path.iterdir()} == {tmp_path / "a", tmp_path / "b", elsewhere, foreign}


def test_a_file_system_that_knows_no_permissions_gets_its_files(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    with complete_folder(tmp_path / "model") as folder:
        save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    assert (tmp_path / "model/model.safetensors").stat().st_mode & 0o777 == 0o600


def test_a_sealed_folder_has_the_files_that_were_sealed(tmp_path):
    (tmp_path / "backbone").mkdir()
    for name in ("a", "backbone/b"):
        (tmp_path / name).write_bytes(b"1234")
    assert fault_in(tmp_path) == "it has no checksums"
    seal(tmp_path)
    assert fault_in(tmp_path) == ""
    (tmp_path / "new").touch()
    assert fault_in(tmp_path) == "new is not as it was written"
    (tmp_path / "new").unlink()
    (tmp_path / "backbone/b").write_bytes(b"1235")
    assert fault_in(tmp_path) == "backbone/b is not as it was written"
    (tmp_path / "backbone/b").unlink()
    assert fault_in(tmp_path) == "backbone/b is missing"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The only folder for temporary files; all users may write there."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "_SHORT", ())
    tmp_path.chmod(0o1777)
    return tmp_path


@pytest.mark.timeout(20)
def test_what_others_leave_in_a_folder_of_all_users_neither_blocks_nor_is_removed(temporary):
    def named(name):
        return temporary / f".trishul-{name}.{files._HOST}-00000000.tmp"

    mine, foreign, pipe, link = map(named, ("mine", "foreign", "pipe", "link"))
    mine.mkdir()
    foreign.mkdir()
    os.mkfifo(pipe)
    (temporary / "elsewhere").mkdir()
    link.symlink_to(temporary / "elsewhere")
    other = temporary / ".of-another-program.1234.tmp"
    other.touch()
    old = 0, os.stat(other).st_mtime - 2 * KEPT_SECONDS
    for path in (mine, foreign, other):
        os.utime(path, old)
    if os.getuid() == 0:
        for path in (foreign, pipe):
            os.chown(path, 12345, 12345)
    assert mine in remove_abandoned() and not mine.exists()
    assert other.exists() and (temporary / "elsewhere").exists()
    assert os.getuid() or (foreign.exists() and pipe.exists())


def test_a_scratch_folder_is_ones_own_and_goes_except_for_kept_logs(temporary):
    with scratch_folder("ray") as folder:
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert remove_abandoned() == []  # its process lives
    assert list(temporary.iterdir()) == []
    with scratch_folder("ray") as folder:
        log = temporary / folder / "r/session_1/logs/raylet.out"
        log.parent.mkdir(parents=True)
        log.touch()
        keep_logs(folder)
    with scratch_folder("later"):
        assert log.exists() and remove_abandoned() == []
    os.utime(log, (0, log.stat().st_mtime - files.LOG_SECONDS))
    assert [str(path) for path in remove_abandoned()] == [folder]
    assert list(temporary.iterdir()) == []
