"""Commands on the model of a run: export it, and score what it generates."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trishul_ray.cli.output import (
    Plugins,
    Runs,
    err,
    print_field,
    print_line,
    print_table,
    show_progress,
)
from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.storage.durable import Json


def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model with the update merged in.")
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Write this client's own model, by number or name, for a method that leaves a "
            "part of the model with each client.",
        ),
    ] = None,
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Write a run's PEFT adapter, or the model with the update merged in.

    Reads the newest checkpoint, so that a run in progress can be exported too, and needs no data.
    The folder also has a model card, the class names, and the image processor or the tokenizer.
    Full fine-tuning has no adapter: its model is written.
    """
    from trishul_ray.runs.export import export_run

    written = export_run(run_id, directory, merged=merged, runs=runs, client=client)
    print_line(f"{written.note}, after round {written.round}: {directory}")


def evaluate(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or its folder.")],
    rows: Annotated[
        int, typer.Option(min=1, help="Most rows, in equal shares of every group.")
    ] = 500,
    batch: Annotated[int, typer.Option(min=1, help="Rows answered at once.")] = 16,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Also evaluate the backbone before training.")
    ] = False,
    validation: Annotated[
        bool, typer.Option("--validation", help="Take validation rows in place of test rows.")
    ] = False,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer. Default: task.target_length."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Tasks of lm-evaluation-harness to run instead (extra `eval`), into harness.json.",
        ),
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="--tasks: examples in each prompt.")] = 0,
    task_files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="--tasks: a folder with files of custom tasks."),
    ] = None,
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Score what a run of instruction tuning generates for test rows.

    Greedy, with the run's own template, precision and limits. Writes `eval.json` and, with each
    answer, `answers.jsonl` next to `result.json`; repeat the command to show them. Tables show a
    score with `eval: {score: rouge_l}`.
    """
    from trishul_ray.runs.evaluate import evaluate_run
    from trishul_ray.runs.harness import run_harness

    if tasks is not None:
        given = {"--untuned": untuned, "--validation": validation, "--new-tokens": new_tokens}
        if unread := [option for option, value in given.items() if value]:
            raise InputError(f"{unread[0]}: --tasks runs the harness, which does not take it")
        how = {"limit": rows, "batch_size": batch, "num_fewshot": shots}
        _print_harness(run_harness(run_id, tasks.split(","), task_files, runs=runs, **how))
        return
    with show_progress() as progress:
        found = evaluate_run(
            run_id, runs=runs, rows=rows, batch_size=batch, untuned=untuned,
            split="validation" if validation else "test", new_tokens=new_tokens,
            progress=progress.task_progress("evaluating"),
        )  # fmt: skip
    _print_scores(found)


def _print_harness(results: "Json") -> None:
    for name, numbers in results.items():
        scores = {k: v for k, v in numbers.items() if isinstance(v, float)}
        print_field(name, ", ".join(f"{k} {v:.4g}" for k, v in scores.items()))


def _print_scores(found: "Json") -> None:
    """Print the scores of answers, by group too, and warn where hardly any answer ends."""
    from rich.table import Table

    from trishul_ray.runs.evaluate import FEW_END, MUCH_REPEATED

    models = [name for name in ("tuned", "untuned") if name in found]
    table = Table(
        "score", *models, title=f"{found['rows']:,} of {found['of']:,} {found['split']} rows"
    )
    for score in [name for name, value in found["tuned"].items() if isinstance(value, float)]:
        table.add_row(score, *(f"{found[model].get(score, math.inf):.4g}" for model in models))
    for group, scores in found["tuned"].get("groups", {}).items():
        each = [found[model]["groups"][group].get("rouge_l", math.nan) for model in models]
        table.add_row(f"rouge_l, {scores['rows']:,} rows of {group}", *(f"{x:.4g}" for x in each))
    print_table(table)
    ended, repeated = found["tuned"]["ended"], found["tuned"].get("repeated", 0.0)
    if ended < FEW_END:
        why = "the model has hardly learned to stop, or the template has no end that is generated"
        if repeated > MUCH_REPEATED:
            why = f"{repeated:.0%} of their text repeats itself, as greedy ones of small models do"
        print_line(f"warning: {ended:.0%} of the answers end: {why}; look at the answers", err)
