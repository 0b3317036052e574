"""Preparation of datasets by name: sources, cache, damaged files and malformed rows."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import DAMAGE
from PIL import Image

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.choose_rows import choose_rows, encode, hold_out
from trishul_ray.data.datasets.cifar import CIFAR100
from trishul_ray.data.prepare import dataset_names, describe_datasets, prepare
from trishul_ray.data.public import DATASETS
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.storage.integrity import take_remarks

PUBLIC = [*DATASETS.all().values()]


def png(pixels: np.ndarray, mode: str = "RGB") -> bytes:
    sink = BytesIO()
    Image.fromarray(pixels).convert(mode).save(sink, format="PNG")
    return sink.getvalue()


def images(rows: int, seed: int, side: int = 32) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, side, side, 3), dtype=np.uint8)


def write_parquet(file: Path, encoded: list[bytes | None], labels: list[int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "img": pa.array(
                [{"bytes": data, "path": None} for data in encoded],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "fine_label": pa.array(labels, pa.int64()),
            "coarse_label": pa.array([0] * len(labels), pa.int64()),
        }
    )
    pq.write_table(table, file)


def mirror(hub: Path, rows: int = 4) -> Path:
    """Write a mirror of a small CIFAR-100: two train shards and a test shard."""
    folder = hub / "uoft-cs/cifar100/cifar100"
    for seed, name in enumerate(
        ["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"]
    ):
        encoded = [png(image) for image in images(rows, seed)]
        write_parquet(folder / f"{name}.parquet", encoded, list(range(10 * seed, 10 * seed + rows)))
    return folder


def test_every_name_has_a_description():
    paper = {"20newsgroups", "cifar100", "svhn", "mrqa", "glue/mnli", "glue/rte"}
    others = {"digits", "images", "table", "hub", "rows", "synthetic/topics", "synthetic/shapes"}
    assert set(dataset_names()) >= paper | others | {source.name for source in PUBLIC}
    assert len(dataset_names()) == len(set(dataset_names()))
    described = describe_datasets()
    assert tuple(described) == dataset_names()
    # One line per message, on a terminal of 80 columns.
    assert all(0 < len(text) <= 60 for text in described.values())


def test_a_mirror_is_read_shard_by_shard(tmp_path):
    mirror(tmp_path / "hub")
    reported = []
    data = prepare(
        "cifar100",
        cache=tmp_path,
        hub=tmp_path / "hub",
        progress=lambda *step: reported.append(step),
    )
    expected = np.concatenate([images(4, 0), images(4, 1)]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(data.train.column("pixels"), expected)
    assert data.train.labels.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert data.test.labels.tolist() == [20, 21, 22, 23]
    assert data.info.num_classes == 100 and data.info.image_shape == (3, 32, 32)
    np.testing.assert_allclose(data.info.mean, (expected / 255).mean((0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(data.info.std, (expected / 255).std((0, 2, 3)), atol=1e-6)
    assert ("cifar100 train", 1.0) in reported and all(
        0 <= fraction <= 1 for _, fraction in reported
    )


def test_prepared_files_are_reused_until_the_source_changes(tmp_path):
    folder = mirror(tmp_path / "hub")
    first = prepare("cifar100", cache=tmp_path, hub=tmp_path / "hub")
    written = first.train.path.stat().st_mtime_ns
    again = prepare("cifar100", cache=tmp_path, hub=tmp_path / "hub")
    assert again == first and again.train.path.stat().st_mtime_ns == written
    write_parquet(folder / "test-00000-of-00001.parquet", [png(images(1, 7)[0])], [99])
    changed = prepare("cifar100", cache=tmp_path, hub=tmp_path / "hub")
    assert changed.folder != first.folder and changed.test.labels.tolist() == [99]


@pytest.mark.parametrize("damage", [*DAMAGE, "gone", "description"])
def test_damaged_prepared_file_is_reported_and_rebuilt(tmp_path, damage):
    first = prepare("digits", cache=tmp_path, hub=None)
    path, fingerprint = first.test.path, first.fingerprint
    content = path.read_bytes()
    take_remarks()
    if damage == "gone":
        path.unlink()
    elif damage == "description":  # not of the rows, but of their divisor
        assert b'"mean": [0.' in content
        path.write_bytes(content.replace(b'"mean": [0.', b'"mean": [1.'))
    else:
        path.write_bytes(DAMAGE[damage](content))
    again = prepare("digits", cache=tmp_path, hub=None)
    assert again.fingerprint == fingerprint and path.read_bytes() == content
    (line,) = take_remarks()
    assert line.startswith(f"{first.folder} is damaged (test.arrow ")


def test_concurrent_calls_prepare_once(tmp_path):
    mirror(tmp_path / "hub", rows=30)
    calls = []

    def call(index):
        return prepare(
            "cifar100",
            cache=tmp_path,
            hub=tmp_path / "hub",
            progress=lambda *_: calls.append(index),
        )

    with ThreadPoolExecutor(4) as pool:
        datasets = list(pool.map(call, range(4)))
    assert len(set(calls)) == 1
    assert len({data.fingerprint for data in datasets}) == 1
    assert not list(datasets[0].folder.glob("*.tmp"))


BAD_ROWS = {
    "wrong mode": ([png(images(1, 0)[0], "L")], [0], r"row 0: the image is L 32x32, not RGB 32x32"),
    "wrong size": (
        [png(images(1, 0, side=16)[0])],
        [0],
        r"row 0: the image is RGB 16x16, not RGB 32x32",
    ),
    "not an image": ([png(images(1, 0)[0]), b"GIF?"], [0, 1], r"row 1: not a readable image"),
    "no bytes": ([None], [0], r"row 0: the image has no bytes"),
    "label above": (
        [png(images(1, 0)[0])] * 2,
        [0, 100],
        r"row 1: fine_label is 100, not .*99",
    ),
    "no rows": ([], [], r"split train: 0 rows, not the official 50000"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_malformed_row_is_reported(tmp_path, case):
    encoded, labels, message = BAD_ROWS[case]
    folder = mirror(tmp_path / "hub")
    (folder / "train-00001-of-00002.parquet").unlink()
    write_parquet(folder / "train-00000-of-00002.parquet", encoded, labels)
    with pytest.raises(CorruptFileError, match=message) as caught:
        prepare("cifar100", cache=tmp_path, hub=tmp_path / "hub")
    assert "uoft-cs/cifar100, split train" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_names_and_folders_are_reported(tmp_path):
    with pytest.raises(InputError, match=r"unknown dataset 'cifar101'.*mean 'cifar10'"):
        prepare("cifar101", cache=tmp_path, hub=None)
    with pytest.raises(InputError, match=r"storage.hub or TRISHUL_HUB\) is not a folder"):
        prepare("cifar100", cache=tmp_path, hub=tmp_path / "nowhere")
    folder = mirror(tmp_path / "hub")
    (folder / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(InputError, match=r"is missing cifar100/test-\*\.parquet of uoft-cs"):
        prepare("cifar100", cache=tmp_path, hub=tmp_path / "hub")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"storage.cache: cannot write"):
        prepare("digits", cache=tmp_path / "file", hub=None)


@pytest.mark.parametrize("with_mirror", [False, True])
def test_missing_dataset_names_the_places_searched(tmp_path, monkeypatch, with_mirror):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    hub = tmp_path / "hub" if with_mirror else None
    if hub is not None:
        hub.mkdir()
    with pytest.raises(InputError) as caught:
        prepare("cifar100", cache=tmp_path, hub=hub)
    message = str(caught.value)
    assert message.startswith("dataset uoft-cs/cifar100 not found: ") and "\n" not in message
    assert (f"mirror {hub} does not have it" if with_mirror else "no mirror is set") in message
    files = "uoft-cs/cifar100/cifar100/train-*.parquet"
    assert message.endswith(f"set TRISHUL_HUB or storage.hub to a folder with {files}")


@pytest.mark.parametrize("fetch", [None, "cifar100/{split}-*.parquet"])
def test_hub_and_mirror_give_same_rows(tmp_path, monkeypatch, fetch):
    """``load_dataset`` reads a folder with the layout of the hub's repository and its card."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = mirror(tmp_path / "hub")
    (folder.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: cifar100\n  data_files:\n"
        "  - split: train\n    path: cifar100/train-*\n  - split: test\n    path: cifar100/test-*\n"
        "dataset_info:\n  config_name: cifar100\n  features:\n"
        "  - name: img\n    dtype: image\n  - name: fine_label\n    dtype: int64\n"
        "  - name: coarse_label\n    dtype: int64\n---\n"
    )
    direct, columns = CIFAR100.read(tmp_path / "hub", lambda *_: None)
    repo = replace(CIFAR100.repo, repo=str(folder.parent), revision=None, fetch=fetch)
    online = replace(CIFAR100, repo=repo, sizes={"train": 8, "test": 4})
    info, downloaded = online.read(None, lambda *_: None)
    assert info.classes == direct.classes and info.mean == direct.mean
    for split in ("train", "test"):
        for name in ("pixels", "label"):
            np.testing.assert_array_equal(downloaded[split][name], columns[split][name])
    short = replace(online, sizes={"train": 8, "test": 5})
    with pytest.raises(CorruptFileError, match=r"split test: 4 rows, not the official 5"):
        short.read(None, lambda *_: None)


