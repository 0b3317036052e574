"""Diagnostics of the clients' uploads, for the figures."""

import threading

import numpy as np
import pytest
import torch

from trishul_ray.contract.methods import without_timings
from trishul_ray.errors import InputError, PermanentError, RunError
from trishul_ray.federation import diagnostics
from trishul_ray.federation.checkpoint import open_checkpoints, state_digest
from trishul_ray.federation.diagnostics import append_round
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker import local
from trishul_ray.methods.trishul import Trishul

INLINE = ("resources.backend=inline", "evaluation.every=9")


@pytest.mark.parametrize("method", ["ravan", "trishul", "trishul method.lam=0", "fedsb"])
def test_upload_spectra_are_recorded_with_any_prox(small, inline_result, method):
    name, *more = method.split()
    final = inline_result(small(f"method={name}", *more, *INLINE))
    values = final.checkpoint.spectra["uploaded"]
    heads, rank = values.shape
    assert heads == sum(e.shape[0] for e in final.spec.layout.entries if "core" in e.name)
    assert rank > 1 and (np.diff(values) <= 0).all() and (values[:, 0] > 0).all()
    assert ("before" in final.checkpoint.spectra) == (method == "trishul")
    if method == "trishul":
        # Spectra of the same cores, except for scalars near 1.
        assert final.checkpoint.spectra["after"].shape == values.shape
        np.testing.assert_allclose(values[:, 0], final.checkpoint.spectra["after"][:, 0], rtol=0.2)


def test_spectra_before_and_after_are_recorded(small, inline_result):
    final = inline_result(small("method=trishul", *INLINE))
    found = final.checkpoint.spectra
    before, after, tau = (found[name] for name in ("before", "after", "threshold"))
    assert before.shape == after.shape == found["uploaded"].shape and tau.shape == (1,)
    assert tau > 0 and (after >= 0).all() and (after < before).any()
    np.testing.assert_allclose(before - after, np.minimum(before, tau), rtol=1e-9, atol=1e-15)


def test_matrices_compare_the_clients_of_every_round(small, inline_result):
    final = inline_result(small("method=ravan", *INLINE))
    found = final.checkpoint.matrices
    assert found["round"].tolist() == [1, 2, 3]
    cohorts = [record.clients for record in final.checkpoint.records[1:]]
    np.testing.assert_array_equal(found["clients"], cohorts)
    for number, record in enumerate(final.checkpoint.records[1:]):
        inner = found["inner_products"][number]
        # The mean square of the updates is their variance and the square of their mean.
        variance = np.trace(inner) / len(inner) - inner.mean()
        assert record.diagnostics["delta_aggregation_variance"] == pytest.approx(variance, rel=1e-6)
        above = np.triu_indices(len(inner), 1)
        cosine = found["cosine"][number][above].mean()
        assert record.diagnostics["delta_client_cosine"] == pytest.approx(cosine, rel=1e-6)
        alignment = record.diagnostics["delta_principal_angle_similarity"]
        assert found["principal_angle_similarity"][number][above].mean() == pytest.approx(alignment)
        assert record.diagnostics["delta_inconsistency_index"] == pytest.approx(1 - alignment)
        assert record.diagnostics["delta_relative_variance"] > 0


EVERYONE = "evaluation.diagnostics_cohort=all"


@pytest.mark.parametrize("words", [["method=ravan"], ["method=trishul", "federation.compute=bell"]])
def test_comparing_all_clients_changes_nothing_else(small, inline_result, words):
    plain, asked = small(*words, *INLINE), small(*words, *INLINE, EVERYONE)
    assert plain.id != asked.id
    before, after = inline_result(plain), inline_result(asked)
    assert after.digest == before.digest
    assert without_timings(after.checkpoint.records) == without_timings(before.checkpoint.records)
    everyone = {k: v for k, v in after.checkpoint.matrices.items() if k.startswith("everyone_")}
    assert after.checkpoint.matrices.keys() - everyone.keys() == before.checkpoint.matrices.keys()
    for name, matrix in before.checkpoint.matrices.items():
        np.testing.assert_array_equal(matrix, after.checkpoint.matrices[name])
    assert everyone["everyone_clients"].tolist() == [*range(plain.federation.clients)]
    # The cohort of the last round sent the compared uploads, from the same broadcast.
    last = before.checkpoint.matrices["clients"][-1]
    for name in ("cosine", "inner_products", "principal_angle_similarity"):
        matrix = everyone[f"everyone_{name}"]
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-12)
        np.testing.assert_allclose(matrix[np.ix_(last, last)], before.checkpoint.matrices[name][-1])


def test_matrices_outlive_a_stop(small, inline_result):
    experiment = small("method=ravan", *INLINE, EVERYONE)
    prepared = prepare_run(experiment)
    whole = inline_result(experiment).checkpoint.matrices
    for _ in range(2):
        InlineDriver(experiment, prepared, "a").step()
    again = InlineDriver(experiment, prepared, "a")
    while not again.step().finished:
        pass
    done = InlineDriver(experiment, prepared, "a").final()  # from the last checkpoint
    for found in (again.final().checkpoint.matrices, done.checkpoint.matrices):
        assert found.keys() == whole.keys() and "everyone_cosine" in found
        for name, matrix in whole.items():
            np.testing.assert_array_equal(found[name], matrix)


