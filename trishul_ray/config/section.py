"""Sections of an experiment: frozen fields, each of which is part of a run's id or not.

A field that can change a number is part of the id if it is not at its default. So a new field
changes no id, and a change of a default needs a new ``NUMERICS``.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen group of fields; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, of which Python and pydantic make 1 and 0."""
        inner: Iterable[Any] = (value,)
        if isinstance(value, list | tuple):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        if any(isinstance(each, bool) for each in inner):
            annotation: Any = cls.model_fields[info.field_name or ""].annotation
            kinds = value_types(annotation)
            if bool not in kinds and kinds & {int, float}:
                raise PydanticCustomError("truth", "input should be a number, not true or false")
        return value

    def reject_unused(self, names: Iterable[str], condition: str) -> None:
        """Refuse fields that are not read under a condition, such as "with kind='none'".

        Raises:
            ValueError: One of them is not at its default.
        """
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} has no effect {condition}")


@cache
def value_types(annotation: Any) -> frozenset[Any]:
    """Return the types of the values, also those in containers, that a field's type allows."""
    if get_origin(annotation) is Literal:
        return frozenset(map(type, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return value_types(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not ...]
    return frozenset().union(*map(value_types, parts)) if parts else frozenset({annotation})


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
