"""Group cells by the resources that their trials request, so that trials can share actors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.slices import Slices, plan_slices


@dataclass(frozen=True)
class Group:
    """Cells that request the same resources."""

    ids: tuple[str, ...]
    bundles: tuple[Mapping[str, float], ...]
    concurrent: int


def group_cells(
    experiments: Mapping[str, Experiment],
    nodes: Sequence[Mapping[str, float]],
    concurrency: int | None = None,
) -> list[Group]:
    """Group cells by the resources they request, in an order in which neighbors share most.

    Where the number of actors is ``auto``, a cell has one actor if there are more cells than
    slices of the cluster, and otherwise its share of them.

    Args:
        experiments: The cells, by id.
        nodes: Resources of each node, such as ``{"CPU": 4.0}``.
        concurrency: Number of cells at a time; None is what the nodes hold.

    Raises:
        InputError: A cell requests more than the nodes hold; the message names the field.
    """
    slices = {id: _slices(experiment, nodes, 1) for id, experiment in experiments.items()}
    grouped: dict[tuple[Slices, bool], list[str]] = {}
    for id, experiment in experiments.items():
        one = slices[id]
        if _divides_cluster(experiment):
            alike = sum(
                slices[other] == one and _divides_cluster(experiments[other]) for other in slices
            )
            share = _count_slots(one, nodes) // min(alike, concurrency or alike)
            actors = max(1, min(share, experiment.federation.clients_per_round))
            one = _slices(experiment, nodes, actors)
        grouped.setdefault((one, experiment.resources.backend == "inline"), []).append(id)
    groups = []
    for (held, inline), ids in grouped.items():
        # An inline run computes in the trial's own process, the first bundle.
        bundles = tuple(held.bundles()) if inline else ({}, *held.bundles())
        at_once = _count_slots(held, nodes) // held.actors
        groups.append(Group(_by_inputs(ids, experiments), bundles, concurrency or at_once))
    return groups


def _divides_cluster(experiment: Experiment) -> bool:
    """Return whether the number of actors depends on what the cluster holds."""
    both = experiment.resources.actors, experiment.federation.clients_per_actor
    return both == ("auto", "auto") and experiment.resources.backend == "ray"


def _slices(experiment: Experiment, nodes: Sequence[Mapping[str, float]], actors: int) -> Slices:
    """Return what a cell requests, with ``actors`` actors where it leaves the number open."""
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    if experiment.resources.backend == "inline" or _divides_cluster(experiment):
        resources = experiment.resources.model_copy(update={"actors": actors})
        federation = experiment.federation.model_copy(update={"clients_per_actor": "auto"})
        experiment = experiment.model_copy(
            update={"resources": resources, "federation": federation}
        )
    slices = plan_slices(experiment, total)
    if _count_slots(slices, nodes) < slices.actors:
        raise InputError(
            f"resources: {slices} do not fit on the nodes of the cluster; lower resources.actors, "
            "resources.cpus_per_actor or resources.gpus_per_actor"
        )
    return slices


def _count_slots(slices: Slices, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many slices of this size the nodes hold together."""
    count = 0
    for node in nodes:
        fits = int(node.get("CPU", 0.0) / slices.cpus + 1e-9)
        if slices.gpus:
            fits = min(fits, int(node.get("GPU", 0.0) / slices.gpus + 1e-9))
        count += fits
    return count


def _by_inputs(ids: Sequence[str], experiments: Mapping[str, Experiment]) -> tuple[str, ...]:
    """Return ids so that cells with the same backbone and data follow each other."""
    order: dict[tuple[str, str], int] = {}
    for id in ids:
        order.setdefault(inputs_of(experiments[id]), len(order))
    return tuple(sorted(ids, key=lambda id: order[inputs_of(experiments[id])]))


def inputs_of(experiment: Experiment) -> tuple[str, str]:
    """Return what decides the backbone and the data that a trial keeps loaded."""
    return experiment.model.model_dump_json(), experiment.data.model_dump_json()
