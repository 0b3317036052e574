import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove the caller's settings, and keep the checks off the hub."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "TRISHUL_", "HF_")) or name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
