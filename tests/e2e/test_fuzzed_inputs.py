"""Changed inputs of every kind are read, or rejected in one line, and leave nothing behind.

An input is a valid one with random changes, drawn by its number, so that a failure can be
reproduced.
"""

import hashlib
import io
import json
import random
import shutil
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from example_plugins import unloaded_after
from fuzz import ODD_VALUES, change_bytes, change_json, change_text
from PIL import Image
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors
from summaries import invented_summary
from transformers import ViTConfig, ViTForImageClassification

from trishul_ray.config.fields import DataConfig, ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.images import decode_and_resize
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import field_names, load_experiment
from trishul_ray.federation.checkpoint import Checkpoint, CheckpointStore
from trishul_ray.federation.records import RoundRecord
from trishul_ray.lab.clock.devices import read_devices
from trishul_ray.methods.base.messages import State
from trishul_ray.models.backbone import Backbone
from trishul_ray.plugins import loading as plugins
from trishul_ray.report.summary import RunSummary, list_runs, missing_scores
from trishul_ray.storage.integrity import to_checked_json
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.loading import load_sweep

ROOT = Path(__file__).parents[2]
#: Number of inputs of each kind, without and with the slow tests.
FEW, MANY = 30, 2000


def configurations(folder):
    """Draw fields of the schema with values of other types, and changed YAML files."""
    sound = load_experiment(None, ["method=trishul"]).to_yaml().decode()
    names, file = sorted(field_names()), folder / "mine.yaml"

    def read(rng, show):
        text = show(change_text(rng, sound) if rng.random() < 0.5 else "seed: 1")
        values = [json.dumps(rng.choice(ODD_VALUES)) for _ in range(rng.randrange(3))]
        words = show([f"{rng.choice(names)}={value}" for value in values])
        file.write_text(text, encoding="utf-8")
        load_experiment(file, words)

    return read


def sweeps(folder):
    """Draw changed sweep files."""
    sound = [file.read_text() for file in sorted((ROOT / "sweeps" / "smoke").glob("*.yaml"))]
    sound = [text for text in sound if len(text) < 3000]
    file = folder / "mine.yaml"

    def read(rng, show):
        file.write_text(show(change_text(rng, rng.choice(sound))), encoding="utf-8")
        load_sweep(file)

    return read


def mirrors(folder):
    """Draw changed user tables in every format."""
    rows = [{"text": f"word {n}", "label": n % 2} for n in range(40)]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    sound = {
        "csv": "\n".join(["text,label", *(f'"{r["text"]}",{r["label"]}' for r in rows)]).encode(),
        "jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "parquet": sink.getvalue(),
    }

    def read(rng, show):
        suffix = rng.choice(sorted(sound))
        file = folder / f"rows.{suffix}"
        file.write_bytes(show(change_bytes(rng, sound[suffix])))
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        prepare(DataConfig(name="table", path=str(file)), cache=cache, hub=None)

    return read


