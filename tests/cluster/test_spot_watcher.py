"""The spot watcher: what EC2 announces is passed on to Ray once, whatever fails in between."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_metadata import FakeMetadata
from ray_nodes import RayNodes

SCRIPT = Path(__file__).parents[2] / "cluster" / "spot_watcher.py"
NODE = "ab" * 28
#: The command ``ray``, which notes its words.
FAKE_RAY = """
from pathlib import Path

class cli:
    def main(words, standalone_mode):
        failures = Path("failures").read_text().splitlines(keepends=True)
        Path("failures").write_text("".join(failures[1:]))
        if failures:
            raise RuntimeError(failures[0].strip())
        with Path("called").open("a") as file:
            file.writelines(f"{word}\\n" for word in words)
"""


@pytest.fixture
def served():
    with FakeMetadata() as metadata:
        yield metadata


@pytest.fixture
def watch(served, start, tmp_path):
    """``watch(...)`` -> the watcher under way; Ray fails once for each line of ``failures``."""
    package = tmp_path / "ray"
    (package / "scripts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "scripts" / "scripts.py").write_text(FAKE_RAY)

    def begin(*words, url=served.url, failures=()):
        (tmp_path / "failures").write_text("".join(f"{line}\n" for line in failures))
        return start(
            sys.executable, SCRIPT, "--address=10.0.0.1:6379", f"--node-id={NODE}",
            f"--metadata={url}", "--interval=0.1", *words,
            PYTHONPATH=str(tmp_path), http_proxy="http://127.0.0.1:9",
            options={"stderr": subprocess.STDOUT},
        )  # fmt: skip

    return begin


def called(tmp_path):
    """The words of all calls of the command ``ray``."""
    file = tmp_path / "called"
    return file.read_text().splitlines() if file.exists() else []


def looked(served, times=3):
    """Wait until the watcher has looked so many times more."""
    end, before = time.monotonic() + 60, served.tokens
    while served.tokens < before + times:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_notice_drains_the_node_once_and_ends_the_watcher(served, watch, tmp_path):
    watcher = watch()
    looked(served)
    assert called(tmp_path) == []
    served.interrupt()
    code, out, _ = watcher.end()
    assert code == 0 and f"EC2 will interrupt this spot instance: draining node {NODE}" in out
    assert called(tmp_path) == [
        "drain-node",
        *("--address", "10.0.0.1:6379"),
        *("--node-id", NODE),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", "EC2 will interrupt this spot instance"),
    ]


def test_a_recommendation_drains_unless_it_is_ignored(served, watch, tmp_path):
    served.recommend_rebalance()
    careful = watch("--ignore-rebalance")
    looked(served)
    assert called(tmp_path) == [] and careful.process.poll() is None
    code, out, _ = watch().end()
    assert code == 0 and "recommends to rebalance" in out


def test_what_fails_is_tried_again_and_reported_once(served, watch, tmp_path):
    served.interrupt()
    watcher = watch(failures=["the control service does not answer"] * 3)
    code, out, _ = watcher.end()
    first, last = out.splitlines()
    assert "the control service does not answer; trying again every 0.1 s" in first
    assert code == 0 and "draining node" in last


def test_metadata_that_cannot_be_reached_are_tried_again(watch):
    watcher = watch(url="http://127.0.0.1:9")
    assert "trying again every 0.1 s" in watcher.process.stdout.readline()
    time.sleep(0.5)
    assert watcher.process.poll() is None


@pytest.mark.slow
def test_the_node_of_this_machine_is_found(start, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    spec = importlib.util.spec_from_file_location("spot_watcher", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    nodes = RayNodes(start, tmp_path)
    try:
        nodes.add()
        (node,) = nodes._alive()
        assert script.this_node(f"127.0.0.2:{nodes.port}") == node.node_id.hex()
    finally:
        nodes.close()
