import numpy as np
import pytest

from trishul_ray.errors import InputError
from trishul_ray.report.figures import heads_per_layer, spectra
from trishul_ray.report.uploads import (
    PANELS,
    client_matrices,
    diagnostics_curves,
    mean_over_rounds,
    uploaded_spectrum,
)
from trishul_ray.rng import numpy_rng


def test_matrices_are_averaged_by_pair_of_clients():
    clients = [[4, 1], [1, 7], [4, 1], [9, -1]]
    two = np.array([[1.0, 2.0], [2.0, 3.0]])
    alone = np.array([[5.0, np.nan], [np.nan, np.nan]])
    known, mean = mean_over_rounds(clients, [two, 10 * two, 3 * two, alone])
    assert known.tolist() == [1, 4, 7, 9]
    nan = np.nan
    wanted = [
        [(3 + 10 + 9) / 3, (2 + 6) / 2, 20, nan],
        [(2 + 6) / 2, (1 + 3) / 2, nan, nan],
        [20, nan, 30, nan],
        [nan, nan, nan, 5],
    ]
    np.testing.assert_allclose(mean, wanted)


@pytest.mark.parametrize(("rounds", "clients", "cohort"), [(1, 2, 2), (50, 20, 3), (3, 60, 20)])
def test_client_matrices(tmp_path, pixels, rounds, clients, cohort):
    rng = numpy_rng(0, "figure")
    who = np.stack([np.sort(rng.permutation(clients)[:cohort]) for _ in range(rounds)])
    x = rng.normal(size=(rounds, cohort, 8))
    covariance = x @ x.transpose(0, 2, 1)
    similarity = rng.random((rounds, cohort, cohort))
    pixels(client_matrices(who, covariance, similarity, tmp_path / "m.png", note="all of it"))


def test_clients_that_sent_nothing_are_drawn_too(tmp_path, pixels):
    zero, unknown = np.zeros((1, 2, 2)), np.full((1, 2, 2), np.nan)
    pixels(client_matrices([[0, 1]], zero, unknown, tmp_path / "m.png"))


def test_diagnostics_curves(tmp_path, pixels):
    rounds = list(range(1, 31))
    series = {name: [1 / (i + 1) for i in rounds] for name in PANELS}
    gaps = series | {"inconsistency_index": [np.nan] * 30}
    pixels(diagnostics_curves(rounds, series, gaps, tmp_path / "d.png", note="all of it"))


@pytest.mark.parametrize("shape", [(1, 1), (48, 32)])
def test_spectra_of_several_ranks(tmp_path, pixels, shape):
    values = -np.sort(-numpy_rng(0, "figure").random(shape), axis=1)
    values[0, shape[1] // 2 + 1 :] = np.nan
    pixels(uploaded_spectrum(values, tmp_path / "u.png"))
    pixels(spectra(values, np.maximum(values - 0.3, 0), 0.3, tmp_path / "s.png"))


def test_squared_norms_beside_the_heads(tmp_path, pixels):
    names, heads = ["a", "b", "c"], [2, 6, 4]
    plain = pixels(heads_per_layer(names, heads, tmp_path / "a.png"))
    both = pixels(heads_per_layer(names, heads, tmp_path / "b.png", [1e3, 4e3, 2e3]))
    assert (plain < 30).all(axis=2).sum() < (both < 30).all(axis=2).sum()  # a black line more


def test_a_note_is_above_the_figure(tmp_path, pixels):
    note = "part of cifar100: 10,000 of 50,000 training rows, 500 of 10,000 test rows scored"
    names = ["a", "b"]
    plain = pixels(heads_per_layer(names, [1, 2], tmp_path / "a.png"))
    noted = pixels(heads_per_layer(names, [1, 2], tmp_path / "b.png", note=note))
    corner = np.s_[:40, 8:40]  # left of the axis, above its label
    assert (plain[corner] > 250).all() and not (noted[corner] > 250).all()
    assert (noted[:, -2:] > 250).all()  # wrapped, not cut


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda p: uploaded_spectrum(np.ones(3), p), r"\(3,\) must be \[n, r\]"),
        (
            lambda p: diagnostics_curves([1], *[{n: [] for n in PANELS}] * 2, p),
            "principal_angle_similarity has",
        ),
        (
            lambda p: client_matrices([[0, 1]], np.ones((1, 3, 3)), np.ones((1, 2, 2)), p),
            r"covariance \(1, 3, 3\)",
        ),
        (lambda p: heads_per_layer(["a"], [1], p, [1.0, 2.0]), "1 blocks, 2 norms"),
    ],
)
def test_wrong_input_is_named_and_nothing_written(tmp_path, draw, says):
    with pytest.raises(InputError, match=says):
        draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
