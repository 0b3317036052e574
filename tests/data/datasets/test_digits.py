"""The digits dataset: its splits cover all rows once, and are the same bytes everywhere."""

import numpy as np
from sklearn.datasets import load_digits

from trishul_ray.data.prepare import prepare


def test_splits_are_disjoint_and_hold_all_rows(tmp_path):
    digits = prepare("digits", cache=tmp_path, hub=None)
    sizes = {name: len(digits.split(name)) for name in digits.split_names}
    assert sizes == {"pretrain": 300, "train": 1000, "test": 497}
    images, labels = load_digits(return_X_y=True)
    rows = np.concatenate([digits.split(n).column("pixels").reshape(-1, 64) for n in sizes])
    held = np.concatenate([digits.split(n).labels for n in sizes])
    # Scaling 0..16 by 255/16 and rounding can be undone: compare the rows in sorted order.
    back = np.rint(rows * (16 / 255)).astype(int)
    want = np.column_stack([images.astype(int), labels])
    got = np.column_stack([back, held])
    np.testing.assert_array_equal(got[np.lexsort(got.T)], want[np.lexsort(want.T)])
    assert rows.min() == 0 and rows.max() == 255


def test_every_split_has_every_class(tmp_path):
    digits = prepare("digits", cache=tmp_path, hub=None)
    for name in digits.split_names:
        assert np.bincount(digits.split(name).labels, minlength=10).min() > 15
    assert digits.info.num_classes == 10 and digits.info.image_shape == (1, 8, 8)
