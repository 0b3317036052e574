"""Base class of the sections of an experiment, with fields that are part of a run's id or not.

A field that can change a result is part of the id if it is not at its default. Adding a field
therefore changes no id, and changing a default requires a new ``NUMERICS``.
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
    """A frozen group of fields that rejects unknown fields.

    Sections of an experiment, and the ``Config`` of methods and stages, extend this class. Define
    each field with ``pydantic.Field``, or with :func:`not_in_id` if it cannot change a result.
    Non-finite floats are rejected.

    Example:
        >>> from pydantic import Field
        >>> class MyConfig(Section):
        ...     strength: float = Field(0.0, ge=0, description="weight of the penalty")
        ...     label: str = not_in_id("", "name in logs")
        >>> MyConfig(strength=0.1, label="first").identity()
        {'strength': 0.1}
        >>> MyConfig().identity()
        {}
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def identity(self) -> dict[str, Any]:
        """Return the fields that are part of the id and not at their default.

        Returns:
            JSON values keyed by field name. Nested sections are dictionaries, and tuples become
            lists.
        """
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
        """Reject fields that have no effect under a condition.

        Args:
            names: Names of fields of this section.
            condition: The condition, such as ``"with kind='none'"``, for the message.

        Raises:
            ValueError: A field is not at its default.
        """
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} has no effect {condition}")


def not_in_id(default: Any, description: str, **limits: Any) -> Any:
    """Define a field that cannot change a run's results and is not part of its id.

    Args:
        default: The default value.
        description: A description of the field for ``trishul run --fields``.
        **limits: Further arguments of ``pydantic.Field``, such as ``ge`` or ``max_length``.

    Returns:
        A pydantic field.
    """
    return Field(default, description=description, json_schema_extra={"identity": False}, **limits)


def identifies(field: FieldInfo) -> bool:
    """Return whether a field can change a run's results and is therefore part of its id.

    Args:
        field: A field of ``Section.model_fields``.

    Returns:
        False for fields that :func:`not_in_id` defines, otherwise True.
    """
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("identity") is False)


def _usable_path(text: str) -> str:
    """Validate that the file system accepts a path; names and URIs are also valid."""
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


#: A name or path that the file system accepts.
PathText = Annotated[str, AfterValidator(_usable_path)]


def stored_hash(content: str | None, path: str | None) -> str | None:
    """Parse a stored ``"<hash> <path>"``.

    Args:
        content: The stored text.
        path: The current path.

    Returns:
        The hash, or None if nothing is stored or the stored path differs.

    Example:
        >>> stored_hash("sha256:1f rows.csv", "rows.csv")
        'sha256:1f'
        >>> stored_hash("sha256:1f rows.csv", "other.csv") is None
        True
    """
    value, _, stored = (content or "").partition(" ")
    return value if value and stored == path else None
