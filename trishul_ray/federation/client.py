"""The client actor: a GPU slice, a resident backbone and the shards of the clients it adopts.

Whoever unpickles the actor's class imports this module: the coordinator, which shall ask for its
client actors at once. So what takes seconds to import (torch, transformers) is imported where it
is needed, in the actors' own processes.
"""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import ray

from trishul_ray.federation.determinism import deterministic, set_environment
from trishul_ray.federation.resources import Slices
from trishul_ray.federation.surroundings import Surroundings

if TYPE_CHECKING:
    from trishul_ray.federation.contract import Blueprint
    from trishul_ray.federation.jobs import (
        Arrays,
        EvalJob,
        EvalReport,
        SurveyJob,
        TrainJob,
        TrainReport,
        Upload,
    )
    from trishul_ray.federation.reduce import Partial, Reducer
    from trishul_ray.federation.workbench import Workbench
    from trishul_ray.federation.world import Prepared

set_environment()


def cap_device_memory(share: float) -> None:
    """Enforce a GPU slice on the device: Ray only keeps books of it.

    Args:
        share: of one GPU, 0 < share <= 1; above that, or 0, nothing is capped.
    """
    import torch

    if torch.cuda.is_available() and 0.0 < share < 1.0:
        torch.cuda.set_per_process_memory_fraction(share)


@ray.remote
class ClientActor:
    """Runs any client's round; every method gives the same result however often it is called.

    Ray may restart it after a crash (the first call then rebuilds everything) and repeat a call:
    no call leaves anything behind. Every method also gives its process, by which the pool sees
    restarts.
    """

    def __init__(
        self,
        experiment: dict[str, Any],
        prepared: "Prepared",
        gpu_share: float,
        surroundings: Surroundings,
    ) -> None:
        """Pin threads and kernels, cap the memory; what can fail comes with the first call."""
        from trishul_ray.experiment import Experiment

        surroundings.enter()
        self.settings = Experiment.model_validate(experiment)
        self.prepared = prepared
        # Never left: these are the settings of this process for as long as it lives.
        self._kernels = ExitStack()
        self._kernels.enter_context(deterministic(self.settings))
        cap_device_memory(gpu_share)
        self.pid = os.getpid()
        self._bench: Workbench | None = None

    @property
    def bench(self) -> "Workbench":
        """The workbench, built once.

        Not in the constructor: Ray turns what a constructor raises into text, and bad input
        must reach the person as what it is.
        """
        if self._bench is None:
            from trishul_ray.federation.world import build_workbench

            self._bench = build_workbench(self.settings, self.prepared)
        return self._bench

    def _adapted(self, survey: "Arrays") -> "Workbench":
        """The workbench, with the adapters that a survey decides."""
        from trishul_ray.federation.world import adapt_to

        adapt_to(self.bench, survey)
        return self.bench

    def describe(self, survey: "Arrays") -> "tuple[int, Blueprint]":
        """The blueprint of the workbench.

        Raises:
            InputError: the workbench cannot be built from this input.
        """
        from trishul_ray.federation.world import blueprint_of

        return self.pid, blueprint_of(self._adapted(survey))

    @ray.method(num_returns=2)
    def train(
        self, broadcast: "Arrays", job: "TrainJob"
    ) -> "tuple[tuple[int, TrainReport], Upload]":
        """Train one client; the upload is a return of its own, so that it can stay here."""
        from trishul_ray.federation.jobs import survey_in
        from trishul_ray.federation.local import train_client

        upload, report = train_client(self._adapted(survey_in(broadcast)), broadcast, job)
        return (self.pid, report), upload

    def evaluate(self, broadcast: "Arrays", job: "EvalJob") -> "tuple[int, EvalReport]":
        """Evaluate the broadcast on one chunk of test rows."""
        from trishul_ray.federation.jobs import survey_in
        from trishul_ray.federation.local import evaluate_chunk

        return self.pid, evaluate_chunk(self._adapted(survey_in(broadcast)), broadcast, job)

    def survey(self, job: "SurveyJob") -> "tuple[int, Arrays]":
        """One client's answer to the method's survey."""
        from trishul_ray.federation.local import survey_client

        return self.pid, survey_client(self.bench, job)

    def reduce(self, reducer: "Reducer", *uploads: "Upload") -> "tuple[int, Partial]":
        """Judge and sum one group of uploads, without their passing through the coordinator."""
        from trishul_ray.federation.reduce import partial_sum

        return self.pid, partial_sum(uploads, reducer)


def start_clients(
    experiment: dict[str, Any], prepared: Any, slices: Slices, surroundings: Surroundings
) -> list[Any]:
    """Ask for the client actors of a run; they come up by themselves, owned by this process.

    Args:
        experiment: what they build their workbenches from, as plain fields.
        prepared: a reference to a :class:`~trishul_ray.federation.world.Prepared` in the object
            store, so that one copy serves all.
        slices: how many actors, with what each.
        surroundings: what relative paths mean.
    """
    limit = experiment["resources"]["max_restarts"]
    remote = ClientActor.options(  # type: ignore[attr-defined]  # added by ray.remote
        num_cpus=slices.cpus, num_gpus=slices.gpus, max_restarts=limit, max_task_retries=limit
    )
    return [
        remote.remote(experiment, prepared, slices.gpus, surroundings) for _ in range(slices.actors)
    ]
