"""`trishul doctor --clean` removes leftovers, names them, and checks nothing."""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from trishul_ray.data.from_python import store_rows
from trishul_ray.doctor.services import check_cache
from trishul_ray.federation.on_ray.old_sessions import QUIET_SECONDS, mark_session
from trishul_ray.files import KEPT_SECONDS, scratch_folder


def test_leftovers_are_removed_and_named(called, monkeypatch, tmp_path):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = """
        import os, signal
        from trishul_ray.files import scratch_folder
        with scratch_folder("test"):
            os.kill(os.getpid(), signal.SIGKILL)
        """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(killed)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    (abandoned,) = tmp_path.glob("trishul-test-*")
    os.utime(abandoned / ".owner", (0, 0))
    failed, session = tmp_path / "cache/data/table-0123456789ab", tmp_path / "ray/session_1"
    failed.mkdir(parents=True)
    session.mkdir(parents=True)
    (failed / "lock").touch()
    mark_session(session)
    for path in (failed / "lock", session):
        os.utime(path, (time.time() - 2 * QUIET_SECONDS,) * 2)
    with scratch_folder("test") as used:
        os.utime(f"{used}/.owner", (0, 0))
        code, out, _ = called("doctor", "--clean")
        assert Path(used).is_dir()
    assert code == 0
    removed = [failed, session, abandoned]
    assert out.splitlines() == [*(f"removed {folder}" for folder in removed), "3 removed"]
    assert not any(folder.exists() for folder in [*removed, Path(used)])


def test_rows_and_weights_are_removed_a_month_after_their_last_use(called, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    passed = [{"text": "a", "label": 0}]
    old, used = store_rows(passed, cache, {}), store_rows(passed * 2, cache, {})
    (cache / "weights").mkdir()
    weights = [cache / "weights" / f"{name}.safetensors" for name in ("old", "used")]
    for place in (old, used, *weights):
        place.touch()
        if place != weights[1]:
            os.utime(place, (time.time() - 2 * KEPT_SECONDS,) * 2)
    assert store_rows(passed * 2, cache, {}) == used  # which is a use
    code, out, _ = called("doctor", "--clean")
    assert code == 0 and out.splitlines() == [
        f"removed {old}",
        f"removed {weights[0]}",
        "2 removed",
    ]
    assert used.is_dir() and weights[1].is_file()
    # Without the command, they go when others come.
    os.utime(used, (time.time() - 2 * KEPT_SECONDS,) * 2)
    assert list(used.parent.iterdir()) == [used]
    assert store_rows(passed, cache, {}) == old
    assert list(used.parent.iterdir()) == [old]


def test_the_parts_of_the_cache_have_their_sizes(tmp_path):
    assert "MiB" not in check_cache(tmp_path / "none").detail
    (tmp_path / "data" / "digits").mkdir(parents=True)
    (tmp_path / "data" / "digits" / "train.arrow").write_bytes(bytes(3 * 2**20))
    assert check_cache(tmp_path).detail.endswith("; data 3 MiB")
