"""What killed processes leave of finished runs."""

from filelock import FileLock

from trishul_ray.runs.folder import remove_locks


def test_locks_of_killed_processes_are_removed(tmp_path):
    for id in ("finished", "held", "unfinished"):
        (tmp_path / f".{id}.lock").touch()
    with FileLock(tmp_path / ".held.lock"):
        remove_locks(str(tmp_path), {"finished", "held"})
    assert {path.name for path in tmp_path.iterdir()} == {".held.lock", ".unfinished.lock"}
