"""A real Ray cluster on this machine, with the jobs API."""

import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from ports import free_port


@pytest.fixture
def cluster(start, tmp_path):
    """``cluster(token, mode)`` -> the address of the dashboard of a new cluster with two CPUs."""
    started = []

    def begin(token=None, mode=None, **environment):
        home = tmp_path / f"home-{len(started)}"
        (home / ".ray").mkdir(parents=True)
        if token is not None:
            (home / ".ray" / "auth_token").write_text(token)
        if mode is not None:
            environment["RAY_AUTH_MODE"] = mode
        port, dashboard = free_port(), free_port()
        # Ray's sockets need a short path.
        folder = Path("/tmp") / f"trishul-{os.getpid()}-{port}"
        command = start(
            Path(sys.executable).with_name("ray"), "start", "--head", "--block",
            f"--port={port}", "--num-cpus=2", f"--temp-dir={folder}", "--disable-usage-stats",
            "--include-dashboard=true", "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
            cwd=home,
            options={"stdout": -3, "stderr": -3},
            HOME=str(home),
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **environment,
        )  # fmt: skip
        started.append((command, folder))
        address = f"http://127.0.0.1:{dashboard}"
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/version", timeout=1).close()
                return address
            except urllib.error.HTTPError as answer:
                assert answer.code == 401  # it wants the token
                return address
            except OSError:
                assert time.monotonic() < deadline and command.process.poll() is None
                time.sleep(0.2)

    yield begin
    for command, folder in started:
        command.process.send_signal(signal.SIGTERM)
        command.left_behind(10)
        command.sweep()
        shutil.rmtree(folder, ignore_errors=True)
