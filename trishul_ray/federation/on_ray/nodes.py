"""The nodes of a cluster: which ones take work, which are being drained, which may be added."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private.state import state

#: Where `ray up` puts a cluster's configuration on its head node.
CLUSTER_FILE = "~/ray_bootstrap_config.yaml"


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that are being drained: they take no new work and will end."""
    return set(state.get_draining_nodes())


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


def possible_nodes() -> list[Mapping[str, float]]:
    """Return the resources of the nodes that take work, and of those that may be added.

    The latter are known on the head node of a cluster that `ray up` has started. Elsewhere these
    are the working nodes.
    """
    now: list[Mapping[str, float]] = list(working_nodes().values())
    try:
        cluster = yaml.safe_load(Path(CLUSTER_FILE).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return now
    heads = [node for node in now if "node:__internal_head__" in node]
    return max(now, [*heads, *_largest_cluster(cluster)], key=_gpus_and_cpus)


def launch_failures() -> list[str]:
    """Return one line for each kind of node that the autoscaler could not start, with the reason.

    Such as a lack of spot capacity, about which Ray is silent.
    """
    from ray.autoscaler.v2.sdk import get_cluster_status

    failed = get_cluster_status(ray.get_runtime_context().gcs_address).failed_launches
    reasons = {launch.ray_node_type_name: launch.details for launch in failed}
    return [f"cannot start {name}: {' '.join(str(why).split())}" for name, why in reasons.items()]


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
