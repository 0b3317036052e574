"""YAML whose values know the file and the line that they stand in.

``yaml.safe_load`` keeps the last of two equal keys and forgets lines. A sweep needs both: two cells
with one name are a mistake, and every error names its line.
"""

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trishul_ray.errors import InputError

#: Aliases may repeat parts of a file, but not without end.
_MAX_NODES = 100_000
_KINDS: dict[type, str] = {dict: "key: value pairs", list: "a list"}


@dataclass(frozen=True)
class Node:
    """A YAML value.

    Attributes:
        value: A plain scalar, a list of nodes, or a dictionary from keys, as written, to nodes.
        place: Where it stands, as ``file:line``; for the value of a key, where the key stands.
        text: A scalar as written (``1.0``, ``on``); empty otherwise.
    """

    value: Any
    place: str
    text: str = ""

    @property
    def is_scalar(self) -> bool:
        """Whether the value is neither a list nor a mapping."""
        return not isinstance(self.value, dict | list)

    def plain(self) -> Any:
        """Return the value without places, as ``yaml.safe_load`` does; keys are text."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def mapping(self, what: str, known: Collection[str] | None = None) -> dict[str, "Node"]:
        """Return the keys and values, or raise an InputError that names ``what``.

        Args:
            what: what the value is.
            known: the allowed keys; None allows all.
        """
        found: dict[str, Node] = self._expect(dict, what)
        for key, node in found.items():
            if known is not None and key not in known:
                node.fail(f"{what}: unknown key {key!r}; {hint(key, known)}")
        return found

    def items(self, what: str) -> list["Node"]:
        """Return the items of a list, or raise an InputError that names ``what``."""
        found: list[Node] = self._expect(list, what)
        return found

    def scalar(self, what: str) -> str:
        """Return a scalar as written, or raise an InputError that names ``what``."""
        if not self.is_scalar or not _is_name(self.text):
            self.fail(f"{what} must be a name or a number, not {self.describe()}")
        return self.text

    def describe(self) -> str:
        """Return what kind of value it is, for an error message."""
        if self.is_scalar:
            return f"{self.text!r}" if self.text else "nothing"
        return _KINDS[type(self.value)] if self.value else f"empty {self.value}"

    def fail(self, message: str) -> NoReturn:
        """Raise an InputError that starts with the place."""
        raise InputError(f"{self.place}: {message}")

    def _expect(self, kind: type, what: str) -> Any:
        if not isinstance(self.value, kind):
            self.fail(f"{what} must be {_KINDS[kind]}, not {self.describe()}")
        return self.value


def hint(name: str, known: Collection[str]) -> str:
    """Return what ``name`` may have meant: the nearest of ``known``, or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


def read_located(path: Path, shown: str) -> tuple[Node, str]:
    """Read a YAML file.

    Args:
        path: the file.
        shown: its name in places.

    Returns:
        The content, and the comment at the head of the file without its marks.

    Raises:
        InputError: the file cannot be read, is not YAML, repeats a key, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"sweep file {shown} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sweep file {shown} cannot be read: {error}") from error
    return parse_located(text, shown), "\n".join(_head_comment(text))


def parse_located(text: str, shown: str, place: str | None = None) -> Node:
    """Parse YAML text; raises as :func:`read_located`.

    Args:
        text: one YAML document.
        shown: name of the file.
        place: where all of it stands; by default ``<shown>:<line>``.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return Node({}, place or f"{shown}:1")
        return _Reader(loader, shown, place).read(root, None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = place or (f"{shown}:{mark.line + 1}" if mark else shown)
        raise InputError(f"{where}: not YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        where = place or f"{shown}:{text.count(chr(10), 0, error.position) + 1}"
        raise InputError(f"{where}: not YAML: {error.reason}") from error


@dataclass
class _Reader:
    loader: yaml.SafeLoader
    shown: str
    place: str | None
    nodes: int = 0
    parents: list[yaml.Node] = field(default_factory=list)

    def at(self, node: yaml.Node) -> str:
        return self.place or f"{self.shown}:{node.start_mark.line + 1}"

    def read(self, node: yaml.Node, key: yaml.Node | None) -> Node:
        place = self.at(key or node)
        self.nodes += 1
        if any(node is parent for parent in self.parents) or self.nodes > _MAX_NODES:
            raise InputError(f"{self.at(node)}: an alias that contains itself, or too many of them")
        if isinstance(node, yaml.ScalarNode):
            try:
                value = self.loader.construct_object(node)
            except ValueError as error:  # an impossible date
                raise InputError(f"{place}: {node.value!r}: {error}; put it in quotes") from error
            return Node(value, place, node.value)
        self.parents.append(node)
        content = self.mapping(node) if isinstance(node, yaml.MappingNode) else self.items(node)
        self.parents.pop()
        return Node(content, place)

    def items(self, node: yaml.Node) -> list[Node]:
        return [self.read(item, None) for item in node.value]

    def mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not _is_name(key.value):
                raise InputError(f"{self.at(key)}: a key must be a name or a number, in one line")
            if key.tag.endswith(":merge"):
                raise InputError(f"{self.at(key)}: `<<` is not supported; use `extends: FILE`")
            if key.value in found:
                raise InputError(
                    f"{self.at(key)}: {key.value!r} appears twice (first at "
                    f"{found[key.value].place}); rename or remove one"
                )
            found[key.value] = self.read(value, key)
        return found


def _is_name(text: str) -> bool:
    return text.isprintable() and text.strip() != ""


def _head_comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").removeprefix(" ").rstrip()
