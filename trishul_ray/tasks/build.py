"""Which task an experiment is: by what the dataset's rows are and what the backbone is."""

from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from trishul_ray.data.prepared import DatasetInfo
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import usual_architecture
from trishul_ray.models.lookup import load_model_config, load_preprocessing
from trishul_ray.tasks.base import Architecture, Task
from trishul_ray.tasks.image_classification import image_task
from trishul_ray.tasks.question_answering import QuestionAnswering
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.text import Template, TokenizerRef
from trishul_ray.tasks.text2text import TextToClass
from trishul_ray.tasks.verbalizer import Verbalizer

if TYPE_CHECKING:
    from pathlib import Path

    from trishul_ray.experiment import Experiment

#: What a family is, in messages.
_FAMILY: dict[Architecture, str] = {
    "image-classification": "a model of images",
    "sequence-classification": "an encoder",
    "seq2seq-lm": "an encoder-decoder",
    "causal-lm": "a decoder",
}
#: What ``task.kind=auto`` is on texts.
_USUAL_KIND: dict[Architecture, str] = {
    "sequence-classification": "classification",
    "seq2seq-lm": "text2text",
    "causal-lm": "verbalizer",
}
#: On which families a kind goes, for texts.
_GOES_ON: dict[str, tuple[Architecture, ...]] = {
    "classification": ("sequence-classification", "causal-lm"),
    "text2text": ("seq2seq-lm",),
    "verbalizer": ("causal-lm",),
}
#: Families whose positions begin after the padding token's id.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl"})


def build_task(
    experiment: "Experiment", info: DatasetInfo, *, hub: "Path | None", cache: "Path"
) -> Task:
    """The task of an experiment on a dataset; reads configurations and tokenizers, no weights.

    Args:
        experiment: names the backbone and the task's switches.
        info: the dataset's description.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: the backbone is not of a family that can do this on such rows, or the switches
            do not fit the dataset; says what goes.
    """
    shape = load_model_config(experiment.model, hub=hub, cache=cache)
    family = usual_architecture(shape)
    kind = _kind(experiment, info, shape, family)
    if info.kind == "image":
        return image_task(load_preprocessing(experiment.model, hub=hub, cache=cache), info)
    _check_length(experiment, shape)
    tokens = TokenizerRef(experiment.model, hub=hub, cache=cache, vocabulary=shape.vocab_size)
    settings = experiment.task
    if kind == "classification":
        if family == "causal-lm":
            _check_padding(experiment, shape, tokens)
        return SequenceClassification(
            tokens,
            fields=info.fields,
            num_classes=info.num_classes,
            max_length=settings.max_length,
            groups=info.groups,
            decoder=family == "causal-lm",
        )
    if kind == "verbalizer":
        if settings.template is None:
            raise InputError(
                f"task.template is not set, and nothing is known for dataset {info.name!r}: give "
                f"a prompt, e.g. '{{{info.fields[0]}}}\\nAnswer:'"
            )
        return Verbalizer(
            tokens,
            template=Template(settings.template, info.fields, info.name),
            verbalizers=_class_texts(experiment, info),
            max_length=settings.max_length,
            groups=info.groups,
        )
    fields = ("question", "context") if info.kind == "qa" else info.fields
    text = settings.template or _plain_template(fields)
    common: dict[str, Any] = {
        "template": Template(text, fields, info.name),
        "max_length": settings.max_length,
        "target_length": settings.target_length,
        "start_id": _start_id(experiment, shape),
        "groups": info.groups,
    }
    if info.kind == "qa":
        return QuestionAnswering(tokens, **common)
    return TextToClass(tokens, class_texts=_class_texts(experiment, info), **common)


def _kind(
    experiment: "Experiment", info: DatasetInfo, shape: PretrainedConfig, family: Architecture
) -> str:
    """The kind of task, or the one line that says what goes with what."""
    asked = experiment.task.kind
    what = f"model.name={experiment.model.name!r} ({shape.model_type}) is {_FAMILY[family]}"
    if info.kind == "image":
        if asked not in ("auto", "classification"):
            raise InputError(
                f"task.kind={asked!r} needs texts, but dataset {info.name!r} holds images: set "
                "auto or classification"
            )
        if family != "image-classification":
            raise InputError(
                f"dataset {info.name!r} holds images, but {what}: take one of images, e.g. a vit"
            )
        return "classification"
    if family == "image-classification":
        raise InputError(
            f"dataset {info.name!r} holds texts, but {what}: take an encoder (bert), an "
            "encoder-decoder (t5) or a decoder (llama)"
        )
    kind = _USUAL_KIND[family] if asked == "auto" else asked
    if info.kind == "qa" and (kind != "text2text" or family != "seq2seq-lm"):
        raise InputError(
            f"dataset {info.name!r} asks questions, which task.kind=text2text on an "
            f"encoder-decoder (t5) answers; here task.kind={asked!r} and {what}"
        )
    if family not in _GOES_ON[kind]:
        able = " or ".join(_FAMILY[f] for f in _GOES_ON[kind])
        raise InputError(
            f"task.kind={asked!r} goes with {able}, but {what}: set task.kind={_USUAL_KIND[family]}"
        )
    return kind


def _check_length(experiment: "Experiment", shape: PretrainedConfig) -> None:
    """Refuse rows longer than the positions that a model has (T5's are relative: any length)."""
    positions = getattr(shape, "max_position_embeddings", None)
    if positions is None:
        return
    if shape.model_type in _OFFSET_POSITIONS:
        positions -= (shape.pad_token_id or 0) + 1
    if experiment.task.max_length > positions:
        raise InputError(
            f"task.max_length={experiment.task.max_length} exceeds the {positions} positions of "
            f"model.name={experiment.model.name!r}"
        )


def _check_padding(experiment: "Experiment", shape: PretrainedConfig, tokens: TokenizerRef) -> None:
    """A head on a decoder takes a row's last token, which it finds by the padding after it."""
    if shape.pad_token_id not in (None, tokens.pad_id):
        raise InputError(
            f"model.name={experiment.model.name!r}: config.json has pad_token_id="
            f"{shape.pad_token_id}, but its tokenizer pads with {tokens.pad_id}: make them agree"
        )


def _class_texts(experiment: "Experiment", info: DatasetInfo) -> tuple[str, ...]:
    texts = experiment.task.verbalizers or info.classes
    if len(texts) != info.num_classes:
        raise InputError(
            f"task.verbalizers has {len(texts)} entries, but dataset {info.name!r} has "
            f"{info.num_classes} classes: {', '.join(info.classes[:6])}"
            + (", ..." if info.num_classes > 6 else "")
        )
    return texts


def _plain_template(fields: tuple[str, ...]) -> str:
    """Each field after its name, as T5 was pretrained (Raffel et al. 2020); one alone as it is."""
    if len(fields) == 1:
        return f"{{{fields[0]}}}"
    return " ".join(f"{name}: {{{name}}}" for name in fields)


def _start_id(experiment: "Experiment", shape: PretrainedConfig) -> int:
    start: int | None = getattr(shape, "decoder_start_token_id", None)
    if start is None:
        start = shape.pad_token_id
    if start is None:
        raise InputError(
            f"model.name={experiment.model.name!r}: its config.json names neither "
            "decoder_start_token_id nor pad_token_id, with which answers begin"
        )
    return start
