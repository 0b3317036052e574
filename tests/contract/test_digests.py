"""Ids and recorded names of the small runs of digests.py, alike on all processors."""

import pytest
from contract.digests import (
    CONFIGURATIONS,
    experiment_of,
    known,
    outcome,
    recorded,
    run_inline,
    stored,
    usable,
)

from trishul_ray.methods.base import method_classes
from trishul_ray.stages import stage_names

KNOWN = stored()
#: Five shapes of a run: plain; state at clients; every upload is kept; a survey; the edge.
SHAPES = ["trishul", "scaffold", "attacked", "fedsb", "privacy"]


@pytest.fixture
def made(cache, tmp_path):
    """``made(name, *overrides)`` -> the experiment of a configuration, in this test's folder."""

    def make(name, *more):
        places = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
        return experiment_of(name, *places, *more)

    return make


@pytest.fixture(scope="module")
def experiments():
    return {name: experiment_of(name) for name in filter(known, CONFIGURATIONS)}


def test_every_method_and_every_section_that_is_off_by_default_is_among_them(experiments):
    experiments = list(experiments.values())
    shipped = {
        n for n, cls in method_classes().items() if cls.__module__.startswith("trishul_ray.")
    }
    assert {each.method.name for each in experiments} >= shipped
    sections = {key for each in experiments for key in each.to_dict()}
    assert {*stage_names()} <= sections


def test_ids_are_those_that_are_stored(experiments):
    """A change of an id starts finished runs over: see digests.py for one that is meant."""
    assert {name: each.id for name, each in experiments.items()} == {
        name: id for name, (id, _) in KNOWN.items() if known(name)
    }


@pytest.mark.parametrize(
    "name",
    [
        name if name in SHAPES[:3] else pytest.param(name, marks=pytest.mark.slow)
        for name in filter(usable, CONFIGURATIONS)
    ],
)
def test_a_run_records_the_stored_names_and_the_same_numbers_again(name, made, tmp_path):
    experiment = made(name, "resources.backend=inline")
    found = outcome(run_inline(experiment))
    assert recorded(found) == sorted(KNOWN[name][1])
    if name not in SHAPES:  # the others are repeated in the tests of what they configure
        return
    elsewhere = made(name, "resources.backend=inline", f"storage.runs={tmp_path / 'again'}")
    assert outcome(run_inline(elsewhere)) == found
