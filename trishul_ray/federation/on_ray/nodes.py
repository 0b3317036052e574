"""The nodes of a cluster: which ones take work, which are being drained, which may be added."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import yaml

from trishul_ray.errors import RunError, first_line
from trishul_ray.federation.on_ray.ray_internals import draining_nodes, gpu_memory, started_here
from trishul_ray.runtime.gpu import MEMORY_GB

#: File of a cluster's configuration on its head node, by `ray up` and cluster/kuberay.yaml.
CLUSTER_FILE = "~/ray_bootstrap_config.yaml"
#: A resource that only the head node has.
HEAD = "node:__internal_head__"
#: Beginning of a resource of nodes with GPUs, whose name follows.
ACCELERATOR = "accelerator_type:"
#: Seconds in which the head node must answer.
HEAD_SECONDS = 120.0


def draining_nodes_of_trial() -> set[str]:
    """Return the draining nodes that hold a bundle of this process's placement group, if any."""
    group = ray.util.get_current_placement_group()
    if group is None or not (draining := draining_nodes()):
        return set()
    return draining & set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())


def working_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of the nodes that take work, by node id."""
    draining = draining_nodes()
    return {
        node["NodeID"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    }


def possible_nodes() -> Sequence[Mapping[str, float]]:
    """Return the resources of the nodes that take work, and of those that may be added.

    The latter are known on the head node of a cluster with an autoscaler. They count from the
    beginning: a job starts while there is none of them.

    Raises:
        RunError: The head node does not answer.
    """
    return with_workers_to_come(list(working_nodes().values()), _cluster_file())


def with_workers_to_come(
    now: Sequence[Mapping[str, float]], cluster: str | None
) -> Sequence[Mapping[str, float]]:
    """Return the nodes that there are, or those that a cluster's file allows, if these are more."""
    if cluster is None:
        return now
    heads = [node for node in now if HEAD in node]
    return max(now, [*heads, *_largest_cluster(yaml.safe_load(cluster))], key=_gpus_and_cpus)


def _cluster_file() -> str | None:
    """Return the text of :data:`CLUSTER_FILE`, from whichever node; None if there is none."""
    if started_here():  # without an autoscaler
        return None
    try:
        text: str | None = ray.get(_read_cluster_file.remote(), timeout=HEAD_SECONDS)
    except ray.exceptions.RayError as error:
        raise RunError(
            f"the head node of the cluster does not answer: {first_line(error)}"
        ) from error
    return text


@ray.remote(num_cpus=0, resources={HEAD: 0.001})
def _read_cluster_file() -> str | None:
    try:
        return Path(CLUSTER_FILE).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _largest_cluster(cluster: Mapping[str, Any]) -> list[Mapping[str, float]]:
    """Return the resources of as many workers as a cluster's configuration allows."""
    nodes: list[Mapping[str, float]] = []
    for name, kind in cluster["available_node_types"].items():
        if name != cluster.get("head_node_type"):
            count = kind.get("max_workers", cluster.get("max_workers", 0))
            nodes += [kind.get("resources", {})] * count
    return nodes[: cluster.get("max_workers", len(nodes))]


def _gpus_and_cpus(nodes: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    total = total_resources(nodes)
    return total["GPU"], total["CPU"]


def total_resources(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the CPUs and GPUs of nodes together."""
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}


def least_gpu_memory(nodes: Sequence[Mapping[str, float]]) -> float | None:
    """Return the bytes of the smallest GPU of nodes; None if there is none, or one is not known.

    On this machine its driver says it, elsewhere the name that Ray gives to a node's GPUs.
    """
    if started_here():
        return min(gpu_memory(), default=None)
    sizes: list[float | None] = []
    for node in (node for node in nodes if node.get("GPU", 0.0) > 0):
        names = [key.removeprefix(ACCELERATOR) for key in node if key.startswith(ACCELERATOR)]
        sizes += [MEMORY_GB.get(name) for name in names] or [None]
    known = [1e9 * size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None
