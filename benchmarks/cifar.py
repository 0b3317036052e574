"""CIFAR-100 over 20 clients: TRISHUL, RAVAN and FedIT at matched parameters.

    python benchmarks/cifar.py [options]

A short learning-rate grid first (seed 0), then each method at its rate (other seeds, so that the
comparison does not reuse the split its rates were chosen on; the test images are the same). About
20 minutes on two idle CPU cores. Every run lands under its id in --runs: a repeated command reads
what is there and runs the rest, so it may be stopped at any time.

Needs a mirror with CIFAR-100 and vit-cifar10-128x6 (TRISHUL_HUB or --hub), or another backbone by
--model. The head for 100 classes is drawn at random, so the untouched backbone is right about once
in a hundred. Writes curves, a table and all settings to benchmarks/results/.
"""

import argparse
import io
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from _results import RESULTS, Report, Section, wide_console
from _setups import SMALL
from rich.console import Console

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.cluster import ray_session
from trishul_ray.loading import load_experiment
from trishul_ray.report.figures import accuracy_curve
from trishul_ray.runner import Outcome, run_experiment
from trishul_ray.tracking.progress import RunProgress, count

GRID_SEED = 0
#: Of each run's result.json, kept with the results.
KEPT = (
    *("id", "final", "best", "parameters", "heads"),
    *("uploaded_parameters", "downloaded_parameters", "round_seconds"),
)


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    label: str
    method: str
    settings: tuple[str, ...]


#: Under Adam the paper's λ = 0.01 shrinks a core by about a thousandth of a step, hence λ = 1 too;
#: and TRISHUL's bases are jointly orthonormal where RAVAN's are not, hence RAVAN with both.
VARIANTS = (
    Variant("TRISHUL λ=0.01", "trishul", ("method.lam=0.01",)),
    Variant("TRISHUL λ=1", "trishul", ("method.lam=1.0",)),
    Variant("RAVAN", "ravan", ()),
    Variant("RAVAN Gram-Schmidt", "ravan", ("adapter.init=gram_schmidt",)),
    Variant("FedIT", "fedit", ()),
)
#: The learning rate of a method is chosen on its plain form; its variants take it over.
TUNED = {variant.method: variant for variant in reversed(VARIANTS)}


@dataclass(frozen=True)
class Run:
    """A finished run: the content of result.json, and its metrics round by round."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    @classmethod
    def of(cls, outcome: Outcome) -> "Run":
        """Read what a run left."""
        table = pq.read_table(io.BytesIO(outcome.home.read("metrics.parquet")))
        return cls(outcome.summary, table.to_pylist())

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Round and accuracy, where measured."""
        return [(m["round"], m["accuracy"]) for m in self.metrics if m["accuracy"] is not None]

    def last(self, name: str) -> float | None:
        """A metric of the last trained round; None where the method has no such thing."""
        value: float | None = self.metrics[-1].get(name)
        return value


