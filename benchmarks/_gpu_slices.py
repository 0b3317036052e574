"""Processes with capped memory on one GPU: throughput together, and one that wants too much."""

from typing import Any

from _gpu import Place, vision
from _gpu_worker import Worker
from _results import Goal, Section

from trishul_ray.experiment import Experiment

#: Seconds of training of each measurement.
SECONDS = 12.0
#: A batch that no slice can hold; on the CPU, the room of a slice.
GREEDY = {"cuda": 8192, "cpu": 32_768}


def measure(place: Place) -> None:
    """One, two and three workers, each capped at its share; then a greedy one beside them."""
    most = 2 if place.rehearsal else 3
    seconds = 0.1 if place.rehearsal else SECONDS
    settings = ["model.precision=bf16", f"federation.local_steps={place.times(25)}"]
    experiment, prepared = vision(place, *settings)
    workers = [Worker.start(experiment, prepared, 1 / (most + 1)) for _ in range(most)]
    try:
        failed = [answer for w in workers if "error" in (answer := w.answer())]
        if failed:
            raise RuntimeError(f"a worker did not start: {failed[0]['error']}")
        train(workers[:1], 0.0)  # kernels and caches
        found = {number: train(workers[:number], seconds) for number in range(1, most + 1)}
        place.add(together(place, experiment, found))
        batch = f"federation.batch_size={GREEDY[place.device.type]}"
        greedy = Worker.start(vision(place, *settings, batch)[0], prepared, 0.05)
        workers.append(greedy)
        ready = greedy.answer()
        answers = train(workers, seconds) if "error" not in ready else [ready]
        place.add(alone(found[1][0]["digest"], answers))
    finally:
        for worker in workers:
            worker.end()


def train(workers: list[Worker], seconds: float) -> list[dict[str, Any]]:
    """Let workers train at the same time; return their answers."""
    for worker in workers:
        worker.send("train", seconds)
    return [worker.answer(seconds) for worker in workers]


def together(
    place: Place, experiment: Experiment, found: dict[int, list[dict[str, Any]]]
) -> Section:
    """Steps a second of several workers against one."""
    rate = {
        number: sum(answer["steps"] / answer["seconds"] for answer in answers)
        for number, answers in found.items()
    }
    rows = [
        [
            str(number),
            f"{rate[number]:.1f}",
            f"{rate[number] / rate[1]:.2f}",
            ", ".join(f"{answer['process']:.2f}" for answer in found[number]),
            f"{found[number][-1]['device']:.1f} of {found[number][-1]['total']:.1f}",
        ]
        for number in found
    ]
    digests = {answer["digest"] for answers in found.values() for answer in answers}
    return Section(
        "Slices of one device",
        ["processes", "steps / s together", "of one", "GiB of each", "GiB of the device"],
        rows,
        [
            f"the same client in every process, batches of {experiment.federation.batch_size}, "
            f"{experiment.model.precision}, each capped at 1/{len(found) + 1} of the memory",
        ],
        [Goal("different uploads of the same client", len(digests) - 1, 0)],
        {"answers": found},
    )


def alone(digest: str, answers: list[dict[str, Any]]) -> Section:
    """What the greedy worker, the last one, did to itself and to the others."""
    *others, greedy = answers
    said = greedy.get("error", "nothing: it trained")
    harmed = sum(answer.get("digest") != digest for answer in others)
    return Section(
        "A client that wants more than its slice",
        ["what", ""],
        [["it says", said], ["others beside it", f"{len(others)}, {harmed} of them harmed"]],
        ["capped at 0.05 of the memory; the others train at the same time"],
        [
            Goal("failed without its name", float("client 0 in round 1" not in said), 0),
            Goal("others harmed", harmed, 0),
        ],
        {"error": said},
    )
