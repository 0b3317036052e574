"""Commands for a finished run: export its model, score its responses, and verify its rounds."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from trishul_ray.cli.output import (
    Plugins,
    Run,
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
    run_id: Run,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model, with the update merged in.")
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Write the personalized model of this client (number or name); only for "
            "personalized methods.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Truncate updates to this rank, and print the error."),
    ] = None,
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Write a run's PEFT adapter, or the model with the update merged in.

    The command needs no data. It reads the newest checkpoint, so it can also export an unfinished
    run. The folder also contains a model card, the class names, and the image processor or the
    tokenizer. For full fine-tuning, which has no adapter, it contains the whole model.
    """
    from trishul_ray.runs.export import export_run

    written = export_run(run_id, directory, merged=merged, runs=runs, client=client, rank=rank)
    print_line(f"{written.note}, after round {written.round}: {directory}")


def verify(
    run_id: Run,
    rounds: Annotated[
        str, typer.Option(metavar="N|all", help="Number of rounds to repeat, from the first.")
    ] = "2",
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Repeat rounds of a finished run, and compare the state after each.

    The run may be a folder copied from another machine if its data and backbone are available here.
    If a state differs, the exit code is 1, and the first difference in software or hardware is
    printed.
    """
    from trishul_ray.runs.verify import verify_run

    if not (rounds == "all" or rounds.isdecimal()):
        raise InputError(f"--rounds {rounds!r} must be a number of rounds, or all")
    number = None if rounds == "all" else int(rounds)
    with show_progress() as progress:
        found = verify_run(run_id, number, runs=runs, progress=progress.task_progress("verifying"))
    table = Table("round", "recorded", "found", "equal", "largest difference")
    for each in found.rounds:
        name, size = each.difference or ("", 0.0)
        shown = f"{name} {size:.2g}" if name else ""
        equal = "yes" if each.equal else "no"
        table.add_row(str(each.round), each.recorded[:12], each.found[:12], equal, shown)
    print_table(table)
    if not found.equal:
        why = f"the run has {found.stack}" if found.stack else "software and hardware are the same"
        print_line(f"the states differ; {why}")
        raise typer.Exit(1)


def evaluate(
    run_id: Run,
    rows: Annotated[
        int, typer.Option(min=1, help="Maximum number of rows, spread evenly over groups.")
    ] = 500,
    batch: Annotated[int, typer.Option(min=1, help="Rows per batch.")] = 16,
    untuned: Annotated[
        bool, typer.Option("--untuned", help="Also evaluate the untuned model.")
    ] = False,
    validation: Annotated[
        bool, typer.Option("--validation", help="Evaluate validation rows instead of test rows.")
    ] = False,
    new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens per response; default: task.target_length."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Run tasks of lm-evaluation-harness instead (extra `eval`); write harness.json.",
        ),
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="With --tasks: examples per prompt.")] = 0,
    task_files: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --tasks: folder with files of custom tasks."),
    ] = None,
    runs: Runs = "runs",
    plugin: Plugins = None,
) -> None:
    """Generate and score responses of an instruction-tuned model.

    The prompts are test rows. Decoding is greedy, with the run's template, precision and limits.
    The command writes `eval.json` and, with each response, `answers.jsonl` next to `result.json`;
    repeat it to show the scores. Tables of sweeps show a score with `eval: {score: rouge_l}`.
    """
    from trishul_ray.runs.evaluate import evaluate_run
    from trishul_ray.runs.harness import run_harness

    if tasks is None:
        with show_progress() as progress:
            found = evaluate_run(
                run_id, runs=runs, rows=rows, batch_size=batch, untuned=untuned,
                split="validation" if validation else "test", new_tokens=new_tokens,
                progress=progress.task_progress("evaluating"),
            )  # fmt: skip
        _print_scores(found)
        return
    if untuned or validation or new_tokens:
        raise InputError("--tasks does not support --untuned, --validation and --new-tokens")
    found = run_harness(
        run_id, tasks.split(","), task_files, runs=runs, limit=rows, batch_size=batch,
        num_fewshot=shots,
    )  # fmt: skip
    for name, numbers in found.items():
        scores = [f"{k} {v:.4g}" for k, v in numbers.items() if isinstance(v, float)]
        print_field(name, ", ".join(scores))


def _print_scores(found: "Json") -> None:
    """Print the scores of responses, also per group, and warn if few responses end."""
    from rich.table import Table

    from trishul_ray.runs.evaluate import FEW_END

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
    if (ended := found["tuned"]["ended"]) < FEW_END:
        print_line(f"warning: only {ended:.0%} of the responses end; see answers.jsonl", err)
