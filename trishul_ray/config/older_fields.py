"""Fields that sections of an experiment had in older versions, and what takes their place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trishul_ray.plugins.installed import objects


@dataclass(frozen=True)
class Older:
    """Form of a section of an experiment in older versions.

    It is an entry point of the group ``trishul_ray.plugins.older`` with the name of the section.

    Attributes:
        fields: Names of fields that the section does not have any more.
        of_today: Return the fields of the section without those that are gone where they have no
            effect. Raise a ValueError for the others, which names what to write in their place.
    """

    fields: frozenset[str]
    of_today: Callable[[Mapping[str, Any]], dict[str, Any]]


def of_today(section: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of an experiment in today's fields, given one of an older version.

    Raises:
        ValueError: A field is gone; names what to write in its place.
    """
    found = dict(fields)
    older: Older | None = objects("older").get(section)
    return found if older is None else older.of_today(found)


def older_fields() -> list[str]:
    """Return the dotted names of fields that older versions had."""
    found: dict[str, Older] = objects("older")
    return [f"{name}.{field}" for name, older in found.items() for field in sorted(older.fields)]
