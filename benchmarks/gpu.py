"""Measurements on a GPU: a step, the paper's run, the prox, right results, slices, backbones.

    python benchmarks/gpu.py [PART ...] [options]

Parts (all by default) in this order, and the seconds after which each is stopped:

    graphs (80)      a local step of ViT-B/16 as a CUDA graph against its limit; bytes of uploads
    step (120)       the same step eager, by parts, profiled
    run (140)        the paper's run on CIFAR-100: 50 rounds of 3 clients x 50 steps of 32
    prox (60)        the proximal map on stacks of cores: time and error of each route
    right (120)      states against the CPU's; the same bytes twice and resumed; tests marked gpu
    slices (90)      processes with capped memory on one GPU; one that wants too much
    backbones (190)  T5-Base and LLaMA-3.2-1B: a step against its limit, memory of two client actors

They take 13 minutes at most. --seconds divides another time among them, and a part that ends early
leaves the rest of its share to the next ones.

Each part runs in a process of its own, and a part that fails or is stopped does not stop the next.
Results go to benchmarks/results/ as soon as they are known; parts measured later on the same day
are added to the same page. With a mirror (TRISHUL_HUB, or --hub) the run uses its images, without
one noise.

The script needs neither Ray, MLflow nor datasets. --rehearse runs every part on the CPU with tiny
shapes, which says that the script works and nothing else.
"""

import datetime
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package need not be installed

#: What the script imports, by the name of its module, and where that differs by its name on PyPI.
NEEDED = {
    **{name: name for name in ("torch", "transformers", "numpy", "pyarrow", "psutil", "pydantic")},
    **{name: name for name in ("joblib", "tenacity", "safetensors", "xxhash")},
    **{"PIL": "pillow", "yaml": "PyYAML"},
}
#: Some have wheels for the older tag alone, some for the newer.
PLATFORMS = "--platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64"


