"""Measure a round and a local step, relative to the limit.

    python benchmarks/round.py [PART ...] [options]

Parts (by default all), with minutes on two idle CPU cores:

    backend  (2)  a round, inline and on Ray with the same number of threads, as a multiple of the
                  limit: forward pass and input gradient of the frozen backbone on the same batches
    small    (1)  a local step of a small ViT (width 128, 6 blocks), relative to the limit
    large    (3)  a local step of ViT-B/16 (q, v, 4 heads of rank 110), relative to the limit

Limit and step are measured alternately, so that changes in machine speed affect both sides of a
ratio. With a mirror (TRISHUL_HUB or --hub), the images are CIFAR-100 and the small ViT is
pretrained. Without a mirror, noise and random weights are used, which take the same time. Results
are written to benchmarks/results/.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from _backends import NICENESS, backends
from _limit import time_steps
from _results import Goal, Report, Section, argument_parser, paired
from _setups import Setup, has_real_data, large, small

ALL = ("backend", "small", "large")


def main() -> None:
    options = _arguments()
    for name, value in (("TRISHUL_HUB", options.hub), ("TRISHUL_CACHE", options.cache)):
        if value:
            os.environ[name] = str(value)
    if options.data == "auto":
        options.data = "cifar100" if has_real_data() else "synthetic"
    report = Report("round", options)
    os.environ.setdefault(NICENESS, "0")  # before Ray starts
    shared = [f"resources.threads={options.threads}", f"model.precision={options.precision}"]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "backend" in options.parts:
            report.add(backends(small(scratch, options.data, _rounds(options, shared))))
        if "small" in options.parts:
            chosen = [*shared, f"federation.batch_size={options.batch}"]
            setup = small(scratch, options.data, chosen)
            report.add(steps(setup, options.steps, "small ViT", 1.6))
        if "large" in options.parts:
            chosen = [*shared, f"federation.batch_size={options.large_batch}"]
            setup = large(scratch, options.data, chosen)
            report.add(steps(setup, options.large_steps, "ViT-B/16", 1.15))


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, ALL)
    add = parser.add_argument
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all)")
    add("--data", choices=["auto", "cifar100", "synthetic"], default="auto")
    add("--hub", type=Path, help="a mirror with CIFAR-100; default TRISHUL_HUB")
    add("--cache", type=Path, help="prepared data; default TRISHUL_CACHE")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="precision of the backbone")
    add("--rounds", type=int, default=7, help="rounds of backend, including one warm-up")
    add("--local-steps", type=int, default=20, help="local steps of backend")
    add("--batch", type=int, default=32, help="batch size of the small ViT")
    add("--steps", type=int, default=60, help="measured steps of the small ViT")
    add("--large-batch", type=int, default=32, help="batch size of ViT-B/16")
    add("--large-steps", type=int, default=5, help="measured steps of ViT-B/16")
    options = parser.parse_args()
    if min(options.rounds - 2, options.steps, options.large_steps, options.local_steps) < 1:
        parser.error("--rounds must be at least 3, and numbers of steps at least 1")
    return options


def _rounds(options: argparse.Namespace, shared: list[str]) -> list[str]:
    return [
        *shared,
        f"federation.batch_size={options.batch}",
        f"federation.rounds={options.rounds}",
        f"federation.local_steps={options.local_steps}",
        # Rounds with and without evaluation alternate.
        "evaluation.every=2",
        "resources.actors=1",
    ]


def steps(setup: Setup, count: int, name: str, bound: float) -> Section:
    """Measure local steps relative to the limit."""
    step, limit = time_steps(setup.experiment, setup.prepared, count)
    ratio = paired(step, limit)
    resources, model = setup.experiment.resources, setup.experiment.model
    return Section(
        f"A local step, {name} ({setup.label})",
        ["step ms", "limit ms", "step / limit"],
        [[step.show(1e3, 1), limit.show(1e3, 1), ratio.show(digits=3)]],
        [
            f"{setup.experiment.method.name}, batch {setup.experiment.federation.batch_size}, "
            f"{resources.threads} threads, {model.precision}; medians (min-max) of {count} steps, "
            "measured alternately with the limit",
        ],
        [Goal(f"local step / limit, {name}", ratio.median, bound)],
        {"step": step.values, "limit": limit.values},
    )


if __name__ == "__main__":
    main()
