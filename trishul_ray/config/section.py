"""Sections of an experiment: frozen fields, each of which is part of a run's id or not.

A field that can change a number is part of the id if it is not at its default. So a new field
changes no id, and a change of a default needs a new ``NUMERICS``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
)


class Section(BaseModel):
    """A frozen group of fields; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def reject_unused(self, names: Iterable[str], condition: str) -> None:
        """Refuse fields that are not read under a condition, such as "with kind='none'".

        Raises:
            ValueError: One of them is not at its default.
        """
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} has no effect {condition}")


def not_in_id(default: Any, description: str, **limits: Any) -> Any:
    """Return a field that cannot change a run's numbers and is left out of its id."""
    return Field(default, description=description, json_schema_extra={"identity": False}, **limits)


def _usable_path(text: str) -> str:
    """Return ``text`` if a file system accepts it as a path; names and URIs pass, too."""
    parts = text.encode(errors="surrogateescape").split(b"/")
    if not text.strip() or "\0" in text or max(map(len, parts)) > 255 or len(text) > 4000:
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        raise ValueError(
            f"{shown} is not a valid name or path: it must not be empty or contain NUL, and each "
            "part may have at most 255 bytes"
        )
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{text!r}: the user does not exist") from None
    return text


#: A name or a path that the file system accepts.
PathText = Annotated[str, AfterValidator(_usable_path)]


class Noted(NamedTuple):
    """The content of your own data or model as it was noted; one line ``hash path`` in files."""

    hash: str
    path: str

    @classmethod
    def parse(cls, line: Any) -> Any:
        """Return the note that a line holds; anything else as it is."""
        return cls(*line.partition(" ")[::2]) if isinstance(line, str) else line

    def __str__(self) -> str:
        return f"{self.hash} {self.path}"

    def hash_of(self, path: str | None) -> str | None:
        """Return the hash; None if the note is on another path."""
        return self.hash if self.hash and self.path == path else None


NotedText = Annotated[Noted, BeforeValidator(Noted.parse), PlainSerializer(str, return_type=str)]