HUB = os.environ.get("TRISHUL_HUB", "")


@pytest.mark.skipif(
    not (Path(HUB) / "uoft-cs/cifar100").is_dir() or not HUB,
    reason="TRISHUL_HUB is not set or lacks uoft-cs/cifar100",
)
def test_real_cifar100(cache):
    data = prepare("cifar100", cache=cache, hub=Path(HUB))
    counts = np.bincount(data.train.labels, minlength=100)
    assert len(counts) == 100 and counts.min() > 0
    assert data.info.classes[0] == "apple" and data.info.classes[-1] == "worm"
    np.testing.assert_allclose(data.info.mean, (0.507, 0.487, 0.441), atol=0.01)


def inputs_of(split):
    """Return the inputs of the rows, and their labels, to compare by content."""
    kind = split.info.kind
    if kind == "image":
        return [row.tobytes() for row in split.column("pixels")]
    fields = split.info.fields if kind == "text" else ("question", "context")
    return list(zip(*(split.texts(name).to_pylist() for name in fields), strict=True))


@pytest.mark.parametrize("name", ["digits", "synthetic/topics", "synthetic/questions"])
def test_held_out_rows_are_disjoint_by_content(name, cache):
    whole = prepare(name, cache=cache, hub=None)
    data = hold_out(whole, 0.2, cache=cache)
    train, held = inputs_of(data.train), inputs_of(data.split("validation"))
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(inputs_of(whole.train))
    assert len(held) == pytest.approx(0.2 * len(whole.train), abs=len(whole.train) / 20)
    assert data.test.fingerprint == whole.test.fingerprint and data.info == whole.info
    assert hold_out(whole, 0.0, cache=cache) is whole


