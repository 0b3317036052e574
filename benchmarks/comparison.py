"""All methods under one protocol on images: accuracy, exactness, traffic and time.

    python benchmarks/comparison.py [options]

A learning-rate grid first (seed 0), then every method at its rate with other seeds; both for each
partition asked for, the latter for each compute profile. `--grid` without a rate takes the
library's default of each method and runs no grid. Runs go by --processes at a time and land under
their ids in --runs: a repeated command reads what is there and runs the rest, so it may be stopped
at any time.

CIFAR-100 needs a mirror with it and vit-cifar10-128x6 (TRISHUL_HUB or --hub), or another backbone
by --model. Its head for 100 classes is drawn at random, so the untouched backbone is right about
once in a hundred. `--dataset digits` needs nothing.

Writes tables, curves and all settings to benchmarks/results/.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

from _results import Report, Section, told_by
from _runs import Run, add_places, run_all, words_of
from _setups import SMALL
from _variants import VARIANTS, rate_of, tuned_for
from rich.console import Console

from trishul_ray.config import COMPUTE_LEVELS, COMPUTE_PROFILES
from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import prepare_rows
from trishul_ray.report.figures.curves import draw_curves, metric_of_run
from trishul_ray.report.figures.drawing import save_png
from trishul_ray.tracking.progress import format_count

GRID_SEED = 0
DATASETS = {"cifar100": "CIFAR-100", "digits": "digits"}
#: Backbones by dataset; that of CIFAR-100 has a head drawn at random.
MODELS = {"cifar100": SMALL, "digits": "vit-digits"}
#: Of each run's result.json, kept with the results.
KEPT = (
    *("id", "final", "best", "parameters", "heads", "state_sha256"),
    *("uploaded_parameters", "downloaded_parameters", "round_seconds"),
)
COLUMNS = [
    *("method", "lr", "final", "best", "trained", "up", "down", "s / round"),
    *("aggregation error", "effective rank", "aggregation variance", "values zeroed"),
    "live components",
]


def main() -> None:
    """Grid, comparison, report."""
    options = _arguments()
    report = Report(options.name, options, "name")
    console = report.console
    try:
        tuned = {partition: tune(options, partition, console) for partition in options.partitions}
        for _, grid in tuned.values():
            report.add(grid)
        rates = {part: tuned.get(options.rates_from, own)[0] for part, own in tuned.items()}
        for section in compare(options, rates, console, report.stem):
            report.add(section)
    except (InputError, RunError) as error:
        sys.exit(f"error: {error}")


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__)
    add = parser.add_argument
    add("--name", default="comparison", help="of the results' files")
    add("--variants", nargs="+", choices=list(VARIANTS), metavar="NAME",
        default=[name for name, variant in VARIANTS.items() if not variant.asked],
        help=f"lines of the table: {', '.join(VARIANTS)}")  # fmt: skip
    add("--partitions", nargs="+", choices=["dirichlet", "iid"], default=["dirichlet", "iid"])
    add("--dataset", choices=list(MODELS), default="cifar100")
    add("--model", help="backbone (default: " + ", ".join(MODELS.values()) + ")")
    add("--budget", type=int, default=8, help="trainables, as a LoRA rank per matrix")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the frozen backbone")
    add("--clients", type=int, default=20)
    add("--alpha", type=float, default=0.3, help="Dirichlet concentration")
    add("--compute", nargs="+", choices=list(COMPUTE_PROFILES), default=["full"],
        help="what clients can train; a table for each")  # fmt: skip
    add("--weighting", choices=["uniform", "size"], default="uniform",
        help="of clients; size deals a Dirichlet partition to clients of unequal size")  # fmt: skip
    add("--rounds", type=int, default=20, help="rounds of the comparison")
    add("--local-steps", type=int, default=10)
    add("--batch-size", type=int, default=32)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the comparison")
    add("--evaluate-every", type=int, default=5, help="rounds between evaluations")
    add("--grid", type=float, nargs="*", default=[1e-3, 3e-3, 1e-2],
        help="learning rates; none: the library's defaults, no grid")  # fmt: skip
    add("--grid-rounds", type=int, default=8, help="rounds of a grid run")
    add("--rates-from", choices=["each", "dirichlet", "iid"], default="each",
        help="take the rates of one partition's grid for all (default: each its own)")  # fmt: skip
    add("--processes", type=int, default=2, help="runs at a time, each on one CPU thread")
    add_places(parser)
    options = parser.parse_args()
    options.model = options.model or MODELS[options.dataset]
    return options


def experiment_of(
    options: argparse.Namespace,
    name: str,
    lr: float | None,
    seed: int,
    rounds: int,
    partition: str,
    compute: str = "full",
) -> Experiment:
    """The experiment of one cell; without a rate, at the library's default."""
    variant = VARIANTS[name]
    return load_experiment(
        None,
        [
            f"dataset={options.dataset}",
            f"model={options.model}",
            f"model.precision={options.precision}",
            f"method={variant.method}",
            *variant.settings,
            f"budget={options.budget}",
            *([] if lr is None else [f"optimizer.lr={lr}"]),
            f"seed={seed}",
            f"partition.kind={partition}",
            f"partition.alpha={options.alpha}",
            f"partition.variant={'per-label' if options.weighting == 'size' else 'per-client'}",
            f"federation.weighting={options.weighting}",
            f"federation.compute={compute}",
            f"federation.clients={options.clients}",
            "federation.clients_per_round=3",
            f"federation.local_steps={options.local_steps}",
            f"federation.batch_size={options.batch_size}",
            f"federation.rounds={rounds}",
            f"evaluation.every={min(options.evaluate_every, rounds)}",
            # On a CPU larger batches leave the cache: 256 took a fifth longer for an image.
            "evaluation.batch_size=64",
            *words_of(options),
        ],
    )


