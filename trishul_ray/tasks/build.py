"""Choose and build the task of an experiment from its dataset, backbone and settings."""

from typing import TYPE_CHECKING, Any

from trishul_ray.data.prepared import DatasetInfo
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone, ModelKind
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.image_classification import image_task
from trishul_ray.tasks.question_answering import QuestionAnswering
from trishul_ray.tasks.sequence_classification import SequenceClassification
from trishul_ray.tasks.text import Template, TokenizerRef
from trishul_ray.tasks.text2text import TextToClass
from trishul_ray.tasks.verbalizer import Verbalizer

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

#: Description of each family of backbones, for messages.
_FAMILY_NAMES: dict[ModelKind, str] = {
    "image-classification": "a model of images",
    "sequence-classification": "an encoder",
    "seq2seq-lm": "an encoder-decoder",
    "causal-lm": "a decoder",
}
#: Kind of task on texts for ``task.kind=auto``, by family.
_DEFAULT_TASK_KIND: dict[ModelKind, str] = {
    "sequence-classification": "classification",
    "seq2seq-lm": "text2text",
    "causal-lm": "verbalizer",
}
#: Families that support each kind of task on texts.
_SUPPORTED_FAMILIES: dict[str, tuple[ModelKind, ...]] = {
    "classification": ("sequence-classification", "causal-lm"),
    "text2text": ("seq2seq-lm",),
    "verbalizer": ("causal-lm",),
}
#: Model types whose positions begin after the id of the padding token.
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl"})


def build_task(experiment: "Experiment", info: DatasetInfo, backbone: Backbone) -> Task:
    """Build the task of an experiment. Reads configurations and tokenizers, but no weights.

    Raises:
        InputError: The backbone's family does not support the dataset or the kind of task, or the
            settings do not fit the dataset. The message says what is supported.
    """
    task_kind = _choose_kind(experiment, info, backbone)
    if info.kind == "image":
        return image_task(backbone.preprocessing, info)
    _check_length(experiment, backbone)
    tokens = TokenizerRef(backbone, vocabulary_size=backbone.architecture.vocab_size)
    settings = experiment.task
    if task_kind == "classification":
        is_decoder = backbone.family == "causal-lm"
        if is_decoder:
            _check_padding(backbone, tokens)
        return SequenceClassification(
            tokens,
            fields=info.fields,
            num_classes=info.num_classes,
            max_length=settings.max_length,
            groups=info.groups,
            decoder=is_decoder,
        )
    if task_kind == "verbalizer":
        if settings.template is None:
            raise InputError(
                f"task.template is not set, and there is no default for dataset {info.name!r}: "
                f"set a prompt, e.g. '{{{info.fields[0]}}}\\nAnswer:'"
            )
        return Verbalizer(
            tokens,
            template=Template(settings.template, info.fields, info.name),
            verbalizers=_class_texts(experiment, info),
            max_length=settings.max_length,
            groups=info.groups,
        )
    fields = ("question", "context") if info.kind == "qa" else info.fields
    text = settings.template or _default_template(fields)
    common: dict[str, Any] = {
        "template": Template(text, fields, info.name),
        "max_length": settings.max_length,
        "target_length": settings.target_length,
        "start_id": _decoder_start_id(backbone),
        "groups": info.groups,
    }
    if info.kind == "qa":
        return QuestionAnswering(tokens, **common)
    return TextToClass(tokens, class_texts=_class_texts(experiment, info), **common)


def _choose_kind(experiment: "Experiment", info: DatasetInfo, backbone: Backbone) -> str:
    """Return the kind of task, or raise an InputError that says what is supported."""
    kind, family = experiment.task.kind, backbone.family
    described = f"model.name={backbone.name!r} ({backbone.architecture.model_type}) is "
    described += _FAMILY_NAMES[family]
    if info.kind == "image":
        if kind not in ("auto", "classification"):
            raise InputError(
                f"task.kind={kind!r} needs texts, but dataset {info.name!r} holds images: set "
                "auto or classification"
            )
        if family != "image-classification":
            raise InputError(
                f"dataset {info.name!r} holds images, but {described}: use a model of images, e.g. "
                "a vit"
            )
        return "classification"
    if family == "image-classification":
        raise InputError(
            f"dataset {info.name!r} holds texts, but {described}: use an encoder (bert), an "
            "encoder-decoder (t5) or a decoder (llama)"
        )
    chosen = _DEFAULT_TASK_KIND[family] if kind == "auto" else kind
    if info.kind == "qa" and (chosen != "text2text" or family != "seq2seq-lm"):
        raise InputError(
            f"dataset {info.name!r} asks questions, which needs task.kind=text2text on an "
            f"encoder-decoder (t5); here task.kind={kind!r} and {described}"
        )
    if family not in _SUPPORTED_FAMILIES[chosen]:
        supported = " or ".join(_FAMILY_NAMES[f] for f in _SUPPORTED_FAMILIES[chosen])
        raise InputError(
            f"task.kind={kind!r} needs {supported}, but {described}: set "
            f"task.kind={_DEFAULT_TASK_KIND[family]}"
        )
    return chosen


def _check_length(experiment: "Experiment", backbone: Backbone) -> None:
    """Reject rows longer than the model's positions (T5's are relative: any length)."""
    architecture = backbone.architecture
    positions = getattr(architecture, "max_position_embeddings", None)
    if positions is None:
        return
    if architecture.model_type in _OFFSET_POSITIONS:
        positions -= (architecture.pad_token_id or 0) + 1
    if experiment.task.max_length > positions:
        raise InputError(
            f"task.max_length={experiment.task.max_length} exceeds the {positions} positions of "
            f"model.name={backbone.name!r}"
        )


def _check_padding(backbone: Backbone, tokens: TokenizerRef) -> None:
    """Check that they pad alike: the head of a decoder finds a row's last token by the padding."""
    pad_id = backbone.architecture.pad_token_id
    if pad_id not in (None, tokens.pad_id):
        raise InputError(
            f"model.name={backbone.name!r}: config.json has pad_token_id={pad_id}, but its "
            f"tokenizer pads with {tokens.pad_id}: make them agree"
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


def _default_template(fields: tuple[str, ...]) -> str:
    """Each field after its name, as T5 was pretrained (Raffel et al. 2020); a single one alone."""
    if len(fields) == 1:
        return f"{{{fields[0]}}}"
    return " ".join(f"{name}: {{{name}}}" for name in fields)


def _decoder_start_id(backbone: Backbone) -> int:
    start_id: int | None = getattr(backbone.architecture, "decoder_start_token_id", None)
    if start_id is None:
        start_id = backbone.architecture.pad_token_id
    if start_id is None:
        raise InputError(
            f"model.name={backbone.name!r}: its config.json has neither decoder_start_token_id nor "
            "pad_token_id, one of which must begin an answer"
        )
    return start_id
