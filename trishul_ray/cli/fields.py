"""List the fields of an experiment with their values, allowed values and descriptions."""

import textwrap
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from pydantic import BaseModel

from trishul_ray.experiment.loading import field_names
from trishul_ray.methods.base import method_names
from trishul_ray.stages import STAGES
from trishul_ray.tasks.base import task_kinds

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Names of JSON Schema types. All other types are called text.
_TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "names with values, {a: b}",
    "Plugin": "Python file",
}
#: JSON Schema keys that limit values.
_LIMITS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "maxLength": "of at most {} characters",
}


class FieldDescription(NamedTuple):
    """The value, allowed values and meaning of a field as texts, and whether it is in the id."""

    name: str
    value: str
    allowed: str
    meaning: str
    in_id: bool


class _Field(NamedTuple):
    name: str
    schema: dict[str, Any]
    value: Any


def section_names() -> set[str]:
    """Return the names of the sections of an experiment, including sections of stages."""
    return {name.partition(".")[0] for name in field_names() if "." in name}


def field_list(experiment: "Experiment", sections: Collection[str] = (), width: int = 100) -> str:
    """Format a paragraph per field: its value in ``experiment``, allowed values and description.

    The section ``method`` has the fields of the experiment's method. A nonempty ``sections`` limits
    the list to these sections.
    """
    blocks = []
    for field in describe_fields(experiment):
        if sections and field.name.partition(".")[0] not in sections:
            continue
        note = "" if field.in_id else "; not in the id"
        blocks.append(f"{field.name}={field.value}  ({field.allowed}{note})")
        if field.meaning:
            blocks.append(textwrap.indent(textwrap.fill(field.meaning, max(40, width - 4)), "    "))
    return "\n".join(blocks)


def describe_fields(experiment: "Experiment") -> Iterator[FieldDescription]:
    """Describe the fields of an experiment by section, with fields of stages last."""
    registered = {"method.name": method_names(), "task.kind": task_kinds()}
    fields = [each for each in _fields(experiment) if each.name != "stages"]
    for name, stage in STAGES.all().items():
        registered |= {f"{name}.{f}": each.choices() for f, each in stage.registries.items()}
        fields += _fields(experiment.stages.get(name) or stage.Config(), f"{name}.")
    for name, schema, value in fields:
        allows = " | ".join(registered[name]) if name in registered else allowed(schema)
        text = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
        # YAML ends a document that is a plain scalar with dots.
        text = text.strip().removesuffix("...").strip()
        in_id = schema.get("identity", True)
        yield FieldDescription(name, text, allows, schema.get("description", ""), in_id)


def _fields(section: BaseModel, prefix: str = "") -> Iterator[_Field]:
    properties = type(section).model_json_schema()["properties"]
    values = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield _Field(f"{prefix}{name}", properties[name], values[name])


def allowed(schema: dict[str, Any]) -> str:
    """Describe the values that a JSON Schema allows, such as ``integer >= 1 or auto``."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(allowed, schema["anyOf"])))
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        items = schema.get("prefixItems", [])
        count = f"{len(items)} " if items else ""
        return f"list of {count}{allowed(items[0] if items else schema['items'])}s"
    kind = _TYPES.get(schema.get("type") or schema["$ref"].rpartition("/")[2], "text")
    limits = [text.format(schema[key]) for key, text in _LIMITS.items() if key in schema]
    return f"{kind} {', '.join(limits)}".strip()
