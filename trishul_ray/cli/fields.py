"""The list of fields of an experiment: what each allows and means."""

import textwrap
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trishul_ray.config.section import Noted
from trishul_ray.methods.base import method_names
from trishul_ray.plugins.loading import Plugin
from trishul_ray.stages import STAGES
from trishul_ray.tasks.base import task_kinds

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Names of the types of fields.
_TYPES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Plugin: "Python file",
    Noted: "text",
}


def field_list(experiment: "Experiment", width: int = 100) -> str:
    """Return a paragraph for each field: its value in ``experiment``, what it allows and means.

    Fields of the method are those of the experiment's method.
    """
    registered = {"method.name": method_names(), "task.kind": task_kinds()}
    fields = [each for each in _fields(experiment) if each[0] != "stages"]
    for name, stage in STAGES.all().items():
        registered |= {f"{name}.{f}": each.choices() for f, each in stage.registries.items()}
        fields += _fields(experiment.stages.get(name) or stage.Config(), f"{name}.")
    blocks = []
    for name, field, value in fields:
        notes = [" | ".join(registered[name]) if name in registered else allowed(field)]
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            notes.append("not in the id")
        shown = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
        shown = shown.strip().removesuffix("...").strip()  # of a document with one plain value
        head = f"{name}={shown}  ({'; '.join(notes)})"
        text = textwrap.indent(textwrap.fill(field.description or "", max(40, width - 4)), "    ")
        blocks.append(f"{head}\n{text}" if text else head)
    return "\n".join(blocks)


def allowed(field: FieldInfo) -> str:
    """Return what a field allows, e.g. ``integer >= 1 or auto``."""
    return _describe(field.annotation, field.metadata)


def _fields(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        value = str(value) if isinstance(value, Noted) else value
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, list(value) if isinstance(value, tuple) else value


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe(arguments[0], list(arguments[1:]))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        options = [each for each in arguments if each is not types.NoneType]
        text = " or ".join(_describe(each, metadata) for each in options)
        return text + (" or null" if types.NoneType in arguments else "")
    if origin is tuple:
        count = "" if Ellipsis in arguments else f"{len(arguments)} "
        return f"list of {count}{_describe(arguments[0], [])}s"
    if origin is dict:
        return "names with values, {a: b}"
    limits = []
    for each in _flat(metadata):
        for kind, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (bound := getattr(each, kind, None)) is not None:
                limits.append(f"{sign} {bound}")
        if isinstance(each, annotated_types.MaxLen):
            limits.append(f"of at most {each.max_length} characters")
    return " ".join([_TYPES.get(annotation, str(annotation)), ", ".join(limits)]).strip()


def _flat(metadata: list[Any]) -> Iterator[Any]:
    """Yield constraints, also those inside a field's own information."""
    for each in metadata:
        yield from _flat(each.metadata) if isinstance(each, FieldInfo) else [each]
