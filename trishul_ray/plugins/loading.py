"""Load plug-ins from Python files of users and from modules of installed packages.

Loading a plug-in executes its code, which registers methods, stages, tasks, datasets or codecs. An
experiment stores the name and the content hash of each plug-in that it uses, and the hash is part
of its id. The text of a file is sent to the workers, but is not stored with a run: loading a stored
run never executes code from the run.

Installed packages list their modules as entry points in the group ``trishul_ray.plugins``.
"""

import hashlib
import importlib.util
import linecache
import sys
import traceback
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from trishul_ray.errors import InputError, RunError, first_line

#: Group of the entry points of installed plug-ins.
GROUP = "trishul_ray.plugins"

#: Prefix of the module names of plug-in files.
PREFIX = "trishul_plugin_"


@dataclass(frozen=True)
class Plugin:
    """A plug-in as stored in an experiment.

    Attributes:
        name: Name of the file without ``.py``, or package and version.
        content: ``sha256:`` and the hash of the file's text, or of the package's files.
        source: Text of the file; None for a package, and in a stored run.
    """

    name: str
    content: str
    source: str | None = None


class Loaded:
    """The plug-ins that this process has loaded.

    Attributes:
        owners: Plug-ins, keyed by the name of their module or package.
        newest: Module names of the latest content of each file, keyed by plug-in name.
        current: The plug-in that is being loaded, or None.
        faults: One line per installed plug-in that could not be loaded; None until
            :func:`load_installed` has run.
    """

    def __init__(self) -> None:
        self.owners: dict[str, Plugin] = {}
        self.newest: dict[str, str] = {}
        self.current: Plugin | None = None
        self.faults: list[str] | None = None


LOADED = Loaded()


def load_plugin(path: str | Path) -> Plugin:
    """Load a plug-in file, so that experiments can use the items that it registers.

    Loading the same content again has no effect. Changed content replaces the items that the file
    registered before.

    Args:
        path: Path of the Python file; ``~`` is expanded.

    Returns:
        The plug-in: its name, content hash and text.

    Raises:
        InputError: The file cannot be read, or its code raises. The message reports the line.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine.py"
        >>> _ = file.write_text("ANSWER = 42")
        >>> load_plugin(file).name
        'mine'
    """
    if not isinstance(path, str | Path):
        raise InputError(f"plug-in of type {type(path).__name__}: pass the path of a Python file")
    path = Path(path)
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"plug-in {path}: {reason}; pass the path of a Python file") from error
    content = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return _run(Plugin(path.stem, content, text), str(path))


def find_stored(entry: Any) -> Plugin:
    """Find the loaded plug-in of an entry in a configuration, without executing its text.

    Args:
        entry: A :class:`Plugin`, or a dictionary with ``name`` and ``content``.

    Returns:
        The loaded plug-in.

    Raises:
        InputError: The entry is invalid, or as for :func:`find_plugin`.
    """
    if isinstance(entry, Plugin):
        return find_plugin(entry)
    if not isinstance(entry, dict) or not {"name", "content"} <= entry.keys():
        raise InputError(f"plugins: {entry!r} is neither a Python file nor a stored plug-in")
    return find_plugin(Plugin(str(entry["name"]), str(entry["content"])))


def find_plugin(plugin: Plugin) -> Plugin:
    """Load a plug-in sent by another process, or find a stored plug-in among the loaded plug-ins.

    Args:
        plugin: The plug-in; its text is executed if it has one.

    Returns:
        The loaded plug-in.

    Raises:
        InputError: The plug-in is not loaded, or the loaded content differs.
    """
    if plugin.source is not None:
        return _run(plugin, f"<plug-in {plugin.name}>")
    load_installed()
    known = {p.content: p for p in LOADED.owners.values() if p.name == plugin.name}
    if (found := known.get(plugin.content)) is not None:
        return found if found.source is None else _run(found, f"<plug-in {found.name}>")
    if known:
        raise InputError(
            f"plug-in {plugin.name} has changed: expected content {plugin.content[:19]}, but "
            f"loaded {next(reversed(known))[:19]}; restore the file, or start over"
        )
    raise InputError(
        f"plug-in {plugin.name} (content {plugin.content[:19]}) is not loaded: pass --plugin "
        f"{plugin.name}.py (from Python: trishul_ray.load_plugin), or install its package"
    )


def installed() -> EntryPoints:
    """Return the entry points of installed plug-ins."""
    return entry_points(group=GROUP)


def load_installed() -> None:
    """Load the plug-ins of installed packages once; :func:`faults` lists skipped plug-ins."""
    if LOADED.faults is not None:
        return
    LOADED.faults = []
    for entry in installed():
        try:
            package = entry.module.partition(".")[0]
            LOADED.current = LOADED.owners[package] = _of_package(entry, package)
            entry.load()
        except Exception as error:
            LOADED.faults.append(f"plug-in {entry.name} ({entry.value}): {_reason(error)}")
        finally:
            LOADED.current = None


def faults() -> list[str]:
    """Return one line per installed plug-in that could not be loaded."""
    return LOADED.faults or []


def owner_of(module: str) -> Plugin | None:
    """Return the plug-in that contains a module, or None.

    Args:
        module: Name of the module.
    """
    return LOADED.owners.get(module) or LOADED.owners.get(module.partition(".")[0])


def named(cls: type) -> str:
    """Return the display name of a class, including the plug-in that defines it.

    Args:
        cls: The class.

    Returns:
        Such as ``Mine of plug-in mine``, or the class name if it is not from a plug-in.
    """
    owner = owner_of(cls.__module__)
    return cls.__name__ if owner is None else f"{cls.__name__} of plug-in {owner.name}"


def fault_of(error: BaseException) -> str:
    """Format an error as one line.

    Args:
        error: Any exception.

    Returns:
        The message of an ``InputError`` or ``RunError``. For other errors, the plug-in's line in
        the traceback (if any), the type and the message.
    """
    if isinstance(error, InputError | RunError):
        return str(error)
    owners = LOADED.owners.items()
    files = {vars(sys.modules[n])["__file__"]: p for n, p in owners if n in sys.modules}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{files[f.filename].name}, line {f.lineno}: " for f in frames if f.filename in files]
    return f"{lines[-1] if lines else ''}{_reason(error)}"


def _run(plugin: Plugin, where: str) -> Plugin:
    """Execute the text of a file unless it is already the latest content under this name."""
    stem = "".join(c if c.isalnum() else "_" for c in plugin.name)
    name = f"{PREFIX}{stem}_{plugin.content[7:15]}"
    if LOADED.newest.get(plugin.name) == name:
        return LOADED.owners[name]
    source = plugin.source or ""
    module = ModuleType(name)
    module.__file__ = where
    linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
    sys.modules[name], LOADED.owners[name] = module, plugin
    before, LOADED.current = LOADED.current, plugin
    try:
        exec(compile(source, where, "exec"), vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[name], LOADED.owners[name]
        # The failed text may have replaced items that the older text registered.
        LOADED.newest.pop(plugin.name, None)
        raise InputError(f"plug-in {where}{_line_of(error, where)}: {_reason(error)}") from error
    finally:
        LOADED.current = before
    LOADED.newest[plugin.name] = name
    return plugin


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
