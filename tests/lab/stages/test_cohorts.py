"""Cohort strategies: what each promises, and what all of them must."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trishul_ray.lab.clock.cohorts import (
    CohortConfig,
    Oort,
    Past,
    Situation,
    cohort_names,
    register_cohort,
    strategy_class,
)
from trishul_ray.runtime.random_streams import numpy_rng


@st.composite
def situations(draw):
    """A round of some clients, part of which have taken part before."""
    clients = draw(st.integers(2, 25))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    ready = np.flatnonzero(rng.random(clients) < 0.7)
    if not len(ready):
        ready = np.arange(clients)
    number = draw(st.integers(1, 60))
    last = np.where(rng.random(clients) < draw(st.sampled_from([0.0, 0.5, 1.0])), number - 1, 0)
    loss = np.where(last > 0, rng.random(clients) * 3, math.nan)
    return Situation(
        round=number,
        wanted=draw(st.integers(1, len(ready))),
        ready=ready,
        rng=numpy_rng(7, "cohort", number),
        options=CohortConfig(),
        rows=rng.integers(1, 50, clients),
        loss=loss,
        squared=loss**2 * 1.1,
        last=last,
        utilities=rng.random(number - 1),
        seconds=rng.random(clients) * 100 + 1,
        battery=rng.random(clients),
    )


def again(now):
    return replace(now, rng=numpy_rng(7, "cohort", now.round))


@pytest.mark.parametrize("name", cohort_names())
@given(now=situations())
@settings(max_examples=60)
def test_every_strategy_chooses_different_ready_clients_and_the_same_again(name, now):
    strategy = strategy_class(name)()
    chosen = strategy.choose(now)
    assert len(set(chosen.tolist())) == now.wanted
    assert set(chosen.tolist()) <= set(now.ready.tolist())
    np.testing.assert_array_equal(strategy.choose(again(now)), chosen)


@given(now=situations())
def test_uniform_draws_as_if_nothing_were_known(now):
    drawn = numpy_rng(7, "cohort", now.round).choice(now.ready, now.wanted, replace=False)
    np.testing.assert_array_equal(strategy_class("uniform")().choose(now), drawn)


@given(now=situations())
def test_power_of_choice_over_all_takes_the_highest_losses_and_new_clients_first(now):
    everyone = replace(now, options=CohortConfig(select="power_of_choice", candidates=1000))
    chosen = strategy_class("power_of_choice")().choose(everyone)
    loss = np.nan_to_num(now.loss, nan=math.inf)
    assert sorted(loss[chosen]) == sorted(loss[now.ready])[-now.wanted :]


def test_candidates_are_drawn_by_their_rows():
    rows = np.array([1, 1, 8])
    counts = np.zeros(3)
    options = CohortConfig(select="power_of_choice", candidates=1)
    nothing = np.full(3, math.nan)
    for number in range(1, 2001):
        now = Situation(
            number, 1, np.arange(3), numpy_rng(0, "cohort", number), options, rows, nothing,
            nothing, np.zeros(3, dtype=int),
        )  # fmt: skip
        counts[strategy_class("power_of_choice")().choose(now)] += 1
    assert abs(counts[2] / 2000 - 0.8) < 0.04  # 4 standard errors


def oort(number=50, seconds=None, squared=None, last=None, utilities=()):
    squared = np.arange(1.0, 11.0) if squared is None else squared
    clients = len(squared)
    return Situation(
        round=number,
        wanted=4,
        ready=np.arange(clients),
        rng=numpy_rng(0, "cohort", number),
        options=CohortConfig(select="oort"),
        rows=np.full(clients, 3),
        loss=np.sqrt(squared),
        squared=squared,
        last=np.full(clients, 49) if last is None else last,
        utilities=np.array(utilities),
        seconds=np.ones(clients) if seconds is None else seconds,
    )


def test_oorts_score_is_as_published():
    seconds = np.array([10.0, 20, 30, 40, 50, 60, 70, 80, 90, 100])
    last = np.arange(40, 50)
    now = oort(seconds=seconds, last=last)
    util = 3 * np.sqrt(now.squared)
    clipped = np.minimum(util, np.quantile(util, 0.95))
    preferred = np.percentile(seconds, 30)
    for client in range(10):
        score = (clipped[client] - clipped.min()) / (clipped.max() - clipped.min())
        score += math.sqrt(0.1 * math.log(50) / last[client])
        if seconds[client] > preferred:
            score *= (preferred / seconds[client]) ** 2
        assert Oort().scores(now, np.arange(10))[client] == pytest.approx(score, rel=1e-12)


def test_oort_explores_less_and_less_and_prefers_fast_new_clients():
    seen = np.r_[np.ones(500, dtype=int), np.zeros(500, dtype=int)]
    seconds = np.where(np.arange(1000) % 2, 1.0, 9.0)
    squared = np.where(seen > 0, 1.0, math.nan)
    for number, share in ((2, 0.9 * 0.98**2), (20, 0.9 * 0.98**20), (400, 0.3)):
        now = replace(oort(number, seconds, squared, last=seen), wanted=200)
        chosen = Oort().choose(now)
        new = chosen[chosen >= 500]
        assert len(new) == int(200 * share)
        assert (seconds[new] == 1.0).mean() > 0.75  # nine times as likely


def test_oorts_pacer_waits_longer_once_utility_falls():
    seconds = np.arange(1.0, 11.0)
    rising, falling = np.arange(40.0), np.arange(40.0)[::-1]
    at = {p: float(np.percentile(seconds, p)) for p in (30, 35, 40)}
    assert Oort().preferred(oort(seconds=seconds, utilities=rising)) == at[30]
    assert Oort().preferred(oort(seconds=seconds, utilities=falling[:39])) == at[30]
    assert Oort().preferred(oort(seconds=seconds, utilities=falling)) == at[35]
    longer = np.arange(60.0)[::-1]
    assert Oort().preferred(oort(seconds=seconds, utilities=longer)) == at[40]
    assert Oort().preferred(oort(seconds=seconds, utilities=np.arange(400.0)[::-1])) == math.inf


@given(now=situations(), weight=st.sampled_from([0.0, 1.0]))
def test_energy_takes_the_fullest_batteries_or_the_highest_utilities(now, weight):
    now = replace(now, options=CohortConfig(select="energy", battery_weight=weight))
    chosen = strategy_class("energy")().choose(now)
    util = now.rows * np.sqrt(now.squared)
    top = np.nan_to_num(util[now.ready]).max()
    value = now.battery if weight else np.nan_to_num(util, nan=top)
    assert sorted(value[chosen]) == sorted(value[now.ready])[-now.wanted :]


@given(first=st.sets(st.integers(0, 9)), then=st.sets(st.integers(0, 9)))
def test_what_is_recorded_of_a_client_stays_with_it(first, then):
    start, one, two = Past.of(10), *(np.array(sorted(c), dtype=int) for c in (first, then))
    past = start.noted(one, asked=True, joules=10.0 + one, last=1 + one)
    more = past.noted(two, asked=True)
    assert set(np.flatnonzero(more.asked)) == first | then
    assert more.joules.tolist() == [10.0 + c if c in first else 0.0 for c in range(10)]
    assert more.last.tolist() == [1 + c if c in first else 0 for c in range(10)]
    assert np.isnan(more.loss).all() and not start.asked.any() and not start.joules.any()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"select": "ort"}, "unknown strategy 'ort'; known: .*did you mean 'oort'"),
        ({"late": "partial"}, "cohort.late=partial needs cohort.deadline"),
        ({"candidates": 3}, "candidates=3.0 has no effect with select='uniform'"),
        ({"select": "oort", "battery_weight": 1}, "battery_weight=1.0 has no effect with .*oort"),
        ({"extra": 0.5}, "greater than or equal to 1"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_wrong_cohorts_are_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        CohortConfig(**fields)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="cohort strategy 'oort' is taken"):

        @register_cohort("oort")
        class Mine(Oort):
            __module__ = Oort.__module__
