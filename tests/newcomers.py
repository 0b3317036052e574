"""Methods and a task that were written by the guides alone, as plug-ins for the tests."""

import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trishul_ray import stages
from trishul_ray.methods import base
from trishul_ray.plugins import registry as plugins
from trishul_ray.tasks import base as tasks

FOLDER = Path(__file__).parent / "methods" / "newcomers"
REGISTRIES = [base.METHODS, stages.STAGES]
if find_spec("trishul_ray.lab") is not None:  # not in a copy of the core alone
    REGISTRIES.append(import_module("trishul_ray.lab.codecs.base").CODECS)
    REGISTRIES.append(import_module("trishul_ray.lab.clock.cohorts").COHORTS)
NEWCOMERS = sorted(file.stem for file in FOLDER.glob("*.py"))


@contextmanager
def unloaded_after():
    """Forget the plug-ins that are loaded inside: other tests know the built-in ones alone."""
    for registry in REGISTRIES:  # the built-in ones are registered before
        registry.all()
    tables = [plugins._owners, plugins._newest, plugins._classes, plugins._datasets]
    tables += [tasks.task_classes(), *(registry.classes for registry in REGISTRIES)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for module in plugins._owners.keys() - before[0].keys():
            if module.startswith(plugins._PREFIX):
                sys.modules.pop(module, None)
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
