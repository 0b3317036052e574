"""A sweep shows results that were made for another MLflow experiment; nothing runs again."""

import io

from mlflow.tracking import MlflowClient
from rich.console import Console
from tiny_run import TINY

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runs.runner import run_experiment
from trishul_ray.sweeps.cells import TuneOptions
from trishul_ray.sweeps.loading import load_sweep
from trishul_ray.sweeps.reproduce import reproduce
from trishul_ray.tracking.progress import RunProgress, SweepProgress


def test_sweeps_that_share_a_reused_result_each_have_it_once_with_their_own_axes(
    mlflow_store, tmp_path, cache
):
    places = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
    words = [*TINY, *places, "tracking.mlflow=true"]
    for seed in (0, 1):
        experiment = load_experiment(None, [*words, f"seed={seed}"])
        run_experiment(experiment, RunProgress(2, Console(file=io.StringIO())))
    sweeps = []
    for name, seeds in (("mine", "[0]"), ("yours", "[0, 1]")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"axes: {{seed: {seeds}}}\n")
        sweeps.append(load_sweep(file, [*words, "tracking.experiment=other"]))
    for _ in range(2):
        progress = SweepProgress(Console(file=io.StringIO()))
        assert reproduce(sweeps, TuneOptions(), progress).ran == 0
        client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
        runs = client.search_runs([client.get_experiment_by_name("other").experiment_id])
        parents = {r.info.run_id: r.info.run_name for r in runs if "trishul.attempt" in r.data.tags
                   and "mlflow.parentRunId" not in r.data.tags}  # fmt: skip
        assert sorted(parents.values()) == ["mine-custom", "yours-custom"]
        cells = [run for run in runs if run.info.run_id not in parents]
        assert sorted(
            (parents[run.data.tags["mlflow.parentRunId"]], run.data.tags["seed"],
             run.data.params.get("axis.seed"), "trishul.id" in run.data.tags)
            for run in cells
        ) == [
            ("mine-custom", "0", None, True),
            ("yours-custom", "0", "0", False),  # a short run; the whole one is the first sweep's
            ("yours-custom", "1", "1", True),
        ]  # fmt: skip
        (short,) = [run for run in cells if "trishul.shared_id" in run.data.tags]
        (whole,) = [
            run for run in cells if run.info.run_id == short.data.tags["trishul.shared_run"]
        ]
        assert whole.data.tags["trishul.id"] == short.data.tags["trishul.shared_id"]
        assert whole.data.tags["sweep.mine"] == "custom" and whole.data.tags["sweep"] == "mine"
        assert short.info.run_name == "seed=0"
        for run in cells:
            assert run.info.status == "FINISHED"
            assert len(client.get_metric_history(run.info.run_id, "Score/accuracy")) == 3
