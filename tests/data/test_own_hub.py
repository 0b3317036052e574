"""One's own data: any dataset of a mirror or of the hub."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import close_session

from trishul_ray.config import DataConfig
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.own import OwnHub
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError


def own(path, cache, hub=None, **fields):
    return prepare(DataConfig(name="hub", path=path, **fields), cache=cache / "cache", hub=hub)


def hub_split(hub, where, rows):
    (hub / where).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), hub / where)


def test_any_dataset_of_a_mirror_by_its_column_names(tmp_path):
    hub = tmp_path / "hub"
    rows = [{"review": f"r{n}", "stars": n % 3, "idx": n} for n in range(6)]
    hub_split(hub, "me/films/en/train-00000-of-00001.parquet", rows)
    hub_split(hub, "me/films/en/validation-00000-of-00001.parquet", rows[:2])
    unlabelled = [row | {"stars": -1} for row in rows]
    hub_split(hub, "me/films/en/test-00000-of-00001.parquet", unlabelled)
    columns = {"text": "review", "label": "stars"}
    data = own("me/films/en", tmp_path, hub, columns=columns)
    assert data.info.source == "mirror:me/films" and data.info.classes == ("0", "1", "2")
    assert data.test.texts("text").to_pylist() == ["r0", "r1"]  # of validation
    # With one configuration its name is not needed.
    same = own("me/films", tmp_path, hub, columns=columns)
    assert same.fingerprint == data.fingerprint
    hub_split(hub, "me/films/fr/train-00000-of-00001.parquet", rows)
    with pytest.raises(InputError, match=r"name one of me/films/en, me/films/fr"):
        own("me/films", tmp_path, hub, columns=columns)


def test_class_names_of_the_hub_are_kept(tmp_path):
    feature = {"names": ["bad", "fair", "good"], "_type": "ClassLabel"}
    meta = {"info": {"features": {"label": feature}}}
    table = pa.table({"text": ["a", "b", "c"], "label": [0, 2, 0]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(meta)})
    folder = tmp_path / "hub/me/films/data"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    data = own("me/films", tmp_path, tmp_path / "hub")
    assert data.info.classes == ("bad", "fair", "good")
    assert sorted([*data.train.labels, *data.test.labels]) == [0, 0, 2]


def test_a_hub_dataset_that_is_nowhere_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    with pytest.raises(InputError) as caught:
        own("me/films@0123abc", tmp_path)
    said = str(caught.value)
    assert said.startswith("data.path='me/films@0123abc' not found: no mirror is set (storage.hub")
    assert "set TRISHUL_HUB to a folder with me/films/data/train-*.parquet" in said
    assert "\n" not in said
    with pytest.raises(InputError, match=r"data.path='films' must be owner/name"):
        own("films", tmp_path)


def test_attempts_to_reach_the_hub_print_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    # Nobody answers there, on a machine with a network either.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    close_session()
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    with pytest.raises(InputError, match=r"the Hugging Face hub did not give it"):
        own("me/films", tmp_path)
    close_session()
    assert waits  # it was tried again
    assert [r for r in caplog.records if r.name.startswith("huggingface_hub")] == []


def test_the_hub_itself_gives_what_a_mirror_gives(tmp_path, monkeypatch):
    """`load_dataset` on a folder laid out as a repository of the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    rows = [{"text": f"t{n}", "label": n % 2} for n in range(6)]
    hub_split(tmp_path / "hub", "me/films/data/train-00000-of-00001.parquet", rows)
    hub_split(tmp_path / "hub", "me/films/data/test-00000-of-00001.parquet", rows[:3])
    mirrored = own("me/films", tmp_path, tmp_path / "hub")
    source = OwnHub("me/films", {}, 0.2)
    folder = HubRepo(str(tmp_path / "hub/me/films"))
    monkeypatch.setattr(OwnHub, "_repo", lambda _: folder)
    _, splits = source.read(None, lambda *_: None)
    for split in ("train", "test"):
        assert splits[split]["text"].to_pylist() == mirrored.split(split).texts("text").to_pylist()
        np.testing.assert_array_equal(splits[split]["label"], mirrored.split(split).labels)
