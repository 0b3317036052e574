"""What bfloat16 keeps of the updates that a method folds into the frozen weight, and at what cost.

    python benchmarks/folded.py [PART ...] [options]

Parts (all by default):

    kept   FedEx-LoRA and FedIT on digits at several learning rates: how much of the folded update
           is in the weight, rounded once to bfloat16 and in two terms; and their losses
    cost   a local step of LoRA on ViT-B's blocks with a folded update, beside one without

Digits are embedded; nothing is downloaded. The cost is in CPU time of the one thread that runs,
since that does not depend on what else the machine does. Results go to benchmarks/results/.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from _results import Goal, Report, Section, Times, paired, told_by
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from trishul_ray.adapters import linear, lora
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import find_layers
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import CheckpointStore
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.server import Server
from trishul_ray.federation.workbench import global_model
from trishul_ray.storage import Store

ALL = ("kept", "cost")
WIDTH = 768


def main() -> None:
    """Measure the parts that are asked for."""
    options = _arguments()
    report = Report("folded", options)
    torch.set_num_threads(1)
    if "kept" in options.parts:
        report.add(kept(options))
    if "cost" in options.parts:
        report.add(cost(options))


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__, ALL)
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[1e-3, 3e-3], help="learning rates")
    add("--rounds", type=int, default=2)
    add("--local-steps", type=int, default=5)
    add("--blocks", type=int, default=2, help="blocks of ViT-B/16 in the timed step")
    add("--batch", type=int, default=2, help="images in the timed step")
    add("--steps", type=int, default=15, help="timed steps")
    return parser.parse_args()


@contextmanager
def rounded_once() -> Iterator[None]:
    """Give a moved weight as one rounded tensor, without the rest of it."""

    def split(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        high = weight.to(dtype)
        return high, torch.zeros_like(high)

    before, linear.split = linear.split, split
    try:
        yield
    finally:
        linear.split = before


def kept(options: argparse.Namespace) -> Section:
    """FedIT, FedEx rounded once, and FedEx, at every rate."""
    rows, data = [], {}
    for lr in options.rates:
        fedit, _ = _run(options, "fedit", "bf16", lr)
        with rounded_once():
            before, _ = _run(options, "fedex", "bf16", lr)
        after, errors = _run(options, "fedex", "bf16", lr)
        wide, _ = _run(options, "fedex", "fp32", lr)
        size, once, twice = (statistics.fmean(column) for column in zip(*errors, strict=True))
        rows.append(
            [f"{lr:g}", f"{size:.1e}", f"{once:.1%}", f"{twice:.2%}"]
            + [f"{loss:.5f}, {right:.2%}" for loss, right in (fedit, before, after, wide)]
        )
        data[str(lr)] = {
            "relative_size": size,
            "error_rounded_once": once,
            "error_two_terms": twice,
            "fedit": fedit,
            "fedex_rounded_once": before,
            "fedex": after,
            "fedex_fp32": wide,
        }
    scored = len(prepare_run(load_experiment(None, ["dataset=digits"])).dataset.test)
    worst = max(found["error_two_terms"] for found in data.values())
    return Section(
        f"FedEx-LoRA's folded update on digits, bf16, {options.rounds} rounds of 3 clients x "
        f"{options.local_steps} steps",
        [
            *("lr", "folded / weight", "wrong, rounded once", "wrong, two terms", "FedIT"),
            *("FedEx, rounded once", "FedEx", "FedEx, fp32"),
        ],
        rows,
        [
            "wrong: ‖what the weight moved by − what was folded‖ / ‖what was folded‖, Frobenius, "
            "mean over layers, after the last round",
            f"FedIT and FedEx: test loss and accuracy, one seed; {scored} test images",
            "FedEx, rounded once: only the rounding of the weight is as it was; the order in which "
            "outputs are summed is today's",
        ],
        [Goal("folded update, relative error", worst, 1e-2)],
        data,
    )


def _run(
    options: argparse.Namespace, method: str, precision: str, lr: float
) -> tuple[tuple[float, float], list[tuple[float, float, float]]]:
    """Loss and accuracy; by layer: folded / weight, its error rounded once, and as it is kept."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = load_experiment(
            None,
            [
                f"method={method}",
                f"model.precision={precision}",
                f"optimizer.lr={lr}",
                "federation.clients=20",
                "federation.clients_per_round=3",
                f"federation.rounds={options.rounds}",
                f"federation.local_steps={options.local_steps}",
                "resources.backend=inline",
                "resources.threads=1",
                "tracking.mlflow=false",
                f"storage.runs={folder}",
            ],
        )
        executor = InlineExecutor(experiment, prepare_run(experiment))
        checkpoints = CheckpointStore(Store.open(folder), experiment.id)
        server = Server(experiment, executor, checkpoints, "benchmark")
        while not server.finished:
            server.step()
        last = next(record for record in reversed(server.checkpoint.records) if record.scored)
        bench = executor.bench
        trained = global_model(bench, server.broadcast(), options.rounds)
        errors = []
        for name, base in trained.base.items():
            weight = bench.model.model.get_submodule(name).weight.detach()
            if weight.dtype == torch.float32:
                continue
            moved = weight.float() + base
            parts = linear.split(moved, weight.dtype)
            found = (parts[0].double(), parts[0].double() + parts[1].double())
            exact = base.double()
            once, twice = (
                float((part - weight.double() - exact).norm() / exact.norm()) for part in found
            )
            errors.append((float(exact.norm() / weight.double().norm()), once, twice))
    return (last.scores["loss"], last.scores["accuracy"]), errors


