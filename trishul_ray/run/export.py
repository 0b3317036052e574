"""Taking the result of a run away: what ``trishul export`` does."""

from pathlib import Path

import yaml

from trishul_ray.adapters.export import export_merged, export_peft
from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint, open_checkpoints
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import Arrays, changed_sources, survey_in
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.server import broadcast_of
from trishul_ray.federation.workbench import adapt_to, build_workbench, global_model
from trishul_ray.loading import build_experiment
from trishul_ray.methods.base import build_method
from trishul_ray.models.lookup import quiet_transformers
from trishul_ray.storage import Store


def export_run(run: str, directory: Path, *, merged: bool, runs: str) -> int:
    """Write the adapter (or the merged model) of a run's newest checkpoint.

    Args:
        run: an id under ``runs``, or a run's folder.
        directory: made by this call.
        merged: the whole model instead of the adapter.
        runs: where runs lie.

    Returns:
        The round it comes from.

    Raises:
        InputError: no such run, or ``directory`` holds something already.
        RunError: the run has no sound checkpoint, or its data or backbone have changed since.
    """
    folder, _, name = run.rstrip("/").rpartition("/")
    home = Store.open(folder or runs).child(name)
    if not home.exists("config.yaml"):
        raise InputError(f"run {run!r} does not exist: no config.yaml in {home.uri}")
    fields = yaml.safe_load(home.read("config.yaml"))
    fields["storage"]["runs"] = folder or runs
    experiment = build_experiment(fields)
    if experiment.id != name:
        raise InputError(f"run {run!r}: its config.yaml now describes {experiment.id}, not {name}")
    prepared = prepare_run(experiment)
    with deterministic(experiment):
        found, broadcast = last_broadcast(experiment)
        bench = build_workbench(experiment, prepared)
        if changed := changed_sources(found.sources, bench.sources):
            raise RunError(f"run {name} was made with other {changed} than are there now")
        adapt_to(bench, survey_in(broadcast))
        trained = global_model(bench, broadcast, found.round)
    if merged:
        with quiet_transformers():
            export_merged(bench.model, trained, directory)
    else:
        export_peft(bench.model, trained, directory, experiment.model.name)
    return found.round


def last_broadcast(experiment: Experiment) -> tuple[Checkpoint, Arrays]:
    """The newest checkpoint, and what the server would broadcast next.

    Raises:
        RunError: the run left no sound checkpoint.
    """
    checkpoints = open_checkpoints(experiment)
    found = checkpoints.newest()
    if found is None:
        why = "; ".join(checkpoints.skipped) or "none was written"
        raise RunError(f"run {experiment.id} has no usable checkpoint: {why}")
    return found, broadcast_of(
        build_method(experiment.method, experiment.adapter), found.state, found.survey
    )
