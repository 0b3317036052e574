"""The registry that finds every method by itself: each file of this package is looked into."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from trishul_ray.methods.base import Method, MethodConfig

if TYPE_CHECKING:
    from trishul_ray.sections import AdapterConfig

_REGISTRY: dict[str, type[Method]] = {}
_M = TypeVar("_M", bound=type[Method])


def register(name: str) -> Callable[[_M], _M]:
    """Class decorator: make a method available under ``name`` in every config and test."""

    def add(cls: _M) -> _M:
        if _REGISTRY.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"method name {name!r} is taken by {_REGISTRY[name].__qualname__}")
        _REGISTRY[name] = cls
        return cls

    return add


@cache
def _discover() -> None:
    package = importlib.import_module("trishul_ray.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"trishul_ray.methods.{module.name}")


def method_names() -> list[str]:
    """Names of all registered methods, sorted; every file of the package is looked into."""
    _discover()
    return sorted(_REGISTRY)


def method_class(name: str) -> type[Method]:
    """The class registered under ``name``; KeyError if there is none."""
    _discover()
    return _REGISTRY[name]


def build_method(config: MethodConfig, adapter: "AdapterConfig | None" = None) -> Method:
    """The method a configuration asks for.

    Args:
        config: its own section.
        adapter: the experiment's adapter section; needed where the method is to be run.
    """
    method = method_class(config.name)(config)
    if adapter is not None:
        method.lora_alpha = adapter.alpha
    return method
