"""The client actor: a GPU slice, a resident backbone and the shards of the clients it adopts."""

import os
from typing import Any

import ray
import torch

from trishul_ray.experiment import Experiment
from trishul_ray.federation.jobs import Arrays, EvalJob, EvalReport, TrainJob, TrainReport, Upload
from trishul_ray.federation.local import evaluate_chunk, train_client
from trishul_ray.federation.reduce import Expected, Partial, partial_sum
from trishul_ray.federation.server import Blueprint
from trishul_ray.federation.world import Prepared, blueprint_of, build_workbench


def cap_device_memory(share: float) -> None:
    """Enforce a GPU slice on the device: Ray only keeps books of it.

    Args:
        share: of one GPU, 0 < share <= 1; above that, or 0, nothing is capped.
    """
    if torch.cuda.is_available() and 0.0 < share < 1.0:
        torch.cuda.set_per_process_memory_fraction(share)


@ray.remote
class ClientActor:
    """Runs any client's round; every method gives the same result however often it is called.

    Ray may restart it after a crash (the constructor rebuilds everything) and repeat a call: no
    call leaves anything behind.
    """

    def __init__(self, experiment: dict[str, Any], prepared: Prepared, gpu_share: float) -> None:
        """Pin the threads, cap the memory, build the workbench."""
        settings = Experiment.model_validate(experiment)
        torch.set_num_threads(settings.resources.threads)
        cap_device_memory(gpu_share)
        self.bench = build_workbench(settings, prepared)
        self.pid = os.getpid()

    def describe(self) -> Blueprint:
        """The blueprint of the workbench."""
        return blueprint_of(self.bench)

    def process_id(self) -> int:
        """This actor's operating-system process."""
        return self.pid

    @ray.method(num_returns=2)
    def train(self, broadcast: Arrays, job: TrainJob) -> tuple[tuple[int, TrainReport], Upload]:
        """Train one client; the upload is a return of its own, so that it can stay here."""
        upload, report = train_client(self.bench, broadcast, job)
        return (self.pid, report), upload

    def evaluate(self, broadcast: Arrays, job: EvalJob) -> tuple[int, EvalReport]:
        """Evaluate the broadcast on one chunk of test rows."""
        return self.pid, evaluate_chunk(self.bench, broadcast, job)

    def reduce(self, weighting: str, expected: Expected, *uploads: Upload) -> Partial:
        """Judge and sum one group of uploads, without their passing through the coordinator."""
        return partial_sum(uploads, weighting, expected)
