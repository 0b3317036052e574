"""Seconds of a round: inline and on Ray by turns, with the limit between them; scored and not.

Both backends run the same experiment, round by round, in one process and in one Ray actor with as
many threads; at the end their states must be the same bytes, or the comparison would be void.
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
from trishul_ray.federation.on_ray.driver import Workers, open_driver
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.federation.worker.context import WorkerContext
from trishul_ray.runtime.random_streams import numpy_rng

#: Rounds shorter than this are dominated by fixed costs; the goal for Ray does not speak of them.
LONG_ROUND = 2.0
#: Ray's own setting. By default its workers yield to any other process of the machine, which on
#: one that is not quite idle would decide the ratio; the script sets them equal.
NICENESS = "RAY_worker_niceness"


def round_limit(limit: Limit, context: WorkerContext, cohort: list[int], number: int) -> float:
    """Seconds of the limit on the very batches of a round; their preparation is not counted."""
    fed, seed, seconds = context.settings.federation, context.settings.seed, 0.0
    for client in cohort:
        rng = numpy_rng(seed, "batches", number, client)
        rows = context.shards.shard(client)
        for indices in batch_order(rows, fed.local_steps, fed.batch_size, rng):
            batch = context.task.prepare_batch(
                context.train.batch(indices), context.device, context.dtype
            )
            seconds += sum(limit.seconds(batch))
    return seconds


def backends(setup: Setup) -> Section:
    """Inline and Ray by turns, round by round, with the limit between them."""
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
            # In turn first, so that a machine that slows down or speeds up favours neither.
            for name, driver in both if number % 4 < 2 else both[::-1]:
                took[name] = _timed(driver.step)
            if number == 1:
                continue  # first touches: compilation of kernels, page faults, caches
            kind = "training" if number % 2 == 0 else "evaluation too"
            for name, value in took.items():
                seconds[kind][name].append(value)
        inline.step()
        ray.step()
        same = inline.final().digest == ray.final().digest
    rows, goals = [], [Goal("backends that ended with other bytes", float(not same), 0.0)]
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
            f"{len(seconds['training']['ray'])} rounds of each kind, ratios of neighbours",
            "a round includes broadcast, reduction, diagnostics and checkpoint; the limit covers "
            "the training batches alone",
            f"Ray's workers run at niceness {os.environ[NICENESS]} (Ray's default is 15)",
        ],
        goals,
        data,
    )


def scored(setup: Setup, turns: int = 3) -> Section:
    """Runs that are scored after every round beside runs that are not, by turns."""
    fed, evaluation = setup.experiment.federation, setup.experiment.evaluation
    seconds: dict[str, list[float]] = {"scored": [], "not scored": []}
    with ray_session(), Workers() as workers:
        for turn in range(2 * turns):
            kind = "scored" if turn % 4 in (0, 3) else "not scored"
            every = {"every": 1 if kind == "scored" else fed.rounds + 1}
            storage = setup.experiment.storage
            place = {"runs": f"{storage.runs}/{turn}"}
            changed = {
                "evaluation": evaluation.model_copy(update=every),
                "storage": storage.model_copy(update=place),
            }
            experiment = setup.experiment.model_copy(update=changed)
            with open_driver(experiment, setup.prepared, str(turn), workers=workers) as driver:
                driver.begin()
                driver.step()  # the untouched backbone is scored in it, in both kinds
                took = [_timed(driver.step) for _ in range(fed.rounds - 1)]
            seconds[kind].append(sum(took) / len(took))
    times = {name: Times.of(values) for name, values in seconds.items()}
    over = paired(times["scored"], times["not scored"])
    rows = [[name, each.show()] for name, each in times.items()]
    return Section(
        f"Scored in every round, with a spare actor ({setup.label})",
        ["a run that is", "s a round"],
        [*rows, ["scored / not scored", over.show(digits=3)]],
        [
            f"{fed.rounds - 1} rounds of {fed.clients_per_round} client x {fed.local_steps} steps "
            f"of {fed.batch_size} beside {evaluation.limit} test rows, "
            f"{setup.experiment.resources.actors} actors of one thread; {turns} runs of each kind",
        ],
        [Goal("a run scored in every round / one that is not", over.median, 1.1)],
        seconds,
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
