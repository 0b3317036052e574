"""Load the methods of example_plugins/ for the tests of methods."""

import pytest
from example_plugins import FOLDER, unloaded_after

from trishul_ray.plugins.loading import load_plugin


@pytest.fixture(scope="package", autouse=True)
def example_plugins():
    """Register the methods of ``example_plugins/`` for the tests of methods."""
    with unloaded_after():
        for file in sorted(FOLDER.glob("*.py")):
            load_plugin(file)
        yield