def missing_packages() -> str:
    """Return what is missing and how to bring it to a machine without a network; or nothing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = " ".join(NEEDED[name] for name in missing)
    return (
        f"missing: {', '.join(missing)}\n"
        f"with a network:  python -m pip download --only-binary=:all: {PLATFORMS} "
        f"--python-version {version} -c constraints.txt -d wheels {packages}\n"
        "here:            python -m pip install --no-index --no-deps --target packages wheels/*.whl"
        " && export PYTHONPATH=packages"
    )


if __name__ == "__main__" and (fault := missing_packages()):
    raise SystemExit(fault)

try:
    import numpy as np
    import torch
    from _limit import PARTS, Limit, now, time_steps
    from _results import Goal, Section, hardware_slug, told_by, versions
    from _setups import LARGE, dealt, has_real_data, random_vit, synthetic
    from torch import Tensor
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    from trishul_ray.data.dataset import PreparedDataset, write_split
    from trishul_ray.errors import InputError, RunError
    from trishul_ray.experiment import Experiment
    from trishul_ray.experiment.loading import load_experiment
    from trishul_ray.federation.checkpoint import state_digest
    from trishul_ray.federation.determinism import deterministic, set_environment
    from trishul_ray.federation.evaluation import EvaluatedModel, evaluate_chunk
    from trishul_ray.federation.inline import InlineDriver
    from trishul_ray.federation.local import LocalSteps, train_client, train_together
    from trishul_ray.federation.messages import EvalJob, TrainJob, to_array
    from trishul_ray.federation.prepare import Prepared, prepare_run
    from trishul_ray.federation.workbench import Workbench, build_workbench, new_run
    from trishul_ray.methods.base import method_names
    from trishul_ray.models.builtin import BUILTINS
    from trishul_ray.models.lookup import KNOWN
    from trishul_ray.models.tokenizers import byte_tokenizer
    from trishul_ray.runs.results import hardware
    from trishul_ray.runtime.gpu import cap_device_memory
    from trishul_ray.runtime.random_streams import numpy_rng, torch_rng
    from trishul_ray.spectral.svt import svt, svt_by_iteration, svt_stats
except ModuleNotFoundError as missing:
    raise SystemExit(f"missing: {missing.name}") from missing

GIB = 2**30
#: Goals: a step as a multiple of its limit by precision, one of three stacked clients likewise, the
#: prox as a share of a bf16 step, and the run in seconds, whose limit is 35 s at an H100's dense
#: bf16 peak.
STEP, STACKED, PROX = {"bf16": 1.35, "fp32": 1.05}, 1.15, 0.1
RUN = {"eager": 130.0, "graphs": 100.0, "graphs, three stacked": 80.0}
#: Rounds from which a run is extrapolated.
FIRST = 5
#: Error bound of :func:`trishul_ray.spectral.svt.svt`, as a share of the largest singular value.
EXACT = 1e-6


@dataclass(frozen=True)
class Place:
    """Device on which a part is measured.

    Attributes:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        scratch: A folder for data and weights.
        add: Takes each section of the result as soon as it is known, in the place of an earlier one
            with the same title.
    """

    device: torch.device
    scratch: Path
    add: Callable[[Section], None]

    @property
    def rehearsal(self) -> bool:
        """Whether shapes are tiny and nothing is worth timing."""
        return self.device.type == "cpu"

    def times(self, full: int) -> int:
        """Return how often to repeat something."""
        return 2 if self.rehearsal else full


# Experiments, timing and memory.


def experiment_at(place: Place, *overrides: str) -> Experiment:
    """Return an experiment on the device, without tracking, in the scratch folder."""
    places = (f"storage.runs={place.scratch}/runs", f"storage.cache={place.scratch}/cache")
    device = f"resources.device={place.device.type}"
    common = (device, "resources.backend=inline", "tracking.mlflow=false", *places)
    return load_experiment(None, [*common, *overrides])


def vision(
    place: Place, *overrides: str, rows: dict[str, int] | None = None
) -> tuple[Experiment, Prepared]:
    """Return ViT-B/16 with random weights on noise like CIFAR-100; a tiny ViT in a rehearsal."""
    model = [f"model={LARGE}", "model.init=random", "budget=lower"]
    rows = rows or {"train": 10_000, "test": 1_000}
    if place.rehearsal:
        folder, rows = place.scratch / "tiny-vit", {"train": 400, "test": 64}
        random_vit(folder, 32, 2, 4, patch=8)
        model = [f"model={folder}", "model.init=random", "budget=2", "federation.batch_size=4"]
    experiment = experiment_at(place, "dataset=cifar100", "dataset=synthetic", *model, *overrides)
    return experiment, dealt(experiment, synthetic(place.scratch / "noise", rows))


def text(place: Place, kind: str, *overrides: str) -> tuple[Experiment, Prepared]:
    """Return T5-Base or LLaMA-3.2-1B with random weights, on letters that fill the paper's lengths.

    ``kind`` is ``t5`` or ``llama``. Words and tokens mean nothing; every token is a letter.
    """
    name, length = {"t5": ("google-t5/t5-base", 256), "llama": ("meta-llama/Llama-3.2-1B", 128)}[
        kind
    ]
    config = KNOWN[name]()
    model = ["adapter.matching=published", "budget=lower"]
    if place.rehearsal:
        config, length = BUILTINS[f"{kind}-tiny"].config(), 24
        model = ["adapter.rank=4", "adapter.heads=2", "federation.batch_size=4"]
    folder, file = place.scratch / kind, place.scratch / f"{kind}.csv"
    config.save_pretrained(folder)
    byte_tokenizer(kind).save_pretrained(folder)
    rng = numpy_rng(0, "letters")
    letters = rng.integers(ord("a"), ord("z") + 1, (600, length), dtype="uint8")
    lines = [f"{bytes(row).decode()},{'abcd'[i % 4]}" for i, row in enumerate(letters)]
    file.write_text("\n".join(["text,label", *lines]) + "\n")
    data = ("dataset=table", f"data.path={file}", f"model={folder}", "model.init=random")
    task = ("task.template='{text}:'", "task.verbalizers=['a', 'b', 'c', 'd']")
    lengths = (f"task.max_length={length}", "task.target_length=16", "model.precision=bf16")
    experiment = experiment_at(place, *data, *task, *lengths, *model, *overrides)
    return experiment, prepare_run(experiment)


def first_steps(bench: Workbench) -> LocalSteps:
    """Return the local steps of client 0 in round 1; compute them inside ``bound()``."""
    start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
    return LocalSteps(bench, new_run(bench, start, 1, 0), TrainJob(round=1, client=0))


def endless(steps: LocalSteps) -> Callable[[], None]:
    """Return a call that computes the next step; the last one, which keeps its cores, is none."""
    numbers = itertools.cycle(range(1, steps.last))

    def step() -> None:
        number = next(numbers)
        steps.compute(number, steps.batch(number))

    return step


def per_call(place: Place, call: Callable[[], object], calls: int = 10) -> list[float]:
    """Return seconds of a call, five times the mean of ``calls`` that are not waited for."""
    call()
    found = []
    for _ in range(place.times(5)):
        began = now(place.device)
        for _ in range(place.times(calls)):
            call()
        found.append((now(place.device) - began) / place.times(calls))
    return found


def launches(place: Place, call: Callable[[], object], calls: int = 10) -> list[float]:
    """Return the seconds that the host takes for a call on a device that has nothing to do."""
    found = []
    for _ in range(place.times(calls)):
        now(place.device)
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


def captured(place: Place, call: Callable[[], object]) -> Callable[[], object]:
    """Return a CUDA graph of a call, to replay; the call itself in a rehearsal."""
    if place.rehearsal:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries set themselves up before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(seconds: Sequence[float]) -> str:
    """Return ``median (min-max)`` in milliseconds."""
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def memory(device: torch.device) -> dict[str, float]:
    """Return GiB that this process has taken at most, and that are taken of the whole device."""
    if device.type == "cpu":
        import psutil

        return {"process": psutil.Process().memory_info().rss / GIB, "device": 0.0, "total": 0.0}
    free, total = torch.cuda.mem_get_info(device)
    most = torch.cuda.max_memory_reserved(device)
    return {"process": most / GIB, "device": (total - free) / GIB, "total": total / GIB}


# Right.


def right(place: Place) -> None:
    """Run the tests marked gpu, compare every method with the CPU, and runs with themselves."""
    marked_tests(place)
    rows, worst = [], 0.0
    for method in ["trishul", "fullft", "local"] if place.rehearsal else method_names():
        changes = [f"method={method}", "federation.rounds=1"]
        try:
            here, there = (
                small_run(place, f"{method}-{device}", *changes, f"resources.device={device}")[0]
                for device in (place.device.type, "cpu")
            )
        except InputError as error:  # a combination of methods that needs a field
            rows.append([method, f"not run: {error}", ""])
            continue
        if not there.size:  # e.g. method=local
            rows.append([method, "no state of the server", ""])
            continue
        difference = float(np.abs(here - there).max())
        rows.append([method, f"{difference:.1e}", f"{np.abs(there).max():.2g}"])
        worst = max(worst, difference)
    columns = ["method", "largest difference", "largest entry"]
    goal = Goal("difference of states after a round", worst, 1e-4)
    place.add(Section("One round against the CPU, fp32", columns, rows, goals=[goal]))

    rows, differing = [], 0
    configurations = [(m, p) for m in ("trishul", "fedsb", "fullft") for p in ("fp32", "bf16")]
    for method, precision in configurations[: 1 if place.rehearsal else None]:
        changes = [f"method={method}", f"model.precision={precision}", "federation.rounds=3"]
        name = f"{method}-{precision}"
        small_run(place, f"{name}-resumed", *changes, stop=1)
        names = (f"{name}-1", f"{name}-2", f"{name}-resumed")
        digests = {small_run(place, each, *changes)[1] for each in names}
        rows.append([method, precision, "same" if len(digests) == 1 else "DIFFERENT"])
        differing += len(digests) - 1
    title, columns = "The same run twice, and stopped and resumed", ["method", "precision", "bytes"]
    goal = Goal("runs with other bytes", differing, 0)
    place.add(Section(title, columns, rows, goals=[goal]))


def small_run(
    place: Place, name: str, *overrides: str, stop: int | None = None
) -> tuple[np.ndarray, str]:
    """Return the numbers of a run's state and its digest; continue it from a checkpoint, if any."""
    experiment = experiment_at(
        place,
        *("dataset=synthetic/shapes", "model=vit-digits", "model.init=random"),
        *("federation.clients=4", "federation.clients_per_round=3", "federation.local_steps=4"),
        *("federation.batch_size=8", "evaluation.limit=64"),
        # Adam would turn the rounding noise of a gradient that is zero into a whole step.
        *("optimizer.name=sgd", "optimizer.lr=0.1"),
        f"storage.runs={place.scratch / name}",
        *overrides,
    )
    driver = InlineDriver(experiment, prepare_run(experiment), "benchmark")
    report = driver.begin()
    while not report.finished and (stop is None or report.round < stop):
        report = driver.step()
    if not report.finished:
        return np.empty(0), ""
    result = driver.final()
    arrays: list[np.ndarray] = []
    result.checkpoint.state.map(arrays.append)
    return np.concatenate([each.ravel().astype(np.float64) for each in arrays]), result.digest