def tune(
    options: argparse.Namespace, partition: str, console: Console
) -> tuple[dict[str, float], Section]:
    """The learning rate of each variant that has one of its own: best loss after a few rounds.

    By test loss, not accuracy: after few rounds accuracies on a hundred classes lie within their
    noise of each other, losses do not.
    """
    names = tuned_for(options.variants)
    if not options.grid:
        return _defaults(options, partition, names)
    cells = {
        f"grid: {VARIANTS[name].label}, {partition}, lr {lr:g}": experiment_of(
            options, name, lr, GRID_SEED, options.grid_rounds, partition
        )
        for name in names
        for lr in options.grid
    }
    runs = iter(run_all(cells, options.processes, console).values())
    rates: dict[str, float] = {}
    rows, data = [], {}
    for name in names:
        found = {lr: next(runs).summary["final"] for lr in options.grid}
        rates[name] = min(found, key=lambda lr: float(found[lr]["loss"]))
        edge = rates[name] in (min(found), max(found)) and len(found) > 1
        rows.append(
            [
                VARIANTS[name].label,
                *(f"{cell['loss']:.3f}, {cell['accuracy']:.2%}" for cell in found.values()),
                f"{rates[name]:g}" + (" (edge of the grid)" if edge else ""),
            ]
        )
        data[name] = {str(lr): cell for lr, cell in found.items()}
    return rates, Section(
        f"Learning rates: test loss and accuracy after {options.grid_rounds} rounds, "
        f"{_named(options, partition)}, seed {GRID_SEED}",
        ["method", *(f"lr {lr:g}" for lr in options.grid), "taken"],
        rows,
        [
            f"the rate with the lowest loss is taken{_where(options, partition)}; variants of a "
            "method take over its rate, FedProx takes FedIT's",
            "one seed and few rounds: a choice, not a finding; the seeds below are others, the "
            "test images are the same",
        ],
        data=data,
    )


def _defaults(
    options: argparse.Namespace, partition: str, names: list[str]
) -> tuple[dict[str, float], Section]:
    rates, rows = {}, []
    for name in names:
        chosen = experiment_of(options, name, None, GRID_SEED, options.rounds, partition).optimizer
        rates[name] = chosen.lr
        rows.append([VARIANTS[name].label, f"{chosen.lr:g}", chosen.lr_source])
    return rates, Section(
        f"Learning rates: the library's defaults, {_named(options, partition)}",
        ["method", "lr", "source"],
        rows,
        ["not tuned here: no grid was run; variants of a method take over its rate"],
    )


def compare(
    options: argparse.Namespace, rates: dict[str, dict[str, float]], console: Console, stem: str
) -> list[Section]:
    """Every variant at its rate in every place: curves, accuracies and what they cost."""
    places = list(itertools.product(options.partitions, options.compute))

    def label(name: str, partition: str, compute: str, seed: int) -> str:
        return f"{VARIANTS[name].label}, {_place(partition, compute)}, seed {seed}"

    # Seeds outermost: what has been run when somebody stops it is a whole comparison.
    cells = {
        label(name, partition, compute, seed): experiment_of(
            options, name, rate_of(name, rates[partition]), seed, options.rounds, partition, compute
        )
        for seed in options.seeds
        for partition, compute in places
        for name in options.variants
    }
    runs = run_all(cells, options.processes, console)
    sections = []
    for partition, compute in places:
        found = {
            name: [runs[label(name, partition, compute, seed)] for seed in options.seeds]
            for name in options.variants
        }
        figure = options.out / f"{stem}_{_place(partition, compute)}.png"
        sections.append(_section(options, rates[partition], partition, compute, found, figure))
    return sections


