"""Clients that never take part (``federation.held_out``)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trishul_ray.config.fields import FederationConfig
from trishul_ray.data.sampling import participants
from trishul_ray.errors import InputError
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.lab.privacy.stage import guarantee

ON = ["federation.held_out=0.3", "evaluation.per_client=true", "federation.clients=10"]
CLOCK = ["devices.kind=lognormal", "cohort.extra=1.6"]
#: Ways to draw cohorts.
STRATEGIES = {
    "uniform": [],
    "all for one": ["federation.clients_per_round=7", "evaluation.diagnostics_cohort=all"],
    "survey": ["method.allocation=gradient"],
    "poisson": ["privacy.noise=0.1", "privacy.sampling=poisson"],
    "fixed": ["privacy.noise=0.1", "privacy.sampling=fixed"],
    "clock": [*CLOCK, "cohort.dropout=0.2"],
    "power_of_choice": [*CLOCK, "cohort.select=power_of_choice"],
}


@pytest.fixture
def trained(monkeypatch):
    """Return the clients that have trained, or responded to a survey."""
    found, train = set(), InlineExecutor.train

    def noted(self, broadcast, jobs):
        found.update(job.client for job in jobs)
        return train(self, broadcast, jobs)

    monkeypatch.setattr(InlineExecutor, "train", noted)
    return found


@pytest.fixture
def checkpoint_of(small, drive_to_end):
    """``checkpoint_of("method=ravan", ...)`` returns the last checkpoint of a run."""

    def run(*words):
        experiment = small("resources.backend=inline", *words)
        driver = InlineDriver(experiment, prepare_run(experiment), "a")
        try:
            return drive_to_end(driver).checkpoint
        finally:
            driver.close()

    return run


@given(clients=st.integers(2, 200), percent=st.integers(0, 50), seed=st.integers(0, 5))
def test_held_out_clients_match_the_share(clients, percent, seed):
    fed = FederationConfig(clients=clients, clients_per_round=1, held_out=percent / 100)
    found = participants(fed, seed)
    assert len(found) == fed.participants == clients - math.ceil(clients * percent / 100)
    assert (np.diff(found) > 0).all() and {*found.tolist()} <= {*range(clients)}


def test_the_seed_draws_who():
    fed = FederationConfig(clients=50, held_out=0.2)
    drawn = [tuple(participants(fed, seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", STRATEGIES)
def test_held_out_clients_are_never_asked(small, checkpoint_of, trained, name):
    words = [*ON, "federation.rounds=4", *STRATEGIES[name]]
    experiment, checkpoint = small(*words), checkpoint_of(*words)
    members = {*participants(experiment.federation, experiment.seed).tolist()}
    asked = {c for r in checkpoint.records for c in [*r.clients, *map(int, r.missing)]}
    assert len(members) == 7 and asked | trained <= members
    last = checkpoint.records[-1]
    counts = {c: 0 for c in members}
    for record in checkpoint.records:
        for client in record.clients:
            counts[client] += str(client) not in record.refused
    assert {int(c): n for c, n in last.participation.items()} == counts
    scores = {int(c): value for c, value in last.per_client.items()}
    assert len(scores) == 10
    inside = np.mean([scores[c] for c in members])
    outside = np.mean([scores[c] for c in scores.keys() - members])
    assert last.scores["participation_gap"] == pytest.approx(inside - outside)
    never = np.mean([scores[c] for c in scores if not counts.get(c)])
    assert last.scores["never_sampled_mean"] == pytest.approx(never)


def test_nobody_held_out_changes_nothing(small, checkpoint_of):
    plain = small("evaluation.per_client=true")
    assert small("federation.held_out=0", "evaluation.per_client=true").id == plain.id
    assert "held_out" not in plain.identity()["federation"]
    assert small(*ON).id != small(*ON[1:]).id
    one, other = checkpoint_of(), checkpoint_of("evaluation.per_client=true")
    assert state_digest(one.state) == state_digest(other.state)
    assert "participation_gap" not in other.records[-1].scores
    assert one.records[-1].participation == {}


def test_shards_are_independent_of_held_out_clients(small):
    words = ["partition.kind=dirichlet", "federation.clients=10"]
    one, other = (prepare_run(small(*words, *more)).shards for more in ([], ON))
    np.testing.assert_array_equal(one.permutation, other.permutation)
    np.testing.assert_array_equal(one.offsets, other.offsets)


def test_guarantee_covers_participants(small):
    """Seven of ten clients: the three clients of a round are sampled from these."""
    noise = "privacy.noise=1"
    one, other = guarantee(small(*ON, noise)), guarantee(small("federation.clients=7", noise))
    assert (one.clients, one.epsilon()) == (7, other.epsilon())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["federation.held_out=0.6"], "held_out"),
        (["federation.held_out=-0.1"], "held_out"),
        ([ON[0], ON[2]], "held_out=0.3 needs evaluation.per_client=true"),
        (
            [*ON[:2], "federation.clients=4"],
            "held_out=0.3 leaves 2 of federation.clients=4, fewer than "
            "federation.clients_per_round=3",
        ),
        (
            [*ON, "devices.kind=lognormal", "cohort.extra=3"],
            "cohort.extra=3 selects 9 .*held_out=0.3",
        ),
    ],
)
def test_rejected_combinations(small, words, message):
    with pytest.raises((ValidationError, InputError), match=message):
        small(*words)