def test_diverging_client_outside_cohorts_only_loses_the_comparison(small):
    experiment = small("method=ravan", *INLINE, EVERYONE)
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    run = driver.executor.run

    def diverging(broadcast, jobs, *more):
        if {job.client for job in jobs if isinstance(job, TrainJob)} - cohort:
            raise PermanentError("training loss of client 9 is not finite")
        return run(broadcast, jobs, *more)

    driver.executor.run = diverging
    for number in range(1, experiment.federation.rounds + 2):
        cohort = {*driver.draw(number)}
        report = driver.step()
        assert any("client 9" in e for e in report.events) == (
            number == experiment.federation.rounds
        )
    assert report.finished and "everyone_cosine" not in driver.final().checkpoint.matrices
    assert state_digest(driver.final().checkpoint.state) == driver.final().digest


def test_more_clients_than_can_be_compared_are_rejected(small):
    with pytest.raises(InputError, match=r"diagnostics_cohort='all' compares at most 100 clients"):
        small("federation.clients=101", EVERYONE)


def test_first_and_last_rounds_are_diagnosed(small, inline_result):
    words = ("method=trishul", "resources.backend=inline", "evaluation.diagnostics_every=5")
    final = inline_result(small(*words, "federation.rounds=3"))
    diagnosed = [
        r.round for r in final.checkpoint.records if "delta_aggregation_variance" in r.diagnostics
    ]
    assert (
        diagnosed
        == [r.round for r in final.checkpoint.records if "svt_zeroed" in r.diagnostics]
        == [1, 3]
    )


@pytest.mark.parametrize("every", [0, 1])
def test_client_time_covers_only_local_steps(small, monkeypatch, every):
    """Spectra are computed only in diagnosed rounds, and outside of the timed steps."""
    experiment = small("method=trishul", *INLINE, f"evaluation.diagnostics_every={every}")
    clock = [0.0]

    def slow(function, seconds):
        def called(*args, **options):
            clock[0] += seconds
            return function(*args, **options)

        return called

    monkeypatch.setattr(local.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(local, "new_run", slow(local.new_run, 10.0))
    monkeypatch.setattr(Trishul, "upload", slow(Trishul.upload, 100.0))
    monkeypatch.setattr(Trishul, "after_steps", slow(Trishul.after_steps, 1.0))
    context = InlineExecutor(experiment, prepare_run(experiment)).context
    start = context.method.initial_state(context.model.layout, context.initial, {})
    _, report = local.train_client(context, start.map(to_array), TrainJob(1, 0))
    assert report.seconds == experiment.federation.local_steps
    assert bool(report.spectra) == (every == 1)


def test_limited_clients_compare_common_heads(small, inline_result):
    final = inline_result(small("method=ravan", "method.head_fraction=0.5", *INLINE))
    cosine = final.checkpoint.matrices["cosine"]
    assert np.nanmax(np.abs(cosine)) <= 1 + 1e-9
    np.testing.assert_allclose(np.diagonal(cosine, axis1=1, axis2=2), 1.0)
    trained = final.checkpoint.spectra["uploaded"]
    cores = sum(e.shape[0] for e in final.spec.layout.entries if "core" in e.name)
    assert 0 < len(trained) <= -(-cores // 2)


def test_methods_without_cores_have_no_matrices(small, inline_result):
    final = inline_result(small("method=fedit", *INLINE))
    assert final.checkpoint.matrices == {} and final.checkpoint.spectra == {}


def test_rounds_of_different_width_are_padded():
    def found(*clients):
        size = len(clients)
        return {"clients": np.array(clients), "cosine": np.ones((size, size))}

    rounds = append_round(append_round({}, 1, found(3)), 4, found(0, 5))
    rounds = append_round(append_round(rounds, 5, {}), 6, found(2))
    assert rounds["round"].tolist() == [1, 4, 6]
    assert rounds["clients"].tolist() == [[3, -1], [0, 5], [2, -1]]
    assert np.isnan(rounds["cosine"][[0, 2]]).sum() == 6
    assert torch.from_numpy(rounds["cosine"]).nan_to_num().sum() == 6


#: Seconds after which a waiting thread gives up, because the threads do not run in parallel.
PATIENCE = 60.0

COMPARED = ("resources.backend=inline", "method=ravan")


def test_uploads_are_compared_while_the_model_is_evaluated(small, monkeypatch):
    experiment = small(*COMPARED)
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    evaluating, comparing = threading.Event(), threading.Event()
    evaluate, compare, met = driver.executor.evaluate, diagnostics.compare_uploads, []

    def evaluated(*args):
        evaluating.set()
        met.append(comparing.wait(PATIENCE))
        return evaluate(*args)

    def compared(*args):
        comparing.set()
        met.append(evaluating.wait(PATIENCE))
        return compare(*args)

    monkeypatch.setattr(driver.executor, "evaluate", evaluated)
    monkeypatch.setattr(diagnostics, "compare_uploads", compared)
    driver.step()
    assert len(met) > 1 and all(met)
    # The step has waited for it: the written record is complete.
    assert "effective_rank" in open_checkpoints(experiment).newest().records[1].diagnostics


def test_comparison_error_precedes_the_state_change(
    small, inline_result, assert_same, drive_to_end, monkeypatch
):
    experiment = small(*COMPARED)
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    driver.step()
    before = driver.checkpoint.state

    def failing(*_):
        raise RunError("no comparison")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="no comparison"):
        patch.setattr(diagnostics, "compare_uploads", failing)
        driver.step()
    assert driver.checkpoint.round == open_checkpoints(experiment).newest().round == 1
    assert driver.checkpoint.state is before
    assert_same(drive_to_end(driver), inline_result(experiment))
