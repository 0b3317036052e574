"""Tests that need a GPU, and their logic rehearsed on the CPU where that is possible.

On a machine with a GPU: ``python -m pytest -m gpu``.
"""

import pytest

from trishul_ray.federation.determinism import set_environment

set_environment()  # cuBLAS reads it at its first call in this process


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU, where this rehearses the test, and the GPU."""
    return request.param
