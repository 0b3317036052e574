"""Schedules of asynchronous rounds: who starts when, from which version, what counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trishul_ray.lab.clock.asynchronous import AsyncConfig
from trishul_ray.lab.clock.schedule import Rules, Schedule


def rules(seconds, *, clients, buffer, concurrency, most=None, draw=None):
    """Rules in which client c takes ``seconds(c)``, and the lowest free clients start."""
    return Rules(
        np.arange(clients),
        buffer,
        concurrency,
        most,
        draw or (lambda free, count, draws: free[:count].tolist()),
        lambda chosen, dropped: np.array([seconds(client) for client in chosen]),
    )


def updates(count, given):
    """Return the first updates, with the clock after each."""
    schedule, found = Schedule(), []
    for number in range(1, count + 1):
        found.append((schedule.next_update(number, given), schedule.seconds))
    return found


def test_a_schedule_of_twelve_jobs():
    """K = 3, M = 4; clients 0 to 5 take 1, 2, 3, 7, 1 and 2 seconds; the lowest free ones start.

    | at | arrive   | buffer after  | start (job: client, end)                   |
    |  0 |          |               | 0: 0, 1;  1: 1, 2;  2: 2, 3;  3: 3, 7      |
    |  1 | 0        | 0             | 4: 4, 2                                    |
    |  2 | 1, 4     | update 1      | 5: 0, 3;  6: 1, 4                          |
    |  3 | 2, 5     | 2, 5          | 7: 4, 4;  8: 5, 5                          |
    |  4 | 6 and 7  | update 2, 7   | 9: 0, 5;  10: 1, 6                         |
    |  5 | 8, 9     | update 3      | 11: 0, 6;  12: 2, 8                        |
    |  6 | 10, 11   | 10, 11        | 13: 4, 7;  14: 5, 8                        |
    |  7 | 3 and 13 | update 4, 13  |                                            |

    At 4 and 7 the lower number is the third upload; the other one waits for the next update.
    """
    given = rules([1, 2, 3, 7, 1, 2].__getitem__, clients=6, buffer=3, concurrency=4)
    found = updates(4, given)
    assert [seconds for _, seconds in found] == [2, 4, 5, 7]
    assert [each.in_flight for each, _ in found] == [2, 3, 2, 3]
    used = [[(job.number, job.client) for job in each.used] for each, _ in found]
    assert used == [
        [(0, 0), (1, 1), (4, 4)],
        [(2, 2), (5, 0), (6, 1)],
        [(7, 4), (8, 5), (9, 0)],
        [(10, 1), (11, 0), (3, 3)],
    ]
    staleness = [[u - job.round for job in each.used] for u, (each, _) in enumerate(found, 1)]
    assert staleness == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 3]]


def test_clients_of_dropped_uploads_start_again():
    """Client 1 takes 5 seconds, the others 1: its upload is four updates old."""
    seconds = [1, 5].__getitem__
    for most, dropped in ((3, 1), (4, 0)):
        given = rules(seconds, clients=2, buffer=1, concurrency=2, most=most)
        found = updates(7, given)
        late = [[(job.number, job.client) for job in each.late] for each, _ in found]
        assert late == [[], [], [], [], [(1, 1)] * dropped, [], []]
        # Client 1 starts again at 5, from the newest version, whether its upload counted or not.
        assert [seconds for _, seconds in found] == [1, 2, 3, 4, 5, 5 + dropped, 6 + dropped]


@st.composite
def runs(draw):
    """The rules of a run with drawn clients and speeds, many of them equal."""
    clients = draw(st.integers(1, 9))
    buffer = draw(st.integers(1, clients))
    concurrency = draw(st.integers(1, clients))
    most = draw(st.none() | st.integers(0, 4))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 7.5]), min_size=9, max_size=9))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return rules(
        speeds.__getitem__,
        clients=clients,
        buffer=buffer,
        concurrency=concurrency,
        most=most,
        draw=lambda free, count, draws: sorted(rng.choice(free, count, replace=False).tolist()),
    )


@given(given_rules=runs())
@settings(max_examples=1000)
def test_a_client_has_one_job_at_a_time(given_rules):
    schedule, starts = Schedule(), []
    inner = given_rules.seconds

    def seconds(clients, dropped):
        starts.extend(clients)
        return inner(clients, dropped)

    watched = Rules(*[*vars(given_rules).values()][:-1], seconds)
    ended = 0
    for number in range(1, 7):
        before = schedule.seconds
        update = schedule.next_update(number, watched)
        assert schedule.seconds >= before
        assert len(update.used) == len({job.client for job in update.used}) == watched.buffer
        flying = [job.client for job in schedule.flying]
        assert len(flying) == len({*flying}) <= watched.concurrency
        assert [job.number for job in schedule.flying] == sorted(j.number for j in schedule.flying)
        for job in update.used:
            assert job.ends <= schedule.seconds
            assert watched.max_staleness is None or number - job.round <= watched.max_staleness
        assert all(number - job.round > watched.max_staleness for job in update.late)
        ended += len(update.used) + len(update.late)
        assert ended + len(flying) == len(starts) == schedule.started


@pytest.mark.parametrize(
    ("fields", "staleness", "weight"),
    [
        ({"weight": "constant"}, 9, 1.0),
        ({}, 3, 0.5),
        ({"power": 2}, 1, 0.25),
        ({"weight": "hinge"}, 4, 1.0),
        ({"weight": "hinge"}, 5, 1 / 11),
        ({"weight": "hinge", "slope": 0.5, "grace": 0}, 2, 0.5),
    ],
)
def test_weights_by_staleness(fields, staleness, weight):
    assert AsyncConfig(kind="fedbuff", **fields).weight_of(staleness) == pytest.approx(weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": 3}, "concurrency=3 has no effect with kind='none'"),
        ({"kind": "fedbuff", "mixing": 0.5}, "mixing=0.5 has no effect with kind='fedbuff'"),
        ({"kind": "fedbuff", "grace": 2}, "grace=2 has no effect with weight='polynomial'"),
        (
            {"kind": "fedasync", "weight": "hinge", "power": 1},
            "power=1.0 has no effect with weight='hinge'",
        ),
        ({"kind": "fedasync", "mixing": 0}, "greater than 0"),
        ({"kind": "fedavg"}, "Input should be 'none', 'fedbuff' or 'fedasync'"),
    ],
)
def test_fields_without_effect_are_rejected(fields, message):
    with pytest.raises(ValidationError, match=message):
        AsyncConfig(**fields)
