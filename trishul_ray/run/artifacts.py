"""What a finished run leaves to look at and to take away, made from its final state alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from trishul_ray.adapters.export import export_merged, export_peft
from trishul_ray.data.partition import skewed_by
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import survey_in
from trishul_ray.federation.prepare import Prepared
from trishul_ray.federation.server import RunResult
from trishul_ray.federation.workbench import adapt_to, build_workbench, global_model
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


def write_artifacts(
    experiment: Experiment,
    prepared: Prepared,
    final: RunResult,
    folder: Path,
    note: str | None = None,
) -> None:
    """Figures into ``folder/figures``, ``diagnostics.npz``, and ``adapter`` (PEFT) or ``model``.

    Args:
        experiment: what was run.
        prepared: its data and partition.
        final: what it left.
        folder: exists and is empty.
        note: stands above every figure.
    """
    figures = folder / "figures"
    figures.mkdir()
    headline = final.blueprint.task.headline
    measured = [r for r in final.records if headline in r]
    metric_curve(
        [r["round"] for r in measured],
        {experiment.method.name: [r[headline] for r in measured]},
        figures / f"{headline}.png",
        references={"untouched backbone": measured[0][headline]},
        metric=headline,
        note=note,
    )
    metric_curve(
        [r["round"] for r in final.records],
        {
            "test": [r.get("loss", math.nan) for r in final.records],
            "training, mean of the cohort": [r.get("train_loss", math.nan) for r in final.records],
        },
        figures / "loss.png",
        metric="loss",
        note=note,
    )
    held = client_labels(prepared, experiment)
    label_distribution(
        held.counts,
        figures / "label_distribution.png",
        classes=held.names,
        what=held.what,
        note=note,
    )
    if final.blueprint.heads:
        heads = final.blueprint.heads
        path = figures / "heads_per_layer.png"
        norms = [final.blueprint.block_norms[block] for block in heads]
        heads_per_layer(list(heads), list(heads.values()), path, norms, note=note)
    _draw_uploads(final, figures, note)
    if final.spectra or final.matrices:
        # Plain NumPy: the arrays of every round's clients, and the last spectra.
        arrays: dict[str, Any] = dict(final.matrices)
        arrays |= {f"spectrum_{key}": value for key, value in final.spectra.items()}
        np.savez(folder / "diagnostics.npz", **arrays)
    if "before" in final.spectra:
        threshold = float(final.spectra["threshold"][0])
        path = figures / "spectra.png"
        spectra(final.spectra["before"], final.spectra["after"], threshold, path, note=note)
    bench = build_workbench(experiment, prepared)
    adapt_to(bench, survey_in(final.broadcast))
    trained = global_model(bench, final.broadcast, experiment.federation.rounds)
    if trained.base or not bench.model.specs:
        # The method moved the backbone itself: no adapter can hold that.
        with quiet_transformers():
            export_merged(bench.model, trained, folder / "model")
    else:
        export_peft(bench.model, trained, folder / "adapter", experiment.model.name)


def _draw_uploads(final: RunResult, figures: Path, note: str | None) -> None:
    """Figures of the cores that clients sent; none for methods that send no cores."""
    if "uploaded" in final.spectra:
        uploaded_spectrum(final.spectra["uploaded"], figures / "uploaded_spectrum.png", note=note)
    diagnosed = [r for r in final.records if "spectral_entropy" in r]
    if diagnosed:
        diagnostics_curves(
            [r["round"] for r in diagnosed],
            {name: [r.get(name, math.nan) for r in diagnosed] for name in PANELS},
            {name: [r.get(f"delta_{name}", math.nan) for r in diagnosed] for name in PANELS},
            figures / "spectral_diagnostics.png",
            note=note,
        )
    if final.matrices and final.matrices["clients"].shape[1] > 1:
        client_matrices(
            final.matrices["clients"],
            final.matrices["covariance"],
            final.matrices["principal_angle_similarity"],
            figures / "client_matrices.png",
            note=note,
        )


def client_labels(prepared: Prepared, experiment: Experiment) -> LabelCounts:
    """Who holds what: by class, or by sub-dataset where the partition is by those."""
    info, train, shards = prepared.dataset.info, prepared.dataset.train, prepared.shards
    wanted = (skewed_by(info, experiment.partition), "label", "group")
    column = next((name for name in wanted if name in train.columns), None)
    if column is None:
        return LabelCounts(shards.sizes[:, None], ("all",), "rows")
    names = info.classes if column == "label" else info.groups
    owner = np.repeat(np.arange(shards.clients), shards.sizes)
    cells = owner * len(names) + train.column(column)[shards.permutation]
    counts = np.bincount(cells, minlength=shards.clients * len(names))
    what = "class" if column == "label" else "sub-dataset"
    return LabelCounts(counts.reshape(-1, len(names)), names, what)
