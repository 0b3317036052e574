"""An existing cluster: joined, shared, left as it was, with a token and without."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from ports import free_port

from trishul_ray.experiment.loading import load_experiment

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(start, tmp_path):
    """``cluster(token)`` -> its address, the environment to join it, and its command."""
    started = []

    def begin(token=None):
        home = tmp_path / "home"
        home.mkdir()
        if token is not None:
            (home / ".ray").mkdir()
            (home / ".ray" / "auth_token").write_text(token)
        port = free_port()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        # Ray's sockets need a short path.
        folder = Path("/tmp") / f"trishul-{os.getpid()}-{port}"
        words = [f"--port={port}", "--num-cpus=2", f"--temp-dir={folder}", "--block"]
        flags = ["--head", "--disable-usage-stats", "--include-dashboard=false"]
        command = start(
            Path(sys.executable).with_name("ray"),
            "start",
            *words,
            *flags,
            cwd=elsewhere,
            options={"stdout": -3, "stderr": -3},
            HOME=str(home),
        )
        started.append((command, folder))
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and command.process.poll() is None
            time.sleep(0.2)
        return {"RAY_ADDRESS": f"127.0.0.1:{port}", "HOME": str(home)}, command

    yield begin
    import shutil

    for command, folder in started:
        command.process.send_signal(signal.SIGTERM)
        command.left_behind(10)
        command.sweep()
        shutil.rmtree(folder, ignore_errors=True)


def test_two_runs_share_a_cluster_that_asks_for_a_token(
    cluster, trishul, small_words, tmp_path, inline_result, cache
):
    environment, daemon = cluster("0123456789abcdef" * 4)
    # Relative places: the cluster's processes live in another folder.
    words = [*small_words, "storage.runs=runs"]
    os.symlink(cache, tmp_path / "link")
    environment["TRISHUL_CACHE"] = "link"
    seeds = ["seed=1", "seed=2"]
    commands = [trishul("run", *words, seed, **environment) for seed in seeds]
    for command, seed in zip(commands, seeds, strict=True):
        code, out, errors = command.end()
        assert code == 0, out + errors
        experiment = load_experiment(None, [*words, seed])
        result = json.loads((tmp_path / "runs" / experiment.id / "result.json").read_text())
        assert result["state_sha256"] == inline_result(experiment).digest
    assert all(command.left_behind() == [] for command in commands)
    # The cluster lives, the runs' actors do not.
    assert daemon.process.poll() is None
    deadline = time.monotonic() + 15
    while actors_of(daemon) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert actors_of(daemon) == []


def actors_of(daemon):
    titles = []
    for process in psutil.Process(daemon.process.pid).children(recursive=True):
        try:
            titles += process.cmdline()[:1]
        except psutil.Error:
            continue
    return [title for title in titles if "ClientActor" in title or "Coordinator" in title]


def test_a_cluster_without_a_token_is_joined_too(cluster, trishul, small_words, tmp_path):
    environment, daemon = cluster()
    words = [*small_words, "storage.runs=runs", "federation.rounds=1"]
    # A token of another cluster lies about: then its mode must be said.
    environment |= {"RAY_AUTH_TOKEN": "f" * 64, "RAY_AUTH_MODE": "disabled"}
    code, out, errors = trishul("run", *words, **environment).end()
    assert code == 0, out + errors
    assert daemon.process.poll() is None


def test_a_cluster_that_does_not_answer_is_one_paragraph(trishul, small_words):
    words = [*small_words, "storage.runs=runs", "federation.rounds=1"]
    code, _, errors = trishul("run", *words, RAY_ADDRESS="127.0.0.1:1").end()
    assert code == 1
    assert "cannot join the cluster at RAY_ADDRESS=127.0.0.1:1" in errors.replace("\n", " ")
    assert "Traceback" not in errors