class Bench:
    """Runs experiments one after the other in one Ray session."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        """Keep the options."""
        self.options, self.console = options, console

    def experiment(self, variant: Variant, lr: float, seed: int, rounds: int) -> Experiment:
        """The experiment of one cell."""
        options = self.options
        storage = [f"storage.runs={options.runs}"]
        storage += [f"storage.hub={options.hub}"] if options.hub else []
        storage += [f"storage.cache={options.cache}"] if options.cache else []
        return load_experiment(
            None,
            [
                "dataset=cifar100",
                f"model={options.model}",
                f"method={variant.method}",
                *variant.settings,
                f"budget={options.budget}",
                f"optimizer.lr={lr}",
                f"seed={seed}",
                "partition.kind=dirichlet",
                f"partition.alpha={options.alpha}",
                f"federation.clients={options.clients}",
                "federation.clients_per_round=3",
                "federation.local_steps=50",
                f"federation.rounds={rounds}",
                # On a CPU larger batches leave the cache: 256 took a fifth longer for an image.
                "evaluation.batch_size=64",
                f"tracking.mlflow={options.mlflow}".lower(),
                "tracking.experiment=benchmark-cifar",
                f"resources.threads={options.threads}",
                *storage,
            ],
        )

    def run(self, label: str, experiment: Experiment) -> Run:
        """Run, continue or read one experiment."""
        self.console.print(f"{label}, id {experiment.id}", highlight=False)
        with RunProgress(experiment.federation.rounds, self.console) as progress:
            return Run.of(run_experiment(experiment, progress))


def main() -> None:
    """Grid, comparison, report."""
    options = _arguments()
    console = wide_console()
    said = {k: v for k, v in vars(options).items() if k not in ("hub", "cache", "runs", "out")}
    report = Report("cifar100", said, console)
    try:
        with ray_session():
            bench = Bench(options, console)
            rates, grid = tune(bench)
            report.add(grid)
            report.add(compare(bench, rates, options.out / f"{report.stem}.png"))
    except (InputError, RunError) as error:
        sys.exit(f"error: {error}")
    report.write(options.out)


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=SMALL, help="backbone (default: %(default)s)")
    add("--budget", type=int, default=8, help="trainables, as a LoRA rank per matrix")
    add("--clients", type=int, default=20)
    add("--alpha", type=float, default=0.3, help="Dirichlet concentration")
    add("--rounds", type=int, default=10, help="rounds of the comparison")
    add("--seeds", type=int, nargs="+", default=[1], help="seeds of the comparison")
    add("--grid", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="learning rates")
    add("--grid-rounds", type=int, default=3, help="rounds of a grid run")
    add("--threads", type=int, default=1, help="CPU threads of one actor")
    add("--mlflow", action="store_true", help="log the runs to MLflow as well")
    add("--hub", type=Path, help="mirror; default TRISHUL_HUB")
    add("--cache", type=Path, help="prepared data; default TRISHUL_CACHE")
    add("--runs", type=Path, default=Path("runs"), help="where runs lie (default: %(default)s)")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def tune(bench: Bench) -> tuple[dict[str, float], Section]:
    """The learning rate of each method: highest accuracy after a few rounds."""
    options = bench.options
    rates: dict[str, float] = {}
    rows, data = [], {}
    for method, variant in TUNED.items():
        found: dict[float, float] = {}
        for lr in options.grid:
            experiment = bench.experiment(variant, lr, GRID_SEED, options.grid_rounds)
            run = bench.run(f"grid: {variant.label}, lr {lr:g}", experiment)
            found[lr] = run.summary["final"]["accuracy"]
        rates[method] = max(found, key=lambda lr: found[lr])
        edge = rates[method] in (min(found), max(found)) and len(found) > 1
        rows.append(
            [
                variant.label,
                *(f"{found[lr]:.2%}" for lr in options.grid),
                f"{rates[method]:g}" + (" (edge of the grid)" if edge else ""),
            ]
        )
        data[method] = {str(lr): accuracy for lr, accuracy in found.items()}
    return rates, Section(
        f"Learning rates: test accuracy after {options.grid_rounds} rounds, seed {GRID_SEED}",
        ["method", *(f"lr {lr:g}" for lr in options.grid), "taken"],
        rows,
        ["variants of a method take its rate; one seed and few rounds: a choice, not a finding"],
        data=data,
    )


def compare(bench: Bench, rates: dict[str, float], figure: Path) -> Section:
    """All variants at their rates: curves, accuracies and what they cost."""
    options = bench.options
    runs: dict[str, list[Run]] = {}
    for variant in VARIANTS:
        lr = rates[variant.method]
        runs[variant.label] = [
            bench.run(
                f"{variant.label}, lr {lr:g}, seed {seed}",
                bench.experiment(variant, lr, seed, options.rounds),
            )
            for seed in options.seeds
        ]
    first = next(iter(runs.values()))
    untouched = statistics.fmean(run.summary["untouched"]["accuracy"] for run in first)
    figure.parent.mkdir(parents=True, exist_ok=True)
    accuracy_curve(
        [number for number, _ in first[0].curve],
        {label: _mean_curve(found) for label, found in runs.items()},
        figure,
        references={"untouched, random head": untouched},
    )
    rows = [_row(variant, rates, runs[variant.label]) for variant in VARIANTS]
    seeds = ", ".join(str(seed) for seed in options.seeds)
    parameters = first[0].summary["parameters"]
    return Section(
        f"CIFAR-100, {options.clients} clients, Dirichlet({options.alpha:g}), "
        f"{options.rounds} rounds",
        [
            "method",
            "lr",
            "final",
            "best (round)",
            "trained",
            "of it head",
            "up",
            "down",
            "s / round",
            "effective rank",
            "aggregation variance",
            "values zeroed",
        ],
        rows,
        [
            f"{options.model}, budget {options.budget}; 3 clients a round, 50 local steps of 32; "
            f"seeds {seeds}{' (mean, min-max)' if len(options.seeds) > 1 else ''}",
            f"untouched backbone: {untouched:.2%}, its head for 100 classes is random; the head "
            f"({parameters['head']:,} numbers) is trained and averaged by every method",
            "trained, up and down in numbers; up and down for all rounds together; seconds are "
            "training and the evaluation of the round before it",
            "diagnostics of the last round: effective rank and aggregation variance of uploaded "
            "cores, share of singular values that the prox left at zero",
        ],
        data={
            label: [
                {key: run.summary[key] for key in KEPT}
                | {"curve": run.curve, "last_round": run.metrics[-1]}
                for run in found
            ]
            for label, found in runs.items()
        },
        figure=figure.name,
    )


def _mean_curve(runs: list[Run]) -> list[float]:
    return [
        statistics.fmean(accuracy for _, accuracy in points)
        for points in zip(*(run.curve for run in runs), strict=True)
    ]


def _row(variant: Variant, rates: dict[str, float], runs: list[Run]) -> list[str]:
    finals = [run.summary["final"]["accuracy"] for run in runs]
    final = f"{statistics.fmean(finals):.2%}"
    if len(finals) > 1:
        final += f" ({min(finals):.2%}-{max(finals):.2%})"
    best = max((run.summary["best"] for run in runs), key=lambda found: found["accuracy"])
    summary = runs[0].summary
    seconds = [value for run in runs for value in run.summary["round_seconds"]]

    def mean(name: str, form: str) -> str:
        values = [value for run in runs if (value := run.last(name)) is not None]
        return format(statistics.fmean(values), form) if values else ""

    return [
        variant.label,
        f"{rates[variant.method]:g}",
        final,
        f"{best['accuracy']:.2%} ({best['round']})",
        count(sum(summary["parameters"].values())),
        count(summary["parameters"]["head"]),
        count(summary["uploaded_parameters"]),
        count(summary["downloaded_parameters"]),
        f"{statistics.median(seconds):.1f}",
        mean("effective_rank", ".2f"),
        mean("aggregation_variance", ".3g"),
        mean("svt_zeroed", ".1%"),
    ]


if __name__ == "__main__":
    main()
