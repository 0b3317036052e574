"""The resources a run requests: how many client actors, and what each one holds.

A single run checks the request against the cluster. A Ray Tune trial turns the same request into
the bundles of its ``PlacementGroupFactory``::

    tune.with_resources(trial, tune.PlacementGroupFactory([{}, *slices.bundles()]))

Nothing here opens a placement group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment


@dataclass(frozen=True)
class Slices:
    """``actors`` client actors, each with ``cpus`` CPUs and ``gpus`` GPUs (fractions allowed)."""

    actors: int
    cpus: float
    gpus: float

    def bundles(self) -> list[dict[str, float]]:
        """Return one bundle per client actor; the coordinator needs no resources."""
        bundle = {"CPU": self.cpus, "GPU": self.gpus}
        return [{k: v for k, v in bundle.items() if v > 0} for _ in range(self.actors)]

    def count_in(self, held: Mapping[str, float]) -> int:
        """Return how many actors fit into a bundle, or on a node: one cannot span two."""
        count = int(held.get("CPU", 0.0) / self.cpus + 1e-9)
        return min(count, int(held.get("GPU", 0.0) / self.gpus + 1e-9)) if self.gpus else count

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.actors} x ({self.cpus:g} CPU{gpus})"


def plan_slices(
    experiment: "Experiment", free: Mapping[str, float], total: Mapping[str, float] | None = None
) -> Slices:
    """Plan how many actors a run starts and what each one holds.

    With ``clients_per_actor=1`` every registered client has its own actor, whose CPU share shrinks
    if necessary. With ``auto`` there are as many actors as slices are free now, at most one per
    client of a cohort and at least one, which waits if the cluster is busy. The plan never changes
    a run's numbers. ``total``, all resources of the cluster, defaults to the free ones.

    Raises:
        InputError: The cluster is too small for the requested resources.
    """
    total = free if total is None else total
    resources, federation = experiment.resources, experiment.federation
    cpus_total, gpus_total = total.get("CPU", 0.0), total.get("GPU", 0.0)
    # Depends on the total: other users of the cluster must not change a client's device.
    use_gpu = resources.device == "cuda" or (resources.device == "auto" and gpus_total > 0)
    gpus = resources.gpus_per_actor if use_gpu else 0.0
    shrinks = resources.cpus_per_actor == "auto"
    cpus = float(resources.threads) if shrinks else float(resources.cpus_per_actor)
    if isinstance(resources.actors, int):
        actors = resources.actors
    elif isinstance(federation.clients_per_actor, int):
        actors = -(-federation.clients // federation.clients_per_actor)
    else:
        slots = [federation.clients_per_round, int(free.get("CPU", 0.0) / cpus)]
        if gpus > 0:
            slots.append(int(free.get("GPU", 0.0) / gpus))
        actors = max(1, min(slots))
    if actors * cpus > cpus_total and shrinks:
        # A hundredth of a CPU is the finest share that survives Ray's rounding.
        cpus = int(100 * cpus_total / actors) / 100
    if actors * cpus > cpus_total or cpus <= 0 or actors * gpus > gpus_total:
        raise InputError(
            f"resources: {actors} actors x (resources.cpus_per_actor={cpus:g}, "
            f"resources.gpus_per_actor={gpus:g}) exceed the cluster's {cpus_total:g} CPU, "
            f"{gpus_total:g} GPU"
        )
    return Slices(actors, cpus, gpus)


def slices_of_bundles(experiment: "Experiment", bundles: Sequence[Mapping[str, float]]) -> Slices:
    """Return the slices that fit into the bundles of a placement group.

    Bundles made by :meth:`Slices.bundles` give those slices back. In any other group (a trial that
    declared less, or that has a bundle of its own in front) each actor takes the experiment's
    slice, and there are as many actors as fit into the bundles.

    Raises:
        InputError: No bundle can hold one slice.
    """
    filled = [dict(bundle) for bundle in bundles if any(bundle.values())]
    first = filled[0] if filled else {}
    if filled and all(bundle == first for bundle in filled) and first.get("CPU", 0.0) > 0:
        return Slices(len(filled), first["CPU"], first.get("GPU", 0.0))
    largest = max(filled, key=lambda b: (b.get("GPU", 0.0), b.get("CPU", 0.0)), default={})
    one = plan_slices(with_actors(experiment, 1), largest)
    actors = sum(map(one.count_in, filled))
    return Slices(min(actors, experiment.federation.clients_per_round), one.cpus, one.gpus)


def with_actors(experiment: "Experiment", actors: int) -> "Experiment":
    """Return an experiment that asks for so many actors, whatever number it names."""
    resources = experiment.resources.model_copy(update={"actors": actors})
    federation = experiment.federation.model_copy(update={"clients_per_actor": "auto"})
    return experiment.model_copy(update={"resources": resources, "federation": federation})
