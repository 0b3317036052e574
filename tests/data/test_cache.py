"""The cache forgets failed preparations, and own tables as they were before an edit."""

import os
import time

import pytest
from filelock import FileLock

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.prepare import KEPT, LOCK, UNUSED_SECONDS, prepare, remove_leftovers
from trishul_ray.errors import InputError


@pytest.fixture
def edit(tmp_path):
    """``edit(number, age=0)`` -> the prepared folder of a table, edited, last used ``age`` ago."""

    def make(number, name="notes.csv", age=0.0):
        table = tmp_path / name
        table.write_text(f"text,label\na{number},x\nb,y\nc,x\n")
        config = DataConfig(name="table", path=str(table))
        folder = prepare(config, cache=tmp_path / "cache", hub=None).folder
        set_age(folder, age)
        return folder

    return make


def set_age(folder, seconds):
    then = time.time() - seconds
    os.utime(folder / LOCK, (then, then))


def folders(tmp_path):
    return set((tmp_path / "cache/data").iterdir())


def test_an_edited_table_is_prepared_a_bounded_number_of_times(edit, tmp_path):
    old = [edit(n, age=2 * UNUSED_SECONDS + 10 - n) for n in range(6)]
    other = edit(0, "others.csv", age=2 * UNUSED_SECONDS)
    digits = prepare("digits", cache=tmp_path / "cache", hub=None).folder
    set_age(digits, 2 * UNUSED_SECONDS)
    last = edit(99)
    assert folders(tmp_path) == {*old[6 - KEPT :], other, digits, last}


def test_what_is_used_is_kept(edit, tmp_path):
    kept = {edit(n, age=10.0 * n) for n in range(6)}
    assert remove_leftovers(tmp_path / "cache") == [] and folders(tmp_path) == kept


def test_a_failed_preparation_is_removed_later(edit, tmp_path):
    bad = DataConfig(name="table", path=str(tmp_path / "bad.csv"))
    (tmp_path / "bad.csv").write_text("text,label\na,x\nb,x\n")
    with pytest.raises(InputError):
        prepare(bad, cache=tmp_path / "cache", hub=None)
    (failed,) = folders(tmp_path)
    assert remove_leftovers(tmp_path / "cache", unused_seconds=60.0) == []  # it may be prepared now
    set_age(failed, 120.0)
    with FileLock(failed / LOCK):
        set_age(failed, 120.0)
        assert remove_leftovers(tmp_path / "cache", unused_seconds=60.0) == []
    set_age(failed, 120.0)
    assert remove_leftovers(tmp_path / "cache", unused_seconds=60.0) == [failed]


def test_a_mapped_folder_is_kept(edit, tmp_path):
    first = edit(1, age=100.0)
    mapped = prepare(
        DataConfig(name="table", path=str(tmp_path / "notes.csv")),
        cache=tmp_path / "cache",
        hub=None,
    )
    labels = mapped.train.labels
    set_age(first, 100.0)
    edit(2)
    assert remove_leftovers(tmp_path / "cache", keep=1, unused_seconds=60.0) == []
    assert len(labels) == 2
