"""Methods, tasks and datasets from files and packages outside the package."""

import io
import json
import sys
import textwrap
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from example_plugins import FOLDER, unloaded_after
from rich.console import Console
from tiny_run import TINY

import trishul_ray
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import build_experiment, load_experiment
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base import method_class, register
from trishul_ray.methods.fedit import FedIT
from trishul_ray.plugins import loading
from trishul_ray.runs.folder import open_run
from trishul_ray.runs.runner import run_experiment
from trishul_ray.tracking.progress import RunProgress


@pytest.fixture(autouse=True)
def nothing_is_left():
    with unloaded_after():
        for table in (loading.LOADED.owners, loading.LOADED.newest):
            table.clear()  # Tests of other files may have left plug-ins.
        yield


@pytest.fixture
def mine(tmp_path):
    """``mine(text)`` writes a copy of FedMedian named mine, in a file ending with ``text``."""

    def write(text="", name="mine.py"):
        source = (FOLDER / "fedmedian.py").read_text().replace("fedmedian", "mine")
        (tmp_path / name).write_text(source + text)
        return str(tmp_path / name)

    return write


def test_used_content_is_in_the_id(mine, tmp_path):
    plain = load_experiment(None, ["method=fedit"])
    first = load_experiment(None, [f"plugins=[{mine()}]", "method=mine"])
    assert [plugin.name for plugin in first.plugins] == ["mine"]
    other = load_experiment(None, [f"plugins=[{mine('# changed')}]", "method=mine"])
    assert first.id != other.id
    again = load_experiment(None, [f"plugins=[{mine()}]", "method=mine"])
    assert again.id == first.id
    # The location of the file has no effect; runs that do not use it are unchanged.
    (tmp_path / "elsewhere").mkdir()
    moved = load_experiment(None, [f"plugins=[{mine(name='elsewhere/mine.py')}]", "method=mine"])
    assert moved.id == first.id
    unused = load_experiment(None, [f"plugins=[{mine()}]", "method=fedit"])
    assert unused.id == plain.id and unused.plugins == ()


def test_a_method_that_extends_a_plugin_notes_both(mine, tmp_path):
    trishul_ray.load_plugin(mine())
    child = tmp_path / "child.py"
    child.write_text(
        "from trishul_ray.methods.base import METHODS, method_class, register\n"
        "Config = method_class('mine').Config\n"
        "@register('child')\n"
        "class Child(method_class('mine')):\n"
        "    class Config(Config):\n"
        "        name: str = 'child'\n"
    )
    made = load_experiment(None, [f"plugins={child}", "method=child"])
    assert [plugin.name for plugin in made.plugins] == ["child", "mine"]


def test_override_accepts_fields_of_plugin_methods(tmp_path):
    file = tmp_path / "strong.py"
    file.write_text(
        "from trishul_ray.methods.base import register\n"
        "from trishul_ray.methods.fedit import FedIT\n"
        "@register('strong')\nclass Strong(FedIT):\n"
        "    class Config(FedIT.Config):\n        strength: float = 1.0\n"
    )
    config = tmp_path / "run.yaml"
    config.write_text(f"plugins: [{file}]\nmethod: strong\n")
    assert load_experiment(config, ["strength=2"]).method.strength == 2
    with unloaded_after():
        made = load_experiment(None, ["strength=3", "method=strong", f"plugins={file}"])
    assert made.method.strength == 3


def test_two_plugins_cannot_define_the_same_method(mine):
    trishul_ray.load_plugin(mine())
    with pytest.raises(InputError, match="method 'mine' is taken by plug-in mine"):
        trishul_ray.load_plugin(mine("# another", name="copy.py"))
    made = load_experiment(None, ["method=mine"])
    assert [plugin.name for plugin in made.plugins] == ["mine"]


def test_a_run_has_the_content_that_it_notes(mine, small):
    made = small(f"plugins=[{mine()}]", "method=mine", "resources.backend=inline")
    noted = method_class("mine").__module__
    trishul_ray.load_plugin(mine("# changed since"))
    assert method_class("mine").__module__ != noted
    run_experiment(made, RunProgress(2, Console(file=io.StringIO())))
    assert method_class("mine").__module__ == noted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('not today\\nsecond line')", "line 1: RuntimeError: not today"),
        ("import nowhere_to_be_found", "line 1: ModuleNotFoundError: No module named"),
        ("x = 1\ndef f(:\n", "line 2: SyntaxError: invalid syntax"),
        (
            "from trishul_ray.methods.base import Method, register\n"
            "@register('fedit')\nclass FedIT(Method):\n    pass\n",
            "ValueError: method 'fedit' is taken",
        ),
        (None, "No such file or directory; pass the path of a Python file"),
    ],
)
def test_a_faulty_file_is_one_line(called, tmp_path, text, said):
    file = tmp_path / "faulty.py"
    if text is not None:
        file.write_text(text)
    for words in (["--plugin", str(file)], [f"plugins=[{file}]"]):
        code, _, error = called("run", "--show", *words)
        assert code == 2 and said in error and f"plug-in {file}" in error
        assert len(error.splitlines()) == 1


