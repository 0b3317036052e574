"""Fixtures of the tests of figures."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def pixels():
    """``pixels(path)`` checks a PNG and returns its pixels, [height, width, 3]."""

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


@pytest.fixture
def has_colour():
    """``has_colour(pixels, "#0072B2")`` tells whether some pixel has about that colour."""

    def find(array, hexadecimal):
        rgb = [int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]
        return bool((np.abs(array.astype(int) - rgb).max(axis=2) <= 8).any())

    return find
