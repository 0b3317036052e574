"""What a run asks of a cluster, in one declared request.

A run on its own checks the request against what is free; a Ray Tune trial turns the same request
into the bundles of its ``PlacementGroupFactory``. Nothing here opens a placement group.
"""

from dataclasses import dataclass

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment


@dataclass(frozen=True)
class Slices:
    """``actors`` client actors, each with ``cpus`` and ``gpus`` (fractions allowed)."""

    actors: int
    cpus: float
    gpus: float

    def bundles(self) -> list[dict[str, float]]:
        """One bundle per client actor; the coordinator needs no resources of its own."""
        bundle = {"CPU": self.cpus, "GPU": self.gpus}
        return [{k: v for k, v in bundle.items() if v > 0}] * self.actors


def plan_slices(experiment: Experiment, free: dict[str, float]) -> Slices:
    """How many actors a run starts and what each holds.

    With ``clients_per_actor=1`` there is one actor per registered client; its CPU share shrinks
    if it must. With ``auto`` there are as many actors as slices are free, at most one per client
    of a cohort. Neither can change a bit of the result.

    Args:
        experiment: the run.
        free: what the cluster (or the trial's bundles) offers, e.g. ``{"CPU": 8, "GPU": 1}``.

    Raises:
        InputError: the slices asked for are not to be had here.
    """
    wanted, fed = experiment.resources, experiment.federation
    cpus_free, gpus_free = free.get("CPU", 0.0), free.get("GPU", 0.0)
    use_gpu = wanted.device == "cuda" or (wanted.device == "auto" and gpus_free > 0)
    gpus = wanted.gpus_per_actor if use_gpu else 0.0
    shrinks = wanted.cpus_per_actor == "auto"
    cpus = float(wanted.threads) if shrinks else float(wanted.cpus_per_actor)
    if isinstance(wanted.actors, int):
        actors = wanted.actors
    elif isinstance(fed.clients_per_actor, int):
        actors = -(-fed.clients // fed.clients_per_actor)
    else:
        slots = [fed.clients_per_round, int(cpus_free / cpus)]
        if gpus > 0:
            slots.append(int(gpus_free / gpus))
        actors = max(1, min(slots))
    if actors * cpus > cpus_free and shrinks:
        # A hundredth of a CPU is the finest share that survives Ray's rounding sensibly.
        cpus = int(100 * cpus_free / actors) / 100
    if actors * cpus > cpus_free or cpus_free <= 0 or actors * gpus > gpus_free:
        raise InputError(
            f"resources: {actors} actors x (resources.cpus_per_actor={cpus:g}, "
            f"resources.gpus_per_actor={gpus:g}) exceed what is free here: "
            f"{cpus_free:g} CPU, {gpus_free:g} GPU"
        )
    return Slices(actors, cpus, gpus)
