"""Load an experiment from YAML and ``key=value`` overrides.

There are four layers, and later layers override earlier ones: the defaults, the preset
(``presets/<dataset>.yaml``, or the file of the field ``preset``), the user's YAML, and the
overrides. ``dataset``, ``model``, ``method`` and ``batch_size`` with a plain value abbreviate
``data.name``, ``model.name``, ``method.name`` and ``federation.batch_size``. The last part of a
field's name is enough if it is unambiguous (``rounds=3``). pydantic converts strings to the type of
the field. A learning rate that is not set comes from ``learning_rates.yaml``. A rate from the file
``optimizer.rates`` replaces a rate that is set.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from trishul_ray.config.fields import SHORT_MODEL_NAMES
from trishul_ray.errors import InputError, did_you_mean
from trishul_ray.experiment.experiment import Experiment
from trishul_ray.experiment.identity import note_content, note_plugins
from trishul_ray.experiment.learning_rates import with_learning_rate
from trishul_ray.experiment.yaml_files import RawFields, parse_yaml, read_yaml
from trishul_ray.methods.base import method_class, method_names
from trishul_ray.plugins.loading import faults, find_stored, load_plugin
from trishul_ray.plugins.registry import EXTENSIONS
from trishul_ray.stages import STAGES, Stages, stage_names

#: Fields that have a short name.
SHORT_FIELDS = {
    "dataset": "data.name",
    "model": "model.name",
    "method": "method.name",
    "batch_size": "federation.batch_size",
}
_ALL_FIELDS = "`trishul run --fields` lists all fields"
#: Names that other packages use for these fields.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "lambda": "method.lam",
    "epochs": "federation.local_epochs",
    "num_rounds": "federation.rounds",
    "num_clients": "federation.clients",
    "random_seed": "seed",
    "checkpoint_dir": "storage.runs",
    "output_dir": "storage.runs",
}
#: Fields of a preset that apply only to the preset's backbone: ranks, random weights, quantization.
_OF_BACKBONE = (
    ("adapter", "matching"), ("model", "init"), ("model", "quantize"),
    ("model", "gradient_checkpointing"),
)  # fmt: skip
#: Fields that loading sets.
_NOTED = ("lr_source", "content")


def load_experiment(
    config: Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Experiment:
    """Read, merge and validate the layers of an experiment.

    Args:
        config: A YAML file, or nested fields. None uses only the preset of the dataset (by default
            digits).
        overrides: ``key=value`` strings. A key is a dotted name, or the last part of one.
        arguments: Fields from Python, keyed by name: a section (``federation={"rounds": 10}``), a
            dotted name, or the last part of an unambiguous name (``rounds``).

    Raises:
        InputError: A field or value is invalid. The message is one line with the field, the value
            and the allowed values.
    """
    fields = read_yaml(config) if isinstance(config, Path) else config or {}
    words = [(key, _value_of(word.strip())) for key, word in map(split_override, overrides)]
    given = [*fields.items(), *words, *arguments.items()]
    return _load([(key, str(v) if isinstance(v, Path) else v) for key, v in given])


def _value_of(word: str) -> Any:
    """Parse the value of an override: null, a list or mapping in YAML, or a string."""
    if word in ("null", "~"):
        return None
    if word[:1] == "[" or (word[:1] == "{" and ":" in word):  # not a template such as {text}
        with suppress(yaml.YAMLError):
            return parse_yaml(word, texts=True)
    return word


#: Fields that determine which other fields exist, in the order in which they are read.
_FIRST = ("plugins", "method", "method.name")


def _load(given: Sequence[tuple[str, Any]]) -> Experiment:
    """Set the fields, where later ones override earlier ones, and resolve them."""
    user: RawFields = {}
    for key, value in sorted(given, key=lambda pair: [name != pair[0] for name in _FIRST]):
        if key == "plugins":
            user["plugins"] = value
            _load_plugins(user)
            continue
        if isinstance(value, Mapping) and _is_top(key):
            for inner, content in value.items():
                set_field(user, f"{key}.{inner}", content)
            user.setdefault(key, {})
            continue
        name = full_name(str(key), [*_core_names(_method_of(user))])
        if isinstance(value, str | int):
            name = SHORT_FIELDS.get(name, name)
        set_field(user, name, value)
    return resolve_experiment(user)


def full_name(key: str, known: Sequence[str]) -> str:
    """Resolve a name, or the last part of one, to the dotted name of a field.

    Fields in ``known`` take precedence over fields of stages.

    Raises:
        InputError: The last part matches no field, or several.
    """
    if "." in key or _is_top(key) or key in SHORT_FIELDS:
        return key

    def ending(names: Iterable[str]) -> list[str]:
        return [name for name in names if name.rpartition(".")[2] == key]

    meant = [name for name in ending(known) if not _is_of_stage(name)]
    meant = meant or ending(_stage_names())
    if len(meant) == 1:
        return meant[0]
    if not meant:
        raise InputError(describe_unknown_field(key, known))
    section, _, field = meant[0].partition(".")
    raise InputError(
        f"{key!r} is ambiguous: it may be {' or '.join(meant)}; add the section, e.g. "
        f"{meant[0]}=... (in Python {section}={{{field!r}: ...}})"
    )


def is_field(name: str) -> bool:
    """Return whether a name, or its last part, names a field of any method."""
    known = {field for method in method_names() for field in field_names(method)}
    parts = {field.rpartition(".")[2] for field in known}
    return name in known | parts | SHORT_FIELDS.keys()


def resolve_experiment(user: RawFields) -> Experiment:
    """Merge the user's fields over their preset, by default their dataset's, and validate them.

    Args:
        user: Nested fields, without abbreviations.

    Raises:
        InputError: As in :func:`load_experiment`.
    """
    _load_plugins(user)
    data = user.get("data", {})
    dataset = data.get("name", "digits") if isinstance(data, dict) else None
    named = user.get("preset")
    if isinstance(named, str) and named not in _presets():
        known = ", ".join(_presets())
        raise InputError(
            f"unknown preset {named!r}; known: {known}{did_you_mean(named, _presets())}"
        )
    preset = _preset(named or dataset) if isinstance(named or dataset, str) else {}
    experiment = build_experiment(_over_preset(preset, user))
    if experiment.data.path is not None and "/" not in experiment.model.name:
        from trishul_ray.experiment.compatibility import with_builtin_defaults  # imports torch

        experiment = with_builtin_defaults(
            experiment,
            budget="budget" not in user,
            weights="init" not in (user.get("model") or {}),
        )
    experiment = with_learning_rate(experiment)
    rounds = experiment.federation.rounds
    for stage in Stages.of(experiment):
        rounds = stage.rounds(rounds)
    federation = experiment.federation.model_copy(update={"rounds": rounds})
    return experiment.model_copy(update={"federation": federation})


def build_experiment(fields: RawFields, *, note: bool = True) -> Experiment:
    """Validate the fields of an experiment.

    Args:
        fields: Nested fields.
        note: Whether to store the hashes of its files; see :mod:`trishul_ray.experiment.identity`.

    Raises:
        InputError: As in :func:`load_experiment`.
    """
    try:
        experiment = Experiment.model_validate(fields)
    except ValidationError as error:
        # A union reports the same error for each of its members.
        messages = dict.fromkeys(_describe_error(item, fields) for item in error.errors())
        raise InputError("; ".join(messages)) from None  # a traceback would start in pydantic
    experiment = note_plugins(experiment)
    return note_content(experiment) if note else experiment


def _load_plugins(fields: RawFields) -> None:
    """Load the files of the field ``plugins`` before reading the names that they register."""
    if given := fields.get("plugins"):
        given = given if isinstance(given, list | tuple) else [given]
        fields["plugins"] = [
            load_plugin(each) if isinstance(each, str | Path) else find_stored(each)
            for each in given
        ]


def field_names(method: str = "trishul") -> Iterator[str]:
    """Yield the dotted names of all fields, including fields of ``method`` and of all stages."""
    yield from _core_names(method)
    yield from _stage_names()


def _core_names(method: str, model: type[BaseModel] = Experiment) -> Iterator[str]:
    for name in model.model_fields:
        section = _section_of(model, name, method)
        if section is None:
            if name != "stages":
                yield name
        else:
            yield from (f"{name}.{inner}" for inner in _core_names(method, section))


def _stage_names() -> Iterator[str]:
    """Yield the dotted names of the fields of all stages, and import their modules."""
    for name, stage in STAGES.all().items():
        yield from (f"{name}.{field}" for field in stage.Config.model_fields)


def _is_of_stage(name: str) -> bool:
    return name.partition(".")[0] in stage_names()


def _is_top(key: str) -> bool:
    """Return whether a key is a top-level field or section of an experiment."""
    return key != "stages" and (key in Experiment.model_fields or key in stage_names())


@cache
def _presets() -> dict[str, Traversable]:
    """Find the preset files of this package and of its extensions, keyed by name."""
    packages = [each for each in ("trishul_ray", *EXTENSIONS) if find_spec(each) is not None]
    folders = [resources.files(each) / "presets" for each in packages]
    files = [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    return {file.name.removesuffix(".yaml"): file for file in sorted(files, key=attrgetter("name"))}


@cache
def _preset(name: str) -> RawFields:
    """Load a preset over the preset that it extends, given its name or a dataset.

    Returns:
        The fields, or an empty dictionary if the file does not exist.
    """
    # Look the name up in the list of files instead of joining paths, since it may come from the
    # user.
    file = _presets().get(name.replace("/", "-"))
    fields = yaml.safe_load(file.read_text(encoding="utf-8")) if file is not None else {}
    assert isinstance(fields, dict)
    base = fields.pop("extends", None)
    return _over_preset(_preset(base), fields) if base else fields


def split_override(text: str) -> tuple[str, str]:
    """Split ``key=value`` into the key and the value, which is still YAML."""
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"override {text!r} is not of the form key=value")
    return key.strip(), raw


def set_field(fields: RawFields, dotted: str, value: Any) -> None:
    """Set a nested field by its dotted name.

    Raises:
        InputError: A section would replace a value, or a value a section.
    """
    *parents, last = dotted.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
        if not isinstance(fields, dict):
            raise InputError(f"{dotted}={value}: {parent} is not a section")
    if isinstance(fields.get(last), dict) and not isinstance(value, Mapping):
        raise InputError(f"{dotted}={value}: {dotted} is a section; set one of its fields")
    fields[last] = value


def _over_preset(preset: RawFields, user: RawFields) -> RawFields:
    """Merge the user's fields over a preset, without fields for another method or backbone."""
    preset = {name: dict(f) if isinstance(f, dict) else f for name, f in preset.items()}

    def names(fields: RawFields, section: str) -> Any:
        return fields[section].get("name") if isinstance(fields.get(section), dict) else None

    method, model = names(user, "method"), names(user, "model")
    if method and names(preset, "method") not in (None, method):
        del preset["method"]
    if isinstance(model, str) and SHORT_MODEL_NAMES.get(model.lower(), model) != names(
        preset, "model"
    ):
        for section, field in _OF_BACKBONE:
            preset.get(section, {}).pop(field, None)
    return _merge(preset, user)


