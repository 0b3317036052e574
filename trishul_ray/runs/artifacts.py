"""The artifacts of a finished run: its figures and its model, both made from its state alone."""

import math
from pathlib import Path
from typing import Any

from trishul_ray.data.partition import client_names, skewed_by
from trishul_ray.data.prepare import Coverage
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.server import RunResult
from trishul_ray.federation.workbench import build_model_bench, class_mix
from trishul_ray.report.figures import heads_per_layer, label_distribution, metric_curve
from trishul_ray.report.outcomes import LabelCounts
from trishul_ray.report.scores import scores_by_name
from trishul_ray.report.uploads import (
    PANELS,
    client_matrices,
    diagnostics_curves,
    spectra,
    uploaded_spectrum,
)
from trishul_ray.runs.trained import Export, fits_adapter, trained_by, write_model


def write_artifacts(
    experiment: Experiment,
    prepared: Prepared,
    result: RunResult,
    folder: Path,
    coverage: Coverage,
) -> Export:
    """Write ``figures/``, and ``adapter/`` (PEFT) or ``model/`` (merged), into a local folder.

    Returns:
        What the model is.
    """
    home = run_folder(experiment)
    with deterministic(experiment):
        _draw_figures(experiment, prepared, result, folder / "figures", coverage)
        bench = build_model_bench(experiment, result.blueprint.info)
        run = trained_by(bench, result.broadcast, experiment.federation.rounds)
        name = "adapter" if fits_adapter(bench) else "model"
        headline = result.blueprint.metrics.headline
        notes = {
            headline: f"{result.records[-1][headline]:.4f} ({coverage.sentence})",
            "clients": f"{experiment.federation.clients}, partition {experiment.partition.kind}",
        }
        # Where it will lie: the folder given is a local one, which is copied there.
        place = f"{home.root}/{name}" if home.is_local else name
        return write_model(run, folder / name, merged=False, notes=notes, place=place)


def _draw_figures(
    experiment: Experiment, prepared: Prepared, result: RunResult, figures: Path, coverage: Coverage
) -> None:
    figures.mkdir()
    note = f"run {experiment.id}, {experiment.method.name}: {coverage.sentence}"
    headline = result.blueprint.metrics.headline
    measured = [r for r in result.records if headline in r]
    metric_curve(
        [r["round"] for r in measured],
        {experiment.method.name: [r[headline] for r in measured]},
        figures / f"{headline}.png",
        references={"untouched backbone": measured[0][headline]},
        metric=headline,
        note=note,
        rows=coverage.test.used if headline == "accuracy" else None,
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
    last = measured[-1]
    if recall := dict(zip(prepared.dataset.info.classes, last.get("recall", ()), strict=False)):
        path = figures / "recall.png"
        scores_by_name(recall, path, what="class", metric="recall on the test rows", note=note)
    for name, whose in (("per_client", "the global model"), ("personal", "its own model")):
        if scores := last.get(name):
            metric = f"test {headline} of the client"
            metric += f", {whose}" * ("personal" in last)
            path = figures / f"{name}.png"
            scores_by_name(scores, path, what="client", metric=metric, note=note)
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
    if "clients" in result.matrices and result.matrices["clients"].shape[1] > 1:
        clients, cosine = result.matrices["clients"], result.matrices["cosine"]
        similarity = result.matrices["principal_angle_similarity"]
        path = figures / "client_matrices.png"
        client_matrices(clients, cosine, similarity, path, note=note)
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
    clients = client_names(info, experiment.partition, shards.clients)
    if column is None:
        return LabelCounts(shards.sizes[:, None], ("all",), "rows", clients)
    names = info.classes if column == "label" else info.groups
    counts = class_mix(shards, train.column(column), len(names))
    what = "class" if column == "label" else "sub-dataset"
    return LabelCounts(counts, names, what, clients)
