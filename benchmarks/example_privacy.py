"""A local step of DP-SGD (privacy.unit=example) and a plain step, alternately.

    python benchmarks/example_privacy.py [small large] [--steps 12] [--threads 2]

Two processes, one with each kind of step, compute steps of batch 32 in turn:

    small         ViT of width 128 with 6 blocks, 32x32 images, budget 8
    large         ViT-B/16 at 224x224, the paper's lower budget

A DP-SGD step has a Poisson batch of 32 rows on average, so single ratios vary with the size of the
batch. Each process reports its peak memory. Weights are random. Results go to benchmarks/results/.
"""

import argparse
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from _results import Goal, Report, Section, Times, argument_parser
from _setups import large, small
from _stepped import Stepped, answer_all

from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.worker.context import build_context
from trishul_ray.federation.worker.local import LocalSteps
from trishul_ray.stages import Stage

BATCH, CLIENTS, BOUND = 32, 20, 2.0
METHODS = ("fedit", "trishul")
PRIVATE = ("privacy.unit=example", "privacy.noise=1")
SETUPS = {"small": small, "large": large}


class Compute(LocalSteps):
    """Local steps whose seconds are measured one by one."""

    def seconds(self) -> Iterator[float]:
        """Yield the seconds of each step."""
        stage: Stage | None = self.context.stages.of_gradients
        for number in itertools.count(1):
            began = time.perf_counter()
            if stage is None:
                self.compute(number, self.batch(number))
            else:
                losses = [stage.gradient(client.step(number)) for client in self.clients]
                self.finish(number, torch.stack(losses))
            yield time.perf_counter() - began


def child(options: argparse.Namespace) -> None:
    """Compute a step for each line of the input; reply with seconds and peak MiB."""
    torch.set_num_threads(options.threads)
    (part,) = options.parts
    words = [f"method={options.method}", f"federation.batch_size={BATCH}", *options.words]
    words += [f"federation.clients={CLIENTS}", "federation.local_steps=100000", "optimizer.lr=1e-3"]
    with tempfile.TemporaryDirectory() as folder:
        setup = SETUPS[part](Path(folder), "synthetic", words)
        context = build_context(setup.experiment, setup.prepared)
    start = context.method.initial_state(context.model.layout, context.initial, {}).map(to_array)
    numbers = {"privacy_noise": 1.0, "privacy_clip_norm": 1.0}
    steps = Compute(context, start, [TrainJob(1, 0, instructions=numbers)])
    with steps.bound():
        seconds = steps.seconds()

        def reply(_: str) -> list[float]:
            took = next(seconds)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            return [took, peak, len(context.initial)]

        answer_all(reply)


def measure(part: str, options: argparse.Namespace) -> Section:
    """Return the section of one backbone."""
    rows, goals, data = [], [], {}
    for method in METHODS:
        command = [__file__, part, "--child", "--method", method, f"--threads={options.threads}"]
        with ExitStack() as stack:
            plain = stack.enter_context(Stepped(command))
            private = stack.enter_context(Stepped([*command, "--words", *PRIVATE]))
            both = [(plain.ask("step"), private.ask("step")) for _ in range(options.steps + 1)][1:]
        plain_s, private_s = (Times.of([pair[i][0] for pair in both]) for i in (0, 1))
        peaks = [both[-1][i][1] for i in (0, 1)]
        numbers = int(both[-1][0][2])
        ratio = statistics.median(private_s.values) / statistics.median(plain_s.values)
        rows.append([
            method, f"{numbers:,}", plain_s.show(1000, 0), private_s.show(1000, 0), f"{ratio:.2f}",
            f"{peaks[0]:.0f}", f"{peaks[1]:.0f}", f"{BATCH * numbers * 4 / 2**20:.0f}",
        ])  # fmt: skip
        goals.append(Goal(f"{method}: DP-SGD step / plain step", ratio, BOUND))
        data[method] = {"plain": plain_s.values, "private": private_s.values, "peak_mib": peaks}
    columns = ["method", "P", "plain ms", "DP-SGD ms", "ratio", "peak MiB plain", "DP-SGD"]
    return Section(
        f"{part}: a step of batch {BATCH} on {options.threads} threads, fp32",
        [*columns, "32 P x 4 bytes, MiB"],
        rows,
        ["ms: median (smallest-largest); ratio: of medians; the peak is that of the process"],
        goals,
        data,
    )


def main() -> None:
    """Measure and write the results."""
    parser = argument_parser(__doc__, tuple(SETUPS))
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each kind")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--method", default="fedit", help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    report = Report("example-privacy", options, "child", "method", "words")
    for part in options.parts:
        report.add(measure(part, options))


if __name__ == "__main__":
    main()
