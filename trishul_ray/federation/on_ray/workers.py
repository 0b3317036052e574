"""Keep the actors of a run for the next run of the same process."""

from contextlib import suppress
from typing import Any, Self

import ray
from ray.exceptions import RayError

from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.coordinator import Coordinator
from trishul_ray.federation.on_ray.process import WorkerEnvironment
from trishul_ray.federation.on_ray.session import driver_node_affinity
from trishul_ray.federation.on_ray.slices import Slices
from trishul_ray.federation.residents import Residents
from trishul_ray.storage import Store


class Workers:
    """A coordinator and its client actors, which one run after another may use.

    A run takes over the actors, with their loaded backbones, if it needs the same slices and the
    same process-wide settings; otherwise they end and new ones start. After a failed run nothing
    is kept. The bytes of a run are those of new actors. Runs of ``resources.backend=inline`` keep
    their backbones here as well.

    Use it as a context manager while Ray runs (in a trial, or inside ``ray_session``), for one run
    at a time.
    """

    def __init__(self) -> None:
        self.residents = Residents()  # of runs in this process
        self.slices: Slices | None = None  # that the actors hold
        #: Whether the coordinator died: the next run gets new actors, with all their restarts.
        self.spoiled = False
        self._coordinator: Any = None
        self._settings: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def coordinator(self, experiment: Experiment, slices: Slices) -> Any:
        """Return a coordinator actor for a run, the present one if it fits."""
        local = Store.open(experiment.storage.runs).is_local
        environment, resources = WorkerEnvironment.of_this_process(), experiment.resources
        settings = (slices, environment, local, resources, experiment.model.precision == "tf32")
        if self._coordinator is None or self.spoiled or settings != self._settings:
            self.close()
            self._coordinator = Coordinator.options(  # type: ignore[attr-defined]  # by ray.remote
                num_cpus=0,
                max_restarts=resources.max_restarts,
                scheduling_strategy=driver_node_affinity() if local else None,
            ).remote(slices, environment)
            self.slices, self._settings = slices, settings
        return self._coordinator

    def close(self) -> None:
        """End the coordinator, and with it its client actors; forget the backbones."""
        if self._coordinator is not None:
            with suppress(RayError):  # the cluster may already be gone
                ray.kill(self._coordinator)
        self._coordinator, self.slices, self.spoiled = None, None, False
        self.residents = Residents()
