"""Imports go one way, from the algebra and the methods to the commands."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trishul_ray
from trishul_ray.methods.base import method_class

ROOT = Path(trishul_ray.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
#: Parts that every part may import.
FOUNDATION = {"errors", "plugins", "runtime", "storage", "version"}

#: Further imports of a part of the package, which is a folder or a file.
MAY_IMPORT = {
    "errors": set(),
    "plugins": set(),
    "runtime": set(),
    "storage": set(),
    "version": set(),
    "spectral": set(),
    # Names of basis initializations are defined in the algebra.
    "config": {"spectral"},
    "adapters": {"spectral"},
    "methods": {"adapters", "config", "spectral"},
    "data": {"config"},
    "models": {"adapters", "config", "data"},
    # The id has the content of user data and models; some defaults depend on the inputs of a
    # backbone.
    "experiment": {"adapters", "config", "data", "methods", "models", "stages", "tasks"},
    # The contract of stages, in which a protocol is the readable part of an experiment.
    "stages": {"adapters", "config", "methods"},
    "tasks": {"config", "data", "models"},
    "tracking": {"config", "storage"},
    # Plug-ins: the documented imports of the guides; nothing imports the plug-ins.
    "lab": {
        *("adapters", "config", "contract", "data", "methods", "report", "spectral", "stages"),
        "tasks",
    },
}
#: Content of the lab and of the folder of the paper, as other parts would refer to it.
EXTENSIONS = (
    "paper.json",
    *("private_heads", "private_core", "fedplora", "Fed-PLoRA"),
    *("fedsa", "fedsvd", "fedrot", "frlora", "rolora", "FedSA", "FedSVD"),
    *("FedRot", "FRLoRA", "RoLoRA", "florist", "FLoRIST", "FeDeRA", "fslora", "FSLoRA", "FLoRG"),
    *("lorafair", "LoRA-FAIR", "florg", "gram_A", "Ditto"),
    *("trishul-private", "ravan-"),
    *("poisson", "canary", "PrivacyConfig", "DevicesConfig", "CohortConfig", "ServerConfig"),
    *("UploadsConfig", "privacy_clip", "error_feedback"),
)
#: The Python interface, which nothing else imports.
INTERFACE = {"api", "result"}
#: Parts that a part may not import: the parts above it.
MAY_NOT_IMPORT = {
    "federation": {"cli", "contract", "report", "runs", "sweeps", "tracking"},
    "contract": {"cli", "jobs", "report", "runs", "sweeps", "tracking"},
    "report": {"cli", "contract", "federation", "runs", "sweeps"},
    "runs": {"cli", "contract", "sweeps"},
    "sweeps": {"cli", "contract", "jobs"},
    "jobs": {"cli", "contract"},
    # A plug-in with additional commands: the documented imports; nothing imports it.
    "paper": {"contract", "federation", "jobs", "runs", "sweeps"},
}
#: Parts that are plug-ins of the others.
PLUG_INS = {"lab", "paper"}
#: Third-party modules that only some parts may import: prefixes of module names.
ONLY = {
    "ray": ("federation.on_ray.", "sweeps.", "models.pretraining.", "cli.", "jobs."),
    "mlflow": ("tracking.",),
    "datasets": ("data.",),
}
#: Files of the federation that run without Ray.
CORE_OF_FEDERATION = ("federation.worker.local", "federation.worker.survey")
CORE = ("spectral", "adapters", "methods", "tasks")


def module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def running(tree):
    """Return all nodes except under `if TYPE_CHECKING`, which is not a dependency."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path, nodes=running):
    """Return every module that a file imports anywhere; relative imports become absolute."""
    package = ["trishul_ray", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in nodes(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found.add(source)
            # `from trishul_ray.methods import ravan` also imports a module.
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return frozenset(found)


def ours(path, nodes=running):
    prefix = "trishul_ray."
    names = imported(path, nodes)
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def parts(path):
    known = {module(file).split(".")[0] for file in FILES}
    return {name.split(".")[0] for name in ours(path)} & known


def of_part(part):
    return [path for path in FILES if module(path).split(".")[0] == part]


def registers(path):
    """Return whether a file registers a method."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("register"):
                    return True
    return False


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_lies_below(part):
    assert of_part(part) or part in ("lab", "paper")  # A copy of only the core lacks it.
    for path in of_part(part):
        assert parts(path) <= FOUNDATION | MAY_IMPORT[part] | {part}, module(path)


@pytest.mark.parametrize("part", MAY_NOT_IMPORT)
def test_a_part_imports_nothing_that_lies_above(part):
    for path in of_part(part):
        assert not parts(path) & MAY_NOT_IMPORT[part], module(path)


def test_the_python_interface_stands_above_everything_but_commands():
    for path in FILES:
        part = module(path).split(".")[0]
        if part not in {"", "api", "cli", "paper"}:
            assert "api" not in parts(path) and (part in INTERFACE or "result" not in parts(path))
        if part in INTERFACE:
            assert not parts(path) & {"cli"}, module(path)


def test_no_folder_imports_back():
    graph = {}
    for path in FILES:
        part = module(path).split(".")[0]
        graph.setdefault(part, set()).update(parts(path) - {part})
    TopologicalSorter(graph).prepare()  # raises CycleError, which reports the cycle


def test_core_imports_and_names_no_extension():
    files = [path for path in FILES if module(path).split(".")[0] not in PLUG_INS]
    for path in files:
        assert not {name.split(".")[0] for name in ours(path, ast.walk)} & PLUG_INS, module(path)
    others = [path for suffix in ("yaml", "html", "md") for path in ROOT.rglob(f"*.{suffix}")]
    texts = [*files, *(path for path in others if path.relative_to(ROOT).parts[0] not in PLUG_INS)]
    named = {
        (path.name, word)
        for path in texts
        for word in EXTENSIONS
        if word in path.read_text(encoding="utf-8")
    }
    assert not named


def test_no_circle_among_files():
    """Include imports in functions, or only for annotations, which would hide a cycle."""
    known = {module(path) for path in FILES if module(path)}
    graph = {module(path): (ours(path, ast.walk) & known) - {module(path)} for path in FILES}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", ONLY)
def test_who_may_import_a_third_party(package):
    def imports(path):
        names = {name.removeprefix("trishul_ray.runtime.lazy.") for name in imported(path)}
        return any(name == package or name.startswith(f"{package}.") for name in names)

    users = [path for path in FILES if imports(path)]
    assert users, f"nothing imports {package}: is the rule out of date?"
    for path in users:
        name = module(path)
        assert f"{name}.".startswith(ONLY[package]), f"{name} imports {package}"
        assert name not in CORE_OF_FEDERATION, f"{name} imports {package}"


#: Built-in methods that were published as extensions of another method.
ANCESTORS = {
    "trishul": "ravan",
    "fedprox": "fedavg",
    **dict.fromkeys(("scaffold", "fedex", "flora", "hetlora", "flexlora"), "fedit"),
}


def test_method_imports_only_its_ancestors():
    methods = {module(path): path for path in of_part("methods") if registers(path)}
    assert len(methods) >= 3
    for name, path in methods.items():
        imports = {other.removeprefix("methods.") for other in ours(path) & set(methods) - {name}}
        method = name.removeprefix("methods.")
        parent = method_class(method).__mro__[1].__module__.rpartition(".")[2]
        assert imports == {parent} & {other.removeprefix("methods.") for other in methods}, name
        assert ANCESTORS.get(method, parent) == parent, name


def test_what_methods_share_imports_no_method():
    methods = {module(path) for path in of_part("methods") if registers(path)}
    for path in of_part("methods"):
        if module(path) not in methods:
            assert not ours(path) & methods, module(path)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (  # A coordinator requests its clients first.
            ["federation.on_ray.coordinator"],
            {"torch", "transformers", "pydantic", "pyarrow.parquet"},
        ),
        (  # A sweep finds its finished runs first.
            ["sweeps.run", "report.page"],
            {"torch", "transformers", "ray", "mlflow", "matplotlib"},
        ),
    ],
)
def test_first_output_needs_nothing_heavy(modules, heavy):
    names = ", ".join(f"trishul_ray.{name}" for name in modules)
    script = f"import sys, {names}\nprint(*sorted({heavy!r} & {{*sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


#: Commands that respond without heavy imports, and a part of their output.
QUICK = [
    (["--help"], "Simulate federated"),
    (["run", "--help"], "Run a federated experiment"),
    (["list", "methods"], "ravan"),
    (["list", "datasets"], "cifar100"),
    (["list", "datasets", "digit"], "did you mean 'digits'?"),
    (["run", "fedration.clients=3"], "unknown field"),
    (["run", "partition.alpha=-1"], "greater than 0"),
    (["run", "method=nope"], "unknown method 'nope'; known: "),
    (["run", "dataset=nope"], "; known: "),
    (["table", "nope"], "; known: "),
    (["sweep", "nope.yaml"], "No such file"),
]
#: Fields of experiments that are read without heavy imports.
READ = [[], ["privacy.epsilon=2"]] if (ROOT / "lab").exists() else [[]]


def test_light_commands_import_nothing_heavy(tmp_path):
    script = (
        "import io, sys\n"
        "from contextlib import redirect_stderr, redirect_stdout\n"
        "from trishul_ray.cli import main\n"
        f"for words, _ in {QUICK!r}:\n"
        "    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):\n"
        "        sys.argv = ['trishul', *words]\n"
        "        try:\n"
        "            main()\n"
        "        except SystemExit:\n"
        "            pass\n"
        "    print(repr((words, out.getvalue())))\n"
        "    heavy = {'torch', 'transformers', 'ray', 'mlflow', 'datasets', 'pandas'}\n"
        "    heavy |= {'pyarrow.parquet', 'pyarrow.compute', 'matplotlib', 'dp_accounting',"
        " 'bitsandbytes'}\n"
        "    heavy |= {'pyarrow', 'PIL'} if words[-1] in ('--help', 'methods') else set()\n"
        "    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())\n"
        "from trishul_ray.experiment.loading import load_experiment\n"
        f"for words in {READ!r}:\n"
        "    experiment = load_experiment(None, words)\n"
        "    assert experiment.id.encode() not in experiment.to_yaml()\n"
        "    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())\n"
        # Rows of clients need tensors, but no imports that draw or export.
        "sys.argv = ['trishul', 'list', 'datasets', 'digits', 'storage.cache=cache']\n"
        "with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):\n"
        "    main_code = None\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        main_code = end.code\n"
        "assert main_code == 0 and not {'matplotlib', 'peft', 'ray'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    answers = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    for (words, part), (said, text) in zip(QUICK, answers, strict=True):
        assert said == words
        assert part in text, text


def test_core_runs_without_ray_mlflow_and_datasets():
    core = [module(path) for path in FILES if module(path).split(".")[0] in CORE]
    names = [f"trishul_ray.{name}" for name in (*core, *CORE_OF_FEDERATION)]
    script = (
        "import importlib, sys\n"
        "for name in ('ray', 'mlflow', 'datasets'):\n"
        "    sys.modules[name] = None  # importing it fails\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert done.returncode == 0, done.stderr
