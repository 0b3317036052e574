"""Read YAML files, and reject repeated keys."""

from pathlib import Path
from typing import Any, TypeAlias

import yaml

from trishul_ray.errors import InputError, first_line, one_line

#: Fields of an experiment, nested by section, before they are validated.
RawFields: TypeAlias = dict[str, Any]


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Check before merge keys (``<<``) are resolved, which repeat the keys that they override.
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                lines = key.start_mark.line + 1, first[key.value].start_mark.line + 1
                raise yaml.YAMLError(
                    f"line {lines[0]}: {key.value!r} appears twice (first on line {lines[1]}); "
                    "remove one"
                )
        return node


class _TextLoader(_Loader):
    """Load every scalar except null as a string, which its field converts."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # as the base class declares it
        first: [each for each in found if each[0].endswith((":null", ":merge"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def parse_yaml(text: str | bytes, *, texts: bool = False) -> Any:
    """Parse YAML; with ``texts``, every scalar except null is a string.

    Raises:
        yaml.YAMLError: The text is not YAML, repeats a key, or is nested too deeply.
    """
    try:
        return yaml.load(text, Loader=_TextLoader if texts else _Loader)  # noqa: S506
    except (RecursionError, ValueError, LookupError, AttributeError) as error:  # such as a month 13
        raise yaml.YAMLError(f"a value cannot be read: {first_line(error)}") from None


def read_yaml(path: Path) -> RawFields:
    """Read the fields of a YAML file, with scalars as strings.

    Raises:
        InputError: The file cannot be read, or does not contain fields.
    """
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"), texts=True)
    except FileNotFoundError as error:
        raise InputError(f"config file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        fault = one_line(error).replace('"<unicode string>"', str(path))
        raise InputError(f"config file {path} is not YAML: {fault}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = "text" if isinstance(loaded, str) else type(loaded).__name__
        raise InputError(f"config file {path} must contain key: value pairs, not a {kind}")
    return loaded
