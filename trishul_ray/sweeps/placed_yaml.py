"""YAML whose values know where they stand, so that every mistake names file and line."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import yaml

from trishul_ray.errors import InputError
from trishul_ray.experiment.yaml_files import TOO_DEEP
from trishul_ray.report.outcomes import is_name

#: Aliases may repeat parts of a file, but not without end.
_MAX_VALUES = 100_000


class Scalar(str):
    """A scalar as written (``1.0``, ``on``).

    ``place`` is its ``file:line``, that of its key if it has one; ``value`` is what YAML makes of
    it.
    """

    place: str
    value: Any

    def __new__(cls, text: str, place: str, value: Any) -> "Scalar":
        """Return the text with its place and its value."""
        made = super().__new__(cls, text)
        made.place, made.value = place, value
        return made


class Pairs(dict[str, Any]):
    """A mapping, and the place where it stands."""

    def __init__(self, place: str, content: Mapping[str, Any] = {}) -> None:  # read
        super().__init__(content)
        self.place = place


class Items(list[Any]):
    """A list, and the place where it stands."""

    place: str


Value = Scalar | Pairs | Items
Kind = TypeVar("Kind", Scalar, Pairs, Items)

KINDS: dict[type, str] = {
    Scalar: "a name or a number",
    Pairs: "key: value pairs",
    Items: "a list",
}


def plain(value: Value) -> Any:
    """Return a value without places, as ``yaml.safe_load`` does; keys are text."""
    if isinstance(value, Pairs):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(item) for item in value] if isinstance(value, Items) else value.value


def fail(value: Value, message: str) -> NoReturn:
    """Raise an InputError that starts with the place of a value."""
    raise InputError(f"{value.place}: {message}")


def parse(text: str, shown: str, place: str | None = None) -> Value:
    """Parse YAML text; ``place`` is where all of it stands, by default ``<shown>:<line>``.

    Raises:
        InputError: It is not YAML, or repeats a key.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Pairs(place or f"{shown}:1")
        return _Parser(loader, shown, place).read(root, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place or (f"{shown}:{mark.line + 1}" if mark else shown)
        raise InputError(f"{where}: not YAML: {error.problem or error.context}") from error
    except RecursionError:
        raise InputError(f"{place or shown}: not YAML: {TOO_DEEP}") from None
    except yaml.reader.ReaderError as error:
        where = place or f"{shown}:{text.count(chr(10), 0, error.position) + 1}"
        raise InputError(f"{where}: not YAML: {error.reason}") from error


class _Parser:
    def __init__(self, loader: yaml.SafeLoader, shown: str, place: str | None) -> None:
        self.loader, self.shown, self.place = loader, shown, place
        self.values = 0
        self.parents: list[yaml.Node] = []

    def at(self, node: yaml.Node) -> str:
        return self.place or f"{self.shown}:{node.start_mark.line + 1}"

    def read(self, node: yaml.Node, named: yaml.Node) -> Value:
        """Return the value of a node; ``named`` is its key, or itself."""
        place = self.at(named)
        self.values += 1
        if any(node is parent for parent in self.parents) or self.values > _MAX_VALUES:
            raise InputError(f"{self.at(node)}: an alias that contains itself, or too many of them")
        if isinstance(node, yaml.ScalarNode):
            try:
                return Scalar(node.value, place, self.loader.construct_object(node))
            except ValueError as error:  # an impossible date
                raise InputError(f"{place}: {node.value!r}: {error}; put it in quotes") from error
        self.parents.append(node)
        content: Value
        if isinstance(node, yaml.MappingNode):
            content = Pairs(place)
            for key, value in node.value:
                content[self.key(key, content)] = self.read(value, key)
        else:
            content = Items(self.read(item, item) for item in node.value)
            content.place = place
        self.parents.pop()
        return content

    def key(self, node: yaml.Node, known: Pairs) -> str:
        if not isinstance(node, yaml.ScalarNode) or not is_name(node.value):
            raise InputError(f"{self.at(node)}: a key must be a name or a number, in one line")
        if node.tag.endswith(":merge"):
            raise InputError(f"{self.at(node)}: `<<` is not supported; use `extends: FILE`")
        if node.value in known:
            raise InputError(
                f"{self.at(node)}: {node.value!r} appears twice (first at "
                f"{known[node.value].place}); rename or remove one"
            )
        return str(node.value)


def expect(value: Value, kind: type[Kind], what: str) -> Kind:
    """Return a value that must be of a kind; a scalar must be a name or a number."""
    if isinstance(value, kind) and not (isinstance(value, Scalar) and not is_name(value)):
        return value
    fail(value, f"{what} must be {KINDS[kind]}, not {describe(value)}")


def describe(value: Value) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, Scalar):
        return repr(str(value)) if value else "nothing"
    return KINDS[type(value)] if value else f"empty {'{}' if isinstance(value, Pairs) else '[]'}"


def place_of(content: Value, loc: Sequence[str | int]) -> str:
    """Return the place of the value that pydantic's ``loc`` leads to, as far as it does."""
    place = content.place
    for part in loc:
        try:
            content = content[part]  # type: ignore[index,assignment]  # it may not be there
            place = content.place
        except (LookupError, TypeError, AttributeError):
            break
    return place