def cost(options: argparse.Namespace) -> Section:
    """A step (forward, backward) with a folded update and one without, by turns."""
    rows, data, goals = [], {}, []
    kinds = {"float32, in the order of bf16": torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kinds["bf16"] = torch.bfloat16
    for label, dtype in kinds.items():
        with as_low_precision(dtype):
            found = _steps(dtype, options)
        plain, folded = Times.of(found[False]), Times.of(found[True])
        ratio = folded.median / plain.median
        rows.append(
            [
                *(label, plain.show(1e3, 0), folded.show(1e3, 0), f"{ratio:.3f}"),
                paired(folded, plain).show(digits=3),
            ]
        )
        data[label] = {"plain": found[False], "folded": found[True]}
        goals.append(Goal(f"step with a folded update / without, {label}", ratio, 1.05))
    return Section(
        f"A LoRA step (rank 32 on q and v) of {options.blocks} blocks of ViT-B/16, "
        f"{options.batch} images",
        ["arithmetic", "without ms", "with a folded update ms", "ratio", "of neighbours"],
        rows,
        [
            "CPU time of the one thread, medians (min-max), by turns; forward and backward, no "
            "data and no optimizer, which would only lower the ratio",
            "float32: the products of bf16 in the same order, a stand-in for a machine that "
            "multiplies bf16 natively; a CPU that does not is not timed in bf16",
        ],
        goals,
        data,
    )


@contextmanager
def as_low_precision(dtype: torch.dtype) -> Iterator[None]:
    """Let layers in ``dtype`` take the route of low precision."""
    kinds = (dtype,)
    before = lora.LOW_PRECISION
    linear.LOW_PRECISION = lora.LOW_PRECISION = kinds
    try:
        yield
    finally:
        linear.LOW_PRECISION = lora.LOW_PRECISION = before


def _steps(dtype: torch.dtype, options: argparse.Namespace) -> dict[bool, list[float]]:
    config = ViTConfig(num_hidden_layers=options.blocks, num_labels=100)
    model = ViTForImageClassification(config).to(dtype)
    adapters = {spec.name: LoRA(32) for spec in find_layers(model)}
    adapted = AdaptedModel(model, adapters, seed=0, train_head=True)
    vector = adapted.initial()
    grad = torch.zeros_like(vector)
    base = {name: 1e-4 * torch.randn(WIDTH, WIDTH) for name in adapters}
    pixels = torch.randn(options.batch, 3, 224, 224).to(dtype)

    def step() -> None:
        adapted.forward(pixel_values=pixels).logits.float().square().mean().backward()

    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.steps + 1):
        for folded in (False, True) if number % 2 else (True, False):
            adapted.bind(Trained(vector, base if folded else {}), grad)
            seconds = _seconds(step)
            if number:
                found[folded].append(seconds)
    return found


def _seconds(step: Callable[[], None]) -> float:
    began = time.process_time()  # the backward has a thread of its own
    step()
    return time.process_time() - began


if __name__ == "__main__":
    main()
