"""A client actor without Ray: one process with its own workbench and a cap on its memory.

Requests and answers go through a connection: ``("train", seconds)`` trains client 0 again and again
for that long, ``("memory",)`` asks what is taken. An error ends the worker and is its answer.
"""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _gpu import memory

from trishul_ray.errors import RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.local import train_client
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.on_ray.slices import cap_device_memory
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.workbench import build_workbench

#: On the CPU, a cap is this many bytes beyond what the process has after loading.
ROOM = 600 * 2**20
#: Seconds to wait for an answer beyond those that were asked for.
PATIENCE = 150.0


@dataclass
class Worker:
    """The parent's side of a worker."""

    process: Any
    connection: Connection

    @classmethod
    def start(cls, experiment: Experiment, prepared: Prepared, cap: float = 0.0) -> "Worker":
        """Start a worker with a share of the device's memory; it answers once it is ready."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["_gpu_worker"])  # imported once for all workers
        here, there = context.Pipe()
        given = (there, experiment.to_dict(), prepared, cap, Path.cwd())
        process = context.Process(target=serve, args=given, daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def send(self, *request: Any) -> None:
        """Ask for something without waiting."""
        self.connection.send(request)

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the next answer; an ``error`` if the worker has ended or does not answer."""
        try:
            if self.connection.poll(seconds + PATIENCE):
                return self.connection.recv()
        except (EOFError, OSError):
            return {"error": "the process ended without an answer"}
        return {"error": f"no answer within {seconds + PATIENCE:.0f} s"}

    def end(self) -> None:
        """End the worker."""
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def serve(
    connection: Connection, fields: dict[str, Any], prepared: Prepared, cap: float, folder: Path
) -> None:
    """Answer requests until the connection is closed."""
    experiment = Experiment.model_validate(fields)
    try:
        with deterministic(experiment):
            answer_requests(connection, experiment, prepared, cap)
    except (EOFError, BrokenPipeError):
        return
    except RunError as error:
        connection.send({"error": str(error)})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})


def answer_requests(
    connection: Connection, experiment: Experiment, prepared: Prepared, cap: float
) -> None:
    """Build the workbench, say that it is ready, and answer."""
    device = torch.device(experiment.resources.device)
    if device.type == "cuda":
        cap_device_memory(cap)
    bench = build_workbench(experiment, prepared)
    start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
    connection.send({"ready": True})
    if cap and device.type == "cpu":
        limit_address_space()
    while True:
        request, *values = connection.recv()
        if request == "memory":
            connection.send(memory(device))
            continue
        began, rounds, digest = time.perf_counter(), 0, ""
        while time.perf_counter() - began < values[0] or not rounds:
            upload, _ = train_client(bench, start, TrainJob(round=1, client=0))
            digest, rounds = state_digest(upload.arrays), rounds + 1
        steps = rounds * experiment.federation.local_steps
        seconds = time.perf_counter() - began
        connection.send({"steps": steps, "seconds": seconds, "digest": digest} | memory(device))


def limit_address_space() -> None:
    """The rehearsal of a cap: nothing may be allocated beyond :data:`ROOM`."""
    import resource

    import psutil

    limit = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
