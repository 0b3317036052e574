"""Diagnostics of a round's uploads beside its evaluation."""

import threading

import pytest

from trishul_ray.errors import RunError
from trishul_ray.federation import comparison
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run

#: Seconds after which a thread that waits for another one gives up: they do not run together.
PATIENCE = 60.0

COMPARED = ("resources.backend=inline", "method=ravan")


def test_uploads_are_compared_while_the_model_is_evaluated(small, monkeypatch):
    experiment = small(*COMPARED)
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    evaluating, comparing = threading.Event(), threading.Event()
    evaluate, compare, met = driver.executor.evaluate, comparison.compare_uploads, []

    def evaluated(*args):
        evaluating.set()
        met.append(comparing.wait(PATIENCE))
        return evaluate(*args)

    def compared(*args):
        comparing.set()
        met.append(evaluating.wait(PATIENCE))
        return compare(*args)

    monkeypatch.setattr(driver.executor, "evaluate", evaluated)
    monkeypatch.setattr(comparison, "compare_uploads", compared)
    driver.step()
    assert len(met) > 1 and all(met)
    # The step has waited for it: the record that is written is complete.
    assert "effective_rank" in open_checkpoints(experiment).newest().records[1].diagnostics


def test_an_error_of_a_comparison_ends_the_step_before_the_state_changes(
    small, inline_result, assert_same, drive_to_end, monkeypatch
):
    experiment = small(*COMPARED)
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    driver.step()
    before = driver.checkpoint.state

    def failing(*_):
        raise RunError("no comparison")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="no comparison"):
        patch.setattr(comparison, "compare_uploads", failing)
        driver.step()
    assert driver.checkpoint.round == open_checkpoints(experiment).newest().round == 1
    assert driver.checkpoint.state is before
    assert_same(drive_to_end(driver), inline_result(experiment))
