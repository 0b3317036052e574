"""Real texts through every text task, with small models: the test loss falls.

    python benchmarks/texts.py [options]

RTE and SST-2 by prompt and label words on a small LLaMA, MRQA and 20 Newsgroups as text to text on
a small T5, TRISHUL over 20 clients. Both models read bytes, have two blocks of width 128 and are
pretrained here for a minute (`trishul pretrain`): the losses say that gradients, batches and masks
are right; the scores say nothing about a method. Runs land under their ids in --runs: a repeated
command reads what is there. Needs a mirror with the datasets (TRISHUL_HUB or --hub), or the hub.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from _results import Report, Section, told_by
from _runs import Run, add_places, run_all, words_of

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.pretraining import ensure_pretrained
from trishul_ray.report.figures.curves import draw_curves, metric_of_run
from trishul_ray.report.figures.drawing import save_png
from trishul_ray.tracking.progress import RunProgress

#: Dataset, model, and what makes the run small: tokens that hold a question's end and its context.
CELLS = {
    "RTE, label words": ("glue/rte", "llama-tiny", ["task.max_length=256"]),
    "SST-2, label words": ("glue/sst2", "llama-tiny", ["task.max_length=160"]),
    "MRQA, text to text": ("mrqa", "t5-tiny", ["task.max_length=256", "task.target_length=24"]),
    "20 Newsgroups, text to text": (
        "20newsgroups",
        "t5-tiny",
        ["task.max_length=256", "task.target_length=20"],
    ),
}


def main() -> None:
    """Run all, draw them, write the page."""
    options = _arguments()
    report = Report("texts", options, "processes")
    try:
        cells = {label: experiment_of(options, *cell) for label, cell in CELLS.items()}
        # Before processes that would wait for each other's pretraining.
        for name, cell in {c.model.name: c for c in cells.values()}.items():
            with RunProgress(1, report.console) as progress:
                tell = progress.task_progress(f"pretraining {name}")
                ensure_pretrained(Backbone.of(cell.model, cell.storage.places), tell, on_ray=False)
        runs = run_all(cells, options.processes, report.console)
    except (InputError, RunError) as error:
        sys.exit(f"error: {error}")
    report.add(section_of(options, runs, options.out / f"{report.stem}.png"))


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__)
    add = parser.add_argument
    add("--method", default="trishul")
    add("--budget", type=int, default=4, help="trainables, as a LoRA rank per matrix")
    add("--rounds", type=int, default=10)
    add("--local-steps", type=int, default=25)
    add("--batch-size", type=int, default=16)
    add("--lr", type=float, default=1e-2, help="Adam's learning rate")
    add("--test-rows", type=int, default=200, help="rows of each test set that are measured")
    add("--seed", type=int, default=1)
    add("--processes", type=int, default=os.cpu_count(), help="runs at a time (default: CPUs)")
    add_places(parser)
    return parser.parse_args()


def experiment_of(
    options: argparse.Namespace, dataset: str, model: str, words: list[str]
) -> Experiment:
    """One of the runs."""
    return load_experiment(
        None,
        [
            f"dataset={dataset}",
            f"model={model}",
            f"method={options.method}",
            f"budget={options.budget}",
            f"optimizer.lr={options.lr}",
            f"seed={options.seed}",
            f"federation.local_steps={options.local_steps}",
            f"federation.batch_size={options.batch_size}",
            f"federation.rounds={options.rounds}",
            f"evaluation.limit={options.test_rows}",
            *words,
            *words_of(options),
        ],
    )


def section_of(options: argparse.Namespace, runs: dict[str, Run], figure: Path) -> Section:
    """Losses over rounds, and what each run scored and cost."""
    figure.parent.mkdir(parents=True, exist_ok=True)
    losses = {label: [m["loss"] for m in run.metrics] for label, run in runs.items()}
    save_png(draw_curves, metric_of_run(range(options.rounds + 1), losses, metric="loss"), figure)
    rows = []
    for label, run in runs.items():
        loss, final = losses[label], run.summary["final"]
        scores = [n for n in (run.summary["headline"], "exact_match") if n in final]
        rows.append(
            [
                label,
                run.summary["config"]["model"]["name"],
                f"{loss[0]:.4f}",
                f"{loss[options.rounds // 2]:.4f}",
                f"{loss[-1]:.4f}",
                ", ".join(f"{name} {final[name]:.1%}" for name in scores),
                f"{statistics.median(run.summary['round_seconds']):.1f}",
            ]
        )
    half = options.rounds // 2
    return Section(
        f"Text tasks on real rows, {options.method}, 20 clients",
        [
            "",
            "model",
            "loss, untouched",
            f"round {half}",
            f"round {options.rounds}",
            "scores",
            "s / round",
        ],
        rows,
        [
            f"{options.rounds} rounds of 3 clients x {options.local_steps} steps of "
            f"{options.batch_size}, learning rate {options.lr:g}; each dataset's own partition",
            f"loss: mean over {options.test_rows} test rows (a seeded subset); of the label words "
            "after a prompt, or of the answer's bytes",
            "the models are two blocks of width 128 on bytes: the scores say nothing of a method",
            "s / round: median with evaluation, several runs at a time on one CPU thread each",
        ],
        data={label: run.told() for label, run in runs.items()},
        figure=figure.name,
    )


if __name__ == "__main__":
    main()
