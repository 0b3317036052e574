"""Streams named by seed, purpose and path."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.runtime.random_streams import numpy_rng, torch_rng

paths = st.tuples(st.integers(0, 2**40), st.sampled_from(["a", "b"]), st.integers(0, 999))


@given(paths, paths)
def test_equal_names_equal_streams_else_not(first, second):
    draws = [numpy_rng(*p).integers(0, 2**63, 4).tolist() for p in (first, second, first)]
    assert draws[0] == draws[2]
    assert (draws[0] == draws[1]) == (first == second)


def test_paths_do_not_run_together():
    assert numpy_rng(0, "x", 1, 23).random() != numpy_rng(0, "x", 12, 3).random()
    assert numpy_rng(0, "x", 1).random() != numpy_rng(0, "x", "1").random()


def test_global_streams_are_not_touched():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    torch.randn(3, generator=torch_rng(0, "x"))
    numpy_rng(0, "x").random()
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
