"""Methods, tasks and datasets from outside the package: your own files, and installed packages.

A plug-in is a Python file, or a module that an installed package names as an entry point. Loading
it runs its code, which registers what it defines; a dataset is a ``PublicDataset`` at its top
level. An experiment notes the plug-ins that it uses with the hash of their content, which is part
of its id. The text of a file travels with the experiment to its workers, but is not stored with a
run: a run's folder names a plug-in, and never runs one. A YAML file of an experiment or sweep may
name plug-ins (``plugins: [mine.py]``): who loads it runs them.

What installed packages add is loaded where it is looked up (:mod:`trishul_ray.plugins.installed`).
This package has such plug-ins, too. Their content is versioned with it: in place of a hash, ids
have the number ``NUMERICS`` of the folder.
"""

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from trishul_ray.errors import InputError, RunError, first_line
from trishul_ray.plugins import installed as entry_points

#: Content of a class whose source cannot be read: it must not be run.
UNKNOWN = "unknown"

#: Beginning of the names of the modules that files become.
_PREFIX = "trishul_plugin_"

_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)


@dataclass(frozen=True)
class Plugin:
    """A plug-in as an experiment notes it.

    Attributes:
        name: The file's name without ``.py``, or package and version.
        content: ``sha256:`` and the hash of the file's text, or of the package's files.
        source: The text of a file; None for a package, and where a run is stored.
    """

    name: str
    content: str
    source: str | None = None


#: The plug-in of a module, or of a package, by its name.
_owners: dict[str, Plugin] = {}
#: The module of a file that was run last, by the name of the plug-in.
_newest: dict[str, str] = {}
#: The classes that fields name (``method=mine``), of this package and of others.
_classes: dict[str, type] = {}
#: The plug-ins of datasets, by the fields that name these (``data.name=mine``).
_datasets: dict[str, Plugin] = {}
#: Why installed plug-ins could not be loaded, one line each; None before they are looked for.
_faults: list[str] | None = None
#: Whether files are refused; see :func:`none_run`.
_refused = False


def load_plugin(path: str | Path) -> Plugin:
    """Load a plug-in from a file: its methods, tasks and datasets can be used from now on.

    Raises:
        InputError: The file cannot be read, or fails; names the line.
    """
    if not isinstance(path, str | Path):
        raise InputError(f"plug-in of type {type(path).__name__}: name a Python file")
    path = Path(path)
    if _refused and path.stem not in _newest:  # nor is a path read that others have named
        raise InputError(_not_run(path.name))
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"plug-in {path}: {reason}; name a Python file") from error
    content = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return _run(Plugin(path.stem, content, text), str(path))


@contextmanager
def none_run() -> Iterator[None]:
    """Refuse to run a plug-in's file in this context; what is loaded already can be used.

    For what other people have written, such as the commands of a cluster's jobs.
    """
    global _refused
    before, _refused = _refused, True
    try:
        yield
    finally:
        _refused = before


def find_noted(note: Any) -> Plugin:
    """Return a plug-in by what a configuration notes of it; a text in it is not run.

    Raises:
        InputError: As :func:`find_plugin`; or it is no note.
    """
    if isinstance(note, Plugin):
        return find_plugin(note)
    if not isinstance(note, dict) or not {"name", "content"} <= note.keys():
        raise InputError(f"plugins: {note!r} is neither a Python file nor the note of a plug-in")
    return find_plugin(Plugin(str(note["name"]), str(note["content"])))


