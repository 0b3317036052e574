"""The lab lists every module that registers a method or a stage."""

import importlib
import pkgutil

import trishul_ray.lab
from trishul_ray.methods.base import METHODS
from trishul_ray.stages import STAGES


def test_modules_list_what_the_lab_registers():
    listed = [*METHODS.names(), *STAGES.names()]
    for module in pkgutil.walk_packages(trishul_ray.lab.__path__, "trishul_ray.lab."):
        importlib.import_module(module.name)
    assert [*METHODS.names(), *STAGES.names()] == listed
