"""Whole federated runs as Ray Tune trials: the same bytes in the bundles of the trials."""

import pytest

from trishul_ray.experiment.loading import build_experiment
from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.on_ray.slices import Slices, plan_slices
from trishul_ray.federation.prepare import prepare_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def trial(config):
    """Find the bundles of the trial, run the experiment, and report."""
    from ray import tune

    experiment = build_experiment(config["fields"])
    with open_driver(experiment, prepare_run(experiment), "trial") as driver:
        report = driver.begin()
        while not report.finished:
            report = driver.step()
        digest = driver.final().digest
    tune.report({"digest": digest, "id": experiment.id, "actors": driver.slices.actors})


def test_two_trials_at_once(small, inline_result, tmp_path):
    from ray import tune

    experiments = [small(f"seed={seed}", "resources.cpus_per_actor=0.5") for seed in (1, 2)]
    slices = plan_slices(experiments[0], {"CPU": 1.0})
    assert slices == Slices(2, 0.5, 0.0)
    request = tune.PlacementGroupFactory([{}, *slices.bundles()])
    tuner = tune.Tuner(
        tune.with_resources(trial, request),
        param_space={"fields": tune.grid_search([e.to_dict(sources=True) for e in experiments])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), name="two", verbose=0),
    )
    results = {result.metrics["id"]: result.metrics for result in tuner.fit()}
    assert {e.id: inline_result(e).digest for e in experiments} == {
        key: metrics["digest"] for key, metrics in results.items()
    }
    assert [metrics["actors"] for metrics in results.values()] == [2, 2]
