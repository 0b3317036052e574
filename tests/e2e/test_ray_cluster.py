"""An existing cluster: joined with a token, shared, and unchanged; ray_nodes.py has no token."""

import json
import os
import socket
import time

import psutil
import pytest

from trishul_ray.experiment.loading import load_experiment

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(ray_head, tmp_path):
    """``cluster(token)`` returns its address, the environment to join it, and its command."""

    def begin(token):
        home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
        elsewhere.mkdir()
        command, port = ray_head(home, "--include-dashboard=false", token=token, cwd=elsewhere)
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and command.process.poll() is None
            time.sleep(0.2)
        return {"RAY_ADDRESS": f"127.0.0.1:{port}", "HOME": str(home)}, command

    return begin


def test_two_runs_share_a_cluster_with_token(
    cluster, trishul, small_words, tmp_path, inline_result, cache
):
    environment, daemon = cluster("0123456789abcdef" * 4)
    # Use relative paths: the cluster's processes run in another folder.
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
    # The cluster is alive, but the runs' actors are not.
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


def test_unreachable_cluster_is_one_paragraph(trishul, small_words):
    words = [*small_words, "storage.runs=runs", "federation.rounds=1"]
    code, _, errors = trishul("run", *words, RAY_ADDRESS="127.0.0.1:1").end()
    assert code == 1
    assert "cannot join the cluster at RAY_ADDRESS=127.0.0.1:1" in errors.replace("\n", " ")
    assert "Traceback" not in errors
