"""Measure local steps, the paper's run and the prox on a GPU.

    python benchmarks/gpu.py [PART ...] [options]

Parts (by default all, in this order), with minutes on an H200:

    steps  (3)  local steps of ViT-B/16, eager and as CUDA graphs, relative to their limit
    run    (3)  the paper's run on CIFAR-100: 50 rounds of 3 clients x 50 steps of 32
    prox   (1)  the proximal map on stacks of cores: time and error

If a part fails, the next one still runs. Each table is written immediately. The script does not
need Ray, MLflow or datasets. The run uses the images of a mirror (TRISHUL_HUB or --hub), or noise
without a mirror. --rehearse tests the script on the CPU with tiny shapes; its numbers are
meaningless. To run the tests on a GPU, use `python -m pytest -m gpu`.
"""

import itertools
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _limit import Limit, first_steps, now
from _results import Goal, Report, Section, argument_parser
from _setups import LARGE, dealt, has_real_data, random_vit, synthetic
from torch import Tensor

from trishul_ray.data.dataset import PreparedDataset, write_split
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.determinism import deterministic, set_environment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.messages import EvalJob, TrainJob, to_array
from trishul_ray.federation.prepare import Prepared, prepare_run
from trishul_ray.federation.worker.context import build_context
from trishul_ray.federation.worker.evaluation import EvaluatedModel, evaluate_chunk
from trishul_ray.federation.worker.local import LocalSteps, train_client, train_clients
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.spectral.svt import svt, svt_stats

#: Goals: a step as a multiple of its limit per precision, and the run in seconds. At the dense bf16
#: peak of an H100, the run would take 35 s.
STEP = {"bf16": 1.35, "fp32": 1.05}
RUN = {"eager": 130.0, "graphs": 100.0, "graphs, three clients in one forward": 80.0}
#: Number of rounds from which a run is extrapolated.
FIRST = 5
#: Error bound of :func:`trishul_ray.spectral.svt.svt`, relative to the largest singular value.
EXACT = 1e-6


@dataclass(frozen=True)
class Place:
    """Environment in which a part is measured.

    Attributes:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        scratch: Temporary folder for data and weights.
        add: Function that adds a section to the report and writes it.
    """

    device: torch.device
    scratch: Path
    add: Callable[[Section], None]

    @property
    def rehearsal(self) -> bool:
        """Whether shapes are tiny and timings are meaningless."""
        return self.device.type == "cpu"

    def times(self, full: int) -> int:
        """Return the number of repetitions, which is 2 in a rehearsal."""
        return 2 if self.rehearsal else full


# Experiments, timing and memory.


def experiment_at(place: Place, *overrides: str) -> Experiment:
    paths = (f"storage.runs={place.scratch}/runs", f"storage.cache={place.scratch}/cache")
    device = f"resources.device={place.device.type}"
    common = (device, "resources.backend=inline", "tracking.mlflow=false", *paths)
    return load_experiment(None, [*common, *overrides])


def vision(
    place: Place, *overrides: str, rows: dict[str, int] | None = None
) -> tuple[Experiment, Prepared]:
    """Set up ViT-B/16 with random weights on noise like CIFAR-100, or a tiny ViT in a rehearsal."""
    model = [f"model={LARGE}", "model.init=random", "budget=lower"]
    rows = rows or {"train": 10_000, "test": 1_000}
    if place.rehearsal:
        folder, rows = place.scratch / "tiny-vit", {"train": 400, "test": 64}
        random_vit(folder, 32, 2, 4, patch=8)
        model = [f"model={folder}", "model.init=random", "budget=2", "federation.batch_size=4"]
    experiment = experiment_at(place, "dataset=cifar100", "dataset=synthetic", *model, *overrides)
    return experiment, dealt(experiment, synthetic(place.scratch / "noise", rows))


def endless(steps: LocalSteps) -> Callable[[], None]:
    """Return a function that computes the next step, cycling without the last step.

    The last step is excluded because it also copies the cores.
    """
    numbers = itertools.cycle(range(1, steps.last))

    def step() -> None:
        number = next(numbers)
        steps.compute(number, steps.batch(number))

    return step


def per_call(place: Place, call: Callable[[], object], calls: int = 10) -> list[float]:
    """Measure the mean seconds of ``calls`` asynchronous calls, five times."""
    call()
    found = []
    for _ in range(place.times(5)):
        began = now(place.device)
        for _ in range(place.times(calls)):
            call()
        found.append((now(place.device) - began) / place.times(calls))
    return found


