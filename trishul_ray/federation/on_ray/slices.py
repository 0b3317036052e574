"""What a run asks of a cluster, in one declared request.

A run on its own checks the request against the cluster; a Ray Tune trial turns the same request
into the bundles of its ``PlacementGroupFactory``::

    tune.with_resources(trial, tune.PlacementGroupFactory([{}, *slices.bundles()]))

Nothing here opens a placement group.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trishul_ray.errors import InputError

if TYPE_CHECKING:
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
        return [{k: v for k, v in bundle.items() if v > 0} for _ in range(self.actors)]

    def __str__(self) -> str:
        """As a person would say it."""
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.actors} x ({self.cpus:g} CPU{gpus})"


def plan_slices(
    experiment: "Experiment",
    free: Mapping[str, float],
    total: Mapping[str, float] | None = None,
) -> Slices:
    """How many actors a run starts and what each holds.

    With ``clients_per_actor=1`` there is one actor per registered client; its CPU share shrinks
    if it must. With ``auto`` there are as many actors as slices are free now, at most one per
    client of a cohort and at least one, which waits for its turn on a busy cluster. None of it
    can change a bit of the result.

    Args:
        experiment: the run.
        free: what nobody holds now, e.g. ``{"CPU": 8, "GPU": 1}``.
        total: what the cluster has; by default no more than ``free``.

    Raises:
        InputError: the slices asked for can never be had here.
    """
    total = free if total is None else total
    wanted, fed = experiment.resources, experiment.federation
    cpus_total, gpus_total = total.get("CPU", 0.0), total.get("GPU", 0.0)
    # By the total: which device a client trains on must not depend on who else is here.
    use_gpu = wanted.device == "cuda" or (wanted.device == "auto" and gpus_total > 0)
    gpus = wanted.gpus_per_actor if use_gpu else 0.0
    shrinks = wanted.cpus_per_actor == "auto"
    cpus = float(wanted.threads) if shrinks else float(wanted.cpus_per_actor)
    if isinstance(wanted.actors, int):
        actors = wanted.actors
    elif isinstance(fed.clients_per_actor, int):
        actors = -(-fed.clients // fed.clients_per_actor)
    else:
        slots = [fed.clients_per_round, int(free.get("CPU", 0.0) / cpus)]
        if gpus > 0:
            slots.append(int(free.get("GPU", 0.0) / gpus))
        actors = max(1, min(slots))
    if actors * cpus > cpus_total and shrinks:
        # A hundredth of a CPU is the finest share that survives Ray's rounding sensibly.
        cpus = int(100 * cpus_total / actors) / 100
    if actors * cpus > cpus_total or cpus <= 0 or actors * gpus > gpus_total:
        raise InputError(
            f"resources: {actors} actors x (resources.cpus_per_actor={cpus:g}, "
            f"resources.gpus_per_actor={gpus:g}) exceed what is here: "
            f"{cpus_total:g} CPU, {gpus_total:g} GPU"
        )
    return Slices(actors, cpus, gpus)


def usable_cores() -> int:
    """The cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def crowding(processes: int, threads: int, cores: float) -> str | None:
    """One line where a run asks for more threads than there are cores; None where it does not.

    Args:
        processes: how many compute at the same time (client actors; 1 inline).
        threads: ``resources.threads``, of each.
        cores: what they share.
    """
    if processes * threads <= cores:
        return None
    actors = f"{processes} actors x " if processes > 1 else ""
    return (
        f"{actors}resources.threads={threads} asks for {processes * threads} threads on "
        f"{cores:g} cores: they take turns, so rounds take longer; the numbers stay the same"
    )


def slices_of_bundles(experiment: "Experiment", bundles: Sequence[Mapping[str, float]]) -> Slices:
    """The slices that a placement group's bundles hold, whoever made it.

    Bundles made by :meth:`Slices.bundles` give back those slices. In any other group (a trial
    that declared less, or with a bundle of its own in front) each actor takes the experiment's
    slice, and there are as many as the bundles hold.

    Raises:
        InputError: no bundle holds one slice.
    """
    filled = [dict(bundle) for bundle in bundles if any(bundle.values())]
    first = filled[0] if filled else {}
    if filled and all(bundle == first for bundle in filled) and first.get("CPU", 0.0) > 0:
        return Slices(len(filled), first["CPU"], first.get("GPU", 0.0))
    best = max(filled, key=lambda b: (b.get("GPU", 0.0), b.get("CPU", 0.0)), default={})
    one = plan_slices(
        experiment.model_copy(
            update={
                "resources": experiment.resources.model_copy(update={"actors": 1}),
                "federation": experiment.federation.model_copy(
                    update={"clients_per_actor": "auto"}
                ),
            }
        ),
        best,
    )
    held = sum(_times(bundle, one) for bundle in filled)
    return Slices(min(held, experiment.federation.clients_per_round), one.cpus, one.gpus)


def _times(bundle: Mapping[str, float], one: Slices) -> int:
    """How often a slice goes into a bundle: an actor cannot straddle two."""
    times = int(bundle.get("CPU", 0.0) / one.cpus + 1e-9)
    return min(times, int(bundle.get("GPU", 0.0) / one.gpus + 1e-9)) if one.gpus else times
