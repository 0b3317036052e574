"""Text-to-text tasks on an encoder-decoder, and classification by generating the class's text.

Training uses teacher-forced cross-entropy. For evaluation, answers are generated greedily and
compared as text.

Legend: N rows, b rows of a batch, W tokens of the input, T tokens of the target including its end
token, V vocabulary size.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.base import ModelInputs, Task, group_column, logits_of, register, to_device
from trishul_ray.tasks.sums import RowScores
from trishul_ray.tasks.text import (
    PromptTokenizer,
    Template,
    TokenizerRef,
    class_texts,
    default_template,
    field_rows,
    generate_greedily,
    trim_padding,
)

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.adapters.model import AdaptedModel
    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo, Split
    from trishul_ray.models.backbone import Backbone

#: Label of positions that the loss ignores.
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Generated:
    """Output to score: teacher-forced logits [b, T, V], and the text of each row."""

    logits: Tensor
    texts: Sequence[str]


@dataclass(eq=False)
class Text2Text(Task):
    """Base class of the text-to-text tasks.

    Attributes:
        tokens: The backbone's tokenizer.
        template: Template of the input text.
        max_length: Maximum tokens of the input.
        target_length: Maximum tokens of the target including its end token, in training and
            generation.
        start_id: Id of the decoder's first token.
        groups: Names of groups of test rows.
    """

    families = ("seq2seq-lm",)
    model_kind = "seq2seq-lm"
    targets = ("labels", "classes", "references", "group", "client")
    #: Prefix of :attr:`key`.
    encoding: ClassVar[str]

    tokens: TokenizerRef
    _: KW_ONLY
    template: Template
    max_length: int
    target_length: int
    start_id: int
    groups: tuple[str, ...] = ()

    @classmethod
    def build(cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone) -> Text2Text:
        """Create the task with the prompt of the section; by default all fields and their names."""
        fields = ("question", "context") if info.kind == "qa" else info.fields
        return cls(
            TokenizerRef.of(backbone),
            template=Template(config.template or default_template(fields), fields, info.name),
            max_length=config.max_length,
            target_length=config.target_length,
            start_id=_decoder_start_id(backbone),
            groups=info.groups,
            **cls.further_arguments(config, info),
        )

    @classmethod
    def further_arguments(cls, config: TaskConfig, info: DatasetInfo) -> dict[str, Any]:
        """Return the arguments of a subclass in addition to the arguments of :class:`Text2Text`."""
        return {}

    def settings(self) -> Json:
        """Return the prompt, the limits and the first token of an answer."""
        return {
            "template": self.template.text,
            "max_length": self.max_length,
            "target_length": self.target_length,
            "decoder_start_token_id": self.start_id,
        }

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the encoded columns."""
        rest = [self.template.text, self.max_length, self.target_length]
        return json.dumps([self.encoding, 1, self.tokens.key, *rest])

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode the inputs, ``input_ids`` int32 [N, W] and ``length`` int32 [N].

        Subclasses add the targets, ``target_ids`` int32 [N, T] and ``target_length`` int32 [N].
        """
        tokens, template, limit = self.tokens, self.template, self.max_length
        prompts = PromptTokenizer(tokens, template, limit, add_special_tokens=True)

        def rows(start: int, stop: int) -> list[list[int]]:
            return prompts.ids(field_rows(split, template, start, stop))

        ids, length = tokens.padded_columns(len(split), limit, rows, progress)
        return {"input_ids": ids, "length": length}

    @property
    def means_rows(self) -> bool:
        """Return False: the loss is the mean over all target tokens of a batch."""
        return False

    def count_labels(self, split: Split) -> np.ndarray:
        """Return the number of target tokens of each encoded row, int64 [N]."""
        return split.column("target_length").astype(np.int64)

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Return the generated texts."""
        return list(outputs.texts)

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert encoded rows to the model's inputs and labels; ``dtype`` is not used.

        Returns:
            ``input_ids`` and ``attention_mask`` int64 [b, W]; ``decoder_input_ids`` int64 [b, T],
            the target shifted right by one; ``labels`` int64 [b, T], -100 on padding. If the rows
            have them, also ``classes`` [b] (the stored label), ``references`` and ``group``, as
            stored.
        """
        ids, mask = trim_padding(batch["input_ids"], batch["length"])
        target, target_mask = trim_padding(batch["target_ids"], batch["target_length"])
        start = target.new_full((len(target), 1), self.start_id)
        prepared = {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": torch.cat([start, target[:, :-1]], dim=1),
            "labels": target.masked_fill(target_mask == 0, IGNORED_LABEL),
        }
        columns = {"classes": "label", "references": "references"}
        rest = {name: batch[column] for name, column in columns.items() if column in batch}
        return to_device(prepared, device) | rest | group_column(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> ModelInputs:
        """Return the inputs of encoder and decoder; no key-value cache is kept."""
        return super().inputs(batch) | {"use_cache": False}

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean cross-entropy over all target tokens of the batch, in float32."""
        logits = logits_of(outputs).float()
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL
        )

    def predict(self, model: AdaptedModel, batch: Mapping[str, Tensor]) -> Generated:
        """Run the encoder once; return the target's logits and a greedily generated text."""
        inputs = self.inputs(batch)
        ids, mask = inputs.pop("input_ids"), inputs["attention_mask"]
        module: Any = model.model
        encoded = module.get_encoder()(input_ids=ids, attention_mask=mask)
        logits = logits_of(model.forward(encoder_outputs=encoded, **inputs))
        generated = generate_greedily(
            module,
            {"encoder_outputs": encoded, "attention_mask": mask},
            max_new_tokens=self.target_length,
            decoder_start_token_id=self.start_id,
            pad_token_id=self.tokens.pad_id,
            eos_token_id=self.tokens.eos_id,
        )
        decode = self.tokens.tokenizer.batch_decode
        return Generated(logits, decode(generated.cpu(), skip_special_tokens=True))

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Compute the loss over the target's tokens, and the scores of the text, of every row."""
        labels = batch["labels"]
        losses = torch.nn.functional.cross_entropy(
            outputs.logits.float().transpose(1, 2),
            labels,
            ignore_index=IGNORED_LABEL,
            reduction="none",
        )
        return RowScores(
            loss=losses.sum(dim=1, dtype=torch.float64),
            terms=(labels != IGNORED_LABEL).sum(dim=1),
            scores=self.score_texts(outputs.texts, batch),
        )

    @abstractmethod
    def score_texts(self, texts: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute each of :attr:`row_metrics` for every generated text, [b] in [0, 1]."""


def _decoder_start_id(backbone: Backbone) -> int:
    start_id: int | None = getattr(backbone.architecture, "decoder_start_token_id", None)
    if start_id is None:
        start_id = backbone.architecture.pad_token_id
    if start_id is None:
        raise InputError(
            f"model.name={backbone.name!r}: its config.json has neither decoder_start_token_id nor "
            "pad_token_id, one of which must start an answer"
        )
    return start_id


@register("text2text")
@dataclass(eq=False)
class TextToClass(Text2Text):
    """Classify by generating the text of a class, one of ``class_texts``, in order.

    Raises:
        InputError: A class has no text, or two texts differ only in case and white space.
    """

    reads = "text"
    encoding = "ClassTextEncoder"

    _: KW_ONLY
    class_texts: tuple[str, ...]

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for text in self.class_texts:
            normalized = normalize(text)
            if not normalized or normalized in seen:
                fault = f"is the same as {seen[normalized]!r}" if normalized else "is empty"
                raise InputError(
                    f"task.verbalizers: {text!r} {fault}; set a different text for every class"
                )
            seen[normalized] = text

    @classmethod
    def further_arguments(cls, config: TaskConfig, info: DatasetInfo) -> dict[str, Any]:
        """Return the text of each class."""
        return {"class_texts": class_texts(config, info)}

    def settings(self) -> Json:
        """Return the settings of :class:`Text2Text`, and the text of each class."""
        return super().settings() | {"class_texts": list(self.class_texts)}

    def answers(self, outputs: Any, classes: Sequence[str]) -> list[str]:
        """Return the names of generated classes, and other generated texts unchanged."""
        numbers = self._predicted(outputs.texts).tolist()
        return [
            text if k < 0 else classes[k] for text, k in zip(outputs.texts, numbers, strict=True)
        ]

    @property
    def classes(self) -> int | None:
        """Number of classes, K."""
        return len(self.class_texts)

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the encoded columns."""
        return json.dumps([super().key, self.class_texts])

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode the inputs, with the text of each row's class as its target.

        Raises:
            InputError: The text of a class has too many tokens.
        """
        tokens, limit = self.tokens, self.target_length
        targets = [[*tokens.ids(text), tokens.eos_id] for text in self.class_texts]
        longest = max(range(len(targets)), key=lambda i: len(targets[i]))
        if len(targets[longest]) > limit:
            raise InputError(
                f"task.target_length={limit} is too short for class text "
                f"{self.class_texts[longest]!r}, which takes {len(targets[longest])} tokens"
            )
        table, lengths = tokens.padded_columns(
            len(targets), limit, lambda a, z: targets[a:z], lambda done: None
        )
        labels = split.labels
        columns = super().encode(split, progress)
        return columns | {"target_ids": table[labels], "target_length": lengths[labels]}

    def _predicted(self, texts: Sequence[str]) -> Tensor:
        """Return the class of every text [b], ignoring case and white space; -1 for other texts."""
        numbers = {normalize(text): number for number, text in enumerate(self.class_texts)}
        return torch.tensor([numbers.get(normalize(text), -1) for text in texts])

    def score_texts(self, texts: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute ``accuracy`` [b]: whether a text is the text of the row's class."""
        return {"accuracy": (self._predicted(texts) == batch["classes"].cpu()).double()}

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Return the scores of :class:`Text2Text`, and the class of every row."""
        rows = super().score(outputs, batch)
        predicted, labels = self._predicted(outputs.texts), batch["classes"].cpu()
        return replace(rows, predicted=predicted, labels=labels)


def normalize(text: str) -> str:
    """Return the text in lower case, with one space between words."""
    return " ".join(text.lower().split())
