import numpy as np
import pytest

from trishul_ray.errors import InputError
from trishul_ray.report.figures import MOST_CLIENTS, _groups, label_distribution
from trishul_ray.rng import numpy_rng


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (20, 100), (10_000, 100)])
def test_label_distribution(tmp_path, clients, classes, pixels):
    rng = numpy_rng(0, "figure")
    counts = rng.multinomial(50, rng.dirichlet([0.3] * classes), size=clients)
    picture = pixels(label_distribution(counts, tmp_path / "l.png"))
    assert picture.shape[1] <= 1600  # stays a page wide, however many clients


def test_label_distribution_takes_an_empty_client_and_names(tmp_path, pixels):
    counts = np.array([[3, 0], [0, 0]])
    pixels(label_distribution(counts, tmp_path / "l.png", classes=["cat", "dog"]))


def test_groups_hold_every_client_once_and_follow_the_commonest_class():
    shares = numpy_rng(0, "figure").dirichlet([0.3] * 7, size=1234)
    groups = _groups(shares)
    assert len(groups) == MOST_CLIENTS
    assert sorted(np.concatenate(groups).tolist()) == list(range(1234))
    order = shares.argmax(axis=1)[np.concatenate(groups)]
    assert (np.diff(order) >= 0).all()


@pytest.mark.parametrize(
    ("counts", "classes", "says"),
    [
        (np.ones(3), None, r"\(3,\) must be"),
        ([[1, -1]], None, ">= 0"),
        ([[1, 1]], ["a"], "1 class names for 2 classes"),
    ],
)
def test_wrong_input_is_named_and_nothing_written(tmp_path, counts, classes, says):
    with pytest.raises(InputError, match=says):
        label_distribution(counts, tmp_path / "x.png", classes)
    assert not list(tmp_path.iterdir())
