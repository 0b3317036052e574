"""The artifacts of a run: its figures and its model, both made from the run's state alone.

:func:`write_artifacts` writes those of a finished run, :func:`export_run` the model of any
checkpoint; both write models by :func:`write_model`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trishul_ray.adapters.export import export_merged, export_peft
from trishul_ray.data.partition import skewed_by
from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import Arrays, changed_sources, survey_in
from trishul_ray.federation.prepare import Prepared, prepare_run
from trishul_ray.federation.server import RunResult, broadcast_of
from trishul_ray.federation.workbench import Workbench, adapt_to, build_workbench, global_model
from trishul_ray.loading import build_experiment
from trishul_ray.methods.base import build_method
from trishul_ray.models.lookup import quiet_transformers
from trishul_ray.report.figures import heads_per_layer, label_distribution, metric_curve
from trishul_ray.report.tables import LabelCounts
from trishul_ray.report.uploads import (
    PANELS,
    client_matrices,
    diagnostics_curves,
    spectra,
    uploaded_spectrum,
)
from trishul_ray.storage import Store


def write_artifacts(
    experiment: Experiment, prepared: Prepared, result: RunResult, folder: Path, note: str
) -> None:
    """Write ``figures/``, and ``adapter/`` (PEFT) or ``model/`` (merged), into a local folder.

    ``note`` is a line above every figure.
    """
    with deterministic(experiment):
        _draw_figures(experiment, prepared, result, folder / "figures", note)
        bench = build_workbench(experiment, prepared)
        rounds = experiment.federation.rounds
        adapter, merged = folder / "adapter", folder / "model"
        write_model(bench, result.broadcast, rounds, adapter=adapter, merged=merged)


def export_run(run: str, directory: Path, *, merged: bool, runs: str) -> int:
    """Write the adapter, or the merged model, of a run's newest checkpoint; return its round.

    Args:
        run: The id of a run under ``runs``, or the folder of a run.
        directory: The folder to create.
        merged: Whether to write the whole model instead of the adapter.
        runs: The folder of all runs.

    Raises:
        InputError: The run does not exist, or ``directory`` is not empty.
        RunError: The run has no usable checkpoint, or its data or backbone have changed.
    """
    folder, _, name = run.rstrip("/").rpartition("/")
    home = Store.open(folder or runs).child(name)
    if not home.exists("config.yaml"):
        raise InputError(f"run {run!r} does not exist: no config.yaml in {home.uri}")
    fields = yaml.safe_load(home.read("config.yaml"))
    fields["storage"]["runs"] = folder or runs
    experiment = build_experiment(fields, note=False)
    if experiment.id != name:
        raise InputError(f"run {run!r}: its config.yaml now describes {experiment.id}, not {name}")
    prepared = prepare_run(experiment)
    checkpoints = open_checkpoints(experiment)
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        why = "; ".join(checkpoints.skipped) or "none was written"
        raise RunError(f"run {name} has no usable checkpoint: {why}")
    method = build_method(experiment.method, experiment.adapter)
    with deterministic(experiment):
        broadcast = broadcast_of(method, checkpoint.state, checkpoint.survey)
        bench = build_workbench(experiment, prepared)
        if changed := changed_sources(checkpoint.sources, bench.sources):
            raise RunError(f"the {changed} of run {name} have changed since it was made")
        target = {"merged" if merged else "adapter": directory}
        write_model(bench, broadcast, checkpoint.round, **target)
    return checkpoint.round


def write_model(
    bench: Workbench,
    broadcast: Arrays,
    round_number: int,
    *,
    adapter: Path | None = None,
    merged: Path | None = None,
) -> None:
    """Write the global model that a broadcast describes.

    Args:
        bench: The workbench of the run.
        broadcast: What clients receive after round ``round_number``.
        round_number: The last round.
        adapter: Folder of the PEFT adapter.
        merged: Folder of the whole model with the update in its weights. If both are given, this
            one is written only if an adapter cannot hold the update.

    Raises:
        InputError: The folder is not empty, or an adapter cannot hold the update.
    """
    adapt_to(bench, survey_in(broadcast))
    trained = global_model(bench, broadcast, round_number)
    fits_adapter = bool(bench.model.specs) and not trained.base
    if merged is not None and (adapter is None or not fits_adapter):
        with quiet_transformers():
            export_merged(bench.model, trained, merged)
    elif adapter is not None:
        export_peft(bench.model, trained, adapter, bench.settings.model.name)


def _draw_figures(
    experiment: Experiment, prepared: Prepared, result: RunResult, figures: Path, note: str
) -> None:
    figures.mkdir()
    headline = result.blueprint.task.headline
    measured = [r for r in result.records if headline in r]
    metric_curve(
        [r["round"] for r in measured],
        {experiment.method.name: [r[headline] for r in measured]},
        figures / f"{headline}.png",
        references={"untouched backbone": measured[0][headline]},
        metric=headline,
        note=note,
    )
    metric_curve(
        [r["round"] for r in result.records],
        {
            "test": _column(result.records, "loss"),
            "training, mean of the cohort": _column(result.records, "train_loss"),
        },
        figures / "loss.png",
        metric="loss",
        note=note,
    )
    held = client_labels(prepared, experiment)
    path = figures / "label_distribution.png"
    label_distribution(held.counts, path, classes=held.names, what=held.what, note=note)
    if heads := result.blueprint.heads:
        path = figures / "heads_per_layer.png"
        norms = [result.blueprint.block_norms[block] for block in heads]
        heads_per_layer(list(heads), list(heads.values()), path, norms, note=note)
    # The figures below show uploaded cores, which some methods do not have.
    if "uploaded" in result.spectra:
        uploaded_spectrum(result.spectra["uploaded"], figures / "uploaded_spectrum.png", note=note)
    diagnosed = [r for r in result.records if "spectral_entropy" in r]
    if diagnosed:
        diagnostics_curves(
            [r["round"] for r in diagnosed],
            {name: _column(diagnosed, name) for name in PANELS},
            {name: _column(diagnosed, f"delta_{name}") for name in PANELS},
            figures / "spectral_diagnostics.png",
            note=note,
        )
    if result.matrices and result.matrices["clients"].shape[1] > 1:
        clients, covariance = result.matrices["clients"], result.matrices["covariance"]
        similarity = result.matrices["principal_angle_similarity"]
        path = figures / "client_matrices.png"
        client_matrices(clients, covariance, similarity, path, note=note)
    if "before" in result.spectra:
        threshold = float(result.spectra["threshold"][0])
        path = figures / "spectra.png"
        spectra(result.spectra["before"], result.spectra["after"], threshold, path, note=note)


def _column(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record.get(name, math.nan) for record in records]


def client_labels(prepared: Prepared, experiment: Experiment) -> LabelCounts:
    """Count each client's rows by class, or by sub-dataset if the partition is by those."""
    info, train, shards = prepared.dataset.info, prepared.dataset.train, prepared.shards
    candidates = (skewed_by(info, experiment.partition), "label", "group")
    column = next((name for name in candidates if name in train.columns), None)
    if column is None:
        return LabelCounts(shards.sizes[:, None], ("all",), "rows")
    names = info.classes if column == "label" else info.groups
    owner = np.repeat(np.arange(shards.clients), shards.sizes)
    cells = owner * len(names) + train.column(column)[shards.permutation]
    counts = np.bincount(cells, minlength=shards.clients * len(names))
    what = "class" if column == "label" else "sub-dataset"
    return LabelCounts(counts.reshape(-1, len(names)), names, what)
