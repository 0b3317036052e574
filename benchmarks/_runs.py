"""Whole runs, some at a time: each in a process of its own, on the inline backend.

On few cores this is the cheapest way to many runs (no idle actor waits for a round to end), and
by the platform's contract the bytes are those of the Ray backend. A run that is finished in the
folder of runs is read, an interrupted one is continued.
"""

import argparse
import io
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import safetensors.torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trishul_ray.experiment import Experiment
from trishul_ray.runs.runner import FinishedRun, run_experiment
from trishul_ray.storage import Store
from trishul_ray.tracking.progress import RunProgress

#: Methods whose clients train parts of different rank of one LoRA pair.
OF_RANKS = ("hetlora", "flexlora")


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where a script that runs whole experiments finds and puts things."""
    add = parser.add_argument
    add("--hub", type=Path, help="mirror; default TRISHUL_HUB")
    add("--cache", type=Path, help="prepared data; default TRISHUL_CACHE")
    add("--runs", type=Path, default=Path("runs"), help="where runs lie (default: %(default)s)")


def words_of(options: argparse.Namespace) -> list[str]:
    """How an experiment is run here, as overrides: inline, untracked, in the places asked for."""
    places = {name: getattr(options, name) for name in ("hub", "cache", "runs")}
    storage = [f"storage.{name}={path}" for name, path in places.items() if path is not None]
    return ["resources.backend=inline", "tracking.mlflow=false", *storage]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        summary: the content of result.json.
        metrics: round by round.
        live: components of the global model that can still train, and all; None but for
            ``OF_RANKS``.
    """

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    live: tuple[int, int] | None = None

    @classmethod
    def of(cls, outcome: FinishedRun) -> "Run":
        """Read what a run left."""
        table = pq.read_table(io.BytesIO(outcome.home.read("metrics.parquet")))
        ranks = outcome.summary.config["method"]["name"] in OF_RANKS
        return cls(vars(outcome.summary), table.to_pylist(), _live(outcome.home) if ranks else None)

    @property
    def final(self) -> float:
        """The headline metric after the last round."""
        return float(self.summary["final"][self.summary["headline"]])

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Round and headline metric, where measured."""
        name = self.summary["headline"]
        return [(m["round"], m[name]) for m in self.metrics if m[name] is not None]

    def told(self) -> dict[str, Any]:
        """All of it but the folders, which are one machine's."""
        config = {k: v for k, v in self.summary["config"].items() if k != "storage"}
        return self.summary | {"config": config, "curve": self.curve, "metrics": self.metrics}

    def mean(self, name: str) -> float | None:
        """A metric averaged over the rounds that have it; None where the method has none."""
        found = [m[name] for m in self.metrics if m.get(name) is not None]
        return sum(found) / len(found) if found else None

    def last(self, name: str) -> float | None:
        """A metric of the last trained round; None where the method has no such thing."""
        value: float | None = self.metrics[-1].get(name)
        return value


def run_all(cells: Mapping[str, Experiment], processes: int, console: Console) -> dict[str, Run]:
    """Run every experiment, ``processes`` at a time, the first ones first.

    Args:
        cells: label to experiment.
        processes: how many at a time.
        console: where the progress goes: a bar on a terminal, a line for each run elsewhere.

    Returns:
        label to finished run.

    Raises:
        InputError, RunError: of the first run that failed; those under way are finished first.
    """
    found: dict[str, Run] = {}
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    # A fresh interpreter for each: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with bar, ProcessPoolExecutor(processes, mp_context=context) as pool:
        task = bar.add_task("runs", total=len(cells))
        waiting = {
            pool.submit(_run, label, experiment.to_dict()): label
            for label, experiment in cells.items()
        }
        try:
            for done in as_completed(waiting):
                label = waiting[done]
                found[label] = done.result()
                bar.advance(task)
                console.print(
                    f"{len(found)}/{len(cells)}  {label}: {found[label].final:.2%}, "
                    f"id {found[label].summary['id']}",
                    highlight=False,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {label: found[label] for label in cells}


def _live(home: Store) -> tuple[int, int]:
    """Components whose row of A and column of B are not both zero, and all, over all layers.

    Where both are zero both gradients are: such a component never trains again.
    """
    found = safetensors.torch.load(home.read("adapter/adapter_model.safetensors"))
    live = total = 0
    for name, a in found.items():
        if ".lora_A." in name:
            b = found[name.replace(".lora_A.", ".lora_B.")]
            live += int(((a != 0).any(dim=1) | (b != 0).any(dim=0)).sum())
            total += len(a)
    return live, total


def _run(label: str, fields: dict[str, Any]) -> Run:
    experiment = Experiment.model_validate(fields)
    with RunProgress(experiment.federation.rounds, Console(file=io.StringIO())) as progress:
        return Run.of(run_experiment(experiment, progress))