def captured(place: Place, call: Callable[[], object]) -> Callable[[], object]:
    """Capture a call as a CUDA graph and return its replay, or the call itself in a rehearsal."""
    if place.rehearsal:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # initialize libraries before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(seconds: Sequence[float]) -> str:
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


# The prox.


def prox(place: Place) -> None:
    """Measure the time and error of the proximal map, compared with a float64 SVD on the CPU."""
    rows, goals = [], []
    for n, r in ((3, 8), (2, 12)) if place.rehearsal else ((96, 110), (96, 156), (36, 110)):
        cores = trained_cores(n, r)
        u, values, vh = torch.linalg.svd(cores.double())
        largest, here = float(values.max()), cores.to(place.device)
        for share in (5e-6, 1e-3):
            threshold = share * largest
            exact = (u * (values - threshold).clamp(min=0).unsqueeze(-2)) @ vh
            wrong = svt(here, threshold).cpu().double() - exact
            error = float(torch.linalg.matrix_norm(wrong, ord=2).max()) / largest
            seconds = per_call(place, partial(svt, here, threshold), 3)
            rows.append([f"{n} x {r}", f"{share:g}", milliseconds(seconds), f"{error:.1e}"])
            title = f"error / sigma_1, {n} x {r}, tau {share:g}"
            goals.append(Goal(title, error, EXACT))
        seconds = per_call(place, partial(svt_stats, here, threshold), 1)
        rows.append([f"{n} x {r}", "svt_stats, once per client", milliseconds(seconds), ""])
    columns = ["cores", "tau / sigma_1", "ms", "error / sigma_1"]
    place.add(Section("The prox", columns, rows, goals=goals))


