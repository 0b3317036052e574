"""The field ``draw``, which seeds partition and cohorts separately from everything else."""

import numpy as np
import pytest
from contract.digests import BASE, CONFIGURATIONS, differences, outcome, run_inline, usable

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.experiment.rows import partition_rows
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.local import batch_order
from trishul_ray.runtime.random_streams import numpy_rng

#: Configurations that draw clients, their compute levels or their devices.
DRAWN = [
    "trishul, by curvature",
    "hetlora",
    "held out",
    "clock, selected",
    "attacked",
    "privacy, survey",
]


@pytest.fixture(autouse=True)
def runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the default of storage.runs is a relative path


def experiment(*words):
    return load_experiment(None, [*BASE, "federation.rounds=2", *words])


def cohorts_of(*words):
    return [record.clients for record in run_inline(experiment(*words)).records[1:]]


def shards_of(one):
    shards = partition_rows(prepare_run(one).dataset, one)
    return [shards.shard(client).tolist() for client in range(one.federation.clients)]


@pytest.mark.parametrize("name", DRAWN)
def test_draw_equal_to_the_seed_changes_no_byte(name):
    if not usable(name):
        pytest.skip("without the extension")
    words = [*CONFIGURATIONS[name].split(), "seed=3"]
    one, same, other = (
        outcome(run_inline(experiment(*words, *more))) for more in ([], ["draw=3"], ["draw=4"])
    )
    changed = {path.partition(".")[0] for path in differences(one, same)}
    assert changed == {"experiment_id"}
    assert "state" in {path.partition(".")[0] for path in differences(one, other)}


def test_only_a_set_draw_is_in_the_id():
    plain = experiment("seed=3")
    assert "draw" not in plain.identity()
    assert len({plain.id, experiment("seed=3", "draw=3").id, experiment("draw=3").id}) == 3


def test_seeds_share_partition_and_cohorts():
    one, other = (experiment("draw=5", f"seed={seed}") for seed in (0, 1))
    assert shards_of(one) == shards_of(other) != shards_of(experiment("draw=6"))
    first, second = (
        cohorts_of("draw=5", f"seed={seed}", "federation.clients=9") for seed in (0, 1)
    )
    assert first == second != cohorts_of("draw=6", "federation.clients=9")


@pytest.mark.parametrize("client", [0, 3])
def test_batches_do_not_depend_on_the_draw(client):
    """The batches of a client depend only on the seed and its shard."""
    batches = [
        batch_order(np.arange(20), 5, 4, numpy_rng(one.seed, "batches", 1, client))
        for one in (experiment("draw=1"), experiment("draw=2"))
    ]
    np.testing.assert_array_equal(*batches)


def test_initial_weights_are_independent_of_draw():
    one, other = (
        InlineExecutor(each, prepare_run(each)).describe({}).initial
        for each in (experiment("seed=2", "draw=0"), experiment("seed=2", "draw=1"))
    )
    np.testing.assert_array_equal(one, other)
