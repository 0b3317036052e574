"""A stored result is used only for the same content of data and weights."""

import contextlib
import io
import json
import os
import random
import shutil
import string
from pathlib import Path

import pytest
import yaml
from PIL import Image
from rich.console import Console
from tiny_files import TINY_TEXT, save_bert
from transformers import ViTConfig, ViTForImageClassification

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runs.runner import run_steps
from trishul_ray.sweeps.status import examine
from trishul_ray.tracking.progress import RunProgress


class World:
    """A folder with a configuration, its files, and the store of its finished run."""

    def __init__(self, place, cache, config):
        self.place, self.cache, self.config = place, cache, config
        self.runs, self.hub = place / "runs", place / "hub"
        self.hub.mkdir(exist_ok=True)
        self.file = place / "run.yaml"
        self.paths = {"data.path": config["data"]["path"], "model.name": config["model"]["name"]}
        self.file.write_text(yaml.safe_dump(config))
        experiment = self.load()
        steps = run_steps(experiment, RunProgress(2, Console(file=io.StringIO())), extras=False)
        for _ in steps:
            pass

        self.backup = place.with_name(f"{place.name}-backup")
        shutil.copytree(place, self.backup)

    @contextlib.contextmanager
    def restored(self):
        """Undo, after this context, all changes of files and all uses of ``patch``."""
        with pytest.MonkeyPatch.context() as self.patch:
            yield
        for place in self.place.parent.glob("moved-*"):
            shutil.rmtree(place)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.backup, self.place)

    def load(self, *overrides):
        paths = [f"storage.{k}={getattr(self, k)}" for k in ("runs", "hub", "cache")]
        return load_experiment(self.file, [*paths, *overrides])

    def status(self, *overrides):
        """Return the state of the run that the configuration describes now."""
        experiment = self.load(*overrides)
        return examine({experiment.id: experiment})[experiment.id]


def nested(words):
    fields = {}
    for word in words:
        name, _, value = word.partition("=")
        section, _, last = name.rpartition(".")
        (fields.setdefault(section, {}) if section else fields)[last] = yaml.safe_load(value)
    fields["method"] = {"name": fields["method"]}
    return fields


def write_table(file, rng):
    words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(24)]
    file.parent.mkdir(parents=True)
    rows = [f"{word} {n},{'ab'[n % 2]}" for n, word in enumerate(words)]
    file.write_text("\n".join(["text,label", *rows, ""]))


def paint(file, rng):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("L", (8, 8), rng.randbytes(64)).save(file)


