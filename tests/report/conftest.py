"""Shared by the tests of figures."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def pixels():
    """``pixels(path)`` -> the picture [height, width, 3]: a PNG with something drawn on it."""

    def read(path):
        with Image.open(path) as image:
            assert image.format == "PNG"
            array = np.asarray(image.convert("RGB"))
        assert min(array.shape[:2]) > 300
        # Not blank: ink covers some of it, and not all.
        ink = float((array < 250).any(axis=2).mean())
        assert 0.005 < ink < 0.95
        return array

    return read
