"""Follow the guides in docs/ literally in a copy of the package.

Files are written as in the guides, the documented commands run on small data, and the tests that
the guides name must find the added code and pass.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from public_mirror import write_table

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("adding-*.md"))
#: All pages whose files are written and whose commands run.
PAGES = [*GUIDES, ROOT / "docs" / "plugins.md"]
#: A file in a guide: its path at the end of a paragraph, then its content.
FILE = re.compile(
    r"`(trishul_ray/[\w/.-]+|\w+\.py)`[^`]*:\n\n```(?:python|yaml)\n(.*?)```", re.DOTALL
)
TUTORIAL = ROOT / "docs" / "getting-started.md"
#: A file of the tutorial, named before its content.
TUTORIAL_FILE = re.compile(r"`(\w+\.(?:py|yaml))`[^`]*:\n\n```(?:python|yaml)\n(.*?)```", re.DOTALL)
#: Guides whose runs are on images; the other guides use texts.
IMAGES = ("adding-a-method", "adding-an-adapter", "adding-a-codec", "plugins")
#: Makes a documented run take seconds.
SMALL = [
    "model.init=random",
    "budget=4",
    "federation.rounds=1",
    "federation.clients=3",
    "federation.clients_per_round=2",
    "federation.local_steps=2",
    "resources.backend=inline",
    "tracking.mlflow=false",
    "evaluation.limit=32",
]
#: Calls commands, given as lines of JSON, in one process.
CALLS = """
import json, sys
from trishul_ray import cli
for line in sys.stdin:
    sys.argv = ["trishul", *json.loads(line)]
    print("$", *sys.argv, flush=True)
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            sys.exit(stop.code)
"""


def documented(text):
    """Yield the words of every command in a guide, without variables and comments."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def call(words, folder, **options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRISHUL")}
    environment |= {"PYTHONPATH": str(folder), "TRISHUL_HUB": str(folder / "hub")}
    environment |= {"TRISHUL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=280, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_is_short_and_linked(guide):
    assert len(guide.read_text(encoding="utf-8").splitlines()) <= 140  # a guide must stay short
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"(docs/{guide.name})" in (ROOT / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy package and tests, and add the files of all guides and the data of their commands."""
    folder = tmp_path_factory.mktemp("clone")
    for part in ("trishul_ray", "tests", "docs", "sweeps"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    written = []
    for guide in PAGES:
        for path, content in FILE.findall(guide.read_text(encoding="utf-8")):
            assert not (folder / path).exists(), path
            (folder / path).write_text(content, encoding="utf-8")
            written.append(path)
    assert len(written) == 7  # one file each, and the preset
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 60).tolist()
    texts = [f"{('see you', 'win now')[n]} {i}" for i, n in enumerate(label)]
    where = folder / "hub" / "ucirvine" / "sms_spam" / "plain_text"
    write_table(where / "train-00000-of-00001.parquet", {"sms": texts, "label": label})
    stars = ["review,stars", *(f"{'very ' * (n % 5)}good,{n % 5 + 1}" for n in range(60))]
    (folder / "reviews.csv").write_text("\n".join(stars), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_the_commands_of_the_guides_work(copy):
    lines = []
    for guide in PAGES:
        for words in documented(guide.read_text(encoding="utf-8")):
            if words[0] == "trishul" and words[1] == "run":
                text = [] if guide.stem in IMAGES else ["model=bert-tiny"]
                lines.append([*words[1:], *text, *SMALL])
            elif words[0] == "trishul":
                lines.append(words[1:])
    assert [line[0] for line in lines].count("run") == 6
    said = call(["-c", CALLS], copy, input="".join(json.dumps(line) + "\n" for line in lines))
    assert "feddyn" in said
    assert "48 of 4,459 training rows, 12 of 1,115 test rows" in " ".join(said.split())
    results = [json.loads(p.read_text()) for p in copy.glob("runs/*/result.json")]
    assert len(results) == 6
    assert any("mean_distance" in json.dumps(result) for result in results)


@pytest.mark.slow
def test_guide_tests_find_the_addition(copy):
    paths = set()
    for guide in GUIDES:
        for words in documented(guide.read_text(encoding="utf-8")):
            if words[:2] == ["make", "test"]:
                paths |= set(words[2].removeprefix("ARGS=").split())
    assert paths and all((ROOT / path).exists() for path in paths)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "feddyn or vera or sms or ordinal or signs or lies_below or circle or ancestors",
    ]
    said = call(["-m", "pytest", *options, *sorted(paths), "-rA"], copy)
    least = {"[feddyn": 7, "[vera]": 3, "[sms-spam]": 3, "ordinal-text-": 3, "[signs]": 3}
    for name, count in least.items():
        assert sum(name in line for line in said.splitlines() if "PASSED" in line) >= count, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_tutorial_work(tmp_path):
    text = TUTORIAL.read_text(encoding="utf-8")
    files = dict(TUTORIAL_FILE.findall(text))
    assert [*files] == ["make_photos.py", "bold.py", "compare.yaml"]
    (tmp_path / "hub").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    lines = []
    for words in documented(text):
        if words[0] == "python":
            call(words[1:], tmp_path)
        elif words[0] == "trishul" and words[1] != "doctor":
            sweep = [each for each in SMALL if not each.startswith("resources")]
            lines.append([*words[1:], *{"run": SMALL, "sweep": sweep}.get(words[1], [])])
    assert [line[0] for line in lines] == [
        *("run", "run", "run", "list", "run", "check", "run", "sweep", "sweep")
    ]
    said = call(["-c", CALLS], tmp_path, input="".join(json.dumps(line) + "\n" for line in lines))
    assert "ok       method=bold  moves, and the loss falls" in said
    assert all(name in said for name in ("federated bold", "photos", "report/compare/report.html"))
    assert (tmp_path / "report" / "compare" / "report.html").exists()