def find_plugin(plugin: Plugin) -> Plugin:
    """Load a plug-in that another process has sent, or make sure that a noted one is loaded.

    Raises:
        InputError: It cannot be loaded, or what is installed or loaded has another content.
    """
    if plugin.source is not None:
        return _run(plugin, f"<plug-in {plugin.name}>")
    load_installed()
    every = (
        *_owners.values(),
        *(_of_class(cls) for cls in _classes.values() if _is_unpackaged(cls)),
    )
    known = {each.content: each for each in every if each.name == plugin.name}
    found = known.get(plugin.content)
    if found is not None:
        return found if found.source is None else _run(found, f"<plug-in {found.name}>")
    if known:
        raise InputError(
            f"plug-in {plugin.name} has changed: content {plugin.content[:19]} is needed, and "
            f"{next(reversed(known))[:19]} is loaded; restore it, or start over"
        )
    raise InputError(
        f"plug-in {plugin.name} (content {plugin.content[:19]}) is needed: load it with --plugin "
        f"{plugin.name}.py (from Python: trishul_ray.load_plugin), or install its package"
    )


def load_installed() -> None:
    """Load the plug-ins of installed packages, once; a faulty one is left out (:func:`faults`)."""
    global _faults
    if _faults is not None:
        return
    _faults = []
    for entry in entry_points.installed():
        try:
            package = entry.module.partition(".")[0]
            if not _is_ours(entry.module):
                _owners[package] = _of_package(entry, package)
            if entry.group == entry_points.GROUP:
                entry.load()
        except Exception as error:
            _faults.append(_fault(entry, error))


def faults() -> list[str]:
    """Return why installed plug-ins could not be loaded, or cannot be known, one line each."""
    outdated = entry_points.outdated()
    return [*(_faults or ()), *([outdated] if outdated else [])]


def _fault(entry: EntryPoint, error: Exception) -> str:
    return f"plug-in {entry.name} ({entry.value}): {_reason(error)}"


def _is_ours(module: str) -> bool:
    return module.startswith("trishul_ray.")


def numerics(cls: type) -> dict[str, int]:
    """Return the number ``NUMERICS`` of each folder of this package that a class is made of.

    Folders without one, or with 0, are left out: they have that of the whole package.
    """
    folders = {".".join(base.__module__.split(".")[:2]) for base in cls.__mro__}
    ours = sorted(name for name in folders if _is_ours(name) and name in sys.modules)
    found = {name.partition(".")[2]: getattr(sys.modules[name], "NUMERICS", 0) for name in ours}
    return {name: number for name, number in found.items() if number}


