"""T5-Base and LLaMA-3.2-1B at the paper's lengths: a step against its limit, and memory."""

import gc
import statistics

import torch
from _gpu import Place, first_steps, memory, milliseconds, per_call, text
from _gpu_worker import Worker
from _limit import Limit
from _results import Goal, Section

from trishul_ray.experiment import Experiment
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.workbench import build_workbench

STEP = 1.15


def measure(place: Place) -> None:
    """Each backbone: the step in this process, then the memory of two actors."""
    for kind, name in (("t5", "T5-Base"), ("llama", "LLaMA-3.2-1B")):
        experiment, prepared = text(place, kind, f"federation.local_steps={place.times(25)}")
        with deterministic(experiment):
            place.add(step(place, name, experiment, prepared))
        gc.collect()  # a run and its steps refer to each other
        if not place.rehearsal:
            torch.cuda.empty_cache()
        if kind == "t5" or not place.rehearsal:
            place.add(actors(place, name, experiment, prepared))


def step(place: Place, name: str, experiment: Experiment, prepared: Prepared) -> Section:
    """A local step against the frozen forward and input gradient."""
    bench = build_workbench(experiment, prepared)
    limit, steps = Limit(bench), first_steps(bench)
    number = 0

    def call() -> None:
        nonlocal number
        number = number % (steps.last - 1) + 1
        steps.compute(number, steps.batch(number))

    with steps.bound():
        batch = steps.batch(1)
        lower = per_call(place, lambda: limit.loss(batch).backward(), 5, 3)
        found = per_call(place, call, 5, 3)
    ratio = statistics.median(found) / statistics.median(lower)
    shape = tuple(batch["input_ids"].shape)
    return Section(
        f"A local step, {name}",
        ["what", "ms"],
        [
            ["limit: frozen forward, loss, input gradient", milliseconds(lower)],
            ["local step", milliseconds(found)],
        ],
        [
            f"{experiment.method.name}, {experiment.model.precision}, random weights, tokens of a "
            f"batch {shape[0]} x {shape[1]}; {memory(place.device)['process']:.2f} GiB taken",
        ],
        [Goal(f"local step / limit, {name}", ratio, STEP)],
        {"limit": lower, "step": found},
    )


def actors(place: Place, name: str, experiment: Experiment, prepared: Prepared) -> Section:
    """Memory of a process that trains this client, and of a second one beside it."""
    taken = [memory(place.device)["device"]]
    rows, workers = [], []
    try:
        for number in (1, 2):
            worker = Worker.start(experiment, prepared)
            workers.append(worker)
            answer = worker.answer()
            if "error" not in answer:
                worker.send("train", 0.0)
                answer = worker.answer()
            if "error" in answer:
                rows.append([str(number), answer["error"], ""])
                break
            taken.append(answer["device"])
            rows.append([str(number), f"{answer['process']:.2f}", f"{taken[-1] - taken[-2]:.2f}"])
    finally:
        for worker in workers:
            worker.end()
    return Section(
        f"Memory of client actors, {name}",
        ["actor", "GiB torch took", "more GiB of the device"],
        rows,
        ["processes one beside the other; the last column includes the CUDA context"],
        data={"device_gib": taken},
    )
