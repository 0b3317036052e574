"""Prepared files: written and read back, mapped, pickled, verified."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.data.dataset import (
    DatasetInfo,
    Origin,
    PreparedDataset,
    Split,
    fingerprint,
    write_split,
)
from trishul_ray.errors import InputError

INFO = DatasetInfo(
    name="toy",
    kind="image",
    classes=("a", "b", "c"),
    image_shape=(3, 4, 5),
    mean=(0.1, 0.2, 0.3),
    std=(1.0, 2.0, 3.0),
    origin=Origin("hub", "toy", "0" * 40, ("a note",)),
)


def columns(rows: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "pixels": rng.integers(0, 256, (rows, 3, 4, 5), dtype=np.uint8),
        "label": rng.integers(0, 3, rows),
    }


@pytest.fixture
def split(tmp_path):
    write_split(tmp_path / "train.arrow", columns(), INFO)
    return Split(tmp_path / "train.arrow")


def test_written_columns_are_read_back(split):
    expected = columns()
    assert len(split) == 7
    assert split.info == INFO
    assert split.columns == ("pixels", "label")
    for name in expected:
        np.testing.assert_array_equal(split.column(name), expected[name])
        assert split.column(name).dtype == expected[name].dtype
    np.testing.assert_array_equal(split.labels, expected["label"])
    assert split.fingerprint == fingerprint(expected)


def test_columns_are_read_only_views(split):
    for name in split.columns:
        view = split.column(name)
        assert not view.flags.owndata and not view.flags.writeable
        assert np.shares_memory(view, split.column(name))
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0


@settings(deadline=None, max_examples=20)
@given(rows=st.lists(st.integers(0, 6), max_size=9))
def test_batch_follows_the_order_of_indices(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("split")
    write_split(folder / "x.arrow", columns(), INFO)
    batch = Split(folder / "x.arrow").batch(np.array(rows, dtype=np.int64))
    expected = columns()
    assert batch["pixels"].shape == (len(rows), 3, 4, 5) and batch["pixels"].dtype == torch.uint8
    assert batch["label"].dtype == torch.int64
    np.testing.assert_array_equal(batch["pixels"].numpy(), expected["pixels"][rows])
    np.testing.assert_array_equal(batch["label"].numpy(), expected["label"][rows])


def test_a_batch_is_a_copy(split):
    split.batch(np.array([0]))["pixels"].fill_(9)
    assert fingerprint(split.read()) == split.fingerprint


def test_pickles_contain_only_paths(tmp_path):
    for name in ("train", "test"):
        write_split(tmp_path / f"{name}.arrow", columns(1000), INFO)
    dataset = PreparedDataset(tmp_path, ("train", "test"))
    dataset.train.batch(np.arange(3))  # opens the files
    data = pickle.dumps(dataset)
    assert len(data) < 500 and len(pickle.dumps(dataset.train)) < 500
    again = pickle.loads(data)
    assert again == dataset and again.fingerprint == dataset.fingerprint
    np.testing.assert_array_equal(again.train.labels, dataset.train.labels)


def test_the_fingerprint_depends_on_values_and_shapes():
    base = columns()
    other = {**base, "label": base["label"] + 1}
    reshaped = {**base, "pixels": base["pixels"].reshape(7, 3, 5, 4)}
    assert len({fingerprint(c) for c in (base, other, reshaped)}) == 3
    assert fingerprint(base) == fingerprint(dict(reversed(base.items())))


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(InputError, match=r"not on this machine.*storage.cache"):
        len(Split(tmp_path / "gone.arrow"))
