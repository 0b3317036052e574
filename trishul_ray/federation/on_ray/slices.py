"""The resources of a run: the number of its client actors, and the resources that each reserves.

A single run checks its request against the cluster. A Ray Tune trial turns the same request into
the bundles of its ``PlacementGroupFactory``::

    tune.with_resources(trial, tune.PlacementGroupFactory([{}, *slices.bundles()]))
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

    def total(self) -> dict[str, float]:
        """Return the total resources of all client actors."""
        return {"CPU": self.actors * self.cpus, "GPU": self.actors * self.gpus}

    def count_in(self, free: Mapping[str, float]) -> int:
        """Return how many actors fit into a bundle or a node; an actor cannot span two."""
        count = int(free.get("CPU", 0.0) / self.cpus + 1e-9)
        return min(count, int(free.get("GPU", 0.0) / self.gpus + 1e-9)) if self.gpus else count

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.actors} x ({self.cpus:g} CPU{gpus})"


def plan_slices(
    experiment: "Experiment",
    free: Mapping[str, float],
    total: Mapping[str, float] | None = None,
    *,
    may_grow: bool = False,
) -> Slices:
    """Plan how many actors a run starts and which resources each of them reserves.

    With ``clients_per_actor=1`` every registered client has an actor, whose number of CPUs is
    reduced if necessary. With ``auto`` there is one actor per slice that is free now, at least one,
    and at most one per client of a cohort. The plan does not affect the results of a run.

    Args:
        experiment: The run.
        free: The resources that are free now.
        total: All resources of the cluster; by default the free ones.
        may_grow: Whether an autoscaler may add nodes. A request that does not fit then waits.

    Raises:
        InputError: The cluster is too small for the requested resources.
    """
    total = free if total is None else total
    resources, federation = experiment.resources, experiment.federation
    cpus_total, gpus_total = total.get("CPU", 0.0), total.get("GPU", 0.0)
    # Use the total: other users of the cluster must not change a client's device.
    use_gpu = resources.needs_gpu or (resources.device == "auto" and gpus_total > 0)
    share = 1.0 if resources.gpus_per_actor == "auto" else resources.gpus_per_actor
    gpus = share if use_gpu else 0.0
    shrinks = resources.cpus_per_actor == "auto"
    cpus = float(resources.threads) if shrinks else float(resources.cpus_per_actor)
    actors = _fixed_actors(experiment)
    if actors is None:
        fitting = Slices(1, cpus, gpus).count_in(free)
        if may_grow and Slices(1, cpus, gpus).count_in(total) == 0:
            fitting = federation.clients_per_round  # on nodes that the autoscaler will add
        actors = max(1, min(federation.clients_per_round, fitting))
    if may_grow:
        return Slices(actors, cpus, gpus)
    if actors * cpus > cpus_total and shrinks:
        # A hundredth of a CPU is the finest fraction that survives Ray's rounding.
        cpus = int(100 * cpus_total / actors) / 100
    if actors * cpus > cpus_total or cpus <= 0 or actors * gpus > gpus_total:
        raise InputError(
            f"resources: {actors} actors x (resources.cpus_per_actor={cpus:g}, "
            f"resources.gpus_per_actor={gpus:g}) exceed the cluster's {cpus_total:g} CPU, "
            f"{gpus_total:g} GPU"
        )
    return Slices(actors, cpus, gpus)


def _fixed_actors(experiment: "Experiment") -> int | None:
    resources, federation = experiment.resources, experiment.federation
    if isinstance(resources.actors, int):
        return resources.actors
    if isinstance(federation.clients_per_actor, int):
        return -(-federation.clients // federation.clients_per_actor)
    return None


def slices_of_bundles(experiment: "Experiment", bundles: Sequence[Mapping[str, float]]) -> Slices:
    """Return one actor for each of the largest bundles of a placement group.

    Raises:
        InputError: No bundle has a CPU.
    """
    filled = [bundle for bundle in bundles if bundle.get("CPU", 0.0) > 0]
    if not filled:
        raise InputError("resources: no bundle of the trial's placement group has a CPU")
    largest = max(filled, key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]))
    actors = min(filled.count(largest), experiment.federation.clients)
    return Slices(actors, largest["CPU"], largest.get("GPU", 0.0))


def with_actors(experiment: "Experiment", actors: int) -> "Experiment":
    """Return an experiment that requests this number of actors."""
    resources = experiment.resources.model_copy(update={"actors": actors})
    federation = experiment.federation.model_copy(update={"clients_per_actor": "auto"})
    return experiment.model_copy(update={"resources": resources, "federation": federation})
