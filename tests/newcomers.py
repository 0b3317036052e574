"""Methods and a task that were written by the guides alone, as plug-ins for the tests."""

from contextlib import contextmanager
from pathlib import Path

from trishul_ray import plugins, stages
from trishul_ray.lab.clock import cohorts
from trishul_ray.lab.codecs import base as codecs
from trishul_ray.methods import base
from trishul_ray.tasks import base as tasks

FOLDER = Path(__file__).parent / "methods" / "newcomers"
NEWCOMERS = sorted(file.stem for file in FOLDER.glob("*.py"))


@contextmanager
def unloaded_after():
    """Forget the plug-ins that are loaded inside: other tests know the built-in methods alone."""
    # The built-in ones are registered before.
    base.method_classes(), tasks.task_classes(), codecs.codec_names(), stages.STAGES.all()
    registries = base.METHODS, codecs.CODECS, cohorts.COHORTS, stages.STAGES
    before = [{*registry.classes} for registry in registries]
    kinds, modules = dict(tasks.task_classes()), plugins.loaded()
    try:
        yield
    finally:
        plugins.unload(modules)
        for registry, names in zip(registries, before, strict=True):
            registry.forget(registry.classes.keys() - names)
        tasks._REGISTRY.clear()
        tasks._REGISTRY.update(kinds)
