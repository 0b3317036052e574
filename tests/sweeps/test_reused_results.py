"""A sweep shows results that were made for another MLflow experiment; nothing runs again."""

import io

from mlflow.tracking import MlflowClient
from rich.console import Console
from tiny_run import TINY

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runs.runner import run_experiment
from trishul_ray.sweeps.cells import TuneOptions, load_sweep
from trishul_ray.sweeps.reproduce import reproduce
from trishul_ray.tracking.progress import RunProgress, SweepProgress


def test_a_reused_result_is_a_run_below_the_sweep_once(tmp_path, cache):
    places = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
    words = [*TINY, *places, "tracking.mlflow=true"]
    run_experiment(load_experiment(None, words), RunProgress(2, Console(file=io.StringIO())))
    file = tmp_path / "mine.yaml"
    file.write_text("axes: {seed: [0]}\n")
    sweep = load_sweep(file, [*words, "tracking.experiment=other"])
    for _ in range(2):
        progress = SweepProgress(Console(file=io.StringIO()))
        assert reproduce([sweep], TuneOptions(), progress).ran == 0
        client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
        runs = client.search_runs([client.get_experiment_by_name("other").experiment_id])
        (parent,) = [run for run in runs if "trishul.id" not in run.data.tags]
        (child,) = [run for run in runs if "trishul.id" in run.data.tags]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["trishul.reused"] == "True" and child.data.tags["sweep"] == "mine"
        assert child.info.status == "FINISHED"
        assert len(client.get_metric_history(child.info.run_id, "Score/accuracy")) == 3
