"""Small real runs in one process: digits, a random-weight ViT."""

import pytest

from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run


@pytest.fixture(scope="session")
def small_backbone(small_vit):
    """Return half of the blocks of vit-digits."""
    return [f"model.name={small_vit}"]


@pytest.fixture
def edge_run(small, drive_to_end):
    """``edge_run("method=ravan", ..., stop=1)`` runs it, and may stop and resume."""

    def run(*overrides, stop=None):
        experiment = small("resources.backend=inline", *overrides)
        prepared = prepare_run(experiment)
        if stop is not None:
            driver = InlineDriver(experiment, prepared, "a")
            for _ in range(stop):
                driver.step()
            driver.close()
        driver = InlineDriver(experiment, prepared, "a")
        try:
            return drive_to_end(driver)
        finally:
            driver.close()

    return run
