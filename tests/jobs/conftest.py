"""A real Ray cluster on this machine, with the jobs API."""

import itertools
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from ports import free_port


@pytest.fixture
def cluster(ray_head, tmp_path):
    """``cluster(token, mode)`` -> the address of the dashboard of a new cluster with two CPUs."""
    number = itertools.count()

    def begin(token=None, mode=None, **environment):
        environment |= {} if mode is None else {"RAY_AUTH_MODE": mode}
        environment.setdefault("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        dashboard = free_port()
        words = ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
        words += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
        home = tmp_path / f"home-{next(number)}"
        command, _ = ray_head(home, *words, token=token, **environment)
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

    return begin
