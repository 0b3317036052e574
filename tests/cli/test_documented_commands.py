"""Parse every command of the README, docs/ and --help and, as far as possible offline, run it.

A run is resolved, checked against the real shapes of its backbone (without weights), and prepared
on a few rows of its dataset. Commands are collected from the documents; none is listed here.
"""

import functools
import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import typer
from example_plugins import unloaded_after
from PIL import Image
from public_mirror import COLUMNS, texts, write_mirror, write_table
from transformers import ViTConfig

from trishul_ray.cli.app import app
from trishul_ray.cli.run import load_arguments
from trishul_ray.cli.sweeps import split_arguments
from trishul_ray.data.public import DATASETS
from trishul_ray.experiment.compatibility import check_fits
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.sweeps.loading import find_sweeps, load_sweep, sweep_from_axes
from trishul_ray.version import NUMERICS, __version__

PUBLIC = [*DATASETS.all().values()]

ROOT = Path(__file__).parents[2]
APP = typer.main.get_command(app)
#: Replaces a backbone of the same kind, whose tokenizer would have to be downloaded.
TINY = {
    "image-classification": "vit-digits",
    "sequence-classification": "bert-tiny",
    "seq2seq-lm": "t5-tiny",
    "causal-lm": "llama-tiny",
}
#: Pages that continue the README.
PAGES = (
    *("asynchronous.md", "configuration.md", "field.md", "instruction-tuning.md"),
    *("object-store.md", "output.md", "public-data.md", "python.md", "slurm.md", "your-data.md"),
)
#: Enough rows for the largest number of clients and of classes.
ROWS = {"train": 400, "test": 100}


def documented_commands():
    """Yield ``(where, words)`` of every command ``trishul ...``, without environment variables."""
    found = []
    for page in (ROOT / "README.md", *(ROOT / "docs" / name for name in PAGES)):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            found += [(page.stem, line) for line in block.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found += [(page.stem, line) for line in re.findall(r"`([^`]*trishul [^`]+)`", prose)]
    for command in (APP.get_command(None, name) for name in APP.list_commands(None)):
        texts = [command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]
        found += [("--help", line) for line in re.findall(r"`(trishul [^`]+)`", "\n".join(texts))]
    for where, line in found:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words[:1] == ["trishul"]:
            words = words[: words.index(">")] if ">" in words else words
            # An ellipsis means further arguments.
            yield where, tuple(word for word in words[1:] if word != "...")


COMMANDS = sorted(set(documented_commands()))


def test_the_commands_are_found():
    """Fail if the documents change their format, so that no command is found any more."""
    found = [words for _, words in COMMANDS]
    assert {words[0] for words in found} >= {"run", "export", "list", "show", "doctor"}
    assert ("run", "dataset=glue/rte") in found
    assert ("list", "datasets", "digits", "partition.kind=iid") in found
    assert len(found) > 20


@pytest.mark.parametrize(
    ("where", "words"), COMMANDS, ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_a_documented_command_works(where, words, paths, called, tmp_path, monkeypatch):
    if words[0] == "list":
        code, _, error = called(*words, *["--runs", tmp_path] * (words[1] == "runs"))
        assert code == 0, error
        return
    if "mine.py" in words:
        (tmp_path / "mine.py").touch()
        monkeypatch.chdir(tmp_path)
    with unloaded_after() if "mine.py" in words else nullcontext():
        check_command(*words)


def check_command(name, *words):
    command = APP.get_command(None, name)
    context = command.make_context(name, list(words))
    if name == "run":
        check_run(load_arguments(context.params["arguments"]))
    if name == "rates":
        assert find_sweeps(["rates"], context.params["profile"])
    if name in ("table", "sweep", "plan", "report"):
        check_sweeps(**context.params)


def check_sweeps(arguments, profile="paper", axis=None, **_):
    names, overrides = split_arguments(arguments or [])
    if axis:
        assert sweep_from_axes(axis, overrides).cells
    for name in names:
        if name.endswith(".yaml"):
            assert load_sweep(Path(name), overrides).cells
        else:
            assert found(name, profile, *overrides)


@functools.cache
def found(name, profile, *overrides):
    return find_sweeps([name], profile, overrides)


def check_run(experiment):
    check_fits(experiment)
    tiny = TINY[backbone_of(experiment.model, experiment.storage.paths).family]
    model = experiment.model.model_copy(update={"name": tiny, "init": "random"})
    # Byte-level tokens are shorter than words, so use short texts and short rows.
    prepared = prepare_run(experiment.model_copy(update={"model": model}))
    assert len(prepared.dataset.train) > 0
    for client in range(experiment.federation.clients):
        assert len(prepared.shards.shard(client)) > 0


def test_links_lead_to_files_and_named_tests():
    folders = (ROOT / name for name in ("docs", "benchmarks", "cluster", "examples"))
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    links = [
        (page, link)
        for page, text in texts.items()
        for link in re.findall(r"\]\(([^)#\s]+)", text)
        if "://" not in link
    ]
    assert len(links) > 50
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []
    tests = [
        (page.parent / link, name)
        for page, text in texts.items()
        for name, link in re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", text)
    ]
    assert len(tests) >= 5
    for file, name in tests:
        assert f"\ndef {name}(" in file.read_text(encoding="utf-8"), (file, name)


@pytest.fixture
def paths(hub, cache, monkeypatch):
    """Run in the folder with the user's files, with the mirror; write nothing there."""
    monkeypatch.chdir(hub.parent / "here")
    monkeypatch.setenv("TRISHUL_HUB", str(hub))
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Create a mirror with a few rows of every public dataset, and the user data of the README."""
    root = tmp_path_factory.mktemp("documented")
    folder, here = root / "hub", root / "here"
    for source in PUBLIC:
        if type(source.rows) in COLUMNS:
            write_mirror(folder, source, ROWS)
    ViTConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=256,
        image_size=32, patch_size=4,
    ).save_pretrained(folder / "trishul" / "vit-cifar10-128x6")  # fmt: skip
    own = {"review": texts(60), "stars": [str(n % 3) for n in range(60)]}
    write_table(folder / "owner" / "name" / "config" / "train-00000-of-00001.parquet", own)
    here.mkdir()
    (here / "my.yaml").write_text("dataset: digits\n")
    (here / "mine.yaml").write_text("axes: {seed: 0..1}\n")
    (here / "cifar.yaml").write_text("dataset: cifar100\n")
    (here / "rates-smoke.yaml").write_text("rates: []\n")
    rows = [f"{text},{n % 2},{n % 7}" for n, text in enumerate(texts(84))]
    (here / "notes.csv").write_text("\n".join(["body,topic,hospital", *rows]))
    own = [{"instruction": text, "output": "yes"} for text in texts(60)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    for n in range(60):
        file = here / "photos" / ("cat", "dog")[n % 2] / f"{n}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), n, np.uint8)).save(file)
    return folder


def test_the_version_is_printed_without_a_command(called):
    code, said, _ = called("--version")
    assert (code, said) == (0, f"trishul-ray {__version__} (numerics {NUMERICS})\n")
