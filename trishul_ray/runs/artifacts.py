"""The model that a finished run leaves: ``adapter/`` (PEFT), or ``model/`` (all weights)."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

from trishul_ray.errors import ArtifactsError
from trishul_ray.experiment import Experiment
from trishul_ray.plugins.loading import fault_of
from trishul_ray.report.summary import RunSummary, write_result
from trishul_ray.runs.export import fits_adapter, load_trained, write_model
from trishul_ray.runs.results import file_hashes
from trishul_ray.storage.store import Store


def add_model(experiment: Experiment, summary: RunSummary, home: Store, folder: Path) -> RunSummary:
    """Export the model of a finished run, first into a local ``folder``, then into ``home``.

    Returns:
        The new result, which is written.

    Raises:
        ArtifactsError: The model cannot be made or stored; the result does not change.
    """
    target = folder
    try:
        run = load_trained(experiment)
        name = "adapter" if fits_adapter(run.context) else "model"
        target, headline, federation = folder / name, summary.headline, experiment.federation
        notes = {
            headline: f"{summary.final[headline]:.4f} ({summary.data.sentence})",
            "clients": f"{federation.clients}, partition {experiment.partition.kind}",
        }
        place = f"{home.root}/{name}" if home.is_local else name
        export = write_model(run, target, merged=False, notes=notes, place=place)
        hashes = {f"{name}/{file}": digest for file, digest in file_hashes(target).items()}
        added = replace(
            summary,
            export=asdict(export),
            files=sorted({*summary.files, *hashes}),
            sha256=summary.sha256 | hashes,
            logged=summary.logged_to is None,
        ).written()
        home.upload_folder(folder, list(hashes))
        write_result(home, added)
    except Exception as error:  # of a plug-in, a disk or a bug: the scores are kept
        if target != folder:
            shutil.rmtree(target, ignore_errors=True)
        raise ArtifactsError(
            f"the model of run {experiment.id} could not be exported: {fault_of(error)}. The run "
            f"has finished: its scores are kept in {home.place('result.json')}, and repeating the "
            "run only exports the model"
        ) from error
    return added
