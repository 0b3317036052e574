"""The paper's run on CIFAR-100 by the clock: ViT-B/16, 50 rounds of 3 clients x 50 steps of 32."""

import statistics
import time
from pathlib import Path

import numpy as np
from _gpu import ALL_ROWS, Place, dealt, experiment_at, vision
from _results import Goal, Section
from _setups import LARGE, has_real_data

from trishul_ray.data.dataset import PreparedDataset, write_split
from trishul_ray.experiment import Experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import Prepared, prepare_run

#: Goal in seconds; the limit is 35 s at an H100's dense bf16 peak.
GOAL = 75.0
#: Images evaluated at once; 157 batches of 64 would leave a large GPU waiting.
BATCH = 500


def measure(place: Place) -> None:
    """Round by round, so that a run that is stopped still says how long it would have taken."""
    experiment, prepared, source = setup(place)
    began = time.perf_counter()
    driver = InlineDriver(experiment, prepared, "benchmark")
    driver.begin()
    seconds = [time.perf_counter() - began]
    rounds, finished = experiment.federation.rounds, False
    while not finished:
        report = driver.step()
        seconds.append(time.perf_counter() - began)
        finished = report.finished
        if finished or len(seconds) % 5 == 0:
            place.add(section(experiment, source, seconds, rounds, driver))


def setup(place: Place) -> tuple[Experiment, Prepared, str]:
    """The experiment, on images of the mirror repeated to the official number, or on noise."""
    settings = ["model.precision=bf16", f"evaluation.batch_size={BATCH}"]
    if place.rehearsal:
        settings += ["federation.rounds=2", "federation.local_steps=2"]
    if place.rehearsal or not has_real_data():
        return *vision(place, *settings, rows=ALL_ROWS), "noise"
    model = [f"model={LARGE}", "model.init=random", "budget=lower"]
    experiment = experiment_at(place, "dataset=cifar100", *model, *settings)
    mirror = prepare_run(experiment).dataset
    repeated = repeat(mirror, place.scratch / "repeated", ALL_ROWS)
    return experiment, dealt(experiment, repeated), "images of the mirror, repeated"


def repeat(dataset: PreparedDataset, folder: Path, rows: dict[str, int]) -> PreparedDataset:
    """A dataset whose splits have the given numbers of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in rows.items():
        split = dataset.split(name)
        chosen = np.arange(count) % len(split)
        columns = {column: split.column(column)[chosen] for column in ("pixels", "label")}
        write_split(folder / f"{name}.arrow", columns, dataset.info)
    return PreparedDataset(folder, tuple(rows))


def section(
    experiment: Experiment, source: str, seconds: list[float], rounds: int, driver: InlineDriver
) -> Section:
    """What is known after some rounds."""
    done = len(seconds) - 1
    total = (
        seconds[-1] if driver.server.finished else seconds[0] + per_round(seconds) * (rounds + 1)
    )
    title = "the whole run" if driver.server.finished else f"the whole run, from {done} rounds"
    fed = experiment.federation
    clients = [r["client_seconds"] for r in driver.server.records if "client_seconds" in r]
    return Section(
        "The paper's run",
        ["what", "s"],
        [
            ["start", f"{seconds[0]:.1f}"],
            ["a round with its evaluation, mean", f"{per_round(seconds):.2f}"],
            [
                f"of it: {fed.clients_per_round} clients train",
                f"{fed.clients_per_round * statistics.median(clients):.2f}",
            ],
            [title, f"{total:.1f}"],
        ],
        [
            f"{fed.rounds} rounds of {fed.clients_per_round} clients x {fed.local_steps} steps of "
            f"{fed.batch_size}, {experiment.model.precision}, inline; every test image after every "
            f"round, {experiment.evaluation.batch_size} at once; {source}",
        ],
        [Goal(title, total, GOAL)],
        {"seconds": seconds},
    )


def per_round(seconds: list[float]) -> float:
    """Mean of the rounds, without the first if there are others."""
    if len(seconds) > 2:
        return (seconds[-1] - seconds[1]) / (len(seconds) - 2)
    return seconds[-1] - seconds[0]
