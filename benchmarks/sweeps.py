"""Measure the overhead of Ray Tune for short trials and for concurrent trials.

    python benchmarks/sweeps.py [trials] [concurrent] [--trials 40] [--rounds 30] [options]

trials      sweeps of sequential short trials with all files: seconds from the end of a trial to the
            end of the next, compared with the same runs without Tune, which run before and after
            the trials, and with only their rounds (training and evaluation)
concurrent  rounds per second of two concurrent trials with one actor each, compared with
            sequential trials with one actor on each of the two CPUs, and with one actor

The experiment is the quick start: TRISHUL on the embedded digits. Results are written to
benchmarks/results/.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from _results import Goal, Report, Section, Times, argument_parser
from rich.console import Console

from trishul_ray.federation.on_ray.driver import Workers
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.runs.runner import run_steps
from trishul_ray.sweeps.cells import Sweep, TuneOptions
from trishul_ray.sweeps.loading import sweep_from_axes
from trishul_ray.sweeps.run import reproduce
from trishul_ray.tracking.progress import RunProgress, SweepProgress

#: Goals: seconds that a trial loses to Tune, and fraction of throughput lost by concurrent trials.
BOUND_TUNE, BOUND_LOSS = 0.05, 0.1
PARTS = ("trials", "concurrent")


class Timed(SweepProgress):
    """Record when cells reach a round, and when they end."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.rounds: dict[str, list[float]] = {}
        self.ends: list[float] = []

    def round(
        self, id: str, round_: int, metrics: Mapping[str, float], primary_metric: str = "accuracy"
    ) -> None:
        super().round(id, round_, metrics, primary_metric)
        self.rounds.setdefault(id, []).append(time.perf_counter())

    def end(self, id: str, *, failure: str | None = None) -> None:
        super().end(id, failure=failure)
        assert failure is None, failure
        self.ends.append(time.perf_counter())


def make_sweep(folder: Path, cells: int, *overrides: str) -> Sweep:
    fixed = ["model.init=random", f"storage.runs={folder}", "evaluation.limit=64"]
    return sweep_from_axes([f"seed=0..{cells - 1}"], [*fixed, *overrides])


def run_sweep(sweep: Sweep, concurrency: int) -> Timed:
    progress = Timed()
    with ray_session(2):
        reproduce([sweep], TuneOptions(retries=0, concurrency=concurrency), progress)
    return progress


def run_alone(sweep: Sweep) -> list[tuple[float, float]]:
    """Measure each run and its rounds without Tune, with reused actors, in seconds."""
    seconds = []
    with ray_session(2), Workers() as workers:
        for cell in sweep.cells:
            began = time.perf_counter()
            steps = run_steps(
                cell.experiment, RunProgress(1, Console(file=io.StringIO())), workers=workers,
                extras=False,
            )  # fmt: skip
            next(steps)  # starts the run
            started = time.perf_counter()
            report = next(steps)
            while not report.finished:
                report = next(steps)
            trained = time.perf_counter()
            list(steps)  # writes the results
            seconds.append((time.perf_counter() - began, trained - started))
    return seconds[1:]


def measure_trials(options: argparse.Namespace, scratch: Path) -> Section:
    """Measure short trials, and the overhead of Tune and MLflow."""
    six = ["federation.rounds=6", "federation.local_steps=4"]
    settings = {
        "one round": ["federation.rounds=1", "federation.local_steps=2"],
        "six rounds": six,
        "six rounds, no MLflow": [*six, "tracking.mlflow=false"],
    }
    rows, goals, data = [], [], {}
    for number, (name, fields) in enumerate(settings.items()):
        folder, some = scratch / str(number), 2 + options.trials // 2
        fields = [*fields, "resources.actors=1"]
        before = run_alone(make_sweep(folder / "before", some, *fields))
        timed = run_sweep(make_sweep(folder / "trials", options.trials, *fields), 1)
        after = run_alone(make_sweep(folder / "after", some, *fields))
        each = Times.of([b - a for a, b in zip(timed.ends, timed.ends[1:], strict=False)])
        whole = Times.of([run for run, _ in (*before, *after)])
        rounds = Times.of([trained for _, trained in (*before, *after)])
        lost = each.median - whole.median
        rows.append([name, each.show(), whole.show(), f"{lost:.3f}", rounds.show()])
        data[name] = {"trials": each.values, "runs": whole.values, "rounds": rounds.values}
        goals.append(Goal(f"seconds lost to Tune per trial, {name}", lost, BOUND_TUNE))
    return Section(
        f"{options.trials} sequential short trials, without the first",
        ["", "a trial, s", "without Tune, s", "lost, s", "only its rounds, s"],
        rows,
        ["medians (min-max); runs without Tune also write all files"],
        goals,
        data,
    )


def measure_concurrent(options: argparse.Namespace, scratch: Path) -> Section:
    """Measure rounds per second of running trials, excluding their start and end."""
    rounds = [f"federation.rounds={options.rounds}", f"federation.local_steps={options.steps}"]
    settings = {
        "two concurrent trials, 1 actor each": (2, 1),
        "sequential, 2 actors": (1, 2),
        "sequential, 1 actor": (1, 1),
    }
    rates = {}
    for number, (name, (concurrency, actors)) in enumerate(settings.items()):
        sweep = make_sweep(scratch / str(number), 2, *rounds, f"resources.actors={actors}")
        marks = run_sweep(sweep, concurrency).rounds.values()
        if concurrency == 1:
            rates[name] = sum(len(m) - 2 for m in marks) / sum(m[-1] - m[1] for m in marks)
        else:
            begin, end = max(m[1] for m in marks), min(m[-1] for m in marks)
            rates[name] = sum(begin < t <= end for m in marks for t in m) / (end - begin)
    together, whole, single = rates.values()
    return Section(
        f"2 trials of {options.rounds} rounds of {options.steps} local steps on 2 CPUs",
        ["", "rounds per second", "relative to sequential trials on 2 CPUs"],
        [[name, f"{rate:.2f}", f"{rate / whole:.2f}"] for name, rate in rates.items()],
        [f"two concurrent trials have {together / single:.2f}x the throughput of one actor"],
        [Goal("throughput lost by two concurrent trials", 1 - together / whole, BOUND_LOSS)],
        {"rounds_per_second": rates},
    )


def main() -> None:
    options = _arguments()
    report = Report("sweeps", options, "parts")
    measures = {"trials": measure_trials, "concurrent": measure_concurrent}
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            report.add(measures[part](options, Path(folder)))


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, PARTS)
    add = parser.add_argument
    add("--trials", type=int, default=40, help="number of short trials")
    add("--rounds", type=int, default=30, help="rounds of a long trial")
    add("--steps", type=int, default=20, help="local steps of a long trial")
    return parser.parse_args()


if __name__ == "__main__":
    main()
