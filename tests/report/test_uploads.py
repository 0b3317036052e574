import numpy as np
import pytest
from matplotlib.figure import Figure

from trishul_ray.errors import InputError
from trishul_ray.report.uploads import (
    PANELS,
    client_matrices,
    diagnostics_curves,
    mean_over_rounds,
    spectra,
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
    expected = [
        [(3 + 10 + 9) / 3, (2 + 6) / 2, 20, nan],
        [(2 + 6) / 2, (1 + 3) / 2, nan, nan],
        [20, nan, 30, nan],
        [nan, nan, nan, 5],
    ]
    np.testing.assert_allclose(mean, expected)


@pytest.mark.parametrize(("rounds", "clients", "cohort"), [(1, 2, 2), (50, 20, 3), (3, 60, 20)])
def test_client_matrices(tmp_path, pixels, rounds, clients, cohort):
    rng = numpy_rng(0, "figure")
    who = np.stack([np.sort(rng.permutation(clients)[:cohort]) for _ in range(rounds)])
    x = rng.normal(size=(rounds, cohort, 8))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    cosine = x @ x.transpose(0, 2, 1)
    similarity = rng.random((rounds, cohort, cohort))
    pixels(client_matrices(who, cosine, similarity, tmp_path / "m.png", note="all of it"))


def test_zero_and_unknown_matrices(tmp_path, pixels):
    zero, unknown = np.zeros((1, 2, 2)), np.full((1, 2, 2), np.nan)
    pixels(client_matrices([[0, 1]], zero, unknown, tmp_path / "m.png"))


def test_diagnostics_curves(tmp_path, pixels):
    rounds = list(range(1, 31))
    series = {name: [1 / (i + 1) for i in rounds] for name in PANELS}
    gaps = series | {"inconsistency_index": [np.nan] * 30}
    pixels(diagnostics_curves(rounds, series, gaps, tmp_path / "d.png", note="all of it"))


@pytest.mark.parametrize("shape", [(48, 32), (1, 1), (2, 110)])
def test_spectra(tmp_path, shape, pixels, has_colour):
    before = -np.sort(-numpy_rng(0, "figure").random(shape), axis=1)
    picture = pixels(spectra(before, np.maximum(before - 0.3, 0), 0.3, tmp_path / "s.png"))
    assert has_colour(picture, "#0072B2") or shape[1] == 1


@pytest.mark.parametrize("threshold", [1e-6, 0.3, 0.0])
def test_spectra_show_what_the_prox_took_away(tmp_path, monkeypatch, threshold):
    """Also where it is a millionth of the singular values, and lines lie upon each other."""
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda f, *a, **k: (drawn.extend(f.axes), save(f, *a, **k))
    )
    before = -np.sort(-numpy_rng(0, "figure").random((8, 16)), axis=1)
    spectra(before, np.maximum(before - threshold, 0), threshold, tmp_path / "s.png")
    above, below = drawn
    assert above.get_yscale() == "log"
    if threshold:
        assert below.get_yscale() == "log"
        lines = {line.get_label(): line.get_ydata() for line in below.get_lines()}
        np.testing.assert_allclose(lines["taken away"][0], threshold, rtol=1e-6)
        bottom, top = below.get_ylim()
        assert bottom < threshold < top and top / bottom < 1e2


@pytest.mark.parametrize("shape", [(1, 1), (48, 32)])
def test_spectra_of_several_ranks(tmp_path, pixels, shape):
    values = -np.sort(-numpy_rng(0, "figure").random(shape), axis=1)
    values[0, shape[1] // 2 + 1 :] = np.nan
    pixels(uploaded_spectrum(values, tmp_path / "u.png"))
    pixels(spectra(values, np.maximum(values - 0.3, 0), 0.3, tmp_path / "s.png"))


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda p: uploaded_spectrum(np.ones(3), p), r"\(3,\) must be \[n, r\]"),
        (
            lambda p: diagnostics_curves([1], *[{n: [] for n in PANELS}] * 2, p),
            "principal_angle_similarity has",
        ),
        (
            lambda p: client_matrices([[0, 1]], np.ones((1, 3, 3)), np.ones((1, 2, 2)), p),
            r"cosine \(1, 3, 3\)",
        ),
        (lambda p: spectra(np.ones((2, 3)), np.ones((2, 4)), 0.1, p), r"\(2, 3\).*\(2, 4\)"),
        (lambda p: spectra(np.ones((0, 3)), np.ones((0, 3)), 0.1, p), r"\(0, 3\)"),
    ],
)
def test_wrong_input_is_named_and_writes_nothing(tmp_path, draw, expected):
    with pytest.raises(InputError, match=expected):
        draw(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
