"""Two commands drive the same run in a bucket, which has no locks."""

import time

import pytest
from tiny_run import TINY

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import run_folder

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

ROUNDS = 40
LONGER = [*TINY, f"federation.rounds={ROUNDS}", "federation.local_steps=20"]


@pytest.fixture
def words(s3_bucket, mlflow_store):
    """Return the overrides of a run in a bucket that logs to a database of this test."""
    place = [f"storage.runs={s3_bucket('runs')}", f"tracking.uri=sqlite:///{mlflow_store}"]
    return [*LONGER, *place, "tracking.mlflow=true"]


def assert_logged_once(store, count=1):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    runs = [run for run in runs if "trishul.id" in run.data.tags]
    assert len({run.data.tags["trishul.id"] for run in runs}) == len(runs) == count
    for run in runs:
        history = client.get_metric_history(run.info.run_id, "Score/accuracy")
        assert sorted(point.step for point in history) == list(range(ROUNDS + 1))
        assert run.info.status == "FINISHED"


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_two_runs_in_a_bucket_are_logged_once(trishul, words, mlflow_store, seconds):
    first = trishul("run", *words)
    time.sleep(seconds)
    ended = [trishul("run", *words).end(300), first.end(300)]
    for code, _, errors in ended:
        waited = "is being driven by another process" in errors
        assert (code, waited) in ((0, False), (1, True)), errors
    assert 0 in [code for code, _, _ in ended]
    assert_logged_once(mlflow_store)
    home = run_folder(load_experiment(None, words))
    assert home.exists("result.json") and home.parent().child(".leases").names() == []


def test_two_sweeps_in_a_bucket_share_a_cell(trishul, words, mlflow_store):
    sweeps = [trishul("sweep", "--axis", seeds, *words) for seeds in ("seed=0", "seed=0,1")]
    for sweep in sweeps:
        code, _, errors = sweep.end(300)
        assert code == 0, errors
    assert_logged_once(mlflow_store, 2)