def save_vit(folder):
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4, num_channels=1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    values = {"do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, cache):
    """Create local texts and a model, the same in a mirror, an image table, and an image folder."""
    rng = random.Random(0)
    made = []
    base = [*TINY_TEXT, "federation.rounds=1", "evaluation.diagnostics_every=0"]

    def add(*words):
        made.append(World(place, cache, nested([*base, *words])))

    place = tmp_path_factory.mktemp("own")
    write_table(place / "data/notes.csv", rng)
    save_bert(place / "bert")
    own = [f"data.path={place}/data/notes.csv", f"model.name={place}/bert"]
    add("data.name=table", "evaluation.per_client=true", "federation.clients=4", *own)
    place = tmp_path_factory.mktemp("mirror")
    write_table(place / "hub/me/notes/train.csv", rng)
    save_bert(place / "hub/me/bert")
    add("data.name=hub", "data.path=me/notes", "model.name=me/bert")
    for kind, optimizer in (("table", "adam"), ("images", "sgd")):
        place = tmp_path_factory.mktemp(kind)
        files = [place / f"data/{'cat' if n % 2 else 'dog'}/{n}.png" for n in range(12)]
        for file in files:
            paint(file, rng)
        if kind == "table":
            rows = [f"{file.relative_to(place / 'data')},{file.parent.name}" for file in files]
            (place / "data/train.csv").write_text("\n".join(["image,label", *rows, ""]))
        save_vit(place / "vit")
        own = [f"data.name={kind}", f"data.path={place}/data", f"model.name={place}/vit"]
        add(*own, f"optimizer.name={optimizer}")
    return made


def other_contents(file, rng):
    """Return other contents of a file, each of which changes results."""
    content = bytearray(file.read_bytes())
    if file.suffix == ".csv":
        header, one, two, *rows = content.decode().splitlines()
        first, second = one.split(","), two.split(",")
        tables = [[two, one, *rows], [two, *rows], [one, one, two, *rows]]
        tables.append([f"{first[0]},{second[1]}", two, *rows])
        if not header.startswith("image"):
            tables.append([f"another {one}", two, *rows])
        for table in tables:
            yield "\n".join([header, *table, ""]).encode()
    elif file.suffix == ".png":
        with Image.open(file) as image:
            image.putpixel((x := rng.randrange(8), 0), image.getpixel((x, 0)) ^ 1)
            image.save(buffer := io.BytesIO(), "PNG")
        yield buffer.getvalue()
    elif file.suffix == ".safetensors":
        place = rng.randrange(8 + int.from_bytes(content[:8], "little"), len(content))
        content[place] ^= 1 << rng.randrange(8)
        yield bytes(content)
    elif file.name == "tokenizer.json":
        values = json.loads(content)
        vocabulary = values["model"]["vocab"]
        one, two = rng.sample(string.ascii_lowercase, 2)
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
        yield json.dumps(values).encode()
    elif file.name in ("config.json", "preprocessor_config.json"):
        values = json.loads(content)
        numbers = {k: v * 2 + 0.001 for k, v in values.items() if isinstance(v, float)}
        for name, other in (numbers | {"image_mean": [0.25]}).items():
            if name in values:
                yield json.dumps(values | {name: other}).encode()


def overwrite(file, content, rng):
    """Write other content, half of the times with the old timestamps."""
    stat = file.stat()
    assert content != file.read_bytes()
    file.write_bytes(content)
    if rng.random() < 0.5:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def own_files(world):
    return [f for f in sorted(world.place.rglob("*.*")) if not f.is_relative_to(world.runs)]


@pytest.mark.slow
def test_other_content_of_any_file_is_a_miss(worlds):
    rng, tried = random.Random(20261121), set()
    for world in worlds:
        for file in own_files(world):
            for content in other_contents(file, rng):
                with world.restored():
                    overwrite(file, content, rng)
                    state = world.status()
                assert state.status in ("stale", "missing") and state.reason, (file, state)
                tried.add(file.suffix)
    assert tried == {".csv", ".png", ".safetensors", ".json"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["result.json", "metrics.parquet"])
def test_damaged_or_differently_computed_results_are_misses(worlds, name):
    rng = random.Random(name)
    for world in worlds:
        (file,) = world.runs.glob(f"*/{name}")
        content = bytearray(file.read_bytes())
        while content[place := rng.randrange(len(content))] in b"eE":
            pass  # 1e-5 and 1E-5 are the same number.
        content[place] ^= 1 << rng.randrange(8)
        with world.restored():
            overwrite(file, bytes(content), rng)
            damaged = world.status()
        assert damaged.status == "corrupt" and damaged.reason, (world.place.name, place, damaged)
        with world.restored():
            for module in ("experiment.experiment", "sweeps.status"):
                world.patch.setattr(f"trishul_ray.{module}.NUMERICS", 1234)
            other = world.status()
        assert other.status == "missing" and other.reason


# Changes that do not affect results. Each may return overrides; the world is restored afterwards.


def other_times(world, rng):
    for file in world.place.rglob("*"):
        if rng.random() < 0.5:
            os.utime(file, (rng.randrange(2**31), rng.randrange(2**31)))


def same_content(world, rng):
    for file in own_files(world):
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)


def other_yaml(world, rng):
    items = rng.sample(list(world.config.items()), len(world.config))
    text = yaml.safe_dump(dict(items), sort_keys=False, indent=rng.randrange(2, 8))
    world.file.write_text("# a comment\n" + text.replace("\n", "  # why\n"))


def other_spelling(world, rng):
    """Refer to the same files by relative paths, by detours, and by links."""
    overrides = []
    world.patch.chdir(world.place)
    link = world.place / "link"
    link.symlink_to(world.place)
    for field, path in world.paths.items():
        if Path(path).is_absolute():
            rest = Path(path).relative_to(world.place)
            spelled = [str(rest), f"./{rest}", f"data/../{rest}", str(link / rest)]
            overrides.append(f"{field}={rng.choice(spelled)}")
    return overrides


def moved(world, rng):
    """Move data, model, mirror and store, with an empty cache or the same one."""
    place = world.place.with_name(f"moved-{rng.randrange(10**9)}")
    world.place.rename(place)
    if rng.random() < 0.2:
        world.patch.setattr(world, "cache", place / "cache")
    for name in ("runs", "hub"):
        world.patch.setattr(world, name, place / name)
    world.patch.setattr(world, "file", place / "run.yaml")
    return [
        f"{field}={place / Path(path).relative_to(world.place)}"
        for field, path in world.paths.items()
        if Path(path).is_absolute()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("change", [other_times, same_content, other_yaml, other_spelling, moved])
def test_what_changes_no_number_is_a_hit(worlds, change):
    rng = random.Random(0)
    for world in worlds:
        for _ in range(4):  # another change each time
            with world.restored():
                state = world.status(*(change(world, rng) or []))
            assert state.status == "finished", (world.place.name, state)
