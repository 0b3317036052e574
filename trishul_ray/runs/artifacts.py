"""Write the files of a finished run.

The tables and result.json are written first, then the model: ``adapter/`` (PEFT), or ``model/``
(all weights).
"""

from dataclasses import asdict, replace
from pathlib import Path

from trishul_ray.errors import ArtifactsError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint
from trishul_ray.plugins.loading import fault_of
from trishul_ray.report.summary import RunSummary, write_result
from trishul_ray.runs.results import file_hashes, write_tables
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.storage.store import Store


def write_results(
    experiment: Experiment, last: Checkpoint, summary: RunSummary, home: Store, *, model: bool
) -> RunSummary:
    """Write the tables and result.json of a finished run, and export its model if ``model``.

    Returns:
        The new content of result.json.

    Raises:
        ArtifactsError: The model cannot be exported; all other files are written.
    """
    with scratch_folder("results") as scratch:
        write_tables(experiment, last, Path(scratch))
        hashes = summary.sha256 | file_hashes(Path(scratch))
        home.upload_folder(Path(scratch))
    # This file marks the run as finished, even if the model cannot be exported.
    summary = write_result(home, replace(summary, files=sorted(hashes), sha256=hashes))
    return _add_model(experiment, summary, home) if model else summary


def _add_model(experiment: Experiment, summary: RunSummary, home: Store) -> RunSummary:
    """Export the model of a finished run to a local folder, and upload it to ``home``."""
    try:
        from trishul_ray.runs.export import fits_adapter, load_trained, write_model  # takes seconds

        run = load_trained(experiment)
        name = "adapter" if fits_adapter(run.context) else "model"
        metric, federation = summary.headline, experiment.federation
        notes = {
            metric: f"{summary.final[metric]:.4f} ({summary.data.sentence})",
            "clients": f"{federation.clients}, partition {experiment.partition.kind}",
        }
        place = f"{home.root}/{name}" if home.is_local else name
        with scratch_folder("model") as scratch:
            folder = Path(scratch)
            export = write_model(run, folder / name, merged=False, notes=notes, place=place)
            hashes = file_hashes(folder)
            home.upload_folder(folder)
        added = replace(
            summary,
            export=asdict(export),
            files=sorted({*summary.files, *hashes}),
            sha256=summary.sha256 | hashes,
        )
        return write_result(home, added)
    except Exception as error:  # a plug-in, a disk or a bug may fail, and the scores must survive
        raise ArtifactsError(
            f"the model of run {experiment.id} could not be exported: {fault_of(error)}. The run "
            f"has finished and its scores are in {home.place('result.json')}; repeat the run to "
            "export only the model"
        ) from error