def test_run_names_its_plugin_without_including_it(mine, called, cache, tmp_path):
    words = [*TINY, f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}", "method=mine"]
    with unloaded_after():
        code, _, error = called("run", "--plugin", mine(), *words)
        assert code == 0, error
        (home,) = (tmp_path / "runs").glob("*/result.json")
        stored = (home.parent / "config.yaml").read_text()
        assert "mine" in stored and "class FedMedian" not in stored
        (noted,) = json.loads(home.read_text())["config"]["plugins"]
        assert noted.keys() == {"name", "content"}
        _, experiment = open_run(str(home.parent), "")
        assert experiment.id == home.parent.name
    text = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (tmp_path / "evil.py").write_text(text)
    for evil in ({**noted, "source": text}, str(tmp_path / "evil.py")):
        with pytest.raises(InputError, match="plug-in"):
            build_experiment(experiment.to_dict() | {"plugins": [evil]})
    assert not (tmp_path / "ran").exists()
    code, _, error = called("export", home.parent, tmp_path / "adapter")
    assert code == 2 and "pass --plugin mine.py" in error
    with unloaded_after():
        code, _, error = called("export", home.parent, tmp_path / "no", "--plugin", mine("# new"))
        assert code == 2 and "plug-in mine has changed" in error
    code, _, error = called("export", home.parent, tmp_path / "adapter", "--plugin", mine())
    assert code == 0, error
    code, _, error = called("show", home.parent, "--plugin", mine())
    assert code == 0, error


def test_a_class_of_a_script_is_rejected():
    with pytest.raises(ValueError, match=r"method 'mine' is defined in .*: save it in a file"):
        register("mine")(type("Mine", (FedIT,), {"__module__": "__main__"}))


def test_a_method_without_adapters_is_named(tmp_path, small):
    file = tmp_path / "bare.py"
    file.write_text(
        "from trishul_ray.methods.base import Method, register\n"
        "@register('bare')\n"
        "class Bare(Method):\n"
        "    summary = reference = communication = 'none'\n"
    )
    made = small(f"plugins={file}", "method=bare", "resources.backend=inline")
    said = r"method='bare': Bare of plug-in bare defines no adapters\(\): define it, or extend"
    with pytest.raises(InputError, match=said):
        InlineExecutor(made, prepare_run(made))


def test_a_dataset_and_a_task_of_a_file(tmp_path, called):
    file = tmp_path / "both.py"
    file.write_text(
        textwrap.dedent(
            """
            from trishul_ray.data.hub import HubRepo
            from trishul_ray.data.public import PublicDataset, TextRows, register_dataset
            from trishul_ray.tasks.base import register
            from trishul_ray.tasks.sequence_classification import SequenceClassification

            NOTES = register_dataset(PublicDataset(
                name="notes", description="notes", repo=HubRepo("notes"), sizes={"train": 40},
                rows=TextRows(fields=("text",), classes=("a", "b")), test_share=0.2,
            ))

            @register("halved")
            class Halved(SequenceClassification):
                def loss(self, outputs, batch):
                    return super().loss(outputs, batch) / 2
            """
        )
    )
    code, said, error = called("list", "datasets", "--plugin", str(file))
    assert code == 0 and "notes" in said, error
    words = ["dataset=notes", "model=bert-tiny", "budget=2"]
    made = load_experiment(None, [f"plugins={file}", *words, "task.kind=halved"])
    assert [plugin.name for plugin in made.plugins] == ["both"]
    assert load_experiment(None, words).plugins == made.plugins


@pytest.fixture
def installed(monkeypatch):
    """``installed(entry, ...)`` sets the entry points of all packages."""

    def set_to(*entries):
        monkeypatch.setattr(loading, "installed", lambda: EntryPoints(entries))
        monkeypatch.setattr(loading.LOADED, "faults", None)

    return set_to


def test_installed_packages_are_found(installed, monkeypatch, tmp_path):
    package = tmp_path / "their_methods"
    package.mkdir()
    text = (FOLDER / "fedmedian.py").read_text().replace("fedmedian", "theirs")
    (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    installed(
        EntryPoint("theirs", "their_methods", loading.GROUP),
        EntryPoint("broken", "nowhere_to_be_found", loading.GROUP),
    )
    made = load_experiment(None, ["method=theirs"])
    (noted,) = made.plugins
    assert noted.name.startswith("their_methods") and noted.source is None
    again = build_experiment(made.to_dict(), note=False)
    assert again.id == made.id
    with pytest.raises(InputError, match=r"unknown method 'x'.*plug-in broken \(nowhere_to"):
        load_experiment(None, ["method=x"])
    changed = made.to_dict() | {"plugins": [{"name": noted.name, "content": "sha256:00"}]}
    with pytest.raises(InputError, match="has changed"):
        build_experiment(changed)
    sys.modules.pop("their_methods", None)


@pytest.mark.slow
def test_method_file_gives_inline_bytes_on_actors(
    local_ray, small, inline_result, assert_same, drive_to_end
):
    from trishul_ray.federation.on_ray.driver import open_driver

    # The actors sum eighteen uploads, and receive the method through the object store.
    wide = ["federation.clients=18", "federation.clients_per_round=18", "federation.local_steps=1"]
    options = ["resources.actors=2", "resources.cpus_per_actor=0.5", "federation.rounds=2"]
    file = FOLDER / "fedmedian.py"
    experiment = small(f"plugins=[{file}]", "method=fedmedian", *wide, *options)
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        result = drive_to_end(driver)
    assert_same(result, inline_result(experiment))


@pytest.mark.slow
def test_a_sweep_with_a_plugin_runs_on_ray(start, mine, cache, tmp_path):
    sweep = tmp_path / "mine.yaml"
    sweep.write_text("name: mine\naxes: {method: [fedit, mine]}\n")
    words = [word for word in TINY if "backend" not in word]
    command = start(
        sys.executable, "-m", "trishul_ray.cli", "sweep", sweep, *words, "--plugin", mine(),
        f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}",
    )  # fmt: skip
    code, _, error = command.end(400)
    assert code == 0, error
    results = [json.loads(p.read_text()) for p in (tmp_path / "runs").glob("*/result.json")]
    assert sorted(r["config"]["method"]["name"] for r in results) == ["fedit", "mine"]
    assert [bool(r["config"].get("plugins")) for r in results].count(True) == 1
