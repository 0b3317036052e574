"""Checks that reject a run before Ray starts."""

from pathlib import Path

from trishul_ray.data.dataset import ProgressCallback
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.identity import check_content
from trishul_ray.experiment.rows import check_rows
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.plugins.loading import find_plugin
from trishul_ray.stages import Stages
from trishul_ray.storage.durable import check_writable
from trishul_ray.tracking.store import tracking_uri


def check_first(experiment: Experiment, progress: ProgressCallback | None = None) -> None:
    """Check plug-ins, the folder of runs, the tracking URI, the files of stages, and the rows.

    The last check, that the backbone exists and that the adapters fit its layers, imports torch.

    Raises:
        InputError: One of them is missing, has changed or is malformed.
    """
    for plugin in experiment.plugins:
        find_plugin(plugin)
    check_content(experiment)
    home = run_folder(experiment)
    if home.is_local:
        check_writable(Path(home.place("")), "storage.runs")
    if experiment.tracking.mlflow:
        tracking_uri(experiment.tracking.uri, experiment.storage.runs)
    for stage in Stages.of(experiment):
        stage.prepare()
    check_rows(experiment, progress)
    from trishul_ray.experiment.compatibility import check_layers  # imports torch

    if missing := check_layers(experiment):
        raise InputError(missing)
