"""A local step against its limit: eager, by parts, by the profiler, and as a CUDA graph."""

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
from trishul_ray.federation.local import LocalSteps
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.workbench import build_workbench

#: Goals: a step as a multiple of the limit, the prox as a share of a bf16 step.
STEP, PROX = 1.15, 0.03


def measure(place: Place) -> None:
    """ViT-B/16, batch 32, q and v, 4 heads of rank 110: bf16, then fp32."""
    for precision in ("bf16", "fp32"):
        experiment, prepared = vision(place, f"model.precision={precision}")
        with deterministic(experiment):
            place.add(whole(place, experiment, prepared))
            place.add(by_parts(place, experiment, prepared))


def whole(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Steps that nobody waits for, as in a run: eager and captured, and what fills them."""
    precision = experiment.model.precision
    bench = build_workbench(experiment, prepared)
    limit, steps = Limit(bench), first_steps(bench)
    count = steps.last - 1  # the last step keeps its cores
    number = 0

    def eager() -> None:
        nonlocal number
        number = number % count + 1
        steps.compute(number, steps.batch(number))

    with steps.bound():
        batch = steps.batch(1)
        lower = per_call(place, lambda: limit.loss(batch).backward(), 10)
        step = per_call(place, eager, 10)
        lower += per_call(place, lambda: limit.loss(batch).backward(), 10)
        data = per_call(place, lambda: steps.batch(1), 10)
        prox = per_call(place, lambda: end_of_step(steps), 10)
        kernels = profile(place, eager)
        graphs, failure = as_graphs(place, steps, limit)
    middle, low = statistics.median(step), statistics.median(lower)
    rows = [
        ["limit: frozen forward, loss, input gradient", milliseconds(lower), "1"],
        ["local step", milliseconds(step), f"{middle / low:.3f}"],
        *(
            [name, milliseconds(seconds), f"{statistics.median(seconds) / low:.3f}"]
            for name, seconds in graphs.items()
        ),
        ["of it: batch", milliseconds(data), f"{statistics.median(data) / low:.3f}"],
        [
            "of it: end of the step (prox)",
            milliseconds(prox),
            f"{statistics.median(prox) / low:.3f}",
        ],
    ]
    goals = [Goal(f"local step / limit, {precision}", middle / low, STEP)]
    if "local step, captured" in graphs:
        ratio = statistics.median(graphs["local step, captured"])
        ratio /= statistics.median(graphs["limit, captured"])
        goals.append(Goal(f"local step / limit, both captured, {precision}", ratio, STEP))
    if precision == "bf16":
        goals.append(Goal("prox / bf16 step", statistics.median(prox) / middle, PROX))
    return Section(
        f"A local step, {precision}",
        ["what", "ms", "of the limit"],
        rows,
        [
            f"batches of {experiment.federation.batch_size}; means of 10 calls that nobody waits "
            "for, median (min-max)",
            f"by the profiler, in a step: {kernels['number']:.0f} kernels, busy "
            f"{kernels['busy']:.1%} of {kernels['seconds'] * 1e3:.2f} ms (profiled)",
            "longest: " + "; ".join(f"{name[:60]} {ms:.3f} ms" for name, ms in kernels["longest"]),
            *([f"no graph: {failure}"] if failure else []),
        ],
        goals,
        {
            "limit": lower,
            "step": step,
            "batch": data,
            "prox": prox,
            "graphs": graphs,
            "kernels": kernels,
        },
    )


def end_of_step(steps: LocalSteps) -> None:
    """What the method does after the optimizer's step."""
    with torch.no_grad():
        steps.bench.method.after_step(steps.run, 1, steps.last)


def as_graphs(
    place: Place, steps: LocalSteps, limit: Limit
) -> tuple[dict[str, list[float]], str | None]:
    """Seconds of the limit and of a step as CUDA graphs, and why there is none."""
    static = steps.batch(1)
    for group in steps.optimizer.param_groups:
        group["capturable"] = not place.rehearsal  # torch asks for it during a capture
    found: dict[str, list[float]] = {}
    try:
        found["limit, captured"] = per_call(
            place, captured(place, lambda: limit.loss(static).backward()), 10
        )
        replay = captured(place, lambda: steps.compute(1, static))

        def step() -> None:
            copy_into(static, steps.batch(2))
            replay()

        found["local step, captured"] = per_call(place, step, 10)
    except RuntimeError as error:
        return found, str(error).splitlines()[0][:200]
    return found, None


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
