"""Ids of experiments: hashes of the fields that can change a number, and of nothing else."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from trishul_ray.stages import STAGES, stage_names
from trishul_ray.storage.durable import Json
from trishul_ray.version import NUMERICS

#: Hex digits of an experiment's id.
ID_LENGTH = 12


def id_of(identity: Mapping[str, Any]) -> str:
    """Return the id of an experiment with this identity."""
    text = json.dumps({"numerics": NUMERICS, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


@cache
def _identifying(section: type[BaseModel]) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, way and default of each field that is, or may be, part of an identity."""
    found = []
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        how = extra.get("identity") if isinstance(extra, dict) else None
        if how is not False:
            found.append((name, how, field.default))
    return tuple(found)


def may_identify(experiment: type[BaseModel], field: str) -> bool:
    """Return whether a field, by its dotted name, can be part of an experiment's id at all."""
    section: Any = experiment
    first, _, field_of_stage = field.partition(".")
    if first not in experiment.model_fields and first in stage_names():
        section, field = STAGES[first].Config, field_of_stage
    for name in field.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break  # a method or task knows its own
        if name in section.model_fields and name not in {n for n, _, _ in _identifying(section)}:
            return False
        info = section.model_fields.get(name)
        section = info.annotation if info is not None else None
    return True


def identity_of(section: BaseModel) -> Json:
    """Return the fields of a section that can change a number, as plain JSON values."""
    kept: Json = {}
    values = vars(section)
    for name, how, default in _identifying(type(section)):
        value = values[name]
        if how == "if set" and value == default:
            continue
        if how == "default":
            value = default
        if isinstance(value, BaseModel):
            nested = identity_of(value)
            if nested:
                kept[name] = nested
        else:
            kept[name] = list(value) if isinstance(value, tuple) else value
    return kept
