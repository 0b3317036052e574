"""The Python interface: :func:`run` an experiment, run a :func:`sweep`, or :func:`load` a run.

Runs have the same ids, files and recovery as with the commands ``trishul run`` and ``trishul
sweep``. Either interface resumes or reads the runs of the other.

Every error is an :class:`~trishul_ray.errors.InputError` or a
:class:`~trishul_ray.errors.RunError`, except errors of your callback. A process runs one experiment
or sweep at a time.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.user.python_rows import store_rows
from trishul_ray.errors import CorruptFileError, InputError, own_errors
from trishul_ray.experiment.loading import field_names, full_name, load_experiment
from trishul_ray.experiment.yaml_files import RawFields
from trishul_ray.methods.base import method_names
from trishul_ray.models.python_model import pass_model
from trishul_ray.report.summary import RunSummary
from trishul_ray.result import Result
from trishul_ray.runs.folder import open_run
from trishul_ray.runs.runner import run_steps
from trishul_ray.sweeps.cells import Sweep, TuneOptions
from trishul_ray.sweeps.loading import load_sweep
from trishul_ray.sweeps.run import reproduce
from trishul_ray.tracking.progress import RunProgress, SweepProgress
from trishul_ray.tracking.terminal import PlainConsole

#: Progress display on standard error: none, lines, or a live bar on a terminal or in a notebook
#: (otherwise lines).
Progress = Literal["off", "plain", "rich"]

#: Locked while this process runs an experiment or a sweep, since Ray and torch's settings are
#: shared.
_running = threading.Lock()


def run(
    dataset: Any = None,
    *,
    method: str | Mapping[str, Any] | None = None,
    model: str | nn.Module | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    progress: Progress = "rich",
    fresh: bool = False,
    on_round: Callable[[dict[str, float]], object] | None = None,
    **fields: Any,
) -> Result:
    """Run an experiment, resume it from its last round, or read the result of a finished one.

    Args:
        dataset: The name of a dataset (default ``digits``), or rows: a Hugging Face ``Dataset`` or
            ``DatasetDict``, a pandas or Arrow table, a list of dictionaries, a dictionary of
            columns, or ``{"train": rows, "test": rows}``. Columns have the names of the dataset
            ``table``, unless ``columns`` maps them, as in ``columns={"text": "body"}``.
        method: The name of a method (default ``trishul``), or its section.
        model: The name of a backbone, its section, or an ``nn.Module``. All linear layers of a
            module are adapted except a classification head named ``classifier``, unless ``targets``
            names other layers. The module receives pixel values, float [b, C, H, W], at the images'
            original size, or input ids and attention mask, int64 [b, n], from its tokenizer. It
            returns logits [b, K] for K classes.
        tokenizer: The fast tokenizer of an ``nn.Module`` that reads texts.
        config: A YAML file, or its content as a dictionary.
        progress: The progress display: ``"rich"``, ``"plain"`` or ``"off"``.
        fresh: Whether to delete an earlier run of the same experiment, and start over.
        on_round: Called in this process before the first round, as round 0, and after each round
            that this call runs, with the values of a row of :attr:`Result.history`. An exception
            stops the run between two rounds, and the same call resumes it.
        **fields: Fields of the experiment, which override ``config``: a section
            (``federation={"rounds": 10}``), or the last part of an unambiguous name (``rounds=10``,
            ``lr=1e-3``, ``runs="runs"``). ``trishul run --fields`` lists all fields.

    Returns:
        The finished run.

    Raises:
        InputError: The input is invalid. Nothing was changed.
        RunError: The run failed. Call it again with the same arguments to resume.

    Example:
        >>> import trishul_ray
        >>> result = trishul_ray.run("digits", method="fedit", rounds=10)  # doctest: +SKIP
        >>> result.final["accuracy"] > result.untuned["accuracy"]  # doctest: +SKIP
        True
    """
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round of type {type(on_round).__name__}: it must be a function")
    with own_errors():
        arguments = _arguments(dataset, method, model, tokenizer, fields)
        if isinstance(config, str):
            config = Path(config)
        if not isinstance(config, Path | Mapping | None):
            kind = type(config).__name__
            raise InputError(f"config of type {kind}: it must be a YAML file, or a dictionary")
        experiment = load_experiment(config, arguments=arguments)
    with (
        _alone(),
        RunProgress(experiment.federation.rounds, _console(progress)) as display,
    ):
        steps = run_steps(experiment, display, fresh=fresh)
        with closing(steps):
            started = False
            while True:
                with own_errors():
                    try:
                        report = next(steps)
                    except StopIteration as end:
                        finished = end.value
                        break
                # A resumed run first reports its earlier rounds.
                if on_round is not None and (started or not report.round):
                    for record in report.records:
                        on_round(record.row())
                started = True
    return Result(experiment, finished.home, finished.summary, repeated=finished.repeated)


def _arguments(
    dataset: Any,
    method: str | Mapping[str, Any] | None,
    model: str | nn.Module | Mapping[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the fields that the arguments of :func:`run` set; rows and modules are stored."""
    arguments = dict(fields)
    if method is not None:
        arguments["method"] = method
    if dataset is not None:
        arguments |= _dataset_fields(dataset, fields)
    if model is not None and not isinstance(model, str | Mapping):
        arguments["model"] = _pass_module(model, tokenizer)
    elif tokenizer is not None:
        raise InputError("tokenizer: only a model that is an nn.Module needs one; omit it")
    elif model is not None:
        arguments["model"] = model
    return arguments