class Lengths:
    """An encoder of texts as their lengths."""

    key = "lengths"

    def encode(self, split, progress):
        return {"length": np.array([len(text.as_py()) for text in split.texts("text")])}


def test_derived_rows_have_their_own_names(tmp_path):
    """Compare equal texts and numbers with other names of classes, groups and clients."""
    for names in (("a", "b"), ("b", "c")):
        rows = [{"text": f"t{n:02}", "label": names[n % 2]} for n in range(40)]
        rows = [
            row | {k: names[n // 20] for k in ("group", "client")} for n, row in enumerate(rows)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{names[0]}.parquet")
        config = DataConfig(name="table", path=str(tmp_path / f"{names[0]}.parquet"))
        raw = prepare(config, cache=tmp_path, hub=None)
        config = config.model_copy(update={"test_groups": ("b",)})
        chosen = choose_rows(raw, config, cache=tmp_path)
        derived = [
            chosen,
            hold_out(raw, 0.5, cache=tmp_path),
            encode(raw, Lengths(), cache=tmp_path),
        ]
        for data in derived:
            assert data.info.classes == data.info.groups == data.info.clients == names
            assert data.info.origin.name == f"{names[0]}.parquet"
        kept = {data.info.groups[number] for number in chosen.train.column("group")}
        assert kept == {*names} - {"b"}


def test_too_few_rows_to_hold_out_are_rejected(tmp_path):
    (tmp_path / "few.csv").write_text("text,label\n" + "".join(f"t{n},{n}\n" for n in range(4)))
    config = DataConfig(name="table", path=str(tmp_path / "few.csv"))
    data = prepare(config, cache=tmp_path / "cache", hub=None)
    with pytest.raises(
        InputError, match=r"data.validation_share=0.5 of 3 training rows selects no row"
    ):
        hold_out(data, 0.5, cache=tmp_path / "cache")
