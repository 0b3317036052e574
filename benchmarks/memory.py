"""Measure the memory of additional actors with the same frozen backbone on one machine.

    python benchmarks/memory.py [--model NAME] [--actors 4] [options]

The backbone is loaded in one Ray actor after the other, and the memory of all actors is measured
after each. Weights are shared through the page cache (as in runs), or separate for each actor:

    interpreter   memory of an actor after all imports, without a model
    added         growth of the memory of all actors when this actor loads the model
    PSS, USS      proportional and unique memory of the actor after all actors have loaded the
                  model, without the interpreter. A page shared by k processes counts 1/k in the
                  PSS of each process, and is not counted in the USS.

Random weights need as much memory as pretrained weights, but no network. Results are written to
benchmarks/results/.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from _results import Goal, Report, Section, argument_parser

from trishul_ray.config.fields import ModelConfig
from trishul_ray.federation.on_ray.session import ray_session

MIB = 2**20
#: Goal for each additional actor, as a fraction of the backbone's size.
BOUND = 0.35
CLASSES = 100


@ray.remote(num_cpus=0)
class Holder:
    """Actor with one backbone, like a client actor."""

    def __init__(self, threads: int) -> None:
        """Import the modules of a client actor."""
        import torch

        from trishul_ray.federation import prepare as world
        from trishul_ray.federation.on_ray import client_actor as client

        self.imported = (client, world)
        self.model: Any = None
        torch.set_num_threads(threads)

    def pid(self) -> int:
        return os.getpid()

    def take(self, config: ModelConfig, cache: Path, shared: bool) -> tuple[float, int]:
        """Load the backbone, run it once, and return the loading time in seconds and its bytes."""
        from trishul_ray.config.paths import StoragePaths
        from trishul_ray.models.backbone import Backbone
        from trishul_ray.models.compute import cast, configure_compute, run_dtype

        backbone = Backbone(config, StoragePaths(cache, hub=None))
        kind = backbone.family
        classes = CLASSES if kind.endswith("classification") else None
        began = time.perf_counter()
        if shared:
            model = backbone.load_resident(kind, classes, seed=0).model
        else:
            model = backbone.load(kind, classes, seed=0)
            cast(model, run_dtype(config))
            configure_compute(model, config)
        took = time.perf_counter() - began
        self.model = model.requires_grad_(False)
        tensors = [*model.parameters(), *model.buffers()]
        for tensor in tensors:
            tensor.sum()  # touch every page, since a forward reads only a few rows of an embedding
        _run_once(self.model, backbone.model_config(kind, classes))
        return took, sum(t.numel() * t.element_size() for t in tensors)


def _run_once(model: Any, shape: Any) -> None:
    import torch

    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        if hasattr(shape, "image_size"):
            size = (1, shape.num_channels, shape.image_size, shape.image_size)
            model(pixel_values=torch.zeros(size, dtype=dtype))
            return
        tokens = torch.ones(1, 32, dtype=torch.int64)
        decoder = {"decoder_input_ids": tokens} if shape.is_encoder_decoder else {}
        model(input_ids=tokens, **decoder)


def weigh(pids: list[int]) -> list[tuple[float, float]]:
    """Return the PSS and USS of processes, in MiB."""
    found = [psutil.Process(pid).memory_full_info() for pid in pids]
    return [(memory.pss / MIB, memory.uss / MIB) for memory in found]


def measure(options: argparse.Namespace, cache: Path, shared: bool) -> Section:
    """Load the backbone in one actor after the other, measuring all actors after each."""
    config = ModelConfig(
        name=options.model,
        init="random",
        precision=options.precision,
        quantize=options.quantize,
    )
    actor: Any = Holder  # the decorator makes it an actor class
    holders = [actor.remote(options.threads) for _ in range(options.actors)]
    pids = ray.get([holder.pid.remote() for holder in holders])
    before = weigh(pids)
    seconds, added, standing = [], [], before
    size = 0
    for holder in holders:
        took, size = ray.get(holder.take.remote(config, cache, shared))
        now = weigh(pids)
        seconds.append(took)
        added.append(sum(pss for pss, _ in now) - sum(pss for pss, _ in standing))
        standing = now
    for holder in holders:
        ray.kill(holder)
    backbone = size / MIB
    own = [
        (after[0] - first[0], after[1] - first[1])
        for after, first in zip(standing, before, strict=True)
    ]
    rows = [
        [
            str(i + 1),
            f"{before[i][0]:.0f}",
            f"{added[i]:.1f}",
            f"{own[i][0]:.1f}",
            f"{own[i][1]:.1f}",
            f"{added[i] / backbone:.1%}",
            f"{seconds[i]:.2f}",
        ]
        for i in range(options.actors)
    ]
    goals = []
    if shared:
        goals = [
            Goal("added by each further actor / backbone, worst", max(added[1:]) / backbone, BOUND),
            Goal("PSS of each further actor / backbone, worst", _worst(own, 0) / backbone, BOUND),
            Goal("USS of each further actor / backbone, worst", _worst(own, 1) / backbone, BOUND),
        ]
    folder = Path(options.model)
    name = folder.name if folder.is_dir() else options.model
    kind = options.precision if options.quantize == "none" else options.quantize
    how = "shared through the page cache" if shared else "separate for each actor"
    return Section(
        f"{name}, {backbone:.0f} MiB in {kind}, weights {how}",
        ["actor", "interpreter MiB", "added MiB", "PSS MiB", "USS MiB", "added / backbone", "s"],
        rows,
        ["s: seconds of loading; the first actor also writes the file that all actors map"]
        if shared
        else [],
        goals,
        {"backbone_mib": backbone, "before": before, "added": added, "own": own},
    )


def _worst(own: list[tuple[float, float]], column: int) -> float:
    return max(values[column] for values in own[1:])


def main() -> None:
    options = _arguments()
    report = Report("memory", options)
    with tempfile.TemporaryDirectory() as folder, ray_session():
        for shared in (True, False)[: 2 if options.quantize == "none" else 1]:
            report.add(measure(options, Path(folder), shared))


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--model", default="google/vit-base-patch16-224-in21k", help="name of the backbone")
    add("--actors", type=int, default=4)
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add(
        "--quantize",
        choices=["none", "nf4", "int8"],
        default="none",
        help="only with shared weights",
    )
    add("--threads", type=int, default=1, help="CPU threads per actor")
    options = parser.parse_args()
    if options.actors < 2:
        parser.error("--actors must be at least 2")
    return options


if __name__ == "__main__":
    main()
