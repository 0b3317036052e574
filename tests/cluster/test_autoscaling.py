"""A sweep on a cluster without workers: nodes start, at most as many as requested, and stop."""

import json
import time
from contextlib import contextmanager
from threading import Event, Thread

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray_nodes import LONG_WAIT, RayNodes

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Files of `ray up` on the head. (`ray.cluster_utils.AutoscalingCluster` is similar, but reads a
#: file that Ray's wheel lacks, and stops all Rays of the machine when it starts.)
CLUSTER = {
    "cluster_name": "fake",
    "max_workers": 4,
    "idle_timeout_minutes": 0.1,
    "provider": {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
    },
    "head_node_type": "ray.head.default",
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    **{f"{nodes}setup_commands": [] for nodes in ("", "head_", "worker_")},
    **{f"{nodes}_start_ray_commands": [] for nodes in ("head", "worker")},
    "initialization_commands": [],
}


def node_type(workers, **resources):
    return {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": workers}


#: None of these machines has a GPU. Ray counts one, but training finds none.
NODE_TYPES = {
    "ray.head.default": node_type(0, CPU=0),
    "cpu": node_type(1, CPU=2, object_store_memory=100 * 2**20),
    "gpu": node_type(3, CPU=1, GPU=1, object_store_memory=100 * 2**20),
}


@pytest.fixture
def cluster(start, tmp_path):
    """Start a head without CPUs, with Ray's autoscaler, version 2."""
    nodes = RayNodes(start, tmp_path)
    provider = {**CLUSTER["provider"], "gcs_address": f"127.0.0.2:{nodes.port}"}
    config = {**CLUSTER, "provider": provider, "available_node_types": NODE_TYPES}
    nodes.add(cpus=0, autoscaling=config)
    yield nodes
    nodes.close()


@contextmanager
def seen_nodes(cluster):
    """Collect the type of every node that exists at some time, keyed by id."""
    types, ended = {}, Event()

    def look():
        while not ended.wait(0.3):
            types.update(cluster.workers())

    thread = Thread(target=look)
    thread.start()
    try:
        yield types
    finally:
        ended.set()
        thread.join()


def test_sweep_scales_nodes_from_zero_and_back(
    cluster, trishul, small_words, tmp_path, inline_result
):
    assert cluster.workers() == {}
    words = [*small_words, "storage.runs=runs"]
    inline = "resources.backend=inline"
    with seen_nodes(cluster) as types:
        sweep = trishul("sweep", "--axis", "seed=0..1", *words, inline, **cluster.environment)
        code, out, errors = sweep.end(4 * LONG_WAIT)
        assert code == 0, out + errors
        end = time.monotonic() + LONG_WAIT
        while cluster.workers():
            assert time.monotonic() < end
            time.sleep(0.5)
    # resources.device=auto is the CPU as long as no node has a GPU.
    assert sorted(types.values()) == ["cpu"]
    for seed in range(2):
        experiment = load_experiment(None, [*words, f"seed={seed}"])
        result = json.loads((tmp_path / "runs" / experiment.id / "result.json").read_text())
        assert result["state_sha256"] == inline_result(experiment).digest
    assert sweep.left_behind() == []
