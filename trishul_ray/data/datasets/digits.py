"""The handwritten digits of scikit-learn: 1797 images of 8x8 pixels in ten classes.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository (its test part), as shipped with ``sklearn.datasets.load_digits``.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trishul_ray.data.dataset import DatasetInfo, Origin, ProgressCallback
from trishul_ray.data.images import pixel_statistics
from trishul_ray.runtime.lazy import sklearn
from trishul_ray.runtime.random_streams import numpy_rng

#: Number of rows per split. The splits are disjoint and contain all 1797 rows. ``pretrain`` is for
#: the built-in backbone.
SPLIT_SIZES = {"pretrain": 300, "train": 1000, "test": 497}


class Digits:
    """The ``digits`` dataset, which needs neither network access nor a mirror."""

    name = "digits"
    description = "8x8 handwritten digits, 1,000 / 497, nothing to download"
    splits = tuple(SPLIT_SIZES)
    official = SPLIT_SIZES

    def key(self, hub: Path | None) -> str:
        """Return a constant, since the rows in scikit-learn never change."""
        return "sklearn-digits-split-1"

    def read(
        self, hub: Path | None, progress: ProgressCallback
    ) -> tuple[DatasetInfo, Mapping[str, Mapping[str, np.ndarray]]]:
        """Build the description, and ``pixels`` uint8 [N, 1, 8, 8] and ``label`` int64 [N].

        The splits are consecutive parts, with :data:`SPLIT_SIZES`, of a permutation of the rows
        drawn from ``numpy_rng(0, "digits-split")``, which is the same for every experiment.
        """
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        # Scale the stored values from 0..16 to 0..255.
        pixels = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        order = numpy_rng(0, "digits-split").permutation(len(labels))
        columns, start = {}, 0
        for split, size in SPLIT_SIZES.items():
            rows = order[start : start + size]
            columns[split] = {"pixels": pixels[rows], "label": labels[rows].astype(np.int64)}
            start += size
        progress("digits", 1.0)
        mean, std = pixel_statistics(columns["pretrain"]["pixels"])
        info = DatasetInfo(
            name=self.name,
            kind="image",
            classes=tuple(str(digit) for digit in range(10)),
            image_shape=(1, 8, 8),
            mean=mean,
            std=std,
            origin=Origin("generated", "scikit-learn load_digits"),
        )
        return info, columns
