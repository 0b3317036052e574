"""A cache that cannot lie: what can change a number is never a hit, all else always is."""

import io
import json
import os
import random
import shutil
import string
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import pytest
import yaml
from PIL import Image
from rich.console import Console
from tiny_files import TINY_TEXT, save_bert
from transformers import ViTConfig, ViTForImageClassification

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import field_names, load_experiment
from trishul_ray.methods.base import build_method
from trishul_ray.runs.runner import run_steps
from trishul_ray.stages import STAGES, stage_names
from trishul_ray.sweeps import status as status_module
from trishul_ray.sweeps.status import examine
from trishul_ray.tracking.progress import RunProgress

#: Times that each world has each mutation, which is another one each time.
TIMES = 4

#: Fields that cannot change a number, written down here once more.
WITHOUT_EFFECT = {
    "name": ["other", "x y"],
    "resources.backend": ["ray"],
    "resources.device": ["cpu", "cuda"],
    "resources.actors": [1, 7],
    "resources.cpus_per_actor": [0.5, 2],
    "resources.gpus_per_actor": [0.25],
    "resources.max_restarts": [0, 9],
    "resources.cuda_graphs": [True],
    "tracking.mlflow": [True],
    "tracking.uri": ["sqlite:///x.db"],
    "tracking.experiment": ["mine"],
    "tracking.parent_run": ["abc"],
    "storage.keep_checkpoints": [5],
    "storage.retry_seconds": [0],
    "federation.clients_per_actor": [1],
    "optimizer.lr_source": ["a guess"],
    "task.answer_pattern": ["[0-9]+"],  # of `trishul eval`
    "optimizer.rates": [None],
    "evaluation.every": [0, 7],  # the only round of these runs is the last, which is scored
    "data.content": ["sha256:0 elsewhere"],
    "model.content": ["sha256:0 elsewhere"],
}
#: Other values of fields that can, where no rule below gives a valid one.
OTHERS = {
    "budget": [3, 5, "lower"],
    "task.kind": ["verbalizer"],
    "task.template": ["{text}!"],
    "task.verbalizers": [["a", "b"], ["b", "a"]],
    "model.image_size": [8, 12],
    "model.quantize": ["nf4", "int8"],
    "federation.held_out": [0.25, 0.5],
    "adapter.targets": [["query"], ["value"]],
    "federation.compute": ["full"],  # a limited client needs another method
    "federation.compute_shares": [],
    "data.columns": [{"text": "label", "label": "text"}],
    "data.name": ["digits"],
    "data.test_groups": [["a"], ["a", "b"]],
    "data.path": ["elsewhere"],
    "model.name": ["vit-digits", "bert-tiny"],
    "method.name": ["fedex", "trishul"],
    "federation.clients_per_round": [1],
    "optimizer.momentum": [0.5],
    "optimizer.warmup": [1, 2, 0.1],
    "optimizer.weight_decay": [0.01],
}
#: Fields that have no other valid value in any of these worlds: their method takes no limits.
WITHOUT_ANOTHER_VALUE = {
    "task.loss",
    "task.turns",
    "federation.compute",
    "federation.compute_shares",
    "plugins",
}


class World:
    """A folder with a configuration, the files that it names, and the store of its finished run."""

    def __init__(self, place, cache, config):
        self.place, self.cache, self.config = place, cache, config
        self.runs, self.hub = place / "runs", place / "hub"
        self.hub.mkdir(exist_ok=True)
        self.file = place / "run.yaml"
        self.paths = {"data.path": config["data"]["path"], "model.name": config["model"]["name"]}
        self.write(config)
        experiment = self.load()
        steps = run_steps(experiment, RunProgress(2, Console(file=io.StringIO())), extras=False)
        for _ in steps:
            pass

        self.backup = place.with_name(f"{place.name}-backup")
        shutil.copytree(place, self.backup)

    @contextmanager
    def restored(self):
        """Undo after this context all changes of files, and of what ``patch`` sets."""
        with pytest.MonkeyPatch.context() as self.patch:
            yield
        for place in self.place.parent.glob("moved-*"):
            shutil.rmtree(place)
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.backup, self.place)

    def write(self, config, **style):
        self.file.write_text(yaml.safe_dump(config, **style))

    def load(self, *overrides):
        places = [f"storage.{k}={getattr(self, k)}" for k in ("runs", "hub", "cache")]
        return load_experiment(self.file, [*places, *overrides])

    def status(self, *overrides):
        """The state of the run that the configuration describes now."""
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
    """Own texts and model, the same in a mirror, a table of images, a folder of images."""
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
    for kind in ("table", "images"):
        place = tmp_path_factory.mktemp(kind)
        files = [place / f"data/{'cat' if n % 2 else 'dog'}/{n}.png" for n in range(12)]
        for file in files:
            paint(file, rng)
        rows = [f"{file.relative_to(place / 'data')},{file.parent.name}" for file in files]
        (place / "data/train.csv").write_text("\n".join(["image,label", *rows, ""]))
        save_vit(place / "vit")
        add(f"data.name={kind}", f"data.path={place}/data", f"model.name={place}/vit")
    for world in made:
        assert world.status().status == "finished"
    return made


