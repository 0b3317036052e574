"""Rounds in which a cohort trains in one forward, by turns with rounds in which each is alone."""

import time
from pathlib import Path
from typing import Any

import torch
from _results import Section, Times, paired
from _setups import Setup, small_on_noise

from trishul_ray.federation.inline import InlineDriver

#: Tokens and rows of a batch: images of 32 x 32 in patches of 8 or 4, and the class token.
SHAPES = {"17 tokens x 16": (8, 16), "65 tokens x 32": (4, 32)}
COHORTS = (1, 3, 10)
METHODS = ("fedit", "trishul")
#: Local steps of a round.
STEPS = 3

#: Wall seconds of rounds, and seconds of the processor.
Seconds = tuple[list[float], list[float]]


def stacked(scratch: Path, shared: list[str], shape: str, rounds: int) -> Section:
    """Time rounds of a ViT of width 192 with 6 blocks, q, k, v and o adapted."""
    patch, batch = SHAPES[shape]
    rows, data = [], {}
    for method in METHODS:
        for cohort in COHORTS:
            overrides = [
                *(f"method={method}", "budget=16", "partition.kind=iid"),
                "adapter.targets=[query, key, value, o_proj]",
                f"federation.clients_per_round={cohort}",
                f"federation.local_steps={STEPS}",
                f"federation.batch_size={batch}",
                f"federation.rounds={rounds + 2}",
                *("evaluation.every=0", "evaluation.diagnostics_every=0"),
                *("evaluation.limit=64", "resources.backend=inline", *shared),
            ]
            folder = scratch / f"{method}-{patch}-{cohort}"
            setup = small_on_noise(folder, 192, 6, overrides, patch)
            alone, together = rounds_by_turns(setup, cohort, rounds)
            ratios = [
                paired(Times.of(b), Times.of(a)) for a, b in zip(alone, together, strict=True)
            ]
            shown = [
                Times.of(each[0]).show(1e3 / (cohort * STEPS), 1) for each in (alone, together)
            ]
            rows.append([method, str(cohort), *shown, *(r.show(digits=3) for r in ratios)])
            data[f"{method}, {cohort}"] = {"alone": alone, "together": together}
    return Section(
        f"Clients of a cohort in one forward, {shape} rows (ViT 192x6, random weights, noise)",
        [
            *("method", "cohort", "alone ms", "together ms", "together / alone"),
            "in seconds of the processor",
        ],
        rows,
        [
            f"inline, {torch.get_num_threads()} threads; medians (min-max) of {rounds} rounds of "
            f"{STEPS} steps for each kind, by turns in one process; ms are those of a round by "
            "client and step",
            "a cohort of 1 computes the same both times: its range is that of the measurement",
        ],
        data=data,
    )


def rounds_by_turns(setup: Setup, cohort: int, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of rounds with clients alone, and with the cohort together."""
    drivers: list[InlineDriver] = []
    seconds: list[Seconds] = []
    for size in (1, cohort):
        fed = setup.experiment.federation.model_copy(update={"stacked": size})
        runs = f"{setup.experiment.storage.runs}/{len(drivers)}"
        storage = setup.experiment.storage.model_copy(update={"runs": runs})
        changed: dict[str, Any] = {"federation": fed, "storage": storage}
        experiment = setup.experiment.model_copy(update=changed)
        drivers.append(InlineDriver(experiment, setup.prepared, "benchmark"))
        seconds.append(([], []))
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            wall, processor = time.perf_counter(), time.process_time()
            drivers[which].step()
            if number:  # the first one scores the untouched model, too
                seconds[which][0].append(time.perf_counter() - wall)
                seconds[which][1].append(time.process_time() - processor)
    for driver in drivers:
        driver.close()
    return seconds[0], seconds[1]
