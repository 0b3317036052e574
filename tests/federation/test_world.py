"""What a worker builds: the measured rows are the data's choice alone."""

import numpy as np
import pytest

from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.workbench import build_workbench


@pytest.fixture
def measured(small):
    """``measured("seed=1", ...)`` -> the test rows that a run evaluates."""

    def rows(*overrides):
        experiment = small(*overrides)
        return build_workbench(experiment, prepare_run(experiment)).test_rows

    return rows


def test_every_seed_and_method_is_measured_on_the_same_rows(measured):
    first = measured("seed=0")
    assert len(first) == len(np.unique(first)) == 64
    for words in (["seed=1"], ["seed=2", "method=fedit"], ["seed=3", "budget=2"]):
        assert measured(*words).tolist() == first.tolist()
    # A subset, not the first rows, and drawn from all of them.
    assert first.max() > 400 and first.tolist() != list(range(64))