def own_files(world, suffix):
    found = [f for f in world.place.rglob(f"*{suffix}") if not f.is_relative_to(world.runs)]
    return sorted(found)


def overwrite(file, content, rng):
    """Write other content, half of the times with the old times."""
    stat = file.stat()
    assert content != file.read_bytes()
    file.write_bytes(content)
    if rng.random() < 0.5:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# Changes that change a number. Each may return overrides; the world is restored afterwards.


def fields_with_effect(world):
    read = build_method(world.load().method).fields_read
    names = [n for n in field_names("fedit") if n not in WITHOUT_EFFECT]
    names = [n for n in names if not n.startswith("adapter.") or n.rpartition(".")[2] in read]
    return [n for n in names if not n.startswith("storage.")]


def changed(world, name, rng):
    """Return an override that gives a field another valid value, None if it has none here."""
    section, _, field = name.rpartition(".")
    found = experiment = world.load()
    if section:
        found = getattr(experiment, section, None) or experiment.stages.get(section)
    value = getattr(found or STAGES[section].Config(), field)
    for _ in range(8):
        other = rng.choice(OTHERS[name]) if OTHERS.get(name) else another_value(name, value, rng)
        if other is None or other == value:
            continue
        override = f"{name}={json.dumps(other)}"
        with suppress(InputError):
            world.load(override)
            return override
    return None


def another_field(world, rng):
    names = fields_with_effect(world)
    while (override := changed(world, rng.choice(names), rng)) is None:
        pass
    return [override]


def another_value(name, value, rng):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value * 2 or 3])
    if isinstance(value, float):
        return value * 0.9 or 0.2
    if value is None:
        return rng.choice([1, 2, 0.5])
    choices = {
        "iid": "dirichlet", "dirichlet": "iid", "auto": "classification", "per-client": "per-label",
        "pretrained": "random", "fp32": "bf16", "matched": "published", "adam": "sgd",
        "constant": "cosine", "run": "round", "round": "all", "uniform": "size",
    }  # fmt: skip
    return {"partition.by": "label", "adapter.path": "merged"}.get(name, choices.get(value))


def another_row(world, rng):
    file = rng.choice(own_files(world, ".csv"))
    header, *rows = file.read_text().splitlines()
    first, second = rng.sample(range(len(rows)), 2)
    if world.config["data"]["name"] == "images":  # the table is not read
        paint_over = rng.choice(own_files(world, ".png"))
        image = Image.open(paint_over).copy()
        image.putpixel((rng.randrange(8), rng.randrange(8)), rng.randrange(256))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        if buffer.getvalue() == paint_over.read_bytes():
            image.putpixel((0, 0), image.getpixel((0, 0)) ^ 1)
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
        overwrite(paint_over, buffer.getvalue(), rng)
        return
    how = rng.choice(["letter", "label", "swap", "remove", "repeat", "image"])
    if how == "image" and own_files(world, ".png"):
        first, second = rng.sample(own_files(world, ".png"), 2)
        overwrite(first, second.read_bytes(), rng)
        return
    if how == "swap":
        rows[first], rows[second] = rows[second], rows[first]
    elif how == "remove":
        del rows[first]
    elif how == "repeat":
        rows.insert(first, rows[second])
    elif how == "label" or own_files(world, ".png"):
        text, label = rows[first].rsplit(",", 1)
        labels = sorted({row.rsplit(",", 1)[1] for row in rows})
        rows[first] = f"{text},{labels[1 - labels.index(label)]}"
    else:
        letter = rng.choice([c for c in string.ascii_lowercase if c != rows[first][0]])
        rows[first] = letter + rows[first][1:]
    overwrite(file, "\n".join([header, *rows, ""]).encode(), rng)


def another_weight(world, rng):
    (file,) = own_files(world, ".safetensors")
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[rng.randrange(header, len(content))] ^= 1 << rng.randrange(8)
    overwrite(file, bytes(content), rng)


