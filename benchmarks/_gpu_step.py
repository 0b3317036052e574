"""A local step against its limit: eager, by parts, by the profiler, and as a CUDA graph."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from _gpu import Place, captured, copy_into, first_steps, milliseconds, per_call, vision
from _limit import PARTS, Limit, now, time_steps
from _results import Goal, Section
from torch.autograd import DeviceType

from trishul_ray.experiment import Experiment
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.workbench import build_workbench

#: Goals: a step as a multiple of the limit, the prox as a share of a bf16 step.
STEP, PROX = 1.15, 0.03


def measure(place: Place) -> None:
    """ViT-B/16, batch 32, q and v, 4 heads of rank 110: bf16, then fp32."""
    setups = [vision(place, f"model.precision={precision}") for precision in ("bf16", "fp32")]
    # Graphs last: a capture that fails may leave the process unusable.
    for measured in (eager, by_parts, as_graphs):
        for experiment, prepared in setups:
            with deterministic(experiment):
                place.add(measured(place, experiment, prepared))


def eager(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Steps that nobody waits for, as in a run, and what the profiler says of them."""
    precision = experiment.model.precision
    bench = build_workbench(experiment, prepared)
    limit, steps = Limit(bench), first_steps(bench)
    numbers = itertools.cycle(range(1, steps.last))  # the last step keeps its cores

    def step() -> None:
        number = next(numbers)
        steps.compute(number, steps.batch(number))

    def prox() -> None:
        with torch.no_grad():
            bench.method.after_step(steps.run, 1, steps.last)

    with steps.bound():
        batch = steps.batch(1)

        def least() -> None:
            limit.loss(batch).backward()

        found = {"limit: frozen forward, loss, input gradient": per_call(place, least, 10)}
        found["local step"] = per_call(place, step, 10)
        found["of it: batch"] = per_call(place, lambda: steps.batch(1), 10)
        found["of it: prox"] = per_call(place, prox, 10)
        found["limit again"] = per_call(place, least, 10)
        kernels = profile(place, step)
    low, whole, _, end, _ = map(statistics.median, found.values())
    goals = [Goal(f"local step / limit, {precision}", whole / low, STEP)]
    if precision == "bf16":
        goals.append(Goal("prox / bf16 step", end / whole, PROX))
    return Section(
        f"A local step, {precision}",
        ["what", "ms", "of the limit"],
        [
            [name, milliseconds(seconds), f"{statistics.median(seconds) / low:.3f}"]
            for name, seconds in found.items()
        ],
        [
            f"batches of {experiment.federation.batch_size}; means of 10 calls that nobody waits "
            "for, median (min-max)",
            f"by the profiler, in a step: {kernels['number']:.0f} kernels, busy "
            f"{kernels['busy']:.1%} of {kernels['seconds'] * 1e3:.2f} ms (profiled)",
            "longest: " + "; ".join(f"{name[:60]} {ms:.3f} ms" for name, ms in kernels["longest"]),
        ],
        goals,
        {"seconds": found, "kernels": kernels},
    )


def as_graphs(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """The limit and a step as CUDA graphs, with a new batch in each."""
    precision = experiment.model.precision
    bench = build_workbench(experiment, prepared)
    limit, steps = Limit(bench), first_steps(bench)
    for group in steps.optimizer.param_groups:
        group["capturable"] = not place.rehearsal  # torch asks for it during a capture
    with steps.bound():
        static = steps.batch(1)
        least = captured(place, lambda: limit.loss(static).backward())
        replay = captured(place, lambda: steps.compute(1, static))

        def step() -> None:
            copy_into(static, steps.batch(2))
            replay()

        low, whole = (statistics.median(per_call(place, call, 10)) for call in (least, step))
        state = [steps.run.vector, *steps.optimizer.state[steps.run.vector].values()]
        before, results = [tensor.clone() for tensor in state], []
        for call in (replay, lambda: steps.compute(1, static)):
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            call()
            results.append(steps.run.vector.clone())
    same = torch.equal(*results)
    return Section(
        f"As CUDA graphs, {precision}",
        ["what", "ms"],
        [["limit", f"{low * 1e3:.2f}"], ["local step", f"{whole * 1e3:.2f}"]],
        [f"the graph's step gives {'the' if same else 'OTHER'} bytes of the eager one"],
        [
            Goal(f"local step / limit, graphs, {precision}", whole / low, STEP),
            Goal(f"other bytes than the eager step, {precision}", float(not same), 0),
        ],
        {"limit": low, "step": whole},
    )


def profile(place: Place, call: Callable[[], object], steps: int = 5) -> dict[str, Any]:
    """Kernels of a step, the share of the time in which the device is busy, the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    kind = DeviceType.CPU
    if not place.rehearsal:
        activities, kind = [*activities, torch.profiler.ProfilerActivity.CUDA], DeviceType.CUDA
    call()
    with torch.profiler.profile(activities=activities) as profiler:
        began = now(place.device)
        for _ in range(steps):
            call()
        seconds = now(place.device) - began
    spans, names = [], defaultdict(float)
    for event in profiler.events():
        if event.device_type == kind:
            spans.append((event.time_range.start, event.time_range.end))
            names[event.name] += (event.time_range.end - event.time_range.start) / 1e3 / steps
    busy, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    longest = sorted(names.items(), key=lambda item: -item[1])[:8]
    return {
        "number": len(spans) / steps,
        "busy": busy / 1e6 / seconds,
        "seconds": seconds / steps,
        "longest": longest,
    }


def by_parts(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Every part of a step waited for: their sum exceeds the step."""
    precision = experiment.model.precision
    found = time_steps(experiment, prepared, place.times(20))
    beside = {"forward": found.forward, "backward": found.backward}
    rows = [
        [
            part,
            milliseconds(found.parts[part]),
            milliseconds(beside[part]) if part in beside else "",
        ]
        for part in PARTS
    ]
    rows.append(["sum", milliseconds(found.step), milliseconds(found.limit)])
    return Section(
        f"Parts of a local step, {precision}",
        ["part", "step ms", "limit ms"],
        rows,
        ["the device is waited for after each part, median (min-max)"],
        data={"parts": found.parts, "limit": found.limit},
    )
