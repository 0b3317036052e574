"""Nodes that a plan may count on: working ones, and those that an autoscaler may add."""

import pytest
import yaml

from trishul_ray.federation.on_ray import nodes
from trishul_ray.federation.on_ray.nodes import least_gpu_memory, with_workers_to_come

HEAD = {"CPU": 0.0, "node:__internal_head__": 1.0}
CLUSTER = {
    "max_workers": 3,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 8}},
        "spot": {"resources": {"CPU": 4, "GPU": 1}, "max_workers": 2},
        "on-demand": {"resources": {"CPU": 8, "GPU": 2}},
    },
}


def possible(working, cluster=None):
    """The nodes that are possible, as CPUs and GPUs."""
    text = None if cluster is None else yaml.safe_dump(cluster, sort_keys=False)
    found = with_workers_to_come(working, text)
    return [(node.get("CPU", 0), node.get("GPU", 0)) for node in found]


def test_without_an_autoscaler_the_working_nodes_are_all():
    assert possible([HEAD, {"CPU": 2.0}]) == [(0, 0), (2, 0)]


def test_a_cluster_from_zero_counts_the_workers_that_it_may_have():
    assert possible([HEAD], CLUSTER) == [(0, 0), (4, 1), (4, 1), (8, 2)]


def test_workers_that_are_there_are_not_counted_twice():
    spot = {"CPU": 4.0, "GPU": 1.0}
    assert possible([HEAD, spot], CLUSTER) == [(0, 0), (4, 1), (4, 1), (8, 2)]


def test_a_file_that_promises_less_than_there_is_changes_nothing():
    big = {"CPU": 64.0, "GPU": 8.0}
    assert possible([HEAD, big], CLUSTER) == [(0, 0), (64, 8)]


def gpu(name, count=1.0):
    return {"CPU": 4.0, "GPU": count, f"accelerator_type:{name}": 1.0}


@pytest.mark.parametrize(
    ("cluster", "gigabytes"),
    [
        ([HEAD, gpu("H100", 8.0), gpu("L4")], 24),
        ([HEAD], None),
        ([gpu("L4"), gpu("GeForce-RTX-5090")], None),
        ([gpu("L4"), {"CPU": 4.0, "GPU": 1.0}], None),
    ],
)
def test_the_memory_of_a_clusters_gpus_is_known_by_their_names(cluster, gigabytes):
    assert least_gpu_memory(cluster) == (gigabytes and gigabytes * 1e9)


def test_the_memory_of_this_machines_gpus_is_what_its_driver_says(monkeypatch):
    monkeypatch.setattr(nodes, "started_here", lambda: True)
    assert least_gpu_memory([{"CPU": 2.0}]) is None or nodes.gpu_memory()
    monkeypatch.setattr(nodes, "gpu_memory", lambda: [32 * 2**30, 24 * 2**30])
    assert least_gpu_memory([gpu("H100", 2.0)]) == 24 * 2**30
