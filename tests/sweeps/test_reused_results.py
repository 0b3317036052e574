"""A sweep reuses results that were made for another MLflow experiment."""

import io
import shutil

from mlflow.tracking import MlflowClient
from rich.console import Console
from tiny_run import TINY

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runs.runner import run_experiment
from trishul_ray.sweeps.cells import TuneOptions
from trishul_ray.sweeps.loading import load_sweep
from trishul_ray.sweeps.run import reproduce
from trishul_ray.tracking.progress import RunProgress, SweepProgress


def test_shared_reused_result_is_logged_once(mlflow_store, empty_store, tmp_path, cache):
    paths = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
    words = [*TINY, *paths, "tracking.mlflow=true"]
    for seed in (0, 1):
        experiment = load_experiment(None, [*words, f"seed={seed}"])
        run_experiment(experiment, RunProgress(2, Console(file=io.StringIO())))
    sweeps = []
    for name, seeds in (("mine", "[0]"), ("yours", "[0, 1]")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"axes: {{seed: {seeds}}}\n")
        sweeps.append(load_sweep(file, [*words, "tracking.experiment=other"]))
    for lost in (False, False, True):
        if lost:
            shutil.copy(empty_store, mlflow_store)
        progress = SweepProgress(Console(file=io.StringIO()))
        assert reproduce(sweeps, TuneOptions(), progress).ran == 0
        client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
        runs = client.search_runs([client.get_experiment_by_name("other").experiment_id])
        parents = {r.info.run_id: r.info.run_name for r in runs if "trishul.attempt" in r.data.tags
                   and "mlflow.parentRunId" not in r.data.tags}  # fmt: skip
        assert sorted(parents.values()) == ["mine-custom", "yours-custom seed"]
        cells = {run.data.tags["seed"]: run for run in runs if run.info.run_id not in parents}
        assert len(cells) == len(runs) - 2 == 2
        for seed, parent, sweeps_of_it in (("0", "mine-custom", 2), ("1", "yours-custom seed", 1)):
            run, tags = cells[seed], cells[seed].data.tags
            assert parents[tags["mlflow.parentRunId"]] == parent and "trishul.id" in tags
            assert sum(name.startswith("sweep.") for name in tags) == sweeps_of_it
            assert run.info.status == "FINISHED"
            assert len(client.get_metric_history(run.info.run_id, "Score/accuracy")) == 3
