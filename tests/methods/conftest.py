"""Load the methods of newcomers/ for the tests of methods."""

import pytest
from newcomers import FOLDER, unloaded_after

from trishul_ray.plugins.loading import load_plugin


@pytest.fixture(scope="package", autouse=True)
def newcomers():
    """Register the methods of ``newcomers/`` for the tests of methods."""
    with unloaded_after():
        for file in sorted(FOLDER.glob("*.py")):
            load_plugin(file)
        yield
