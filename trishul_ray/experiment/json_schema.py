"""The JSON schema of an experiment's YAML, with which editors complete and check fields."""

from typing import Any

from trishul_ray.experiment.experiment import Experiment
from trishul_ray.experiment.loading import SHORT_FIELDS, field_names
from trishul_ray.methods.base import method_classes, method_names
from trishul_ray.stages import STAGES
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.base import task_kinds


def experiment_schema() -> Json:
    """Build the JSON schema of the files that ``trishul run`` reads.

    It contains the sections, the fields of every method and stage, and the abbreviations. Any key
    with a dot is allowed, since a file may contain ``federation.rounds: 10``.
    """
    schema = Experiment.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    properties: dict[str, Any] = schema["properties"]
    del properties["stages"]
    properties["plugins"] = {"type": "array", "items": {"type": "string"}}
    properties["method"] = _method_schema(definitions)
    for name, stage in STAGES.all().items():
        properties[name] = _add(stage.Config.model_json_schema(), f"stage_{name}", definitions)
    definitions["TaskConfig"]["properties"]["kind"]["enum"] = [*task_kinds()]
    for name, field in SHORT_FIELDS.items():
        if name not in properties:
            properties[name] = _find(field, properties, definitions)
    _add_last_names(properties, definitions)
    model_name = _find("model.name", properties, definitions)
    properties["model"] = {"anyOf": [model_name, properties["model"]]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "trishul-ray experiment",
        "type": "object",
        "properties": properties,
        "patternProperties": {r"\.": {}},
        "additionalProperties": False,
        "$defs": definitions,
    }


def _method_schema(definitions: dict[str, Any]) -> Json:
    """Build the schema of the field ``method``, which is a name or a section with a name."""
    sections = []
    for name, cls in method_classes().items():
        section = cls.Config.model_json_schema()
        section["properties"] = {"name": {"const": name}, **section.get("properties", {})}
        section["required"] = ["name"] if name != "trishul" else []
        section["description"] = cls.summary
        sections.append(_add(section, f"method_{name}", definitions))
    return {"anyOf": [{"enum": [*method_names()]}, *sections]}


def _add(section: Json, name: str, definitions: dict[str, Any]) -> Json:
    """Add a schema and the schemas that it references, and return a reference to it."""
    definitions |= section.pop("$defs", {})
    definitions[name] = section
    return {"$ref": f"#/$defs/{name}"}


def _find(field: str, properties: dict[str, Any], definitions: dict[str, Any]) -> Json:
    """Return the schema of a field, given its dotted name."""
    section, _, name = field.partition(".")
    reference = properties[section].get("$ref", "").rpartition("/")[2]
    found: Json = definitions[reference]["properties"][name]
    return found


def _add_last_names(properties: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Add the fields that YAML may abbreviate to the last part of their names."""
    ends: dict[str, list[str]] = {}
    for name in dict.fromkeys(each for method in method_names() for each in field_names(method)):
        if "." in name:
            ends.setdefault(name.rpartition(".")[2], []).append(name)
    for end, names in ends.items():
        core = [name for name in names if name.partition(".")[0] not in STAGES.all()]
        meant = core or names
        if len(meant) != 1 or end in properties:
            continue
        section = meant[0].partition(".")[0]
        if section == "method":
            properties[end] = {"description": meant[0]}
        else:
            properties[end] = _find(meant[0], properties, definitions)
