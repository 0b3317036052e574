"""What a run has learned: its newest checkpoint as a model, and its export. No data are read."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from trishul_ray.adapters.export import AdapterExport, export_merged, export_peft
from trishul_ray.adapters.model import Trained
from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import build_experiment
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import ArrayState, changed_sources
from trishul_ray.federation.server import broadcast_of
from trishul_ray.federation.workbench import (
    ModelBench,
    adapt_to,
    build_model_bench,
    global_model,
)
from trishul_ray.methods.base import build_method
from trishul_ray.models.lookup import quiet_transformers
from trishul_ray.runs.model_files import name_backbone, name_classes, write_model_files
from trishul_ray.runs.results import run_ids
from trishul_ray.storage import Store

#: Ids to name in one message.
_MAX_NEAR = 3


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run after a round."""

    bench: ModelBench
    trained: Trained
    round: int


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        form: ``adapter`` (PEFT) or ``model`` (all weights, with the update in them).
        round: the last round.
        note: what it is, in one line.
        ranks: smallest and largest LoRA rank of an adapter's layers.
        relative_error: the largest relative error of an update that includes changes of the frozen
            weights, in the Frobenius norm; 0 where there are none.
    """

    form: str
    round: int
    note: str
    ranks: list[int] = field(default_factory=list)
    relative_error: float = 0.0


def open_run(run: str, runs: str) -> tuple[Store, Experiment]:
    """Return the folder of a run and its experiment.

    Args:
        run: The id of a run under ``runs``, or the beginning of one, or the folder of a run.
        runs: The folder of all runs.

    Raises:
        InputError: The run does not exist, several begin so, or its config.yaml is not its own.
    """
    folder, _, name = run.rstrip("/").rpartition("/")
    store = Store.open(folder or runs)
    home = store.child(name)
    if not name or not home.exists("config.yaml"):
        name = _complete(run, name, store)
        home = store.child(name)
    fields = yaml.safe_load(home.read("config.yaml"))
    fields["storage"]["runs"] = folder or runs
    experiment = build_experiment(fields, note=False)
    if experiment.id != name:
        raise InputError(f"run {run!r}: its config.yaml now describes {experiment.id}, not {name}")
    return home, experiment


def _complete(run: str, prefix: str, store: Store) -> str:
    """Return the one id that begins with ``prefix``, or raise an InputError with those near it."""
    ids = run_ids(store)
    found = [name for name in ids if prefix and name.startswith(prefix)]
    if len(found) == 1 and store.child(found[0]).exists("config.yaml"):
        return found[0]
    if found:
        near = f"several begin so: {', '.join(found[:_MAX_NEAR])}"
    else:
        close = difflib.get_close_matches(prefix, ids, n=_MAX_NEAR, cutoff=0.5)
        near = f"the nearest are {', '.join(close)}" if close else f"it holds {len(ids)} runs"
    missing = f"no config.yaml in {store.place(prefix)}"
    raise InputError(f"run {run!r} does not exist: {missing}; {near}")


def load_trained(experiment: Experiment) -> TrainedRun:
    """Return the model of the newest checkpoint of an experiment's run.

    Raises:
        InputError: The backbone is not on this machine.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    checkpoints = open_checkpoints(experiment)
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        why = "; ".join(checkpoints.skipped) or "none was written"
        raise RunError(f"run {experiment.id} has no usable checkpoint: {why}")
    method = build_method(experiment.method, experiment.adapter)
    with deterministic(experiment):
        broadcast = broadcast_of(method, checkpoint.state)
        assert checkpoint.info is not None  # the server's checkpoints have it
        bench = build_model_bench(experiment, checkpoint.info)
        if changed := changed_sources(checkpoint.sources, bench.sources):
            raise RunError(f"the {changed} of run {experiment.id} have changed since it was made")
        return trained_by(bench, broadcast, checkpoint.round)


def trained_by(bench: ModelBench, broadcast: ArrayState, round_number: int) -> TrainedRun:
    """Return the global model that the broadcast after a round describes."""
    adapt_to(bench, broadcast.survey)
    return TrainedRun(bench, global_model(bench, broadcast, round_number), round_number)


def fits_adapter(bench: ModelBench) -> bool:
    """Return whether the method adapts layers; full fine-tuning changes all weights instead."""
    return any(True for _ in bench.model.iter_layers(bench.initial))


def export_run(run: str, directory: Path, *, merged: bool, runs: str) -> Export:
    """Write the adapter, or the merged model, of a run's newest checkpoint.

    Full fine-tuning has no adapter: its model is written instead.

    Args:
        run: The id of a run under ``runs``, or the folder of a run.
        directory: The folder to create.
        merged: Whether to write the whole model instead of the adapter.
        runs: The folder of all runs.

    Raises:
        InputError: The run does not exist, or ``directory`` is not empty.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    _, experiment = open_run(run, runs)
    return write_model(load_trained(experiment), directory, merged=merged, notes={})


def write_model(
    run: TrainedRun,
    directory: Path,
    *,
    merged: bool,
    notes: dict[str, str],
    place: str | None = None,
) -> Export:
    """Write a trained model with all that others need to use it.

    Args:
        run: The model.
        directory: The folder to create.
        merged: Whether to write the whole model even where an adapter holds the update.
        notes: Further lines of the model card, by title.
        place: Where the folder will lie in the end; by default where it is written.

    Raises:
        InputError: The folder is not empty.
    """
    bench, trained = run.bench, run.trained
    notes = {"rounds": str(run.round)} | notes
    name_classes(bench.model.model, bench)
    if merged or not fits_adapter(bench):
        why = "" if merged else f", since {bench.settings.method.name} trains every weight"
        export = Export("model", run.round, f"the whole model, with the update in its weights{why}")
        notes |= {"weights": export.note}
        with deterministic(bench.settings), quiet_transformers():
            export_merged(
                bench.model,
                trained,
                directory,
                beside=lambda folder: write_model_files(bench, folder, backbone=None, notes=notes),
            )
        return export
    backbone = name_backbone(bench, place or str(directory.absolute()))
    with deterministic(bench.settings), quiet_transformers():
        adapter = export_peft(
            bench.model,
            trained,
            directory,
            backbone.name,
            revision=backbone.revision,
            beside=lambda folder: write_model_files(bench, folder, backbone=backbone, notes=notes),
        )
    return _describe(adapter, run.round)


def _describe(adapter: AdapterExport, round_number: int) -> Export:
    ranks = [min(adapter.ranks.values()), max(adapter.ranks.values())]
    shown = f"{ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} to {ranks[1]}"
    note = f"PEFT LoRA adapter of rank {shown}"
    if adapter.folded:
        note += (
            f", which holds the changes of the frozen weights, too (relative error "
            f"{adapter.error:.1g})"
        )
    return Export("adapter", round_number, note, ranks, adapter.error)
