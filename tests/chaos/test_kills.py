"""kills.py kills a driver and a client, so that it keeps working."""

import pytest
from chaos.kills import Place, draw, play

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def place():
    with Place() as place:
        yield place


@pytest.mark.parametrize(("number", "victim"), [(40, "driver"), (42, "client")])
def test_killed_random_run_equals_undisturbed_run(place, number, victim):
    assert draw(number).victim == victim
    played = play(number, place)
    assert played.findings == []
    assert played.counts["kills"] and sum(played.counts.values()) > played.counts["kills"]