def trained_cores(n: int, r: int) -> Tensor:
    """Sample cores [n, r, r] in float32 with log-uniform singular values in [1e-8, 1e-2]."""
    generator = torch_rng(0, "cores", n, r)
    u, v = (
        torch.linalg.qr(torch.randn(n, r, r, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    values = 10 ** (-2 - 6 * torch.rand(n, 1, r, generator=generator, dtype=torch.float64))
    cores: Tensor = (u * values) @ v.mT
    return cores.float()


# Local steps.


def steps(place: Place) -> None:
    """Measure ViT-B/16, batch 32, q and v, 4 heads of rank 110, eager and as CUDA graphs."""
    for precision in ("bf16", "fp32"):
        count = f"federation.local_steps={place.times(25)}"
        experiment, prepared = vision(place, count, f"model.precision={precision}")
        with deterministic(experiment):
            place.add(measured_steps(place, experiment, prepared))


def measured_steps(place: Place, experiment: Experiment, prepared: Prepared) -> Section:
    """Measure the limit, steps of one and of three clients, and a chunk of test rows."""
    precision, rows, uploads, goals = experiment.model.precision, [], [], []
    count = place.times(4)
    federation = experiment.federation.model_copy(update={"local_steps": count})
    experiment = experiment.model_copy(update={"federation": federation})
    jobs = [TrainJob(round=1, client=client) for client in range(3)]
    for graphs in (False, True):
        way = "as CUDA graphs" if graphs else "eager"
        context = build_context(with_graphs(experiment, graphs), prepared)
        start = context.method.initial_state(context.model.layout, context.initial, {}).map(
            to_array
        )
        for _ in range(2):
            sent = [train_client(context, start, job)[0] for job in jobs]
            sent += [upload for upload, _ in train_clients(context, start, jobs)]
            uploads.append([upload.arrays.shared for upload in sent])
        together = [
            sum(report.seconds for _, report in train_clients(context, start, jobs)) / count
            for _ in range(place.times(5))
        ]
        limit, local = Limit(context), first_steps(context)
        compute = endless(local)
        with local.bound():
            batch = local.batch(1)
            for _ in range(3):  # the second step is captured
                compute()
            least: Callable[[], object] = lambda: limit.loss(batch).backward()  # noqa: B023, E731
            low = per_call(place, captured(place, least) if graphs else least)
            whole = per_call(place, compute)
        model, size = EvaluatedModel(context), min(500, len(context.test))
        chunk = EvalJob(round=1, start=0, stop=size)
        scored = per_call(place, partial(evaluate_chunk, model, start, chunk), 3)
        model.release()
        floor = statistics.median(low)
        for name, seconds in (
            ("limit: frozen forward, loss, input gradient", low),
            ("local step", whole),
            ("step of three clients in one forward", together),
            (f"chunk of {size} test rows", scored),
        ):
            ratio = f"{statistics.median(seconds) / floor:.3f}"
            rows.append([f"{way}: {name}", milliseconds(seconds), ratio])
        goals.append(
            Goal(f"step / limit, {way}", statistics.median(whole) / floor, STEP[precision])
        )
    for name, one, two in (("eager", 0, 1), ("as CUDA graphs", 2, 3), ("eager and graphs", 0, 2)):
        different = count_unequal(uploads[one], uploads[two])
        goals.append(Goal(f"uploads that are not bitwise identical, {name}", different, 0))
    note = f"batches of {experiment.federation.batch_size}; median (min-max) of means of 10 calls"
    title = f"A local step, {precision}"
    return Section(title, ["what", "ms", "of the limit"], rows, [note], goals)


def count_unequal(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> int:
    return sum(a.tobytes() != b.tobytes() for a, b in zip(some, others, strict=True))


def with_graphs(experiment: Experiment, graphs: bool) -> Experiment:
    resources = experiment.resources.model_copy(update={"cuda_graphs": graphs})
    return experiment.model_copy(update={"resources": resources})


# The paper's run.


def run(place: Place) -> None:
    """Measure a few rounds with CUDA graphs, with three clients per forward, and eager."""
    # A batch size of 64 would underutilize a large GPU.
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
        "graphs, three clients in one forward": with_graphs(
            experiment.model_copy(update={"federation": stacked}), True
        ),
        "eager": experiment,
    }
    for number, (way, chosen) in enumerate(ways.items(), 1):
        storage = chosen.storage.model_copy(update={"runs": f"{place.scratch}/runs-{number}"})
        chosen = chosen.model_copy(update={"storage": storage})
        go(place, way, chosen, prepared, source)


def go(place: Place, way: str, experiment: Experiment, prepared: Prepared, source: str) -> None:
    """Measure the first rounds of a run, and extrapolate to the whole run."""
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
        scored = sum(spent["evaluate"]) / (len(seconds) - 1)  # also before round 1
        steps, whole = statistics.mean(trained), statistics.mean(rounds)
        shown = [
            ["start", f"{seconds[0]:.1f}"],
            ["a round with its evaluation, mean", f"{each:.2f}"],
            [f"of it: {fed.clients_per_round} clients' local steps", f"{steps:.2f}"],
            ["of it: clients, without local steps (such as uploads)", f"{of_clients - steps:.2f}"],
            ["of it: evaluation", f"{scored:.2f}"],
            ["of it: the server", f"{whole - of_clients - scored:.2f}"],
            [title, f"{total:.1f}"],
        ]
        note = (
            f"{fed.rounds} rounds of {fed.clients_per_round} clients x {fed.local_steps} steps of "
            f"{fed.batch_size}, bf16, inline; all test images after every round, 500 per batch; "
            f"{source}"
        )
        goal, data = Goal(title, total, RUN[way]), {"seconds": seconds}
        named = f"The paper's run, {way}"
        place.add(Section(named, ["what", "s"], shown, [note], [goal], data))


def timed(executor: Any, name: str) -> list[float]:
    """Patch a synchronous method to record the seconds of each call in the returned list."""
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
    """Repeat or truncate the rows of a dataset to the given number per split."""
    folder = folder / "repeated"
    folder.mkdir()
    for name, count in rows.items():
        split = dataset.split(name)
        chosen = np.arange(count) % len(split)
        columns = {column: split.column(column)[chosen] for column in ("pixels", "label")}
        write_split(folder / f"{name}.arrow", columns, dataset.info)
    return PreparedDataset(folder, tuple(rows))


#: Function of each part, in order.
PARTS: dict[str, Callable[[Place], None]] = {"steps": steps, "run": run, "prox": prox}


def main() -> None:
    parser = argument_parser(__doc__, [*PARTS])
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with tiny shapes")
    parser.add_argument("--hub", help="a mirror with CIFAR-100; default TRISHUL_HUB")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; use --rehearse to run on the CPU")
    if options.hub:
        os.environ["TRISHUL_HUB"] = options.hub
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    set_environment()
    report = Report("gpu-rehearsal" if options.rehearse else "gpu", options)
    device, failed = torch.device("cpu" if options.rehearse else "cuda"), False
    for name in options.parts:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                PARTS[name](Place(device, Path(scratch), report.add))
            except Exception as error:
                traceback.print_exc()
                report.add(Section(f"Failed: {name}", ["error"], [[str(error)]]))
                failed = True
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
