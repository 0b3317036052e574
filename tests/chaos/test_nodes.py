"""Nodes that are killed or drained in mid-run: same bytes, at most a round lost."""

import json
import re
import time

import pytest
from chaos.audit import rounds_saved
from ray_nodes import LONG_WAIT, RayNodes

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

ACTORS = ("CellTrial", "Trainable", "ClientActor", "Coordinator")


@pytest.fixture
def nodes(start, tmp_path):
    """A head without CPUs, and three nodes with one CPU; the last one is a spot instance."""
    cluster = RayNodes(start, tmp_path)
    cluster.add(cpus=0)
    for watched in (False, False, True):
        cluster.add(watched=watched)
    yield cluster
    cluster.close()


def own_cache(home):
    """Each node prepares its own data and weights, in its own home; so does the driver."""
    return {"TRISHUL_CACHE": "~/cache", "HOME": str(home)}


def wait_until(met, command):
    end = time.monotonic() + 2 * LONG_WAIT
    while not met():
        assert command is None or command.process.poll() is None, command.end()
        assert time.monotonic() < end
        time.sleep(0.1)


def digest(runs, experiment):
    return json.loads((runs / experiment.id / "result.json").read_text())["state_sha256"]


def assert_vacated(cluster):
    for node in cluster.nodes:
        left = [name for name in ACTORS if node.processes(name)]
        assert left == [], f"{left} on {node.address}"


def test_a_run_wider_than_a_node_outlives_a_killed_node_and_a_drained_one(
    nodes, trishul, small_words, tmp_path, inline_result
):
    wide = ["federation.clients=60", "federation.clients_per_round=34", "resources.actors=3"]
    rounds = ["federation.rounds=5", "federation.local_steps=3", "partition.kind=iid"]
    words = [*small_words, *wide, *rounds, "storage.runs=runs"]
    experiment = load_experiment(None, words)
    head, killed, _, spot = nodes.nodes
    run = trishul("run", *words, **nodes.environment, **own_cache(tmp_path))
    runs = tmp_path / "runs"
    wait_until(lambda: rounds_saved(runs).get(experiment.id, 0) >= 1, run)
    assert [len(node.processes("ClientActor")) for node in nodes.nodes] == [0, 1, 1, 1]
    assert head.processes("Coordinator")  # beside the local folder of runs
    spot.metadata.interrupt(60)
    run.wait_for("moves: its node is being drained", LONG_WAIT)
    before = rounds_saved(runs)[experiment.id]
    killed.kill()
    code, out, errors = run.end(4 * LONG_WAIT)
    assert code == 0, out + errors
    assert digest(runs, experiment) == inline_result(experiment).digest
    # Uploads that were on the killed node are lost with it, and at most one round with them.
    continued = [int(n) for n in re.findall(r"continuing after round (\d+)", errors)]
    assert len(re.findall(r"going on from the checkpoint", errors)) <= 1, errors
    assert all(n >= before for n in continued)
    # The drained node ends by itself as soon as it is empty, and its watcher with it.
    wait_until(lambda: spot.address not in nodes.alive(), None)
    assert spot.watcher.left_behind(60) == []
    assert run.left_behind() == []
    assert_vacated(nodes)
    for node in (killed, spot):  # the driver's data are visible to all nodes of one machine
        assert list(node.home.glob("cache/weights/*/weights.pt"))
