"""Shared by the tests that end runs in forks."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fork_environment():
    """Let the server of forks find the modules of ``tests``, and no places of the caller."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        for name in ("TRISHUL_RUNS", "TRISHUL_HUB", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        yield
