"""The locks of runs' folders."""

from filelock import FileLock

from trishul_ray.runs.folder import remove_unused_locks


def test_the_locks_that_killed_processes_left_beside_finished_runs_are_removed(tmp_path):
    for id in ("finished", "held", "unfinished"):
        (tmp_path / f".{id}.lock").touch()
    with FileLock(tmp_path / ".held.lock"):
        remove_unused_locks(str(tmp_path), {"finished", "held"})
    assert {path.name for path in tmp_path.iterdir()} == {".held.lock", ".unfinished.lock"}
