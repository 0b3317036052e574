"""The Python interface: :func:`run` an experiment, :func:`load` one that has run.

Both give a :class:`~trishul_ray.result.Result`. A run has the same id, files and recovery as with
the command ``trishul run``: either continues, or reads, what the other began.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trishul_ray.errors import CorruptFileError, InputError, RunError, at_loss, describe_os_error
from trishul_ray.federation.determinism import set_environment

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from trishul_ray.result import Result
    from trishul_ray.tracking.progress import RunProgress

#: How to show the progress of a run: not at all, as lines, or as a live bar where there is a
#: terminal or a notebook (elsewhere as lines); always on standard error.
Progress = Literal["off", "plain", "rich"]


def run(
    dataset: Any = None,
    *,
    method: "str | Mapping[str, Any] | None" = None,
    model: "str | nn.Module | Mapping[str, Any] | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    config: "str | Path | Mapping[str, Any] | None" = None,
    progress: Progress = "rich",
    fresh: bool = False,
    **fields: Any,
) -> "Result":
    """Run an experiment, or continue it where it stopped; a finished one is read.

    Args:
        dataset: The name of a dataset (default ``digits``), or rows: a Hugging Face ``Dataset`` or
            ``DatasetDict``, a table of pandas or Arrow, a list of dictionaries, a dictionary of
            columns, or ``{"train": rows, "test": rows}``. Their columns are those of the dataset
            ``table``; ``columns={"text": "body"}`` names others.
        method: The name of a method (default ``trishul``), or its section.
        model: The name of a backbone, its section, or any ``nn.Module``: all its linear layers but
            a classification head named ``classifier`` are adapted, unless ``targets`` names others.
            It takes pixel values [b, C, H, W] of the images' own size, or input ids and mask [b, n]
            of its tokenizer, and returns logits [b, K].
        tokenizer: The fast tokenizer of a ``model`` that reads texts.
        config: A YAML file, or its content as a dictionary.
        progress: How to show the progress.
        fresh: Whether to start over: an earlier run of the same experiment is deleted.
        **fields: Fields of the experiment over those of ``config``: a section
            (``federation={"rounds": 10}``), or the last part of a field's name where it is the only
            one (``rounds=10``, ``lr=1e-3``, ``runs="runs"``). ``trishul run --fields`` lists them.

    Returns:
        The finished run.

    Raises:
        InputError: The input is wrong; nothing was changed.
        RunError: The run failed; call it again with the same arguments to continue.
    """
    set_environment()  # before torch is imported
    from trishul_ray.loading import experiment_of_arguments
    from trishul_ray.result import Result
    from trishul_ray.runs.runner import run_experiment

    arguments = dict(fields)
    if method is not None:
        arguments["method"] = method
    if dataset is not None:
        arguments |= _dataset_fields(dataset, fields)
    module = None if model is None or isinstance(model, str | Mapping) else model
    if module is not None:
        arguments["model"] = _pass_module(module, tokenizer)
    elif model is not None:
        arguments["model"] = model
    if isinstance(config, str):
        config = Path(config)
    experiment = experiment_of_arguments(config, arguments)
    with (
        _progress(progress, experiment.federation.rounds) as display,
        at_loss(lambda why: display.note(f"{why}. Repeat the call to continue.")),
    ):
        try:
            finished = run_experiment(experiment, display, fresh=fresh)
        except RunError:
            raise
        except OSError as error:
            raise RunError(describe_os_error(error)) from error
    return Result(experiment, finished.home, finished.summary, repeated=finished.repeated)


def load(
    run: "str | Path",
    *,
    runs: str = "runs",
    model: "nn.Module | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> "Result":
    """Load a finished run.

    Args:
        run: Its id, or its folder.
        runs: The folder or URI where runs are stored.
        model: The ``nn.Module`` of a run on one, which is not stored with the run; only
            :meth:`~trishul_ray.result.Result.model` and ``predict`` need it.
        tokenizer: Its tokenizer, if it has one.

    Raises:
        InputError: There is no such run, or it has not finished.
        CorruptFileError: One of its files is damaged; running it again restores the file from its
            last checkpoint.
    """
    set_environment()
    from trishul_ray.models.from_python import pass_model
    from trishul_ray.result import Result
    from trishul_ray.runs.results import damaged_files, read_result
    from trishul_ray.runs.trained import open_run

    if model is not None:
        pass_model(model, tokenizer)
    home, experiment = open_run(str(run), runs)
    try:
        summary = read_result(home)
    except FileNotFoundError:
        raise InputError(
            f"run {experiment.id} has not finished: no result.json in {home.uri}; run it again to "
            "continue it"
        ) from None
    for name, fault in damaged_files(summary, home).items():
        if fault == "corrupt":
            again = "run it again to restore the file from its last checkpoint"
            raise CorruptFileError(f"{home.place(name)} is corrupt (checksum differs); {again}")
    return Result(experiment, home, summary, repeated=True)


def _dataset_fields(dataset: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that name a dataset, or the rows that were passed in its place."""
    if isinstance(dataset, str):
        return {"data.name": dataset}
    from trishul_ray.data.from_python import store_rows
    from trishul_ray.storage import Places

    section = fields.get("data", {})
    columns = fields.get("columns", section.get("columns", {}))
    storage = fields.get("storage", {})
    places = Places.at(fields.get("cache", storage.get("cache")))
    folder = store_rows(dataset, places.cache, columns)
    return {"data.name": "rows", "data.path": str(folder)}


def _pass_module(module: Any, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    """Return the section ``model`` of a module, which becomes known to this process."""
    from torch import nn

    from trishul_ray.models.from_python import pass_model

    if not isinstance(module, nn.Module):
        raise InputError(
            f"model of type {type(module).__name__}: it must be a name, a section, or an nn.Module"
        )
    passed = pass_model(module, tokenizer)
    return {"name": passed.name, "content": f"{passed.content} {passed.name}"}


def _progress(kind: Progress, rounds: int) -> "RunProgress":
    from rich.console import Console

    from trishul_ray.tracking.progress import RunProgress

    if kind not in get_args(Progress):
        raise InputError(f"progress={kind!r}: must be {', '.join(map(repr, get_args(Progress)))}")
    console = Console(stderr=True, quiet=kind == "off")
    if kind != "rich":
        console = Console(stderr=True, quiet=kind == "off", force_terminal=False)
    return RunProgress(rounds, console)