def another_architecture(world, rng):
    wanted = ("config.json", "preprocessor_config.json")
    file = rng.choice([f for f in own_files(world, ".json") if f.name in wanted])
    values = json.loads(file.read_text())
    if "image_mean" in values:
        values["image_mean"] = [rng.uniform(0.1, 0.4)]
    else:
        key = rng.choice(sorted(name for name, v in values.items() if isinstance(v, float)))
        values[key] = values[key] * 2 + 0.001
    overwrite(file, json.dumps(values, indent=2).encode(), rng)


def another_tokenizer(world, rng):
    files = [f for f in own_files(world, ".json") if f.name == "tokenizer.json"]
    if not files:
        return another_weight(world, rng)
    values = json.loads(files[0].read_text())
    vocabulary = values["model"]["vocab"]
    first, second = rng.sample(string.ascii_lowercase, 2)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return overwrite(files[0], json.dumps(values).encode(), rng)


def other_numerics(world, rng):
    number = rng.randrange(1000, 2000)
    world.patch.setattr("trishul_ray.experiment.ids.NUMERICS", number)
    world.patch.setattr(status_module, "NUMERICS", number)


def damaged_result(world, rng):
    file = rng.choice([*world.runs.glob("*/result.json"), *world.runs.glob("*/metrics.parquet")])
    content = bytearray(file.read_bytes())
    while content[place := rng.randrange(len(content))] in b"eE":
        pass  # 1e-5 and 1E-5 are the same number
    content[place] ^= 1 << rng.randrange(8)
    overwrite(file, bytes(content), rng)


# Changes that do not.


def field_without_effect(world, rng):
    name = rng.choice(list(WITHOUT_EFFECT))
    return [f"{name}={json.dumps(rng.choice(WITHOUT_EFFECT[name]))}"]


def other_times(world, rng):
    for file in world.place.rglob("*"):
        if rng.random() < 0.5:
            os.utime(file, (rng.randrange(2**31), rng.randrange(2**31)))


def same_content(world, rng):
    file = rng.choice([f for s in (".csv", ".json", ".safetensors") for f in own_files(world, s)])
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


def other_yaml(world, rng):
    def shuffled(fields):
        items = list(fields.items())
        rng.shuffle(items)
        return {k: shuffled(v) if isinstance(v, dict) else v for k, v in items}

    style = {"sort_keys": False, "indent": rng.randrange(2, 8)}
    style |= {"default_flow_style": rng.choice([True, False]), "width": rng.choice([20, 80, 1000])}
    world.write(shuffled(world.config), **style)
    lines = world.file.read_text().splitlines()
    if not style["default_flow_style"]:
        lines = [f"{line}  # {rng.random()}" if rng.random() < 0.3 else line for line in lines]
    world.file.write_text("\n".join(["# a comment", *lines, "", "# the end"]))


def other_spelling(world, rng):
    """The same files by relative paths, by detours, and by links."""
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
    """Data, model, mirror and store in another place, with an empty cache or the same one."""
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


MISSES = [
    another_field, another_row, another_weight, another_architecture, another_tokenizer,
    other_numerics, damaged_result,
]  # fmt: skip
HITS = [field_without_effect, other_times, same_content, other_yaml, other_spelling, moved]


@pytest.mark.slow
def test_every_field_that_can_change_a_number_is_in_the_id(worlds):
    rng = random.Random(0)
    left = set()
    for number, world in enumerate(worlds):
        names = fields_with_effect(world)
        overrides = {name: changed(world, name, rng) for name in names}
        ids = {name: world.load(override).id for name, override in overrides.items() if override}
        assert [name for name, id in ids.items() if id == world.load().id] == []
        # Fields of a section that is off have no other value while its switch is off.
        without = {n for n in names if n not in ids and n.split(".")[0] not in stage_names()}
        left = left & without if number else without
    assert left == WITHOUT_ANOTHER_VALUE


@pytest.mark.slow
def test_two_hundred_mutations(worlds):
    rng = random.Random(20261121)
    told = set()
    for world, mutate in product(worlds, [*HITS, *MISSES] * TIMES):
        is_hit = mutate in HITS
        with world.restored():
            overrides = mutate(world, rng) or []
            state = world.status(*overrides)
        case = f"{mutate.__name__} {overrides} in {world.place.name}: {state}"
        assert (state.status == "finished") == is_hit and not (is_hit and state.note), case
        assert is_hit or state.reason, case
        told.add(state.status)
    assert all(world.status().status == "finished" for world in worlds)
    assert told == {"finished", "missing", "stale", "corrupt"}