def images(folder):
    """Draw changed images in every format."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    sound = []
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp"):
        Image.fromarray(pixels).save(sink := io.BytesIO(), kind)
        sound.append(sink.getvalue())

    def read(rng, show):
        encoded = show(change_bytes(rng, rng.choice(sound)))
        decode_and_resize([(encoded, "a.png")], lambda done: None)

    return read


def checkpoints(folder):
    """Draw changed checkpoints with the correct checksum in their names, which are skipped."""
    some = np.ones(5, np.float32)
    sound = Checkpoint(
        "mine", "attempt", 1,
        State(some, {"control": some}, {"a.q": some}, {"a.q": {"basis": some}}, {"a": some}),
        records=[RoundRecord(0, scores={"accuracy": 0.5}), RoundRecord(1, refused={"2": "why"})],
        spectra={"before": some}, matrices={"cosine": some}, test_rows={"row": np.arange(3)},
        sources={"rows": "sha256:0"},
    ).to_bytes({})  # fmt: skip
    files = Store.open(str(folder / "checkpoints"))

    def changed(rng):
        if rng.random() < 0.3:
            return change_bytes(rng, sound)
        tensors = load_tensors(sound)
        (name,) = [name for name, tensor in tensors.items() if tensor.dtype == np.uint8]
        meta = json.dumps(change_json(rng, json.loads(tensors.pop(name).tobytes()))).encode()
        if rng.random() < 0.3:
            del tensors[rng.choice(sorted(tensors))]
        return save_tensors(tensors | {name: np.frombuffer(meta, np.uint8)})

    def read(rng, show):
        data = show(changed(rng))
        name = f"round-000001-{hashlib.sha256(data).hexdigest()}.safetensors"
        files.write(name, data)
        store = CheckpointStore(files, "mine")
        found = store.newest()
        files.remove(name)
        if found is None:
            raise InputError("; ".join(store.skipped))
        found.is_last(3)
        found.to_bytes({})

    return read


def results(folder):
    """Draw changed results with the correct checksum."""
    experiment = Experiment()
    id = experiment.id
    home = Store.open(str(folder / "runs" / id))
    sound = invented_summary(
        id=id, final={"round": 3, "accuracy": 0.5, "loss": 1.5}, best={"round": 2, "accuracy": 0.6},
        round_seconds=[1.0] * 3, versions={"numerics": "5"}, config=experiment.to_dict(),
        identity=experiment.identity(), state_sha256="0" * 64, files=["metrics.parquet"],
        sha256={"metrics.parquet": "0" * 64, "config.yaml": "0" * 64},
    ).to_dict()  # fmt: skip

    def read(rng, show):
        fields = show(change_json(rng, sound))
        home.write("result.json", to_checked_json(fields if isinstance(fields, dict) else {}))
        list_runs(str(folder / "runs"))
        summary = RunSummary.read(home)
        summary.damaged_files(home)
        missing_scores(experiment, summary.scored_rounds)
        str(summary.client_metrics)

    return read


def models(folder):
    """Draw changed files of a backbone, such as an exported one."""
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        image_size=8, patch_size=4, num_channels=1, num_labels=3,
    )  # fmt: skip
    place = folder / "model"
    ViTForImageClassification(config).save_pretrained(place)
    (place / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5]}))
    sound = {file.name: file.read_bytes() for file in place.iterdir()}
    # A model of 2**31 layers would take forever.
    odd = [value for value in ODD_VALUES if not isinstance(value, int) or value < 10]

    def read(rng, show):
        name = show(rng.choice(sorted(sound)))
        if name.endswith(".json") and rng.random() < 0.7:
            data = json.dumps(change_json(rng, json.loads(sound[name]), odd)).encode()
        else:
            data = change_bytes(rng, sound[name])
        (place / name).write_bytes(show(data))
        try:
            backbone = Backbone(ModelConfig(name=str(place)), StoragePaths(folder, None))
            str(backbone.preprocessing)
            backbone.load("image-classification", 3, seed=0)
        finally:
            (place / name).write_bytes(sound[name])

    return read


def devices(folder):
    """Draw changed device files."""
    numbers = {"client": [0, 1, 2, 3], "speed": [1.0, 2.0, 3.0, 4.0]}
    sound = numbers | {"up": [1.0] * 4, "down": [1.0] * 4}
    file = folder / "devices.parquet"
    pq.write_table(pa.table(sound), file)
    content = file.read_bytes()
    odd = [value for value in ODD_VALUES if not isinstance(value, list | dict)]

    def read(rng, show):
        if rng.random() < 0.5:
            file.write_bytes(show(change_bytes(rng, content)))
        else:
            columns = dict(sound)
            for name in rng.sample(sorted(sound), rng.choice([1, 2])):
                values = [rng.choice([*columns[name], *odd]) for _ in range(4)]
                kept = values if rng.random() < 0.5 else [rng.choice(odd)] * 4
                columns[show(rng.choice([name, name, name, "x"]))] = show(kept)
            try:
                table = pa.table(columns)
            except (pa.ArrowException, OverflowError):
                raise InputError("no table") from None
            pq.write_table(table, file)
        read_devices(str(file), 4)

    return read


PLUGIN = '''
"""A method."""
from trishul_ray.methods.base import register
from trishul_ray.methods.fedit import FedIT


@register("fuzzed")
class Fuzzed(FedIT):
    """FedIT with another factor."""

    factor: float = 0.5

    def scale(self, values):
        return [self.factor * value for value in values]
'''


def plug_ins(folder):
    """Draw changed plug-ins."""
    file = folder / "fuzzed.py"

    def read(rng, show):
        file.write_text(show(change_text(rng, PLUGIN)), encoding="utf-8")
        with unloaded_after():
            plugins.load_plugin(file)

    return read


KINDS = [
    configurations, sweeps, mirrors, images, checkpoints, results, models, devices, plug_ins,
]  # fmt: skip


def where_of(error):
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "trishul_ray/" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "a library"
    return f"{type(error).__name__} in {place}"


class Shown(list):
    """The random changes of an input."""

    def __call__(self, value):
        self.append(value)
        return value


def try_inputs(kind, count, folder):
    read, faults, refused = kind(folder), [], 0
    for number in range(count):
        show = Shown()
        try:
            read(random.Random(f"{kind.__name__} {number}"), show)
        except InputError as error:
            refused += 1
            said = str(error)
            if not said.strip() or "\n" in said or "Traceback" in said or len(said) > 3000:
                faults.append(f"{number}: says {said[:300]!r} of {repr(list(show))[:600]}")
        except BaseException as error:
            faults.append(
                f"{number}: {where_of(error)}: {str(error)[:300]} of {repr(list(show))[:600]}"
            )
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults[:20])
    assert count / 10 < refused <= count
    assert [path for path in folder.rglob("*") if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_few_changed_inputs(kind, tmp_path):
    try_inputs(kind, FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_inputs(kind, tmp_path):
    try_inputs(kind, MANY, tmp_path)
