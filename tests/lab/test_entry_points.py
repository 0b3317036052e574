"""The lab as a plug-in: entry points name what it registers, and a run imports what it names."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trishul_ray.lab
from trishul_ray.methods.base import METHODS, method_class
from trishul_ray.plugins import installed as entry_points
from trishul_ray.plugins import registry as plugins

ROOT = Path(trishul_ray.__file__).parent


def test_entry_points_name_what_the_lab_registers():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"][f"{entry_points.GROUP}.method"]
    for name, where in declared.items():
        assert importlib.import_module(where) and method_class(name).__module__ == where
    for module in pkgutil.walk_packages(trishul_ray.lab.__path__, "trishul_ray.lab."):
        importlib.import_module(module.name)
    registered = {n for n, cls in METHODS.classes.items() if "trishul_ray.lab." in cls.__module__}
    assert registered == declared.keys()


@pytest.mark.skipif(bool(plugins.faults()), reason="; ".join(plugins.faults()))
def test_a_run_imports_only_what_it_names_of_the_lab():
    script = (
        "import sys\n"
        "from trishul_ray.experiment.loading import load_experiment\n"
        "for method in ('trishul', 'trishul-private'):\n"
        "    load_experiment(None, [f'method={method}', 'rounds=3']).id\n"
        "    parts = (name.rpartition('trishul_ray.lab.') for name in sys.modules)\n"
        "    print(method, *sorted(end for _, found, end in parts if found and '.' in end))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["trishul", "trishul-private methods.private"]
