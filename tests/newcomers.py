"""Methods and a task that were written by the guides alone, as plug-ins for the tests."""

from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trishul_ray import plugins, stages
from trishul_ray.methods import base
from trishul_ray.tasks import base as tasks

FOLDER = Path(__file__).parent / "methods" / "newcomers"
REGISTRIES = [base.METHODS, stages.STAGES]
if find_spec("trishul_ray.lab") is not None:  # not in a copy of the core alone
    REGISTRIES.append(import_module("trishul_ray.lab.codecs.base").CODECS)
    REGISTRIES.append(import_module("trishul_ray.lab.clock.cohorts").COHORTS)
NEWCOMERS = sorted(file.stem for file in FOLDER.glob("*.py"))


@contextmanager
def unloaded_after():
    """Forget the plug-ins that are loaded inside: other tests know the built-in methods alone."""
    # The built-in ones are registered before.
    tasks.task_classes()
    before = [{*registry.all()} for registry in REGISTRIES]
    kinds, modules = dict(tasks.task_classes()), plugins.loaded()
    try:
        yield
    finally:
        plugins.unload(modules)
        for registry, names in zip(REGISTRIES, before, strict=True):
            registry.forget(registry.classes.keys() - names)
        tasks._REGISTRY.clear()
        tasks._REGISTRY.update(kinds)
