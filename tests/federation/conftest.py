"""A small backbone for runs in this process and on its actors."""

import pytest


@pytest.fixture(scope="session")
def small_backbone(small_vit):
    """Return half of the blocks of vit-digits."""
    return [f"model.name={small_vit}"]