def _merge(base: RawFields, over: RawFields) -> RawFields:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _describe_error(item: Any, fields: RawFields) -> str:
    """Describe an error of pydantic in one line with the field, value and allowed values."""
    path: list[str] = []
    model: type[BaseModel] = Experiment
    for part in map(str, item["loc"]):
        # A location also contains the types of union members. Keep only field names.
        if part == "stages" and model is Experiment:
            continue  # sections of stages are written next to the other sections
        section = _section_of(model, part, _method_of(fields))
        if part in model.model_fields or section is not None or item["type"] == "extra_forbidden":
            path.append(part)
            model = section or model
    dotted = ".".join(path)
    if item["type"] == "extra_forbidden":
        if isinstance(item["input"], Mapping) and item["input"]:
            dotted += f".{next(iter(item['input']))}"  # for a section, report its first field
        return describe_unknown_field(dotted, list(field_names(_method_of(fields))))
    if item["type"] == "value_error":
        text = str(item.get("ctx", {}).get("error", item["msg"]))
        return f"{dotted}: {text}" if dotted and not text.startswith(f"{dotted}.") else text
    given, advice = item["input"], ""
    if item["type"] in ("tuple_type", "list_type") and isinstance(given, str):
        advice = f"; write a list: [{given}]"
    elif item["type"] == "dict_type" and isinstance(given, str):
        advice = "; write a mapping: {name: value}"
    elif isinstance(given, str) and (ends := re.fullmatch(r"(\d+)-(\d+)", given)):
        advice = f"; write a range of a sweep as {ends[1]}..{ends[2]}"
    is_number = isinstance(given, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|nan", given)
    value = given if is_number else repr(given)
    value = value if len(value) <= 60 else value[:57] + "..."
    if item["type"] == "model_type":
        inside = list(model.model_fields)
        named = f"{dotted}.{'name' if 'name' in inside else inside[0]}"
        return f"{dotted}={value}: {dotted} is a section; set one of its fields, e.g. {named}=..."
    return f"{dotted}={value}: {item['msg'][0].lower()}{item['msg'][1:]}{advice}"


def describe_unknown_field(dotted: str, known: Sequence[str]) -> str:
    """Report an unknown field in one line, with similar fields of ``known``."""
    known = list(dict.fromkeys([*known, *_stage_names()]))
    section, _, last = dotted.rpartition(".")
    of_method = f"method.{last}"
    having = {method_class(m): m for m in method_names() if of_method in field_names(m)}
    owners = [m for cls, m in having.items() if not having.keys() & {*cls.__mro__[1:]}]
    if section in ("", "method") and of_method not in known and owners:
        return (
            f"unknown field {dotted!r}: only method={' or '.join(owners)} has it; select this "
            "method (a label of a sweep can set both)"
        )
    # Suggest no field that loading sets.
    names = [*SHORT_FIELDS, *(name for name in known if name.rpartition(".")[2] not in _NOTED)]
    lasts = {name: name.rpartition(".")[2] for name in names}
    similar = difflib.get_close_matches(last.casefold(), lasts.values(), n=1, cutoff=0.7)
    near = (
        [name for name in names if name == _OTHER_NAMES.get(last.casefold())]
        or [name for name in names if lasts[name] == last and not _is_of_stage(name)]
        or difflib.get_close_matches(dotted.casefold(), names, n=1, cutoff=0.6)
        or [name for name in names if lasts[name] in similar]
        # match names of other libraries, such as lora_rank
        or [name for name in names if lasts[name] == last.rpartition("_")[2]]
    )
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else _ALL_FIELDS
    hint += "".join(f"; {fault}" for fault in faults())
    return f"unknown field {dotted!r}; {hint}"


def _method_of(fields: RawFields) -> str:
    method = fields.get("method", "trishul")
    name = method.get("name", "trishul") if isinstance(method, dict) else method
    return name if name in method_names() else "trishul"


def _section_of(model: type[BaseModel], name: str, method: str) -> type[BaseModel] | None:
    """Return the section class of a field, or None if the field is a plain value."""
    if model is Experiment and name == "method":
        return method_class(method).Config
    if model is Experiment and name not in model.model_fields and name in stage_names():
        return STAGES[name].Config
    found = model.model_fields[name].annotation if name in model.model_fields else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None