@cache
def _import_folder(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def load_all(package: str) -> None:
    """Import the modules of a package whose classes register themselves, and all plug-ins."""
    _import_folder(package)
    load_installed()


def claim(field: str, cls: type, registered: type | None, title: str) -> None:
    """Note who defines a class that is registered as what ``field`` names, e.g. ``method=mine``.

    A plug-in's class may be replaced by a newer one of the same name, one of this package may not.

    Args:
        field: Field that names the class.
        cls: The class.
        registered: The class that has its name so far.
        title: How the name is called in the message.

    Raises:
        ValueError: The name is taken.
    """
    old = registered or cls
    ours = old.__module__ != cls.__module__ and _is_ours(old.__module__)
    if ours or old.__qualname__ != cls.__qualname__:
        raise ValueError(f"{title} is taken by {old.__qualname__}")
    owner, prior = _owner_of(cls.__module__), _classes.get(field)
    before = () if prior is None or _is_unpackaged(prior) else _plugins_of(prior)
    if before and (owner is None or owner.name != before[0].name):
        raise ValueError(f"{field} is taken by plug-in {before[0].name}")
    _classes[field] = cls


def _plugins_of(cls: type) -> tuple[Plugin, ...]:
    """Return the plug-ins that define a class and those that it extends."""
    modules = (base.__module__ for base in cls.__mro__)
    found = tuple(dict.fromkeys(filter(None, map(_owner_of, modules))))
    return (_of_class(cls), *found) if _is_unpackaged(cls) else found


def _is_unpackaged(cls: type) -> bool:
    """Return whether a class is of a script, a notebook or another module that is no plug-in."""
    return not _is_ours(cls.__module__) and _owner_of(cls.__module__) is None


class Registry(Generic[_T]):
    """Classes by name, of which a field of an experiment names one.

    Args:
        field: The field, such as ``method``.
        title: Word for a name in messages.
        package: Its modules register classes when they are imported; None if all built-in classes
            are in the module of the registry.
        taken: Names that mean something else.
    """

    def __init__(
        self, field: str, title: str, package: str | None = None, taken: Iterable[str] = ()
    ) -> None:
        self.field, self._title, self._package = field, title, package
        self._taken = frozenset(taken)
        self.classes: dict[str, type[_T]] = {}

    def choices(self) -> list[str]:
        """Return what the field may be: names that mean something else, then those of classes."""
        return [*sorted(self._taken), *self.names()]

    def reserve(self, names: Iterable[str]) -> None:
        """Take names that mean something else."""
        self._taken |= {*names}

    def add(self, name: str, cls: type[_T]) -> None:
        """Make a class available under a name; raises as :func:`claim`."""
        title = f"{self._title} {name!r}"
        if name in self._taken:
            raise ValueError(f"{title} is taken")
        if not _is_ours(cls.__module__) and name not in self.classes:
            entry = entry_points.named_by(self.field).get(name)
            if entry is not None and entry.module.split(".")[0] != cls.__module__.split(".")[0]:
                raise ValueError(f"{title} is taken by {entry.value}")
        claim(f"{self.field}={name}", cls, self.classes.get(name), title)
        self.classes[name] = cls

    def register(self, name: str) -> Callable[[_C], _C]:
        """Return a class decorator that makes a class available under a name."""

        def added(cls: _C) -> _C:
            self.add(name, cls)
            return cls

        return added

    def _load(self) -> None:
        load_installed() if self._package is None else load_all(self._package)

    def names(self) -> list[str]:
        """Return all names, sorted; plug-ins that are loaded when they are named stay unloaded."""
        self._load()
        return sorted({*self.classes, *entry_points.named_by(self.field)})

    def all(self) -> dict[str, type[_T]]:
        """Return all classes by name, sorted, without those of faulty plug-ins (:func:`faults`)."""
        found = {}
        for name in self.names():
            try:
                found[name] = self[name]
            except InputError as error:
                if _faults is not None and str(error) not in _faults:
                    _faults.append(str(error))
        return found

    def plugins(self) -> tuple[Plugin, ...]:
        """Return the plug-ins behind all classes, by name, without this package."""
        return used_by(f"{self.field}={name}" for name in self.all())

    def __getitem__(self, name: str) -> type[_T]:
        """Return the class of a name.

        Raises:
            KeyError: There is none.
            InputError: The plug-in that should register it cannot be loaded, or does not.
        """
        self._load()
        entry = None if name in self.classes else entry_points.named_by(self.field).get(name)
        if entry is not None:
            try:
                entry.load()
            except Exception as error:
                raise InputError(_fault(entry, error)) from error
            if name not in self.classes:
                raise InputError(f"plug-in {entry.name} ({entry.value}) registers no {name!r}")
        return self.classes[name]


def used_by(fields: Iterable[str]) -> tuple[Plugin, ...]:
    """Return the plug-ins behind what fields such as ``method=mine`` name, by name."""
    found: set[Plugin] = set()
    for field in fields:
        if field in _datasets:
            found.add(_datasets[field])
        elif field in _classes:
            found.update(_plugins_of(_classes[field]))
    return tuple(sorted(found, key=lambda plugin: plugin.name))


def provided_by(plugin: Plugin) -> list[str]:
    """Return the fields that name what a plug-in defines, such as ``method=mine``, sorted."""
    classes = (field for field, cls in _classes.items() if _owner_of(cls.__module__) == plugin)
    return sorted([*classes, *(field for field, owner in _datasets.items() if owner == plugin)])


def any_loaded() -> bool:
    """Return whether there is a plug-in, or a class of a script or notebook."""
    load_installed()
    return bool(_owners) or any(map(_is_unpackaged, _classes.values()))


def unpackaged(fields: Iterable[str]) -> list[str]:
    """Return those of the fields that name a class of a script, notebook or other module."""
    return [field for field in fields if field in _classes and _is_unpackaged(_classes[field])]


def note_dataset(name: str, plugin: Plugin) -> None:
    """Note which plug-in defines a dataset."""
    _datasets[f"data.name={name}"] = plugin


def named(cls: type) -> str:
    """Return the name of a class and, if it is a plug-in's, that of the plug-in."""
    owner = _owner_of(cls.__module__)
    return cls.__name__ if owner is None else f"{cls.__name__} of plug-in {owner.name}"


def fault_of(error: BaseException) -> str:
    """Return the message of an error of ours; of another one its type, and the plug-in's line."""
    if isinstance(error, InputError | RunError):
        return str(error)
    files = {vars(sys.modules[n])["__file__"]: p for n, p in _owners.items() if n in sys.modules}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{files[f.filename].name}, line {f.lineno}: " for f in frames if f.filename in files]
    return f"{lines[-1] if lines else ''}{_reason(error)}"


def contents(kind: type) -> Iterator[tuple[Plugin, Any]]:
    """Yield the objects of a type at the top level of the plug-ins' modules, and their plug-ins."""
    load_installed()
    # A process has thousands of modules, and this is asked for every cell of a sweep.
    packages = tuple(f"{name}." for name, plugin in _owners.items() if plugin.source is None)
    names = [*_owners, *(n for n in list(sys.modules) if packages and n.startswith(packages))]
    for name in names:
        plugin, module = _owner_of(name), sys.modules.get(name)
        if plugin is None or not isinstance(module, ModuleType):
            continue
        if plugin.source is not None and _newest.get(plugin.name) != name:
            continue  # an older content of the same file
        for value in list(vars(module).values()):
            if isinstance(value, kind):
                yield plugin, value


def _owner_of(module: str) -> Plugin | None:
    return _owners.get(module) or _owners.get(module.partition(".")[0])


def _run(plugin: Plugin, where: str) -> Plugin:
    """Run a file's text, unless it is what was run last under its name."""
    stem = "".join(c if c.isalnum() else "_" for c in plugin.name)
    name = f"{_PREFIX}{stem}_{plugin.content[7:15]}"
    if _newest.get(plugin.name) == name:
        return _owners[name]
    if _refused:
        raise InputError(_not_run(where))
    module = ModuleType(name)
    module.__file__ = where
    lines = (plugin.source or "").splitlines(keepends=True)
    linecache.cache[where] = (len(plugin.source or ""), None, lines, where)
    sys.modules[name], _owners[name] = module, plugin
    try:
        exec(compile(plugin.source or "", where, "exec"), vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[name], _owners[name]
        _newest.pop(plugin.name, None)  # what it has registered by now is not the older content's
        raise InputError(f"plug-in {where}{_line_of(error, where)}: {_reason(error)}") from error
    _newest[plugin.name] = name
    return plugin


def _not_run(name: str) -> str:
    return f"plug-in {name} is not run here: name yours with --plugin"


def _line_of(error: BaseException, where: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == where:
        return f", line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == where]
    return f", line {frames[-1].lineno}" if frames else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg}"
    return f"{type(error).__name__}: {first_line(error)}"


def _of_package(entry: EntryPoint, package: str) -> Plugin:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError(f"no package {package!r}")
    folders = found.submodule_search_locations
    files = sorted(Path(folders[0]).rglob("*.py")) if folders else [Path(found.origin)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    version = entry.dist.version if entry.dist is not None else "unknown"
    return Plugin(f"{package} {version}", f"sha256:{digest.hexdigest()}")


def _of_class(cls: type) -> Plugin:
    """Return what stands for a class that is no plug-in's: its source identifies it."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        text = inspect.getsource(cls)
    except (OSError, TypeError):
        return Plugin(name, UNKNOWN)
    return Plugin(name, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")