@own_errors()
def sweep(
    file: str | Path | Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, Iterable[Any]] | None = None,
    retries: int = 2,
    stall_minutes: float = 30.0,
    concurrency: int | None = None,
    progress: Progress = "rich",
    **fields: Any,
) -> pd.DataFrame:
    """Run the missing runs of a grid or a search, like ``trishul sweep``.

    Args:
        file: A sweep file, or its content as a dictionary.
        axes: Instead of a file, the values of each varying field, such as ``{"lam": [0, 0.01],
            "seed": range(3)}``.
        retries: Number of retries of a failed cell, each resuming from its last round.
        stall_minutes: Minutes without a finished round after which a cell is retried.
        concurrency: Number of concurrent cells. The default is as many as the cluster has resources
            for.
        progress: The progress display: ``"rich"``, ``"plain"`` or ``"off"``.
        **fields: Fields of every run, as in :func:`run`.

    Returns:
        One row per cell: its label on each axis, the ``id`` of its run, its ``status``
        (``finished``, or why it has no result), the metrics after the last round, and ``reason``,
        which explains a missing result.

    Raises:
        InputError: The input is invalid. Nothing was run.
        RunError: Ray or Ray Tune failed. Call it again with the same arguments to resume.

    Example:
        >>> import trishul_ray
        >>> axes = {"method": ["fedit", "trishul"], "seed": range(3)}
        >>> table = trishul_ray.sweep(axes=axes, rounds=10)  # doctest: +SKIP
        >>> table.groupby("method")["accuracy"].mean()  # doctest: +SKIP
    """
    read = _read_sweep(file, axes, fields)
    with (
        _alone(),
        SweepProgress(_console(progress)) as display,
    ):
        options = TuneOptions(retries, stall_minutes, concurrency)
        (outcome,) = reproduce([read], options, display).outcomes
    rows = []
    for cell in outcome.cells:
        final = {
            name: v
            for name, v in (cell.summary.final if cell.summary else {}).items()
            if name != "round"
        }
        state = {"id": cell.id, "status": cell.status, **final, "reason": cell.reason}
        rows.append({**cell.labels, **state})
    return pd.DataFrame(rows)