def _section(
    options: argparse.Namespace,
    rates: dict[str, float],
    partition: str,
    compute: str,
    found: dict[str, list[Run]],
    figure: Path,
) -> Section:
    first = next(iter(found.values()))
    untouched = statistics.fmean(run.summary["untouched"]["accuracy"] for run in first)
    limits = "" if compute == "full" else f" of {compute} compute"
    drawn = options.model == SMALL and options.dataset == "cifar100"
    figure.parent.mkdir(parents=True, exist_ok=True)
    curve = metric_of_run(
        [number for number, _ in first[0].curve],
        {VARIANTS[name].label: _mean_curve(runs) for name, runs in found.items()},
        references={"untouched, random head" if drawn else "untouched": untouched},
    )
    save_png(draw_curves, curve, figure)
    parameters = first[0].summary["parameters"]
    spread = "mean ± standard deviation" if len(options.seeds) > 1 else "one seed"
    return Section(
        f"{DATASETS[options.dataset]}, {options.clients} clients{limits}, "
        f"{_named(options, partition)}, {options.rounds} rounds of 3 clients x "
        f"{options.local_steps} steps of {options.batch_size}",
        COLUMNS,
        [_row(name, rate_of(name, rates), runs) for name, runs in found.items()],
        [
            f"{options.model}, budget {options.budget}; seeds "
            f"{', '.join(str(seed) for seed in options.seeds)} ({spread}); best: the highest mean "
            "over seeds of any evaluated round",
            f"untouched backbone: {untouched:.2%}{', its head is random' if drawn else ''}; the "
            f"head ({parameters['head']:,} numbers) is trained and averaged by every method and "
            "part of `trained`",
            "trained, up and down in numbers, up and down for all rounds together",
            f"s / round: median, training and evaluation, {options.processes} runs at a time on "
            "one CPU thread each",
            "aggregation error: of the new global update against the weighted mean of the "
            "clients' updates, relative, mean over rounds; spectral diagnostics of the last round",
            *_told(options, partition, compute, found),
        ],
        data={
            VARIANTS[name].label: [
                {key: run.summary[key] for key in KEPT}
                | {"curve": run.curve, "last_round": run.metrics[-1]}
                | {"aggregation_error": run.mean("aggregation_error"), "live": run.live}
                for run in runs
            ]
            for name, runs in found.items()
        },
        figure=figure.name,
    )


def _told(
    options: argparse.Namespace, partition: str, compute: str, found: dict[str, list[Run]]
) -> list[str]:
    """What only some comparisons need said."""
    lines = []
    if any(run.live for runs in found.values() for run in runs):
        lines.append(
            "live components: of the final model's LoRA pairs, those whose row of A and column of "
            "B are not both zero, mean over seeds; the others can never train again"
        )
    if compute != "full":
        shares = ", ".join(
            f"{level:g} of the budget: {share:.0%}"
            for level, share in zip(COMPUTE_LEVELS, COMPUTE_PROFILES[compute], strict=True)
        )
        lines.append(f"what a client can train, drawn once per client and seed: {shares}")
    if options.weighting == "size":
        name = next(iter(found))
        sizes = [
            prepare_rows(
                experiment_of(options, name, None, seed, options.rounds, partition)
            ).shards.sizes
            for seed in options.seeds
        ]
        ranges = "; ".join(f"{min(s)} to {max(s)}, median {statistics.median(s):g}" for s in sizes)
        lines.append(f"clients are weighed by their rows, by seed: {ranges}")
    return lines


def _where(options: argparse.Namespace, partition: str) -> str:
    other = options.rates_from not in ("each", partition)
    where = f" on {options.rates_from}, not here" if other else ""
    return where if options.compute == ["full"] else f"{where} with full compute"


def _place(partition: str, compute: str) -> str:
    return partition if compute == "full" else f"{partition}-{compute}"


def _named(options: argparse.Namespace, partition: str) -> str:
    if partition == "iid":
        return "IID"
    return f"Dirichlet({options.alpha:g})" + (" per label" if options.weighting == "size" else "")


def _mean_curve(runs: list[Run]) -> list[float]:
    return [
        statistics.fmean(accuracy for _, accuracy in points)
        for points in zip(*(run.curve for run in runs), strict=True)
    ]


def _row(name: str, lr: float, runs: list[Run]) -> list[str]:
    finals = [run.final for run in runs]
    final = f"{statistics.fmean(finals):.2%}"
    if len(finals) > 1:
        final += f" ± {statistics.stdev(finals) * 100:.2f}"
    summary = runs[0].summary
    live = [run.live for run in runs if run.live]
    seconds = [value for run in runs for value in run.summary["round_seconds"]]

    def mean(values: list[float | None], form: str) -> str:
        had = [value for value in values if value is not None]
        return format(statistics.fmean(had), form) if had else ""

    return [
        VARIANTS[name].label,
        f"{lr:g}",
        final,
        f"{max(_mean_curve(runs)):.2%}",
        format_count(sum(summary["parameters"].values())),
        format_count(statistics.fmean(run.summary["uploaded_parameters"] for run in runs)),
        format_count(statistics.fmean(run.summary["downloaded_parameters"] for run in runs)),
        f"{statistics.median(seconds):.1f}",
        mean([run.mean("aggregation_error") for run in runs], ".1e"),
        mean([run.last("effective_rank") for run in runs], ".2f"),
        mean([run.last("aggregation_variance") for run in runs], ".3g"),
        mean([run.last("svt_zeroed") for run in runs], ".1%"),
        f"{statistics.fmean(n for n, _ in live):.1f} of {live[0][1]}" if live else "",
    ]


if __name__ == "__main__":
    main()
