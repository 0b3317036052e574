"""Fixtures of the tests that kill runs in forks."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fork_environment():
    """Make the fork server find the modules of ``tests``, without the caller's storage paths."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        for name in ("TRISHUL_RUNS", "TRISHUL_HUB", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        yield
