"""One federation in a process of its own, stepped and weighed by the benchmark that started it.

It is asked to ``step``, or for its ``memory``, so that two federations of different size can be
stepped by turns and neither's memory is the other's.
"""

import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from _setups import small
from _stepped import Stepped, answer_all

from trishul_ray.federation.on_ray.driver import RayDriver, open_driver
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.federation.records import RoundRecord

MIB = 2**20


class Federation(Stepped):
    """The parent's side."""

    def __init__(self, clients: int, data: str, overrides: list[str]) -> None:
        """Start the process; it answers once its actors are up."""
        self.clients = clients
        super().__init__([__file__, str(clients), data, *overrides])


def weigh(driver: RayDriver) -> dict[str, float]:
    """MiB by role, proportional set size: a page shared by k processes counts 1/k in each.

    The driver, the coordinator and the client actors are ours; ``ray`` is the rest of the local
    cluster, with all pages that its object store has ever used. ``peak`` is the largest resident
    set that the coordinator has had.
    """
    found = {"driver": 0.0, "coordinator": 0.0, "actors": 0.0, "ray": 0.0}
    me = psutil.Process()
    coordinator, *actors = driver.processes()
    roles = {me.pid: "driver", coordinator: "coordinator"} | dict.fromkeys(actors, "actors")
    for process in [me, *me.children(recursive=True)]:
        # A worker of Ray's may end while the others are being weighed.
        with suppress(psutil.NoSuchProcess):
            found[roles.get(process.pid, "ray")] += _mib(process)
    status = Path(f"/proc/{coordinator}/status").read_text()
    found["peak"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return found


def _mib(process: psutil.Process) -> float:
    try:
        memory = process.memory_full_info()
    except psutil.AccessDenied:
        return float(process.memory_info().rss / MIB)
    return float(getattr(memory, "pss", memory.uss) / MIB)


def serve(clients: int, data: str, overrides: list[str]) -> None:
    """The child's side."""
    with tempfile.TemporaryDirectory() as scratch:
        chosen = [*overrides, f"federation.clients={clients}"]
        began = time.perf_counter()
        setup = small(Path(scratch), data, chosen)
        dealt = time.perf_counter() - began
        with ray_session(), open_driver(setup.experiment, setup.prepared, "benchmark") as driver:
            assert isinstance(driver, RayDriver)
            driver.begin()
            records: list[RoundRecord] = []

            def answer(what: str) -> Any:
                began = time.perf_counter()
                if what == "step":
                    records.extend(driver.step().records)
                    return time.perf_counter() - began
                upload = max(
                    (r.uploaded_parameters or 0) / len(r.clients) for r in records if r.clients
                )
                return weigh(driver) | {"dealing_seconds": dealt, "upload": 4 * upload / MIB}

            answer_all(answer)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
