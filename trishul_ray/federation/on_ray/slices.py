"""The resources a run requests: how many client actors, and what each one holds.

A single run checks the request against the cluster. A Ray Tune trial turns the same request into
the bundles of its ``PlacementGroupFactory``::

    tune.with_resources(trial, tune.PlacementGroupFactory([{}, *slices.bundles()]))

Nothing here opens a placement group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trishul_ray.errors import InputError
from trishul_ray.runtime.gpu import GIB, capped_share

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Most actors of one GPU by ``auto``: three make 2.4 times the local steps of one on an H200 with a
#: slow host, and more leave each of them less memory.
MOST_PER_GPU = 3
#: So many times its estimated memory is reserved for an actor. Beside tensors, libraries take
#: workspaces and blocks leave gaps (together 1.17 times the tensors on an H200), and an actor that
#: runs out of memory ends a run that a whole GPU would have computed.
MARGIN = 1.5


@dataclass(frozen=True)
class Slices:
    """``actors`` client actors, each with ``cpus`` CPUs and ``gpus`` GPUs (fractions allowed).

    ``note`` tells the user why ``gpus`` was chosen; empty if it was not.
    """

    actors: int
    cpus: float
    gpus: float
    note: str = field(default="", compare=False)

    def bundles(self) -> list[dict[str, float]]:
        """Return one bundle per client actor; the coordinator needs no resources."""
        bundle = {"CPU": self.cpus, "GPU": self.gpus}
        return [{k: v for k, v in bundle.items() if v > 0} for _ in range(self.actors)]

    def total(self) -> dict[str, float]:
        """Return what all client actors hold together."""
        return {"CPU": self.actors * self.cpus, "GPU": self.actors * self.gpus}

    def count_in(self, held: Mapping[str, float]) -> int:
        """Return how many actors fit into a bundle, or on a node: one cannot span two."""
        count = int(held.get("CPU", 0.0) / self.cpus + 1e-9)
        return min(count, int(held.get("GPU", 0.0) / self.gpus + 1e-9)) if self.gpus else count

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.actors} x ({self.cpus:g} CPU{gpus})"


def plan_slices(
    experiment: "Experiment",
    free: Mapping[str, float],
    total: Mapping[str, float] | None = None,
    *,
    gpu_bytes: float | None = None,
    demand: int | None = None,
) -> Slices:
    """Plan how many actors a run starts and what each one holds.

    With ``clients_per_actor=1`` every registered client has its own actor, whose CPU share shrinks
    if necessary. With ``auto`` there are as many actors as slices are free now, at most one per
    client of a cohort and at least one, which waits if the cluster is busy. The plan never changes
    a run's numbers.

    Args:
        experiment: The run.
        free: The resources that are free now.
        total: All resources of the cluster; by default the free ones.
        gpu_bytes: Memory of the smallest GPU, if it is known.
        demand: How many actors, those of other runs included, would find work; by default this
            run's. A GPU is shared only if there are more of them than GPUs.

    Raises:
        InputError: The cluster is too small for the requested resources.
    """
    total = free if total is None else total
    resources, federation = experiment.resources, experiment.federation
    cpus_total, gpus_total = total.get("CPU", 0.0), total.get("GPU", 0.0)
    # Depends on the total: other users of the cluster must not change a client's device.
    use_gpu = resources.device == "cuda" or (resources.device == "auto" and gpus_total > 0)
    shrinks = resources.cpus_per_actor == "auto"
    cpus = float(resources.threads) if shrinks else float(resources.cpus_per_actor)
    gpus, note, actors = 0.0, "", _fixed_actors(experiment)
    if use_gpu and resources.gpus_per_actor == "auto":
        startable = max(actors or 0, int(cpus_total / cpus))
        wanted = min(demand or wanted_actors(experiment), startable)
        gpus, note = _share_of_gpu(experiment, wanted, gpus_total, gpu_bytes)
    elif use_gpu:
        gpus = float(resources.gpus_per_actor)
    if actors is None:
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
            f"{gpus_total:g} GPU{': ' * bool(note)}{note}"
        )
    return Slices(actors, cpus, gpus, note)


def wanted_actors(experiment: "Experiment") -> int:
    """Return how many actors have clients to train in a round."""
    federation = experiment.federation
    groups = -(-federation.clients_per_round // federation.stacked)
    return _fixed_actors(experiment) or groups


def _fixed_actors(experiment: "Experiment") -> int | None:
    resources, federation = experiment.resources, experiment.federation
    if isinstance(resources.actors, int):
        return resources.actors
    if isinstance(federation.clients_per_actor, int):
        return -(-federation.clients // federation.clients_per_actor)
    return None


def _share_of_gpu(
    experiment: "Experiment", actors: int, gpus: float, gpu_bytes: float | None
) -> tuple[float, str]:
    """Return the share of a GPU with which so many actors fit on so many GPUs, and why.

    None is below 1 / :data:`MOST_PER_GPU`, nor too small for an actor's estimated memory. CUDA
    graphs leave no gaps that other actors could fill; a run in this process has no cap.
    """
    resources = experiment.resources
    if actors <= gpus or gpus < 1:  # a bundle may have a share
        return min(gpus, 1.0) or 1.0, ""
    if resources.cuda_graphs or resources.backend == "inline":
        return 1.0, ""
    whole = "each actor takes a whole GPU (resources.gpus_per_actor sets a share): "
    if gpu_bytes is None:
        return 1.0, f"{whole}the memory of the cluster's GPUs is not known"
    from trishul_ray.experiment.gpu_memory import estimated_bytes  # imports torch

    try:
        needed = MARGIN * estimated_bytes(experiment)
    except InputError as error:
        return 1.0, f"{whole}its memory cannot be estimated ({error})"
    sizes = f"by an estimate it needs at most {needed / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB"
    for parts in range(min(MOST_PER_GPU, -int(-actors // gpus)), 1, -1):
        share = int(1e4 / parts) / 1e4  # Ray rounds to this
        if needed <= capped_share(share, gpu_bytes) * gpu_bytes:
            return share, f"each actor takes 1/{parts} of a GPU: {sizes}"
    return 1.0, f"{whole}{sizes}"


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