def marked_tests(place: Place) -> None:
    """Run the tests marked gpu, and note them as they end; in a rehearsal they are collected."""
    needed = ("pytest", "pytest_timeout", "hypothesis")
    title, columns = "Tests marked gpu", ["result"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        place.add(Section(title, columns, [[f"not run: {', '.join(missing)} missing"]]))
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    command += ["--collect-only", "-q"] if place.rehearsal else ["-n", "4"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*command, "tests/gpu", "tests/spectral/test_svt.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    failed: list[str] = []
    assert process.stdout is not None
    for line in map(str.strip, process.stdout):
        lines += [line] if line else []
        passed = sum("PASSED" in each for each in lines)
        failed = [each for each in lines if "FAILED" in each or "ERROR" in each]
        if line in failed or ("PASSED" in line and passed % 10 == 0):
            shown = [
                [f"{passed} passed, {len(failed)} failed so far"],
                *([each] for each in failed),
            ]
            place.add(Section(title, columns, shown))
    goal = Goal("exit code of pytest", abs(process.wait()), 0)
    shown = [[line] for line in [*lines[-1:], *failed]]
    place.add(Section(title, columns, shown, goals=[goal], data={"output": lines[-99:]}))


# The prox.


def prox(place: Place) -> None:
    """Measure time and error of every route, on cores of clients with all heads and with a part."""
    rows, data, goals = [], [], []
    columns = ["cores", "tau / sigma_1", "route", "ms", "error / tau", "error / sigma_1"]
    notes = [
        "medians of means of 3 calls; errors are spectral norms, the largest over the cores, "
        "against an SVD in float64 on the CPU; library: what svt() does on this device"
    ]
    for n, r in ((3, 8), (2, 12)) if place.rehearsal else ((96, 110), (96, 156), (36, 110)):
        cores = trained_cores(n, r)
        u, values, vh = torch.linalg.svd(cores.double())
        largest, here = float(values.max()), cores.to(place.device)
        for share in (5e-6, 1e-3):
            threshold = share * largest
            exact = (u * (values - threshold).clamp(min=0).unsqueeze(-2)) @ vh
            routes: dict[str, Callable[[], Tensor]] = {"library": partial(svt, here, threshold)}
            for dtype in (torch.float64, torch.float32):
                name = str(dtype).removeprefix("torch.")
                routes[f"eigh {name}"] = partial(svt_by_eigh, here, threshold, dtype)
                routes[f"iteration {name}"] = partial(svt_by_iteration, here, threshold, dtype)
            for name, route in routes.items():
                try:
                    wrong = route().cpu().double() - exact
                    seconds = statistics.median(per_call(place, route, 3))
                except RuntimeError as failure:  # e.g. no such kernel in this build
                    rows.append([f"{n} x {r}", f"{share:g}", name, str(failure)[:60], "", ""])
                    continue
                error = float(torch.linalg.matrix_norm(wrong, ord=2).max())
                shown = (
                    f"{seconds * 1e3:.3f}",
                    f"{error / threshold:.1e}",
                    f"{error / largest:.1e}",
                )
                rows.append([f"{n} x {r}", f"{share:g}", name, *shown])
                data.append([n, r, share, name, seconds, error / threshold, error / largest])
                if name == "library":
                    title = f"error of the library's route / sigma_1, {n} x {r}, tau {share:g}"
                    goals.append(Goal(title, error / largest, EXACT))
        seconds = statistics.median(per_call(place, partial(svt_stats, here, threshold), 1))
        rows.append([f"{n} x {r}", "", "svt_stats, once a client", f"{seconds * 1e3:.3f}", "", ""])
        place.add(Section("The prox", columns, rows, notes, goals, {"routes": data}))


def svt_by_eigh(cores: Tensor, threshold: float, dtype: torch.dtype) -> Tensor:
    """Return the proximal map by eigenvectors of the Gram matrix.

    Raises:
        RuntimeError: The eigenvectors are wrong, as they have been on GPUs.
    """
    x = cores.to(dtype)
    gram = x.mT @ x
    squares, vectors = torch.linalg.eigh(gram)
    residual = torch.linalg.matrix_norm(gram @ vectors - vectors * squares.unsqueeze(-2))
    if (worst := float((residual / torch.linalg.matrix_norm(gram)).max())) > 1e-3:
        raise RuntimeError(f"eigh's residual is {worst:.1e}")
    values = squares.clamp(min=0).sqrt()
    gains = 1 - threshold / values.clamp(min=threshold)
    shrunk: Tensor = ((x @ vectors) * gains.unsqueeze(-2)) @ vectors.mT
    return shrunk.to(cores.dtype)


def trained_cores(n: int, r: int) -> Tensor:
    """Return [n, r, r] float32 on the CPU, singular values from 1e-2 to 1e-8, log-uniform."""
    generator = torch_rng(0, "cores", n, r)
    u, v = (
        torch.linalg.qr(torch.randn(n, r, r, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    values = 10 ** (-2 - 6 * torch.rand(n, 1, r, generator=generator, dtype=torch.float64))
    cores: Tensor = (u * values) @ v.mT
    return cores.float()


# A step.


def step(place: Place) -> None:
    """Measure ViT-B/16, batch 32, q and v, 4 heads of rank 110, in bf16 and in fp32."""
    steps = f"federation.local_steps={place.times(25)}"
    setups = [vision(place, steps, f"model.precision={each}") for each in ("bf16", "fp32")]
    for measured in (eager, together_and_scored, by_parts):
        for experiment, prepared in setups:
            with deterministic(experiment):
                place.add(measured(place, experiment, prepared))


def graphs(place: Place) -> None:
    """Measure the step of :func:`step` with ``resources.cuda_graphs``."""
    place.add(launch_costs(place))
    for precision in ("bf16", "fp32"):
        steps = f"federation.local_steps={place.times(25)}"
        experiment, prepared = vision(place, steps, f"model.precision={precision}")
        with deterministic(experiment):
            place.add(as_graphs(place, experiment, prepared))


def launch_costs(place: Place) -> Section:
    """Measure the time of the host for a small operation; ms of 1000 are microseconds of one."""
    rows = []
    for name, device in (("on the device", place.device), ("on the host", torch.device("cpu"))):
        one = torch.zeros(1, device=device)
        found = []
        for _ in range(5):
            began = now(place.device)
            for _ in range(1000):
                one.add_(1.0)
            found.append(time.perf_counter() - began)
        rows.append([name, milliseconds(found)])
    return Section("An addition to one number", ["where", "us, not waited for"], rows)


def eager(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Measure steps that nobody waits for, as in a run, and profile them."""
    precision, bench = experiment.model.precision, build_workbench(experiment, prepared)
    limit, steps = Limit(bench), first_steps(bench)
    compute = endless(steps)

    def prox() -> None:
        with torch.no_grad():
            bench.method.after_steps([steps.run], 1, steps.last)

    with steps.bound():
        batch = steps.batch(1)
        found = {
            "limit: frozen forward, loss, input gradient": per_call(
                place, lambda: limit.loss(batch).backward()
            ),
            "local step": per_call(place, compute),
            "of it: batch": per_call(place, lambda: steps.batch(1)),
            "of it: prox": per_call(place, prox),
            "launches alone, not waited for": launches(place, compute),
        }
        kernels = profile(place, compute)
    low, whole, _, end, _ = map(statistics.median, found.values())
    goals = [Goal(f"local step / limit, {precision}", whole / low, STEP[precision])]
    if precision == "bf16":
        goals.append(Goal("prox / bf16 step", end / whole, PROX))
    rows = [
        [name, milliseconds(seconds), f"{statistics.median(seconds) / low:.3f}"]
        for name, seconds in found.items()
    ]
    notes = [
        f"batches of {experiment.federation.batch_size}; means of 10 calls that nobody waits for, "
        "median (min-max)",
        f"by the profiler, in a step: {kernels['number']:.0f} kernels, busy {kernels['busy']:.1%} "
        f"of {kernels['seconds'] * 1e3:.2f} ms (profiled)",
        "longest: " + "; ".join(f"{name[:60]} {ms:.3f} ms" for name, ms in kernels["longest"][:8]),
    ]
    data = {"seconds": found, "kernels": kernels}
    columns = ["what", "ms", "of the limit"]
    return Section(f"A local step, {precision}", columns, rows, notes, goals, data)


def together_and_scored(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Measure steps of three clients in one pass, and a chunk of test rows."""
    precision, bench = experiment.model.precision, build_workbench(experiment, prepared)
    start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
    limit, steps = Limit(bench), first_steps(bench)
    with steps.bound():
        batch = steps.batch(1)
        low = statistics.median(per_call(place, lambda: limit.loss(batch).backward()))
    jobs, found = [TrainJob(round=1, client=client) for client in range(3)], []
    for _ in range(3):
        reports = [report for _, report in train_together(bench, start, jobs)]
        found.append(sum(each.seconds for each in reports) / steps.last)
    model, size = EvaluatedModel(bench), min(500, len(bench.test))
    chunk = EvalJob(round=1, start=0, stop=size)
    scored = per_call(place, lambda: evaluate_chunk(model, start, chunk), 3)
    model.release()
    rows = [
        ["limit of one client", milliseconds([low])],
        ["step of three stacked clients", milliseconds(found)],
        [f"chunk of {size} test rows", milliseconds(scored)],
    ]
    ratio = statistics.median(found) / len(jobs) / low
    goals = [Goal(f"stacked step of a client / limit, {precision}", ratio, STACKED)]
    title = f"Stacked clients and evaluation, {precision}"
    return Section(title, ["what", "ms"], rows, goals=goals)


def profile(place: Place, call: Callable[[], object], calls: int = 5) -> dict[str, Any]:
    """Return kernels of a call, the share of the time the device is busy, the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    kind = DeviceType.CPU
    if not place.rehearsal:
        activities, kind = [*activities, torch.profiler.ProfilerActivity.CUDA], DeviceType.CUDA
    call()
    with torch.profiler.profile(activities=activities) as profiler:
        began = now(place.device)
        for _ in range(calls):
            call()
        seconds = now(place.device) - began
    events = [each for each in profiler.events() if each.device_type == kind]
    names: dict[str, float] = {}
    for event in events:
        names[event.name] = names.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / calls
    busy, end = 0.0, float("-inf")
    for first, last in sorted((e.time_range.start, e.time_range.end) for e in events):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {
        "number": len(events) / calls,
        "busy": busy / 1e6 / seconds,
        "seconds": seconds / calls,
        "longest": sorted(names.items(), key=lambda item: -item[1])[:60],
    }


def by_parts(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Wait for every part of a step: their sum exceeds the step."""
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
    title, columns = f"Parts of a local step, {experiment.model.precision}", ["part", "ms", "limit"]
    notes = ["the device is waited for after each part, median (min-max)"]
    return Section(title, columns, rows, notes, data={"parts": found.parts, "limit": found.limit})


def as_graphs(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Measure steps with ``resources.cuda_graphs``, and compare the bytes of an upload."""
    precision, uploads = experiment.model.precision, []
    count = place.times(4)
    jobs = [TrainJob(round=1, client=client, steps=count) for client in range(3)]
    for on in (False, True):
        bench = build_workbench(with_graphs(experiment, on), prepared)
        start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
        for _ in range(2):
            sent = [train_client(bench, start, job)[0] for job in jobs]
            sent += [upload for upload, _ in train_together(bench, start, jobs)]
            uploads.append([upload.arrays.shared for upload in sent])
    stacked = [
        sum(report.seconds for _, report in train_together(bench, start, jobs)) / count
        for _ in range(place.times(5))
    ]
    limit, steps = Limit(bench), first_steps(bench)
    compute = endless(steps)
    with steps.bound():
        batch = steps.batch(1)
        for _ in range(3):  # the second step is captured
            compute()
        least = captured(place, lambda: limit.loss(batch).backward())
        low, whole = (statistics.median(per_call(place, call)) for call in (least, compute))
        alone_ms = statistics.median(launches(place, compute))
        kernels = profile(place, compute)
    together = statistics.median(stacked)
    other = [count_unequal(uploads[one], uploads[two]) for one, two in ((0, 1), (2, 3), (0, 2))]
    farthest = max(float(np.abs(a - b).max()) for a, b in zip(uploads[0], uploads[2], strict=True))
    goals = [
        Goal(f"local step / limit, graphs, {precision}", whole / low, STEP[precision]),
        Goal(f"stacked step of a client / limit, graphs, {precision}", together / 3 / low, STACKED),
        Goal(f"other uploads of two eager runs, {precision}", other[0], 0),
        Goal(f"other uploads of two runs as graphs, {precision}", other[1], 0),
        Goal(f"uploads with other bytes than eager ones, {precision}", other[2], 0),
    ]
    rows = [
        ["limit", milliseconds([low])],
        ["local step", milliseconds([whole])],
        ["of it: launches alone, not waited for", milliseconds([alone_ms])],
        ["step of three stacked clients", milliseconds([together])],
    ]
    notes = [
        f"limit and steps replayed; uploads of 3 clients of {jobs[0].steps} steps alone and of the "
        f"same stacked, the farthest from eager by {farthest:.1e}",
        f"{memory(place.device)['process']:.2f} GiB taken; by the profiler, in a step: "
        f"{kernels['number']:.0f} kernels of {sum(ms for _, ms in kernels['longest']):.2f} ms, "
        f"busy {kernels['busy']:.1%} of {kernels['seconds'] * 1e3:.2f} ms (profiled)",
        "longest: " + "; ".join(f"{name[:60]} {ms:.3f} ms" for name, ms in kernels["longest"][:8]),
    ]
    data, title = {"kernels": kernels}, f"As CUDA graphs, {precision}"
    return Section(title, ["what", "ms"], rows, notes, goals, data)


def count_unequal(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
    """Return how many arrays differ in a byte."""
    return sum(a.tobytes() != b.tobytes() for a, b in zip(some, others, strict=True))


def with_graphs(experiment: Experiment, graphs: bool) -> Experiment:
    """Return the experiment with or without CUDA graphs."""
    resources = experiment.resources.model_copy(update={"cuda_graphs": graphs})
    return experiment.model_copy(update={"resources": resources})


# The paper's run.


def run(place: Place) -> None:
    """Measure a few rounds as graphs, then with three clients stacked, then eager."""
    # 157 batches of 64 would leave a large GPU waiting.
    settings = ["model.precision=bf16", "evaluation.batch_size=500"]
    if place.rehearsal:
        settings += ["federation.rounds=2", "federation.local_steps=2"]
    rows = {"train": 50_000, "test": 10_000}
    if place.rehearsal or not has_real_data():
        source, (experiment, prepared) = "noise", vision(place, *settings, rows=rows)
    else:
        source, model = "images of the mirror, repeated", ["model.init=random", "budget=lower"]
        experiment = experiment_at(place, "dataset=cifar100", f"model={LARGE}", *model, *settings)
        prepared = dealt(experiment, repeated(prepare_run(experiment).dataset, place.scratch, rows))
    stacked = experiment.federation.model_copy(update={"stacked": 3})
    ways = {
        "graphs": with_graphs(experiment, True),
        "graphs, three stacked": with_graphs(
            experiment.model_copy(update={"federation": stacked}), True
        ),
        "eager": experiment,
    }
    for number, (way, chosen) in enumerate(ways.items(), 1):
        storage = chosen.storage.model_copy(update={"runs": f"{place.scratch}/runs-{number}"})
        chosen = chosen.model_copy(update={"storage": storage})
        go(place, way, chosen, prepared, source)


def go(place: Place, way: str, experiment: Experiment, prepared: Prepared, source: str) -> None:
    """Measure the first rounds of a run."""
    fed, began = experiment.federation, time.perf_counter()
    driver = InlineDriver(experiment, prepared, "benchmark")
    spent = {name: timed(driver.executor, name) for name in ("train", "evaluate")}
    report = driver.begin()
    seconds = [time.perf_counter() - began]
    while not report.finished and report.round < FIRST:
        report = driver.step()
        seconds.append(time.perf_counter() - began)
        each = (seconds[-1] - seconds[1]) / max(1, len(seconds) - 2)
        total, title = seconds[-1], "the whole run"
        if not report.finished:
            total = seconds[0] + each * (fed.rounds + 1)
            title += f", from {len(seconds) - 1} rounds"
        records = driver.checkpoint.records[1:]
        rounds = [record.seconds or 0.0 for record in records]
        trained = [fed.clients_per_round * (r.client_seconds or 0.0) for r in records]
        of_clients = sum(spent["train"]) / len(rounds)
        scored = sum(spent["evaluate"]) / (len(seconds) - 1)  # one more than there are rounds
        steps, whole = statistics.mean(trained), statistics.mean(rounds)
        shown = [
            ["start", f"{seconds[0]:.1f}"],
            ["a round with its evaluation, mean", f"{each:.2f}"],
            [f"of it: {fed.clients_per_round} clients' local steps", f"{steps:.2f}"],
            ["of it: the rest of the clients, e.g. uploads", f"{of_clients - steps:.2f}"],
            ["of it: evaluation", f"{scored:.2f}"],
            ["of it: the server", f"{whole - of_clients - scored:.2f}"],
            [title, f"{total:.1f}"],
        ]
        note = (
            f"{fed.rounds} rounds of {fed.clients_per_round} clients x {fed.local_steps} steps of "
            f"{fed.batch_size}, bf16, inline; every test image after every round, 500 at once; "
            f"{source}"
        )
        goal, data = Goal(title, total, RUN[way]), {"seconds": seconds}
        named = f"The paper's run, {way}"
        place.add(Section(named, ["what", "s"], shown, [note], [goal], data))


def timed(executor: Any, name: str) -> list[float]:
    """Return the seconds of each later call of a method, which ends when the device has."""
    found: list[float] = []
    method = getattr(executor, name)

    def call(*args: Any) -> Any:
        began = time.perf_counter()
        result = method(*args)
        found.append(time.perf_counter() - began)
        return result

    setattr(executor, name, call)
    return found


def repeated(dataset: PreparedDataset, folder: Path, rows: dict[str, int]) -> PreparedDataset:
    """Return a dataset whose splits have these numbers of rows."""
    folder = folder / "repeated"
    folder.mkdir()
    for name, count in rows.items():
        split = dataset.split(name)
        chosen = np.arange(count) % len(split)
        columns = {column: split.column(column)[chosen] for column in ("pixels", "label")}
        write_split(folder / f"{name}.arrow", columns, dataset.info)
    return PreparedDataset(folder, tuple(rows))


# Other backbones.


def backbones(place: Place) -> None:
    """Measure a step of each backbone in this process, then the memory of two actors."""
    for kind, name in (("t5", "T5-Base"), ("llama", "LLaMA-3.2-1B")):
        experiment, prepared = text(place, kind, f"federation.local_steps={place.times(25)}")
        with deterministic(experiment):
            place.add(text_step(place, name, experiment, prepared))
        if not place.rehearsal:
            torch.cuda.empty_cache()
        if kind == "t5" or not place.rehearsal:
            place.add(actors(place, name, experiment, prepared))


def text_step(place: Place, name: str, experiment: Experiment, prepared: Prepared) -> Section:
    """Measure a local step against the frozen forward and input gradient."""
    bench = build_workbench(experiment, prepared)
    limit, steps = Limit(bench), first_steps(bench)
    with steps.bound():
        batch = steps.batch(1)
        lower = per_call(place, lambda: limit.loss(batch).backward(), 5)
        found = per_call(place, endless(steps), 5)
    ratio = statistics.median(found) / statistics.median(lower)
    rows = [["limit", milliseconds(lower)], ["local step", milliseconds(found)]]
    size = " x ".join(map(str, batch["input_ids"].shape))
    taken = memory(place.device)["process"]
    note = f"bf16, random weights, tokens of a batch {size}; {taken:.2f} GiB taken"
    goal = Goal(f"local step / limit, {name}", ratio, STEP["bf16"])
    return Section(f"A local step, {name}", ["what", "ms"], rows, [note], [goal])


def actors(place: Place, name: str, experiment: Experiment, prepared: Prepared) -> Section:
    """Measure the memory of a process that trains this client, and of a second one beside it."""
    taken, rows, workers = [memory(place.device)["device"]], [], []
    try:
        for number in ("1", "2"):
            workers.append(Worker(experiment, prepared))
            answer = workers[-1].answer()
            if "error" not in answer:
                answer = train(workers[-1:], 0.0)[0]
            if "error" in answer:
                rows.append([number, answer["error"], ""])
                break
            taken.append(answer["device"])
            rows.append([number, f"{answer['process']:.2f}", f"{taken[-1] - taken[-2]:.2f}"])
    finally:
        for worker in workers:
            worker.end()
    columns = ["actor", "GiB torch took", "more GiB of the device"]
    notes = ["processes one beside the other; the last column includes the CUDA context"]
    return Section(f"Memory of client actors, {name}", columns, rows, notes)


# Slices.


def slices(place: Place) -> None:
    """Measure one, two and three capped workers; then a greedy one beside them."""
    most, seconds, greed = (2, 0.1, 32_768) if place.rehearsal else (3, 5.0, 8192)
    settings = ["model.precision=bf16", f"federation.local_steps={place.times(25)}"]
    experiment, prepared = vision(place, *settings)
    workers = [Worker(experiment, prepared, 1 / (most + 1)) for _ in range(most)]
    try:
        if failed := [answer for w in workers if "error" in (answer := w.answer())]:
            raise RuntimeError(f"a worker did not start: {failed[0]['error']}")
        train(workers[:1], 0.0)  # kernels and caches
        found: dict[int, list[dict[str, Any]]] = {}
        for number in range(1, most + 1):
            found[number] = train(workers[:number], seconds)
            place.add(together(experiment, found, most))
        greedy = vision(place, *settings, f"federation.batch_size={greed}")[0]
        workers.append(Worker(greedy, prepared, 0.05))
        ready = workers[-1].answer()
        *others, last = [ready] if "error" in ready else train(workers, seconds)
    finally:
        for worker in workers:
            worker.end()
    said = last.get("error", "nothing: it trained")
    harmed = sum(answer.get("digest") != found[1][0]["digest"] for answer in others)
    rows = [["it says", said], ["others beside it", f"{len(others)}, {harmed} of them harmed"]]
    notes = ["capped at 0.05 of the memory; the others train at the same time"]
    goals = [
        Goal("failed without its name", float("client 0 in round 1" not in said), 0),
        Goal("others harmed", harmed, 0),
    ]
    title = "A client that wants more than its slice"
    place.add(Section(title, ["what", ""], rows, notes, goals))


def together(experiment: Experiment, found: dict[int, list[dict[str, Any]]], most: int) -> Section:
    """Compare steps a second of several workers with one's."""
    rates = {n: sum(a["steps"] / a["seconds"] for a in answers) for n, answers in found.items()}
    rows = [
        [
            *(str(number), f"{rates[number]:.1f}", f"{rates[number] / rates[1]:.2f}"),
            ", ".join(f"{answer['process']:.2f}" for answer in answers),
            f"{answers[-1]['device']:.1f} of {answers[-1]['total']:.1f}",
        ]
        for number, answers in found.items()
    ]
    columns = ["processes", "steps / s together", "of one", "GiB of each", "GiB of the device"]
    digests = {answer["digest"] for answers in found.values() for answer in answers}
    notes = [
        f"the same client in every process, batches of {experiment.federation.batch_size}, bf16, "
        f"each capped at 1/{most + 1} of the memory"
    ]
    goal = Goal("different uploads of the same client", len(digests) - 1, 0)
    return Section("Slices of one device", columns, rows, notes, [goal], {"answers": found})


class Worker:
    """A client actor without Ray: a process with a workbench and a cap on its memory.

    A number of seconds is answered by training client 0 again and again for that long. An error
    ends the worker and is its answer.
    """

    def __init__(self, experiment: Experiment, prepared: Prepared, cap: float = 0.0) -> None:
        """Start it with a share of the device's memory; it answers once it is ready."""
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        given = (there, experiment.to_dict(), prepared, cap)
        self.process = context.Process(target=serve, args=given, daemon=True)
        self.process.start()
        there.close()

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the next answer; an ``error`` if the worker has ended or does not answer."""
        try:
            if self.connection.poll(seconds + 150):
                answer: dict[str, Any] = self.connection.recv()
                return answer
        except (EOFError, OSError):
            return {"error": "the process ended without an answer"}
        return {"error": "no answer"}

    def end(self) -> None:
        """End the worker."""
        self.connection.close()
        self.process.join(10)
        self.process.kill()


def train(workers: list[Worker], seconds: float) -> list[dict[str, Any]]:
    """Let workers train at the same time; return their answers."""
    for worker in workers:
        worker.connection.send(seconds)
    return [worker.answer(seconds) for worker in workers]


def serve(connection: Connection, fields: dict[str, Any], prepared: Prepared, cap: float) -> None:
    """Be a worker until the connection is closed."""
    experiment = Experiment.model_validate(fields)
    device = torch.device(experiment.resources.device)
    try:
        with deterministic(experiment):
            if device.type == "cuda":
                cap_device_memory(cap)
            bench = build_workbench(experiment, prepared)
            start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
            connection.send({"ready": True})
            if cap and device.type == "cpu":
                limit_address_space(600 * 2**20)
            while True:
                seconds, began, rounds, digest = connection.recv(), time.perf_counter(), 0, ""
                while time.perf_counter() - began < seconds or not rounds:
                    upload, _ = train_client(bench, start, TrainJob(round=1, client=0))
                    digest, rounds = state_digest(upload.arrays), rounds + 1
                took = {"steps": rounds * experiment.federation.local_steps, "digest": digest}
                took["seconds"] = time.perf_counter() - began
                connection.send(took | memory(device))
    except (EOFError, BrokenPipeError):
        return
    except RunError as error:
        connection.send({"error": str(error)})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})


def limit_address_space(room: int) -> None:
    """Rehearse a cap: allow no more than ``room`` bytes beside those that are allocated."""
    import resource

    import psutil

    limit = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


# The parts one after the other, and one page of them.

#: Function of each part, and the seconds after which it is stopped.
LIMITS: dict[Callable[[Place], None], int] = {
    graphs: 80, step: 120, run: 140, prox: 60, right: 120, slices: 90, backbones: 190
}  # fmt: skip


class Results:
    """The results of a machine and a day, part by part; written after every change."""

    def __init__(self, folder: Path, rehearsal: bool) -> None:
        """Continue the files of the day, if there are any."""
        folder.mkdir(parents=True, exist_ok=True)
        when = datetime.datetime.now(datetime.UTC)
        what = "gpu-rehearsal" if rehearsal else "gpu"
        self.file = folder / f"{what}_{hardware_slug()}_{when.date().isoformat()}.json"
        self.content: dict[str, Any] = {
            **{"what": what, "date": when.isoformat(timespec="seconds")},
            **{"hardware": asdict(hardware()), "versions": versions(), "parts": {}},
        }
        if self.file.is_file():
            self.content["parts"] = json.loads(self.file.read_text(encoding="utf-8"))["parts"]

    def note(self, part: str, state: str) -> None:
        """Note how a part is; when it begins, forget what an earlier measurement has found."""
        if state == "running":
            self.content["parts"][part] = {"sections": {}}
        self.content["parts"].setdefault(part, {"sections": {}})["state"] = state
        self.write()
        print(f"{part}: {state}", flush=True)

    def add(self, part: str, section: Section) -> None:
        """Keep a section, in the place of one with the same title, and show it."""
        goals = [asdict(goal) | {"met": goal.met} for goal in section.goals]
        fields = asdict(section) | {"goals": goals, "page": section.markdown()}
        self.content["parts"][part]["sections"][section.title] = fields
        self.write()
        print(section.markdown(), flush=True)

    def write(self) -> None:
        """Write both files."""
        text = json.dumps(self.content, indent=1, ensure_ascii=False, default=str) + "\n"
        self.file.write_text(text, encoding="utf-8")
        self.file.with_suffix(".md").write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """Return the results as Markdown."""
        machine, software = self.content["hardware"], self.content["versions"]
        where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cpus']} CPUs"
        numbers = f"torch {software['torch']}, transformers {software['transformers']}"
        lines = [
            f"# {self.content['what']}, {self.content['date'][:10]}",
            "",
            f"{where}; {numbers}.",
        ]
        if "rehearsal" in self.content["what"]:
            lines += ["", "**A rehearsal on the CPU with tiny shapes: its numbers mean nothing.**"]
        for part, found in self.content["parts"].items():
            lines += ["", f"# {part}: {found['state']}", ""]
            lines += [section["page"] for section in found["sections"].values()]
        return "\n".join(lines) + "\n"


def measure(part: Callable[[Place], None], rehearsal: bool, out: Path) -> None:
    """Measure one part in this process."""
    name, began = part.__name__, time.perf_counter()
    results = Results(out, rehearsal)
    results.note(name, "running")
    try:
        if not rehearsal and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; --rehearse runs on the CPU")
        device = torch.device("cpu" if rehearsal else "cuda")
        with tempfile.TemporaryDirectory() as scratch:
            part(Place(device, Path(scratch), partial(results.add, name)))
    except Exception as error:
        traceback.print_exc()
        reason = str(error).partition("\n")[0]
        results.note(name, f"failed: {type(error).__name__}: {reason}")
        raise SystemExit(1) from error
    results.note(name, f"done in {time.perf_counter() - began:.0f} s")


def main() -> None:
    """Run the parts one after the other, each in a process of its own."""
    parts = {part.__name__: part for part in LIMITS}
    parser = told_by(__doc__, [*parts])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--hub", help="a mirror with CIFAR-100; default TRISHUL_HUB")
    parser.add_argument("--limit", type=float, help="seconds of each part, instead of its own")
    parser.add_argument("--seconds", type=float, help="seconds of all parts together")
    parser.add_argument("--here", action="store_true", help="in this process; used by the script")
    options = parser.parse_args()
    chosen = [part for name, part in parts.items() if name in options.parts]
    if options.here:
        measure(chosen[0], options.rehearse, options.out)
        return
    if options.hub:
        os.environ["TRISHUL_HUB"] = options.hub
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    set_environment()
    failed, end = False, time.monotonic() + (options.seconds or 0.0)
    for index, part in enumerate(chosen):
        command = [sys.executable, __file__, part.__name__, "--here", "--out", str(options.out)]
        command += ["--rehearse"] * options.rehearse
        process = subprocess.Popen(command, start_new_session=True)
        limit = options.limit or float(LIMITS[part])
        if options.seconds:
            share = LIMITS[part] / sum(LIMITS[each] for each in chosen[index:])
            limit = max(1.0, share * (end - time.monotonic()))
        try:
            failed |= process.wait(limit) != 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            Results(options.out, options.rehearse).note(part.__name__, f"stopped after {limit:g} s")
            failed = True
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
