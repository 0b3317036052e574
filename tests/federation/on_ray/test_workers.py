"""Runs on the actors of an earlier run give the bytes of new actors."""

import psutil
import pytest

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.driver import Workers, open_driver
from trishul_ray.federation.prepare import prepare_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

TINY = ["federation.clients=3", "federation.rounds=2", "federation.local_steps=2"]

#: Consecutive runs. Each leaves something that the next must not see: other trained parameters,
#: folded bases in two terms, another precision, client state, limits, another seed and budget.
CHAIN = [
    ["method=trishul", "method.allocation=gradient"],
    ["method=fullft"],
    ["method=fedex", "model.precision=bf16"],
    ["method=flora", "budget=2"],
    ["method=scaffold", "seed=1"],
    ["method=hetlora", "method.prune=true", "federation.compute=uniform"],
    ["method=trishul", "model.train_head=false", "adapter.targets=[query, value]"],
]


@pytest.fixture
def workers():
    with Workers() as opened:
        yield opened


@pytest.fixture
def make(small):
    """``make("method=fedit")`` returns an experiment on one actor, of the others' shape."""
    return lambda *overrides: small(*TINY, "resources.actors=1", *overrides)


def run(workers, experiment, drive_to_end):
    """Drive a run to its end; return the result, and the processes that it ran on."""
    with open_driver(experiment, prepare_run(experiment), "a", workers=workers) as driver:
        result = drive_to_end(driver)
        return result, driver.processes()


def test_chained_runs_equal_runs_on_new_actors(
    workers, make, inline_result, assert_same, drive_to_end
):
    seen = set()
    for overrides in CHAIN:
        experiment = make(*overrides)
        result, processes = run(workers, experiment, drive_to_end)
        assert_same(result, inline_result(experiment))
        seen.add(tuple(processes))
    assert len(seen) == 1, "the actors were not reused"
    workers.close()
    family = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_other_settings_and_failures_get_new_actors(
    workers, make, inline_result, assert_same, drive_to_end
):
    first = run(workers, make(), drive_to_end)[1]
    two = make("seed=1", "resources.threads=2", "resources.cpus_per_actor=1")
    second = run(workers, two, drive_to_end)[1]
    assert not set(first) & set(second)
    diverging = make("optimizer.lr=1e30", "resources.threads=2", "resources.cpus_per_actor=1")
    with pytest.raises(RunError, match="is not finite"):
        run(workers, diverging, drive_to_end)
    result, third = run(workers, make("seed=2"), drive_to_end)
    assert not set(second) & set(third)
    assert_same(result, inline_result(make("seed=2")))
