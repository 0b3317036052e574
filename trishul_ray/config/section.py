"""Sections of an experiment: frozen fields, each of which is part of a run's id or not.

A field that can change a number is part of the id if it is not at its default. So a new field
changes no id, and a change of a default needs a new ``NUMERICS``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A frozen group of fields; unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def identity(self) -> dict[str, Any]:
        """Return the fields that are part of the id and not at their default, as JSON values."""
        kept: dict[str, Any] = {}
        values = vars(self)
        for name, field in type(self).model_fields.items():
            value = values[name]
            if not identifies(field):
                continue
            if isinstance(value, Section):
                if nested := value.identity():
                    kept[name] = nested
            elif value != field.get_default(call_default_factory=True, validated_data=values):
                kept[name] = list(value) if isinstance(value, tuple) else value
        return kept

    def reject_unused(self, names: Iterable[str], condition: str) -> None:
        """Reject fields that are not read under a condition, such as "with kind='none'".

        Raises:
            ValueError: One of them is not at its default.
        """
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} has no effect {condition}")


def not_in_id(default: Any, description: str, **limits: Any) -> Any:
    """Return a field that cannot change a run's numbers and is left out of its id."""
    return Field(default, description=description, json_schema_extra={"identity": False}, **limits)


def identifies(field: FieldInfo) -> bool:
    """Return whether a field can change a run's numbers, and so is part of its id."""
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("identity") is False)


def _usable_path(text: str) -> str:
    """Return ``text`` if a file system accepts it as a path; also names and URIs."""
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


def stored_hash(content: str | None, path: str | None) -> str | None:
    """Return the hash in a stored ``hash path`` if it belongs to this path, or None."""
    value, _, stored = (content or "").partition(" ")
    return value if value and stored == path else None
