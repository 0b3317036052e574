"""The handwritten digits embedded in scikit-learn: 1797 images of 8x8, ten classes.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository (its test part), as shipped by ``sklearn.datasets.load_digits``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from trishul_ray.data.images import pixel_statistics
from trishul_ray.data.prepared import DatasetInfo
from trishul_ray.rng import numpy_rng

#: Rows of each split: disjoint, together all 1797. ``pretrain`` is for the built-in backbone.
SPLIT_SIZES = {"pretrain": 300, "train": 1000, "test": 497}


class Digits:
    """The ``digits`` dataset; needs neither network nor mirror."""

    name = "digits"
    description = "8x8 handwritten digits, 1,000 / 497, nothing to download"
    splits = tuple(SPLIT_SIZES)
    official = SPLIT_SIZES

    def key(self, hub: Path | None) -> str:
        """What decides the rows, beside the format: the package's data never change."""
        return "sklearn-digits-split-1"

    def read(
        self, hub: Path | None, progress: Callable[[str, float], None]
    ) -> tuple[DatasetInfo, Mapping[str, Mapping[str, np.ndarray]]]:
        """Rows of every split: ``pixels`` uint8 [N, 1, 8, 8] and ``label`` int64 [N].

        The split is a permutation drawn from ``numpy_rng(0, "digits-split")``, the same for every
        experiment, cut into :data:`SPLIT_SIZES`; rows stand in that permuted order.
        """
        from sklearn.datasets import load_digits  # imports scipy: only when needed

        images, labels = load_digits(return_X_y=True)
        # Stored values are 0..16; the scale to 0..255 keeps 0 and 16 at the ends.
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
            source="scikit-learn load_digits",
        )
        return info, columns
