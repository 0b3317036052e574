"""Run the work with trishul-ray: FedIT in one process or on one Ray actor, with extra fields."""

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from _setups import small_on_noise
from workload import TARGETS, Turns, read

from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.on_ray.session import ray_session

if __name__ == "__main__":
    turns, work, backend = Turns(), read(), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "method=fedit",
            f"adapter.targets={list(TARGETS)}",
            f"adapter.rank={work.rank}",
            f"federation.clients={work.clients}",
            f"federation.clients_per_round={work.cohort}",
            f"federation.local_steps={work.steps}",
            f"federation.batch_size={work.batch}",
            "federation.rounds=10000",
            "partition.kind=iid",
            "evaluation.every=0",
            "evaluation.diagnostics_every=0",
            "optimizer.name=adam",
            f"optimizer.lr={work.lr}",
            f"resources.threads={work.threads}",
            f"resources.backend={backend}",
            "resources.actors=1",
            *sys.argv[3:],
        ]
        setup = small_on_noise(Path(folder), work.width, work.blocks, overrides)
        with (
            ray_session(),
            open_driver(setup.experiment, setup.prepared, "benchmark") as driver,
        ):
            driver.begin()
            for _ in itertools.count():
                turns.wait()
                driver.step()
                turns.answer(work.cohort * work.steps)
