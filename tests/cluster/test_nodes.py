"""A cluster of two nodes with different instruction sets, and its metrics for Prometheus."""

import json
import re
import time
import urllib.request

import pytest
from ray_nodes import LONG_WAIT, RayNodes

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(start, tmp_path):
    """Start a head, and a node whose torch uses no vector instructions."""
    nodes = RayNodes(start, tmp_path)
    nodes.add()
    nodes.add(ATEN_CPU_CAPABILITY="default")
    yield nodes
    nodes.close()


def metrics_of(cluster, run):
    """Return the metrics of a run that the head's agent serves now, keyed by name."""
    url = f"http://127.0.0.2:{cluster.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    lines = re.findall(r"(?m)^ray_(trishul_\w+)\{(.*)\} (.*)$", text)
    return {name: float(value) for name, tags, value in lines if f'run="{run}"' in tags}


def test_mixed_nodes_are_rejected_or_recorded(cluster, trishul, small_words, tmp_path):
    words = [*small_words, "storage.runs=runs", "resources.actors=2", "federation.rounds=300"]
    experiment = load_experiment(None, words)
    run = trishul("run", *words, **cluster.environment)
    code, out, errors = run.end(LONG_WAIT)
    assert code == 2, out + errors
    assert "a node of the cluster has device" in errors
    assert "set resources.mixed_stack=true" in errors

    run = trishul("run", *words, "resources.mixed_stack=true", **cluster.environment)
    end, found = time.monotonic() + LONG_WAIT, {}
    while found.get("trishul_round", 0) < 2:
        assert run.process.poll() is None and time.monotonic() < end, found
        time.sleep(0.5)
        found = metrics_of(cluster, experiment.id)
    fed = experiment.federation
    clients = found["trishul_trained_clients_total"]
    assert found["trishul_rounds"] == 300 and clients % fed.clients_per_round == 0
    assert found["trishul_local_steps_total"] == clients * fed.local_steps
    assert found["trishul_uploaded_bytes_total"] > 0
    code, out, errors = run.end(4 * LONG_WAIT)
    assert code == 0, out + errors
    result = json.loads((tmp_path / "runs" / experiment.id / "result.json").read_text())
    devices = [stack["device"].split()[-1] for stack in result["stacks"]]
    assert len(devices) == 2 and devices.count("DEFAULT") == 1
    assert result["stacks"][0]["first_round"] == 0
