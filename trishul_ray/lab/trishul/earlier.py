"""Fields of TRISHUL and RAVAN that are methods of their own now.

Earlier runs and sweep files name them. Fields that have no effect are left out; the others are
refused with the new spelling.
"""

from collections.abc import Mapping
from typing import Any

from trishul_ray.config.older_fields import Older

#: The fields that are gone, with the value that has no effect.
_GONE = {
    "lam_rule": "fixed",
    "lam_level": None,
    "reallocate_every": 0,
    "spare_heads": 2,
    "head_ranks": "equal",
    "limits": "heads",
    "private_heads": 0,
}

#: Today's extension and field of each.
_NOW = {
    "lam_rule": ("rules", "rule"),
    "lam_level": ("rules", "level"),
    "reallocate_every": ("moving", "move_every"),
    "spare_heads": ("moving", "spare_heads"),
    "limits": ("ranks", "limits"),
    "private_heads": ("private", "private_heads"),
}

#: The combined methods, by their extensions.
_PAIRS = (
    ("moving", "rules"),
    ("private", "rules"),
    ("ranks", "rules"),
    ("ranks", "moving"),
    ("private", "ranks"),
    ("private", "moving"),
)


def _of_today(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``method`` without fields that are gone.

    Raises:
        ValueError: One of them has an effect; names what to write instead.
    """
    name = fields.get("name")
    if name not in ("trishul", "ravan"):
        return dict(fields)
    left = {field: value for field, value in fields.items() if field not in _GONE}
    used = {
        field: value
        for field, value in fields.items()
        if field in _GONE and (value, type(value)) != (_GONE[field], type(_GONE[field]))
    }
    if left.get("allocation") == "ranks":
        used["allocation"] = "ranks"
    if not used:
        return left
    new = {_new(field, value) for field, value in used.items()}
    extensions = sorted({extension for extension, _ in new})
    pair = next((pair for pair in _PAIRS if sorted(pair) == extensions), None)
    if len(extensions) > 2:
        write = f"no method combines {', '.join(extensions)}"
    else:
        suffix = "-".join(pair or extensions)
        if name == "ravan":
            new = {(extension, "" if extension == "ranks" else text) for extension, text in new}
        write = " ".join(
            [f"write method={name}-{suffix}", *sorted(text for _, text in new if text)]
        )
    old = " ".join(f"method.{field}={_text(value)}" for field, value in used.items())
    raise ValueError(f"{old}: moved to a method of its own; {write}")


def _new(field: str, value: Any) -> tuple[str, str]:
    """Return the extension that has a field now, and the override that sets it."""
    if field == "allocation":
        return "ranks", "method.ranks_by=block"
    if field == "head_ranks":
        return "ranks", "method.ranks_by=head"
    extension, now = _NOW[field]
    return extension, f"method.{now}={_text(value)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


#: The section ``method`` as runs and sweep files of before have it.
METHOD = Older(frozenset(_GONE), _of_today)
