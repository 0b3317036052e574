"""Plan sweeps (``trishul sweep --plan``): the states of their runs, and the remaining hours.

Each distinct run counts once, in the first sweep that contains it. Its duration is the mean of
finished runs of its kind on the same device, if there are any. Otherwise, it is estimated from the
operations of the backbone and the proximal steps at sustained rates, or from the kernel launches if
they take longer.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from trishul_ray.data.prepare import official_rows
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.methods.base import build_method
from trishul_ray.report.summary import RunSummary
from trishul_ray.runs.folder import RunFolder
from trishul_ray.runtime.device import usable_cores
from trishul_ray.sweeps.cells import Sweep, distinct
from trishul_ray.sweeps.status import CellState


class Device(NamedTuple):
    """Sustained rates in 10^12 operations per second, and seconds of kernel launches per layer."""

    fp32: float
    tf32: float
    bf16: float
    fp64: float
    launch: float = 3.3e-4


#: Devices, keyed by name. The rates are 0.6 (fp32), 0.4 (tf32, bf16) and 0.3 (fp64) times NVIDIA's
#: dense peak rates. ``cpu`` is one core at 3 GHz with two 256-bit fused multiply-adds per cycle.
#: Without CUDA graphs, launches dominate: a step of ViT-B/16 in bf16 on an H200 takes 72 ms, and
#: 12 ms with CUDA graphs.
DEVICES = {
    "h200": Device(40, 198, 396, 10),
    "h100": Device(40, 198, 396, 10),
    "a100": Device(12, 62, 125, 2.9),
    "v100": Device(9.4, 6.3, 6.3, 2.3),
    "l4": Device(18, 24, 48, 0.15),
    "a10g": Device(19, 14, 28, 0.15),
    "t4": Device(4.9, 3.2, 3.2, 0.075),
    "cpu": Device(0.058, 0.038, 0.077, 0.014, 3e-5),
}
#: Operations of a proximal step of an r x r core, in units of r^3.
PROX_OPERATIONS = 160
#: Seconds of a run in addition to its rounds.
RUN_SECONDS = 3.0
#: Assumed number of rows of user data, since the actual number is unknown before loading.
USER_ROWS = 1000
#: Seconds without a new file after which a run counts as not running.
QUIET_SECONDS = 600.0


def seconds_of(experiment: Experiment, device: str) -> float:
    """Estimate the duration of a run on one device, in seconds.

    Raises:
        InputError: The model is not on this machine, or the adapters do not fit the model.
    """
    from trishul_ray.adapters.multihead import MultiHead  # imports torch
    from trishul_ray.experiment.compatibility import target_layers
    from trishul_ray.models.choose_backbone import backbone_of
    from trishul_ray.models.flops import row_flops

    fed, model, paths = experiment.federation, experiment.model, experiment.storage.paths
    forward, generation, layers = row_flops(
        model.model_copy(update={"content": None}), paths, experiment.task
    )
    method = build_method(experiment.method, experiment.adapter)
    adapters = method.adapters(target_layers(backbone_of(model, paths).shapes, experiment))
    official = official_rows(experiment.data.name) or {}
    each, size = fed.steps_of(max(1, official.get("train", USER_ROWS) // fed.clients))
    steps = fed.rounds * fed.clients_per_round * each
    # The gradient of the input and the gradient of the weight each cost as much as the product.
    passes = 2 + method.train_all + model.gradient_checkpointing
    rows = official.get("test", USER_ROWS)
    rows = len(experiment.scored_rounds) * min(rows, experiment.evaluation.limit or rows)
    products = steps * size * passes * forward + rows * (forward + generation)
    launches = layers * (3 * steps + rows / experiment.evaluation.batch_size)
    cubes = sum(r**3 for a in adapters.values() if isinstance(a, MultiHead) for r in a.head_ranks)
    prox = PROX_OPERATIONS * cubes * steps / method.steps_per_prox if method.steps_per_prox else 0.0
    rates, cores = DEVICES[device], usable_cores() if device == "cpu" else 1
    rate = 1e12 * cores * float(getattr(rates, model.precision))
    graphs = experiment.resources.cuda_graphs and device != "cpu"
    computing = max(products / rate, 0.0 if graphs else launches * rates.launch)
    return RUN_SECONDS + computing + prox / (1e12 * cores * rates.fp64)


def plan_table(
    sweeps: Sequence[Sweep], states: Mapping[str, CellState], device: str
) -> tuple[Table, list[str]]:
    """Build a table with the runs per state and remaining hours of each sweep, and notices.

    Raises:
        InputError: The device is unknown.
    """
    if device not in DEVICES:
        raise InputError(f"--device {device!r} is unknown; known: {', '.join(DEVICES)}")
    measured = _measured((state.summary for state in states.values()), device)
    estimated: dict[str, float] = {}
    merged = distinct(sweeps)
    rows: list[tuple[str, Counter[str], float]] = []
    unknown: Counter[str] = Counter()
    seen = set[str]()
    for sweep in sweeps:
        runs = {id: merged[id] for id in distinct([sweep]) if id not in seen}
        seen |= runs.keys()
        samples = sweep.search.samples if sweep.search else 1
        count, hours = Counter(cells=len(sweep.cells) * samples), 0.0
        for id, experiment in runs.items():
            status: str = states[id].status if id in states else "missing"
            if status == "missing" and _is_running(experiment):
                status = "running"
            count[status] += samples
            if status != "finished":
                kind, rounds = _kind(experiment), experiment.federation.rounds
                scored = f"{kind} {rounds} {experiment.evaluation}"
                try:
                    if kind in measured:
                        seconds = rounds * measured[kind]
                    else:
                        if scored not in estimated:
                            estimated[scored] = seconds_of(experiment, device)
                        seconds = estimated[scored]
                    hours += samples * seconds / 3600
                except InputError as error:
                    unknown[str(error)] += samples
        rows.append((sweep.name, count, hours))
    total = sum((count for _, count, _ in rows), Counter[str]())
    if len(rows) > 1:
        rows.append(("total", total, sum(hours for *_, hours in rows)))
    rare = [status for status in ("failed", "stale", "corrupt") if total[status]]
    columns = ["finished", "running", "missing", *rare]
    table = Table(box=None, pad_edge=False)
    for name in ("sweep", "cells", "runs", *columns, f"hours on {device}"):
        table.add_column(name, justify="left" if name == "sweep" else "right")
    for name, count, hours in rows:
        numbers = [count["cells"], count.total() - count["cells"], *(count[c] for c in columns)]
        table.add_row(name, *map(str, numbers), f"{hours:,.2f}")
    notes = [f"{number} runs of unknown duration: {why}" for why, number in unknown.items()]
    stacks = Counter(
        stack.outdated
        for state in states.values()
        for stack in (state.summary.stacks[-1:] if state.summary else ())
    )
    notes += [
        f"{number} finished runs have {difference}: tables exclude runs of the rarer stack"
        for difference, number in stacks.items()
        if difference
    ]
    reasons = Counter(f"failed: {s.reason}" for s in states.values() if s.status == "failed")
    return table, notes + [f"{number} {reason}" for reason, number in reasons.most_common(5)]


def _measured(summaries: Iterable[RunSummary | None], device: str) -> dict[str, float]:
    """Average the round duration of finished runs on a device, in seconds, keyed by kind."""
    found: dict[str, list[float]] = {}
    for summary in summaries:
        if summary is None or not summary.round_seconds:
            continue
        gpus = [] if summary.config["resources"]["device"] == "cpu" else summary.hardware.gpus
        words = gpus[0].lower().replace("-", " ").split() if gpus else ["cpu"]
        if device in words:
            kind = _kind(Experiment.model_validate(summary.config))
            found.setdefault(kind, []).append(fmean(summary.round_seconds))
    return {kind: fmean(seconds) for kind, seconds in found.items()}


def _kind(experiment: Experiment) -> str:
    """Return the fields that determine the duration of a round, as a key."""
    fed = experiment.federation
    sections = experiment.model, experiment.method, experiment.budget, experiment.data.name
    steps = fed.local_epochs, fed.local_steps, fed.batch_size
    return f"{sections} {fed.clients_per_round} {steps}"


def _is_running(experiment: Experiment) -> bool:
    """Return whether a run without a result has written a file recently."""
    written = RunFolder.of(experiment).home.written()
    return time.time() - max(written.values(), default=0.0) < QUIET_SECONDS


def default_device(sweeps: Sequence[Sweep]) -> str:
    """Return the device that the profiles of the sweeps are designed for."""
    return "h100" if any(sweep.profile == "paper" for sweep in sweeps) else "cpu"
