"""The artifacts of a finished run: its figures and its model, both made from its state alone."""

import math
from pathlib import Path

from trishul_ray.data.partition import count_labels
from trishul_ray.data.prepare import Coverage
from trishul_ray.experiment import Experiment
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.prepare import Prepared, coverage_of
from trishul_ray.federation.server import RunResult
from trishul_ray.federation.workbench import build_model_bench
from trishul_ray.report.figures.drawing import save_png
from trishul_ray.report.figures.kinds.clients import rows_of_clients, scores_by_name
from trishul_ray.report.figures.kinds.curves import diagnostics_of_run, metric_of_run
from trishul_ray.report.figures.kinds.heads import PREFIX, heads_of_run, rounds_of_run
from trishul_ray.report.figures.kinds.matrices import matrices_of_run
from trishul_ray.report.figures.kinds.spectra import prox_of_run, uploaded_of_run
from trishul_ray.runs.export import Export, fits_adapter, trained_by, write_model
from trishul_ray.storage.store import Store


def write_artifacts(
    experiment: Experiment, prepared: Prepared, result: RunResult, folder: Path, home: Store
) -> Export:
    """Write ``figures/``, and ``adapter/`` (PEFT) or ``model/`` (merged), into a local folder.

    The folder is copied to that of the run, ``home``.

    Returns:
        The kind of model.
    """
    coverage, figures = coverage_of(experiment, prepared), folder / "figures"
    with deterministic(experiment):
        note = f"run {experiment.id}, {experiment.method.name}: {coverage.sentence}"
        _draw_scores(experiment, prepared, result, figures, coverage, note)
        held = count_labels(prepared.dataset.train, prepared.shards, experiment.partition)
        save_png(rows_of_clients(held), figures / "label_distribution.png", note)
        _draw_adapters(experiment, result, figures, note)
        bench = build_model_bench(experiment, result.blueprint.info)
        run = trained_by(bench, result.broadcast, experiment.federation.rounds)
        name = "adapter" if fits_adapter(bench) else "model"
        headline = result.blueprint.metrics.headline
        notes = {
            headline: f"{result.checkpoint.records[-1].scores[headline]:.4f} ({coverage.sentence})",
            "clients": f"{experiment.federation.clients}, partition {experiment.partition.kind}",
        }
        place = f"{home.root}/{name}" if home.is_local else name
        return write_model(run, folder / name, merged=False, notes=notes, place=place)


def _draw_scores(
    experiment: Experiment,
    prepared: Prepared,
    result: RunResult,
    figures: Path,
    coverage: Coverage,
    note: str,
) -> None:
    """Draw scores and losses by round, and the last scores by class and by client."""
    method, headline = experiment.method.name, result.blueprint.metrics.headline
    records = result.checkpoint.records
    measured = [record for record in records if record.scored]
    curve = metric_of_run(
        [r.round for r in measured],
        {method: [r.scores[headline] for r in measured]},
        references={"untouched backbone": measured[0].scores[headline]},
        metric=headline,
        rows=coverage.test.used if headline == "accuracy" else None,
    )
    save_png(curve, figures / f"{headline}.png", note)
    losses = metric_of_run(
        [r.round for r in records],
        {
            "test": [r.scores.get("loss", math.nan) for r in records],
            "training, mean of the cohort": [
                math.nan if r.train_loss is None else r.train_loss for r in records
            ],
        },
        metric="loss",
    )
    save_png(losses, figures / "loss.png", note)
    last = measured[-1]
    if recall := dict(zip(prepared.dataset.info.classes, last.recall, strict=False)):
        scores = scores_by_name(recall, "class", "recall on the test rows")
        save_png(scores, figures / "recall.png", note)
    for name, by_client, whose in (
        ("per_client", last.per_client, "the global model"),
        ("personal", last.personal, "its own model"),
    ):
        if by_client:
            metric = f"test {headline} of the client" + f", {whose}" * bool(last.personal)
            scores = scores_by_name(by_client, "client", metric)
            save_png(scores, figures / f"{name}.png", note)


def _draw_adapters(experiment: Experiment, result: RunResult, figures: Path, note: str) -> None:
    """Draw heads, ranks and spectra of what is trained, as far as the method has them."""
    method, arrays = experiment.method.name, result.checkpoint
    records = arrays.records
    if counts := result.blueprint.heads:
        norms = result.blueprint.block_norms
        heads = heads_of_run(experiment.model.name, method, counts, norms)
        save_png(heads, figures / "heads_per_layer.png", note)
        if any(name.startswith(PREFIX) for name in records[-1].diagnostics):
            moved = rounds_of_run(method, counts, [record.row() for record in records])
            save_png(moved, figures / "heads_by_round.png", note)
    if diagnosed := [r.row() for r in records if "spectral_entropy" in r.diagnostics]:
        diagnostics = diagnostics_of_run(diagnosed)
        save_png(diagnostics, figures / "spectral_diagnostics.png", note)
    # The figures below show uploaded cores, which some methods do not have.
    if "clients" in arrays.matrices and arrays.matrices["clients"].shape[1] > 1:
        matrices = matrices_of_run(method, arrays.matrices)
        save_png(matrices, figures / "client_matrices.png", note)
    named = {f"spectrum_{name}": values for name, values in arrays.spectra.items()}
    for name, spectra in (
        ("uploaded_spectrum", uploaded_of_run(method, named)),
        ("spectra", prox_of_run(method, named)),
    ):
        if spectra is not None:
            save_png(spectra, figures / f"{name}.png", note)
