"""The lab lists every module that registers a method, a stage, a task or a dataset."""

import importlib
import pkgutil

import trishul_ray.lab
from trishul_ray.data.public import DATASETS
from trishul_ray.methods.base import METHODS
from trishul_ray.stages import STAGES
from trishul_ray.tasks.base import TASKS

REGISTRIES = (METHODS, STAGES, TASKS, DATASETS)


def test_modules_list_what_the_lab_registers():
    listed = [registry.names() for registry in REGISTRIES]
    for module in pkgutil.walk_packages(trishul_ray.lab.__path__, "trishul_ray.lab."):
        importlib.import_module(module.name)
    assert [registry.names() for registry in REGISTRIES] == listed
