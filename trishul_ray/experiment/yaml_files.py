"""Read YAML as ``yaml.safe_load`` does, but refuse a repeated key."""

from pathlib import Path
from typing import Any, TypeAlias

import yaml

from trishul_ray.errors import InputError, first_line, one_line

#: Fields of an experiment, nested by section, before they are validated.
RawFields: TypeAlias = dict[str, Any]


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Before merge keys (``<<``) are resolved, which repeats those that they override.
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first:
                raise RepeatedKeyError(
                    problem=f"line {line}: {key.value!r} appears twice (first in line "
                    f"{first[key.value]}); remove one"
                )
            first[key.value] = line
        return node


class RepeatedKeyError(yaml.MarkedYAMLError):
    """A key that stands twice in a mapping; ``problem`` names it and its lines."""


#: The ``problem`` of YAML that Python's stack does not hold.
TOO_DEEP = "values are nested too deeply"


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML as ``yaml.safe_load`` does, but refuse a repeated key.

    Raises:
        yaml.YAMLError: It is not YAML, repeats a key, or is nested too deeply.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
    except RecursionError:
        raise yaml.MarkedYAMLError(problem=TOO_DEEP) from None
    except (ValueError, LookupError, AttributeError) as error:  # such as a date in month 13
        raise yaml.MarkedYAMLError(problem=f"a value cannot be read: {first_line(error)}") from None


def parse_texts(text: str) -> Any:
    """Parse YAML in which every scalar but null is a text: numbers, dates, and ``yes``, too."""
    texts = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  # makes texts alone
    return _with_texts(parse_yaml(text), texts)


def _with_texts(parsed: Any, written: Any) -> Any:
    """Return what was parsed with its scalars as they are written; null stays null."""
    if isinstance(parsed, dict):
        inner = zip(written.items(), parsed.values(), strict=True)
        return {key: _with_texts(value, text) for (key, text), value in inner}
    if isinstance(parsed, list):
        return [_with_texts(*both) for both in zip(parsed, written, strict=True)]
    return parsed if parsed is None else written


def read_yaml(path: Path) -> RawFields:
    """Return the fields in a YAML file; raise InputError if it cannot be read, or holds none."""
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"config file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    except RepeatedKeyError as error:
        raise InputError(f"config file {path}, {error.problem}") from error
    except yaml.YAMLError as error:
        raise InputError(f"config file {path} is not YAML: {one_line(error)}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = {"str": "text", "int": "number", "float": "number"}
        name = type(loaded).__name__
        raise InputError(
            f"config file {path} must contain key: value pairs, not a {kind.get(name, name)}"
        )
    return loaded
