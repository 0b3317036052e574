"""Choose and create the task of an experiment from its dataset, backbone and settings."""

from typing import TYPE_CHECKING

from trishul_ray.data.dataset import DatasetInfo, Kind
from trishul_ray.errors import InputError
from trishul_ray.tasks.base import Task, task_classes

if TYPE_CHECKING:
    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.models.backbone import Backbone
    from trishul_ray.models.find_model import ModelKind

#: Description of each family of backbones, for messages.
_FAMILY_NAMES: "dict[ModelKind, str]" = {
    "image-classification": "a model of images",
    "sequence-classification": "an encoder",
    "seq2seq-lm": "an encoder-decoder",
    "causal-lm": "a decoder",
}
#: Description of each kind of rows, for messages.
_ROW_NAMES: dict[Kind, str] = {
    "image": "images",
    "text": "texts",
    "qa": "questions",
    "instruction": "instructions with answers",
}
#: Kind of task for ``task.kind=auto``, keyed by family.
_DEFAULT_TASK_KIND: "dict[ModelKind, str]" = {
    "image-classification": "classification",
    "sequence-classification": "classification",
    "seq2seq-lm": "text2text",
    "causal-lm": "verbalizer",
}


def build_task(config: "TaskConfig", info: DatasetInfo, backbone: "Backbone") -> Task:
    """Create the task for a dataset and a backbone, without reading weights.

    Raises:
        InputError: The backbone's family does not support the dataset or the kind of task, the
            labels are not classes, or the settings are not compatible with the dataset. The message
            lists the supported values.
    """
    task = _choose_task(config.kind, info, backbone)
    if info.doubt and not task.any_labels:
        raise InputError(f"{info.origin.place}: {info.doubt}")
    if "max_length" in task.fields_read and config.max_length > backbone.positions:
        raise InputError(
            f"task.max_length={config.max_length} exceeds the {backbone.positions} positions of "
            f"model.name={backbone.name!r}"
        )
    return task.build(config, info, backbone)


def unread_fields(config: "TaskConfig", info: DatasetInfo, backbone: "Backbone") -> list[str]:
    """Return the fields of the section ``task`` that the task does not read, as dotted names."""
    read = _choose_task(config.kind, info, backbone).fields_read | {"kind"}
    return [f"task.{name}" for name in sorted(type(config).model_fields.keys() - read)]


def _choose_task(kind: str, info: DatasetInfo, backbone: "Backbone") -> type[Task]:
    """Return the class of the task, or raise an InputError that lists the supported ones."""
    family = backbone.family
    described = f"model.name={backbone.name!r} ({backbone.architecture.model_type}) is "
    described += _FAMILY_NAMES[family]
    if info.kind == "image" and family != "image-classification":
        raise InputError(
            f"dataset {info.name!r} has images, but {described}: use a model of images, e.g. a vit"
        )
    if info.kind != "image" and family == "image-classification":
        raise InputError(
            f"dataset {info.name!r} has texts, but {described}: use an encoder (bert), an "
            "encoder-decoder (t5) or a decoder (llama)"
        )
    tasks = task_classes()
    chosen = _DEFAULT_TASK_KIND[family] if kind == "auto" else kind
    task = tasks.get((chosen, info.kind))
    if info.kind == "qa" and (task is None or family not in task.families):
        raise InputError(
            f"dataset {info.name!r} has questions, which need task.kind=text2text on an "
            f"encoder-decoder (t5); here task.kind={kind!r} and {described}"
        )
    if info.kind == "instruction" and kind == "auto":
        raise InputError(
            f"dataset {info.name!r} has {_ROW_NAMES[info.kind]}: set task.kind=instruction, "
            "which also sets the lengths of rows and answers"
        )
    if task is None:
        needed = " or ".join(_ROW_NAMES[reads] for name, reads in tasks if name == chosen)
        fitting = sorted(name for name, reads in tasks if reads == info.kind)
        raise InputError(
            f"task.kind={kind!r} needs {needed}, but dataset {info.name!r} has "
            f"{_ROW_NAMES[info.kind]}: set auto or {' or '.join(fitting)}"
        )
    if family not in task.families:
        supported = " or ".join(_FAMILY_NAMES[f] for f in task.families)
        raise InputError(
            f"task.kind={kind!r} needs {supported}, but {described}: set "
            f"task.kind={_DEFAULT_TASK_KIND[family]}"
        )
    return task
