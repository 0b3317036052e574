"""Registries of methods, stages, tasks, datasets and codecs, keyed by name.

On first use, a registry imports the modules that register its items: the modules of a package, the
modules that extensions of this package list in ``MODULES``, and the plug-ins of installed packages
(:mod:`trishul_ray.plugins.loading`).
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from trishul_ray.errors import did_you_mean
from trishul_ray.plugins.loading import LOADED, Plugin, faults, load_installed, owner_of

#: Optional extension packages. Each lists its modules in ``MODULES``, keyed by the kind of items
#: that they register.
EXTENSIONS = ("trishul_ray.lab", "trishul_ray.paper")

_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)


@cache
def load_extensions(kind: str) -> None:
    """Import the extension modules that register items of a kind."""
    for package in EXTENSIONS:
        if find_spec(package) is not None:
            for module in importlib.import_module(package).MODULES.get(kind, ()):
                importlib.import_module(f"{package}.{module}")


@cache
def _load_package(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


class Registry(Generic[_T]):
    """Items keyed by name, such as the classes for ``method=<name>``.

    Args:
        field: Field that selects an item, such as ``method``.
        title: Word for an item in messages.
        package: Package whose modules register items; None if they are already imported.
        taken: Reserved names.
        advice: Advice for names that other packages use, keyed by regular expression.
    """

    def __init__(
        self, field: str, title: str, package: str | None = None, taken: Iterable[str] = (), *,
        advice: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.field, self.title, self._package = field, title, package
        self._advice = advice
        self._taken = frozenset(taken)
        self.items: dict[str, _T] = {}
        self.owners: dict[str, Plugin] = {}
        REGISTRIES.append(self)

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names, so that no item can be registered under them."""
        self._taken |= {*names}

    def add(self, name: str, item: _T) -> None:
        """Register an item.

        A plug-in may replace its own items, so that a changed file can be loaded again.

        Args:
            name: Name of the item.
            item: The item.

        Raises:
            ValueError: The name is taken, or the item is a class defined in a script or a notebook.
        """
        owner = LOADED.current
        if isinstance(item, type):
            owner = owner_of(item.__module__)
            if owner is None and not item.__module__.startswith("trishul_ray."):
                raise ValueError(
                    f"{self.title} {name!r} is defined in {item.__module__}, which workers cannot "
                    "import: save it in a file and load the file with --plugin mine.py or "
                    "trishul_ray.load_plugin('mine.py')"
                )
        former = self.owners.get(name)
        replaces = former is not None and owner is not None and former.name == owner.name
        if name in self._taken or (name in self.items and not replaces):
            by = f" by plug-in {former.name}" if former is not None else ""
            raise ValueError(f"{self.title} {name!r} is taken{by}")
        self.items[name] = item
        if owner is not None:
            self.owners[name] = owner

    def register(self, name: str) -> Callable[[_C], _C]:
        """Return a class decorator that registers a class under a name."""

        def added(cls: _C) -> _C:
            self.add(name, cast(_T, cls))
            return cls

        return added

    def all(self) -> dict[str, _T]:
        """Return all items, keyed and sorted by name."""
        if self._package is not None:
            _load_package(self._package)
        load_extensions(self.field)
        load_installed()
        return dict(sorted(self.items.items()))

    def names(self) -> list[str]:
        """Return the names of all items, sorted."""
        return [*self.all()]

    def choices(self) -> list[str]:
        """Return the allowed values of the field: names of items and reserved names, sorted."""
        return sorted({*self._taken, *self.names()})

    def __getitem__(self, name: str) -> _T:
        return self.items[name] if name in self.items else self.all()[name]

    def unknown(self, name: str) -> str:
        """Format the message for an unknown name, with the known names and a suggestion."""
        known = self.choices()
        advice = [f"; {a}" for e, a in self._advice.items() if re.fullmatch(e, name, re.IGNORECASE)]
        hint = "".join(advice) or did_you_mean(name, known)
        hint += "".join(f"; {fault}" for fault in faults())
        return f"unknown {self.title} {name!r}; known: {', '.join(known)}{hint}"

    def plugins_of(self, name: str) -> frozenset[Plugin]:
        """Return the plug-ins that define an item and its base classes."""
        item, owner = self.items.get(name), self.owners.get(name)
        bases = item.__mro__ if isinstance(item, type) else ()
        found = (owner, *(owner_of(base.__module__) for base in bases))
        return frozenset(each for each in found if each is not None)


#: All registries of this process.
REGISTRIES: list[Registry[Any]] = []


def provided_by(plugin: Plugin) -> list[tuple[Registry[Any], str]]:
    """Return the items that a plug-in registers, as pairs of registry and name."""
    return [
        (registry, name)
        for registry in REGISTRIES
        for name in registry.all()
        if registry.owners.get(name) == plugin
    ]
