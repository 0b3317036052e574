"""Methods and a task that were written by the guides alone, as plug-ins for the tests."""

import sys
from contextlib import contextmanager
from pathlib import Path

from trishul_ray import plugins
from trishul_ray.edge import cohorts
from trishul_ray.edge.codecs import base as codecs
from trishul_ray.methods import base
from trishul_ray.tasks import base as tasks

FOLDER = Path(__file__).parent / "methods" / "newcomers"
NEWCOMERS = sorted(file.stem for file in FOLDER.glob("*.py"))


@contextmanager
def unloaded_after():
    """Forget the plug-ins that are loaded inside: other tests know the built-in methods alone."""
    # The built-in ones are registered before.
    base.method_classes(), tasks.task_classes(), codecs.codec_names()
    registries = base.METHODS, codecs.CODECS, cohorts.COHORTS
    tables = [tasks._REGISTRY, *(each.classes for each in registries)]
    tables += [plugins._owners, plugins._providers, plugins._newest, plugins._unpackaged]
    before = [dict(table) for table in tables]
    modules = set(sys.modules)
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
        for name in set(sys.modules) - modules:
            if name.startswith("trishul_plugin_"):
                del sys.modules[name]
