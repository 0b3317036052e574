"""What a run records of its clients' uploads, for the figures."""

import numpy as np
import pytest
import torch

from trishul_ray.federation.diagnostics import append_round
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run

INLINE = ("resources.backend=inline", "evaluation.every=9")


@pytest.mark.parametrize("method", ["ravan", "trishul", "trishul method.lam=0", "fedsb"])
def test_spectra_of_what_is_sent_are_recorded_with_and_without_a_prox(small, inline_result, method):
    name, *more = method.split()
    final = inline_result(small(f"method={name}", *more, *INLINE))
    values = final.spectra["uploaded"]
    heads, rank = values.shape
    assert heads == sum(e.shape[0] for e in final.blueprint.layout.entries if "core" in e.name)
    assert rank > 1 and (np.diff(values) <= 0).all() and (values[:, 0] > 0).all()
    assert ("before" in final.spectra) == (method == "trishul")
    if method == "trishul":
        # Of the same cores, but for the scalars near 1.
        assert final.spectra["after"].shape == values.shape
        np.testing.assert_allclose(values[:, 0], final.spectra["after"][:, 0], rtol=0.2)


def test_matrices_compare_the_clients_of_every_round(small, inline_result):
    final = inline_result(small("method=ravan", *INLINE))
    found = final.matrices
    assert found["round"].tolist() == [1, 2, 3]
    cohorts = [record["clients"] for record in final.records[1:]]
    np.testing.assert_array_equal(found["clients"], cohorts)
    for number, record in enumerate(final.records[1:]):
        covariance = found["covariance"][number]
        # Its trace is the spread of which the variance is the mean over clients.
        variance = np.trace(covariance) / len(covariance)
        assert record["delta_aggregation_variance"] == pytest.approx(variance, rel=1e-6)
        np.testing.assert_allclose(covariance.sum(axis=0), 0, atol=1e-6 * covariance.max())
        above = np.triu_indices(len(covariance), 1)
        cosine = found["cosine"][number][above].mean()
        assert record["delta_client_cosine"] == pytest.approx(cosine, rel=1e-6)
        alignment = record["delta_principal_angle_similarity"]
        assert found["principal_angle_similarity"][number][above].mean() == pytest.approx(alignment)
        assert record["delta_inconsistency_index"] == pytest.approx(1 - alignment)
        assert record["delta_relative_variance"] > 0


def test_matrices_outlive_a_stop(small, inline_result):
    experiment = small("method=ravan", *INLINE)
    prepared = prepare_run(experiment)
    InlineDriver(experiment, prepared, "a").step()
    again = InlineDriver(experiment, prepared, "a")
    while not again.step().finished:
        pass
    whole, resumed = inline_result(experiment).matrices, again.final().matrices
    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        np.testing.assert_array_equal(value, resumed[key])


def test_limited_clients_are_compared_over_the_heads_that_both_trained(small, inline_result):
    final = inline_result(small("method=ravan", "method.head_fraction=0.5", *INLINE))
    cosine = final.matrices["cosine"]
    assert np.nanmax(np.abs(cosine)) <= 1 + 1e-9
    np.testing.assert_allclose(np.diagonal(cosine, axis1=1, axis2=2), 1.0)
    trained = final.spectra["uploaded"]
    cores = sum(e.shape[0] for e in final.blueprint.layout.entries if "core" in e.name)
    assert 0 < len(trained) <= -(-cores // 2)


def test_methods_without_cores_have_no_matrices(small, inline_result):
    final = inline_result(small("method=fedit", *INLINE))
    assert final.matrices == {} and final.spectra == {}


def test_rounds_of_different_width_are_padded():
    def found(*clients):
        size = len(clients)
        return {"clients": np.array(clients), "covariance": np.ones((size, size))}

    rounds = append_round(append_round({}, 1, found(3)), 4, found(0, 5))
    rounds = append_round(append_round(rounds, 5, {}), 6, found(2))
    assert rounds["round"].tolist() == [1, 4, 6]
    assert rounds["clients"].tolist() == [[3, -1], [0, 5], [2, -1]]
    assert np.isnan(rounds["covariance"][[0, 2]]).sum() == 6
    assert torch.from_numpy(rounds["covariance"]).nan_to_num().sum() == 6
