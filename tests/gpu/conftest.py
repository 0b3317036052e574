"""Tests that need a GPU, and rehearsals of their logic on the CPU.

On a machine with a GPU: ``python -m pytest -m gpu``.
"""

import pytest

from trishul_ray.federation.determinism import set_environment

set_environment()  # cuBLAS reads it in its first call in this process.


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Return the CPU, for a rehearsal of the test, and the GPU."""
    return request.param
