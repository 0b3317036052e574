"""YAML and ``key=value`` overrides -> a validated :class:`Experiment`, or one clear line.

Layers, later ones win: the defaults, the dataset's preset (``presets/<dataset>.yaml``), the user's
YAML, the overrides. ``dataset``, ``model`` and ``method`` with a plain name are short for
``data.name``, ``model.name`` and ``method.name``.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from trishul_ray.config import SHORT_MODEL_NAMES
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.methods.base import MethodConfig, method_class, method_names


@cache
def _table() -> dict[str, Any]:
    file = resources.files("trishul_ray") / "presets" / "learning_rates.yaml"
    loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def default_learning_rate(
    dataset: str,
    method: str,
    lora_rank: int,
    iid: bool,
    *,
    rates_like: str | None = None,
    partition: str | None = None,
    optimizer: str = "adam",
    model: str | None = None,
) -> tuple[float, str] | None:
    """Return the learning rate and, in words, its source and everything that is borrowed.

    Args:
        dataset: its name; one of a family (``glue/rte``) without a table of its own has that of
            the family (``glue``).
        method: its name.
        lora_rank: the budget; up to 32 counts as the lower one.
        iid: whether the partition is IID.
        rates_like: the method whose rates stand in where ``method`` has none of its own.
        partition: ``partition.kind``, for the source; default: by ``iid``.
        optimizer: ``optimizer.name``, for the source.
        model: the backbone, for the source; None if it is the table's.

    Returns:
        ``(rate, source)``, or None if the tables know neither the method nor its stand-in.
    """
    table = _table()
    rows = table.get(dataset) or table.get(dataset.partition("/")[0]) or table["default"]
    known = next((m for m in (method, rates_like) if m in rows or m in table["unpublished"]), None)
    if known is None:
        return None
    borrowed = [] if known == method else [f"from {known}, for {method}"]
    if known in table["unpublished"]:
        source = f"our choice: no source names a rate for {known}"
        return float(table["unpublished"][known]), _with_borrowed(source, borrowed)
    cells = rows[known]
    column = (0 if iid else 2) + (0 if lora_rank <= 32 else 1)
    rate = float(cells[column] if isinstance(cells, list) else cells)
    if optimizer != "adam":
        borrowed.append(f"from Adam, for {optimizer.upper()}")
    if "model" in rows:  # published
        source = str(rows["source"])
        if lora_rank not in (32, 64):
            borrowed.append(f"from the budgets of LoRA rank 32 and 64, for {lora_rank}")
        kind = partition or ("iid" if iid else "dirichlet")
        printed = "iid" if iid or "partition" in rows else "dirichlet"
        if kind != printed:
            borrowed.append(f"from {_PRINTED[printed]} partition, for {_ASKED[kind]}")
        if model not in (None, rows["model"]):
            borrowed.append(f"from {rows['model']}, for {model}")
    else:
        source = f"{rows['source']} {dataset}"
    return rate, _with_borrowed(source, borrowed)


_PRINTED = {"iid": "an IID", "dirichlet": "a Dirichlet"}


_ASKED = {"iid": "IID", "dirichlet": "Dirichlet", "natural": "natural clients"}


def _with_borrowed(source: str, borrowed: list[str]) -> str:
    return f"{source}; borrowed {'; '.join(borrowed)}" if borrowed else source


_SHORT = {"dataset": "data.name", "model": "model.name", "method": "method.name"}


def load_experiment(path: Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
    """Read, layer and validate.

    Args:
        path: a YAML file, or None for the preset of the dataset alone (digits by default).
        overrides: ``key=value`` strings with dotted keys.

    Raises:
        InputError: one line naming the field, the value and what is allowed.
    """
    user = _read_yaml(path) if path is not None else {}
    _expand_short(user)
    for text in overrides:
        key, value = _split_override(text)
        _put(user, _SHORT.get(key, key), value, text)
    data = user.get("data", {})
    name = data.get("name", "digits") if isinstance(data, dict) else None
    return _with_learning_rate(build_experiment(_merge(_preset(name), user)), user)


def _with_learning_rate(experiment: Experiment, user: dict[str, Any]) -> Experiment:
    """Fill in the learning rate that the user left open, and say where it is from."""
    if "lr" in (user.get("optimizer") or {}):
        return experiment
    method = experiment.method.name
    found = default_learning_rate(
        experiment.data.name,
        method,
        experiment.lora_rank,
        experiment.partition.kind == "iid",
        rates_like=method_class(method).rates_like,
        partition=experiment.partition.kind,
        optimizer=experiment.optimizer.name,
        model=experiment.model.name,
    )
    if found is None:
        return experiment
    rate, source = found
    chosen = experiment.optimizer.model_copy(update={"lr": rate, "lr_source": source})
    return experiment.model_copy(update={"optimizer": chosen})


def build_experiment(fields: dict[str, Any]) -> Experiment:
    """Validate plain fields; see :func:`load_experiment` for what is raised."""
    try:
        return Experiment.model_validate(fields)
    except ValidationError as error:
        raise InputError(_explain(error, fields)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"config file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InputError(f"config file {path} is not YAML: {_one_line(error)}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InputError(f"config file {path} must hold key: value pairs, not a {_kind(loaded)}")
    return loaded


def _expand_short(fields: dict[str, Any]) -> None:
    if "dataset" in fields:
        _put(fields, "data.name", fields.pop("dataset"), "dataset")
    for key in ("model", "method"):
        if isinstance(fields.get(key), str):
            fields[key] = {"name": fields[key]}


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"override {text!r} is not of the form key=value")
    try:
        return key.strip(), yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise InputError(f"override {text!r}: value is not YAML: {_one_line(error)}") from error


def _put(fields: dict[str, Any], dotted: str, value: Any, text: str) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        inner = fields.setdefault(parent, {})
        if isinstance(inner, str) and parent in ("model", "method"):
            inner = fields[parent] = {"name": inner}
        if not isinstance(inner, dict):
            raise InputError(f"override {text!r}: {parent} is not a section")
        fields = inner
    if last in fields and isinstance(fields[last], dict) and not isinstance(value, dict):
        raise InputError(f"override {text!r}: {dotted} is a section; name one of its fields")
    fields[last] = value


def _preset(dataset: Any) -> dict[str, Any]:
    if not isinstance(dataset, str):
        return {}
    # Looked up among the files, never joined to a path: the name is the user's.
    files = {file.name: file for file in (resources.files("trishul_ray") / "presets").iterdir()}
    # "glue/rte" lies in glue-rte.yaml.
    file = files.get(f"{dataset.replace('/', '-')}.yaml")
    if file is None or dataset == "learning_rates":
        return {}
    loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    if "method" in over and isinstance(merged.get("method"), dict):
        # A preset's hyper-parameters belong to the preset's method, not to another one.
        name = over["method"].get("name") if isinstance(over["method"], dict) else None
        if name and name != base.get("method", {}).get("name", name):
            merged["method"] = over["method"]
    if isinstance(base.get("adapter"), dict) and _other_model(base, over):
        # A preset's ranks are those the paper took on the preset's backbone.
        asked = over.get("adapter")
        if not (isinstance(asked, dict) and "matching" in asked):
            merged["adapter"] = {k: v for k, v in merged["adapter"].items() if k != "matching"}
    return merged


def _other_model(base: dict[str, Any], over: dict[str, Any]) -> bool:
    model = over.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return False
    of_preset: str | None = base.get("model", {}).get("name")
    return SHORT_MODEL_NAMES.get(name.lower(), name) != of_preset


def _explain(error: ValidationError, fields: dict[str, Any]) -> str:
    """All faults in one line, each with field, value and what is allowed."""
    return "; ".join(dict.fromkeys(_fault(item, fields) for item in error.errors()))


def _fault(item: Any, fields: dict[str, Any]) -> str:
    # Union members appear in pydantic's location as type names: keep only real field names.
    location = [str(part) for part in item["loc"]]
    path: list[str] = []
    model: type[BaseModel] = Experiment
    for part in location:
        if part in model.model_fields or item["type"] == "extra_forbidden":
            path.append(part)
            if part == "method" and model is Experiment:
                model = method_class(_method_of(fields)).Config
            else:
                model = _section_of(model, part) or model
    dotted = ".".join(path)
    context = item.get("ctx", {})
    if item["type"] == "extra_forbidden":
        return _unknown(dotted, fields)
    if item["type"] == "value_error":
        text = str(context.get("error", item["msg"]))
        return f"{dotted}: {text}" if dotted else text
    value = item["input"]
    allowed = item["msg"][0].lower() + item["msg"][1:]
    return f"{dotted}={_show(value)}: {allowed}"


def _unknown(dotted: str, fields: dict[str, Any]) -> str:
    known = list(field_names(_method_of(fields)))
    tail = {name.rsplit(".", 1)[-1]: name for name in known}
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
    if not near:
        last = difflib.get_close_matches(dotted.rsplit(".", 1)[-1], list(tail), n=1, cutoff=0.7)
        near = [tail[name] for name in last]
    hint = f"; did you mean {near[0]!r}?" if near else "; see `trishul run --help`"
    return f"unknown field {dotted!r}{hint}"


def _method_of(fields: dict[str, Any]) -> str:
    method = fields.get("method", "trishul")
    name = method.get("name", "trishul") if isinstance(method, dict) else method
    return name if name in method_names() else "trishul"


def field_names(method: str = "trishul", model: type[BaseModel] = Experiment) -> Iterator[str]:
    """Dotted names of every field, with those of ``method``."""
    for name in model.model_fields:
        section = _section_of(model, name)
        if name == "method" and model is Experiment:
            section = method_class(method).Config
        if section is None:
            yield name
        else:
            yield from (f"{name}.{inner}" for inner in field_names(method, section))


def _section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if annotation is MethodConfig else annotation
    return None


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {"list": "list", "str": "text", "int": "number", "float": "number"}.get(
        type(value).__name__, type(value).__name__
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
