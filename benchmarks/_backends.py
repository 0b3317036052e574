"""Compare the duration of a round inline and on Ray, relative to the limit.

Both backends alternately run a round of the same experiment, in one process and in one Ray actor
with the same number of threads. Their final states must be bitwise identical, otherwise the
comparison would be invalid.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from _limit import Limit
from _results import Goal, Section, Times, paired
from _setups import Setup

from trishul_ray.data.sampling import batch_order
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.federation.worker.context import WorkerContext
from trishul_ray.runtime.random_streams import numpy_rng

#: Minimum duration of a round, in seconds, to which the goal for Ray applies. Shorter rounds are
#: dominated by fixed costs.
LONG_ROUND = 2.0
#: Environment variable of Ray. By default, its workers yield to all other processes, which would
#: distort the ratio on a machine that is not idle. The script gives both the same priority.
NICENESS = "RAY_worker_niceness"


def round_limit(limit: Limit, context: WorkerContext, cohort: list[int], number: int) -> float:
    """Measure the limit on the batches of a round, in seconds, without preparing the batches."""
    fed, seed, seconds = context.settings.federation, context.settings.seed, 0.0
    for client in cohort:
        rng = numpy_rng(seed, "batches", number, client)
        rows = context.shards.shard(client)
        for indices in batch_order(rows, fed.local_steps, fed.batch_size, rng):
            batch = context.task.prepare_batch(
                context.train.batch(indices), context.device, context.dtype
            )
            seconds += limit.seconds(batch)
    return seconds


def backends(setup: Setup) -> Section:
    """Compare rounds inline and on Ray, which alternate, relative to the limit."""
    runs, fed = setup.experiment.storage.runs, setup.experiment.federation

    def on(backend: str) -> Setup:
        resources = setup.experiment.resources.model_copy(update={"backend": backend})
        storage = setup.experiment.storage.model_copy(update={"runs": f"{runs}/{backend}"})
        changed = {"resources": resources, "storage": storage}
        return Setup(setup.label, setup.experiment.model_copy(update=changed), setup.prepared)

    seconds: dict[str, dict[str, list[float]]] = {
        kind: {"inline": [], "ray": [], "limit": []} for kind in ("training", "evaluation too")
    }
    here, there = on("inline"), on("ray")
    with (
        ray_session(),
        open_driver(here.experiment, here.prepared, "benchmark") as inline,
        open_driver(there.experiment, there.prepared, "benchmark") as ray,
    ):
        assert isinstance(inline, InlineDriver)
        inline.begin()
        ray.begin()
        context: WorkerContext = inline.executor.context
        limit = Limit(context)
        for number in range(1, fed.rounds + 1):
            cohort = inline.draw(number)
            took = {"limit": round_limit(limit, context, cohort, number)}
            both = [("inline", inline), ("ray", ray)]
            # Alternate the order, so that a machine that slows down or speeds up favors neither.
            for name, driver in both if number % 4 < 2 else both[::-1]:
                took[name] = _timed(driver.step)
            if number == 1:
                continue  # warm-up: compilation of kernels, page faults, caches
            kind = "training" if number % 2 == 0 else "evaluation too"
            for name, value in took.items():
                seconds[kind][name].append(value)
        inline.step()
        ray.step()
        same = inline.final().digest == ray.final().digest
    rows, goals = [], [Goal("different final states of the backends", float(not same), 0.0)]
    data: dict[str, Any] = {"same_bytes": same}
    for kind, measured in seconds.items():
        times = {name: Times.of(values) for name, values in measured.items()}
        over = paired(times["ray"], times["inline"])
        rows.append(
            [
                kind,
                times["limit"].show(),
                times["inline"].show(),
                times["ray"].show(),
                paired(times["inline"], times["limit"]).show(),
                paired(times["ray"], times["limit"]).show(),
                over.show(digits=3),
            ]
        )
        data[kind] = measured
        if times["inline"].median >= LONG_ROUND:
            goals.append(Goal(f"Ray / inline, {kind}", over.median, 1.05))
    return Section(
        f"A round, inline and on Ray ({setup.label})",
        [
            "a round with",
            "limit s",
            "inline s",
            "Ray s",
            "inline / limit",
            "Ray / limit",
            "Ray / inline",
        ],
        rows,
        [
            f"{fed.clients_per_round} clients x {fed.local_steps} steps of {fed.batch_size}, "
            f"{setup.experiment.resources.threads} threads, one Ray actor; medians (min-max) of "
            f"{len(seconds['training']['ray'])} rounds of each kind, ratios of adjacent rounds",
            "a round includes broadcast, reduction, diagnostics and checkpoint; the limit covers "
            "only the training batches",
            f"niceness of Ray's workers: {os.environ[NICENESS]} (default: 15)",
        ],
        goals,
        data,
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
