"""`trishul doctor --clean` removes leftovers, names them, and checks nothing."""

import os
import time

from trishul_ray.federation.on_ray.old_sessions import QUIET_SECONDS, mark_session


def test_leftovers_are_removed_and_named(called, monkeypatch, tmp_path):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    failed, session = tmp_path / "cache/data/table-0123456789ab", tmp_path / "ray/session_1"
    failed.mkdir(parents=True)
    session.mkdir(parents=True)
    (failed / "lock").touch()
    mark_session(session)
    for path in (failed / "lock", session):
        os.utime(path, (time.time() - 2 * QUIET_SECONDS,) * 2)
    code, out, _ = called("doctor", "--clean")
    assert code == 0
    assert out.splitlines() == [f"removed {failed}", f"removed {session}", "2 folders removed"]
    assert not failed.exists() and not session.exists()