@own_errors()
def load(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Result:
    """Load a finished run.

    Args:
        run: The id of the run, a prefix of the id, or the run's folder.
        runs: The folder or URI where runs are stored.
        model: The ``nn.Module`` that the run was called with, which is not stored with the run.
            Only :meth:`~trishul_ray.result.Result.model` and ``predict`` need it.
        tokenizer: The tokenizer that the run was called with, if any.

    Returns:
        The finished run.

    Raises:
        InputError: No run or several runs match, or the run has not finished.
        CorruptFileError: A file is corrupt. Repeat the run to restore it from the last checkpoint.

    Example:
        >>> import trishul_ray
        >>> result = trishul_ray.load("1f0c2f", runs="s3://bucket/runs")  # doctest: +SKIP
        >>> result.final["accuracy"]  # doctest: +SKIP
    """
    if model is not None:
        _pass_module(model, tokenizer)
    home, experiment = open_run(str(run), str(runs))
    try:
        summary = RunSummary.read(home)
    except FileNotFoundError:
        raise InputError(
            f"run {experiment.id} has not finished: no result.json in {home.uri}; run it again to "
            "resume it"
        ) from None
    for name, fault in summary.damaged_files(home).items():
        if fault == "corrupt":
            again = "run it again to restore the file from its last checkpoint"
            raise CorruptFileError(f"{home.place(name)} is corrupt (checksum differs); {again}")
    return Result(experiment, home, summary, repeated=True)


def _dataset_fields(dataset: Any, fields: Mapping[str, Any]) -> RawFields:
    """Build the fields that select a dataset, and store rows that were passed instead of a name."""
    if isinstance(dataset, str):
        return {"data.name": dataset}
    section = fields.get("data", {})
    columns = fields.get("columns", section.get("columns", {}))
    storage = fields.get("storage", {})
    paths = StoragePaths.at(fields.get("cache", storage.get("cache")))
    folder = store_rows(dataset, paths.cache, columns)
    return {"data.name": "rows", "data.path": str(folder)}


def _pass_module(module: Any, tokenizer: PreTrainedTokenizerBase | None) -> RawFields:
    """Register a module in this process, and return its section ``model``."""
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model of type {type(module).__name__}: it must be a name, a section, or an nn.Module"
        )
    passed = pass_model(module, tokenizer)
    return {"name": passed.name, "content": f"{passed.content} {passed.name}"}


@contextmanager
def _alone() -> Iterator[None]:
    """Reject a second experiment or sweep while this process is running one."""
    if not _running.acquire(blocking=False):
        raise InputError(
            "this process is already running an experiment; wait for it, use another process, or "
            "run several experiments with trishul_ray.sweep"
        )
    try:
        yield
    finally:
        _running.release()


def _console(kind: Progress) -> Console:
    if kind not in get_args(Progress):
        raise InputError(f"progress={kind!r}: must be {', '.join(map(repr, get_args(Progress)))}")
    live = None if kind == "rich" else False
    return PlainConsole(stderr=True, quiet=kind == "off", force_terminal=live, force_jupyter=live)


def _read_sweep(
    file: str | Path | Mapping[str, Any] | None,
    axes: Mapping[str, Iterable[Any]] | None,
    fields: Mapping[str, Any],
) -> Sweep:
    """Load the sweep that the arguments of :func:`sweep` describe."""
    if (file is None) == (axes is None):
        raise InputError("sweep: pass either a file, or its content, or axes={field: values}")
    known = list(dict.fromkeys(name for m in method_names() for name in field_names(m)))
    values = dict(fields)
    if hasattr(values.get("model"), "forward"):
        raise InputError("model: a sweep requires the name of a model, which its trials load")
    if "dataset" in values:
        values |= _dataset_fields(values.pop("dataset"), fields)
    # Overrides are YAML, which includes JSON.
    overrides = [f"{full_name(k, known)}={json.dumps(_plain(k, v))}" for k, v in values.items()]
    if isinstance(file, str | Path):
        return load_sweep(Path(file), overrides)
    if axes is None:
        return load_sweep(_plain("sweep", file), overrides)
    if not isinstance(axes, Mapping) or not axes:
        raise InputError(f"axes={axes!r}: pass {{field: values}} with at least one field")
    content: dict[str, Any] = {}
    for name, labels in axes.items():
        if isinstance(labels, str) or not isinstance(labels, Iterable):
            kind = type(labels).__name__
            raise InputError(f"axes: {name!r} is of type {kind}: it must be a list of values")
        by_label = isinstance(labels, Mapping)  # fields keyed by label
        content[name if by_label else full_name(name, known)] = labels if by_label else [*labels]
    return load_sweep({"axes": _plain("axes", content)}, overrides)


def _plain(name: str, value: Any) -> Any:
    """Convert a value to plain numbers, strings, lists and dictionaries."""

    def convert(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "item"):  # a NumPy scalar
            return value.item()
        if isinstance(value, range | tuple | Mapping):
            return dict(value) if isinstance(value, Mapping) else list(value)
        raise InputError(
            f"{name} of type {type(value).__name__}: a sweep accepts names, numbers and strings"
        )

    return json.loads(json.dumps(value, default=convert))
