"""Entry points of installed packages: what they add to this one.

Those of the group ``trishul_ray.plugins`` are modules that are loaded whenever something is looked
up. The group ``trishul_ray.plugins.<field>``, such as ``trishul_ray.plugins.method``, has entry
points with the names that they register; they are loaded when they are named.
"""

import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

#: Entry points of installed packages that are plug-ins.
GROUP = "trishul_ray.plugins"

#: File of a checkout of this package that declares its entry points.
_SOURCE = Path(__file__).parents[2] / "pyproject.toml"


@cache
def installed() -> EntryPoints:
    """Return the entry points of all installed packages that are plug-ins, by group and name."""
    every = entry_points()
    ours = [group for group in every.groups if f"{group}.".startswith(f"{GROUP}.")]
    found = (each for group in ours for each in every.select(group=group))
    return EntryPoints(sorted(found, key=lambda each: (each.group, each.name)))


def named_by(field: str) -> dict[str, EntryPoint]:
    """Return the entry points that register what a field may name, by that name."""
    return {entry.name: entry for entry in installed().select(group=f"{GROUP}.{field}")}


@cache
def objects(kind: str) -> dict[str, Any]:
    """Return what the entry points of ``trishul_ray.plugins.<kind>`` name, by their names.

    They are ``check`` (the checks of what a field names: a function of the name), ``group`` (the
    names of numbers in records that MLflow shows together) and ``older``
    (:class:`~trishul_ray.config.older_fields.Older`).
    """
    return {name: entry.load() for name, entry in named_by(kind).items()}


def outdated() -> str | None:
    """Say how to install a checkout again whose entry points are not those it is installed with.

    Installing writes them down; pulling newer source does not.
    """
    try:
        project = tomllib.loads(_SOURCE.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return None  # no checkout
    if project.get("name") != "trishul-ray":
        return None
    declared = {
        (group, name, value)
        for group, entries in project.get("entry-points", {}).items()
        for name, value in entries.items()
    }
    known = {(each.group, each.name, each.value) for each in installed()}
    if not (unknown := sorted(declared - known)):
        return None
    names = ", ".join(name for _, name, _ in unknown[:3]) + ", ..." * (len(unknown) > 3)
    return (
        f"trishul-ray was installed before its source changed, without {names}: run "
        f"`{sys.executable} -m pip install --no-deps --editable {_SOURCE.parent}`"
    )
