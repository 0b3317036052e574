"""Ids of experiments: hashes of the fields that can change a number and are not at a default."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trishul_ray.stages import STAGES, stage_names
from trishul_ray.storage.durable import Json
from trishul_ray.version import NUMERICS

#: Hex digits of an experiment's id.
ID_LENGTH = 12


def id_of(identity: Mapping[str, Any]) -> str:
    """Return the id of an experiment with this identity."""
    text = json.dumps({"numerics": NUMERICS, **identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _identifies(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("identity") is False)


def identity_of(section: BaseModel) -> Json:
    """Return the fields that can change a number and are not at their default, as JSON values."""
    kept: Json = {}
    values = vars(section)
    for name, field in type(section).model_fields.items():
        value = values[name]
        if not _identifies(field):
            continue
        if isinstance(value, BaseModel):
            if nested := identity_of(value):
                kept[name] = nested
        elif value != field.get_default(call_default_factory=True, validated_data=values):
            kept[name] = list(value) if isinstance(value, tuple) else value
    return kept


def may_identify(experiment: type[BaseModel], field: str) -> bool:
    """Return whether a field, by its dotted name, can be part of an experiment's id."""
    section: Any = experiment
    first, _, field_of_stage = field.partition(".")
    if first not in experiment.model_fields and first in stage_names():
        section, field = STAGES[first].Config, field_of_stage
    for name in field.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break  # a method or task knows its own
        info = section.model_fields.get(name)
        if info is not None and not _identifies(info):
            return False
        section = info.annotation if info is not None else None
    return True
