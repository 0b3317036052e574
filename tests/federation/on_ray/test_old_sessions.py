"""Ray's folders of finished runs are removed when no process uses them; others are left alone."""

import os
import subprocess
import sys
import time

import pytest

from trishul_ray.federation.on_ray.session import (
    QUIET_SECONDS,
    mark_session,
    remove_old_sessions,
)


@pytest.fixture
def session(tmp_path):
    """``session(name, age)`` -> a session's folder, last written to ``age`` seconds ago."""

    def make(name, age, marked=True):
        folder = tmp_path / f"session_{name}"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs/raylet.out").write_text("x")
        if marked:
            mark_session(folder)
        for file in (folder / "logs/raylet.out", folder):
            os.utime(file, (time.time() - age, time.time() - age))
        return folder

    return make


def test_only_old_unused_sessions_of_ours_are_removed(session, tmp_path):
    old = session("old", QUIET_SECONDS + 60)
    kept = [session("new", 60.0), session("foreign", QUIET_SECONDS + 60, marked=False)]
    used = session("used", QUIET_SECONDS + 60)
    command = [sys.executable, "-c", "input()", f"--session={used}/sockets"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert remove_old_sessions(tmp_path) == [old]
    finally:
        process.communicate(b"\n")
    assert set(tmp_path.iterdir()) == {*kept, used}
    assert remove_old_sessions(tmp_path) == [used]
