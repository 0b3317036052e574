"""Classify with a decoder: a prompt, followed by a word for each class (its verbalizer).

A class is scored by the first token in which its verbalizer differs from the others, at the single
position after the prompt. The common initial tokens of all verbalizers belong to the prompt. Rows
are stored padded to the right and batches are padded to the left, so that the last position of
every row predicts the answer, and only its logits are computed.

Legend: N rows, b rows of a batch, L stored tokens, W tokens of the batch, K classes, V vocabulary
size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.base import (
    Classification,
    ModelInputs,
    constant,
    group_column,
    logits_of,
    register,
    score_classes,
    to_device,
)
from trishul_ray.tasks.sums import RowScores
from trishul_ray.tasks.text import (
    PromptTokenizer,
    Template,
    TokenizerRef,
    begin_ids,
    class_texts,
    field_rows,
)

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo, Split
    from trishul_ray.models.backbone import Backbone


@register("verbalizer")
class Verbalizer(Classification):
    """Classify by the token that a decoder predicts after a prompt.

    Args:
        tokens: The backbone's tokenizer, which is loaded immediately.
        template: The prompt.
        verbalizers: A word or phrase for each class, in order. A space separates it from the
            prompt, unless it starts or the prompt ends with white space.
        max_length: Maximum tokens of a row.
        groups: Names of groups of test rows.

    Attributes:
        answer_ids: Token id of each class.
        common_prefix: Ids of the common initial tokens of all verbalizers, which end every prompt.

    Raises:
        InputError: Two classes have the same token, or the tokenizer joins the end of the template
            with the text after it.
    """

    reads = "text"
    families = ("causal-lm",)
    model_kind = "causal-lm"
    fields_read = frozenset({"max_length", "template", "verbalizers"})
    tokens: TokenizerRef

    @property
    def classes(self) -> int | None:
        """Number of classes, K."""
        return len(self.answer_ids)

    def __init__(
        self,
        tokens: TokenizerRef,
        *,
        template: Template,
        verbalizers: Sequence[str],
        max_length: int,
        groups: Sequence[str] = (),
    ) -> None:
        self.tokens, self.template = tokens, template
        self.common_prefix, self.answer_ids = answer_tokens(tokens, template, verbalizers)
        self.max_length, self.groups = max_length, tuple(groups)

    @classmethod
    def build(cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone) -> Verbalizer:
        """Create the task with the prompt and the words of the section."""
        if config.template is None:
            raise InputError(
                f"task.template is not set and has no default for dataset {info.name!r}: "
                f"set a prompt, e.g. '{{{info.fields[0]}}}\\nAnswer:'"
            )
        return cls(
            TokenizerRef.of(backbone),
            template=Template(config.template, info.fields, info.name),
            verbalizers=class_texts(config, info),
            max_length=config.max_length,
            groups=info.groups,
        )

    def settings(self) -> Json:
        """Return the prompt, the tokens around it, and the compared tokens."""
        return {
            "template": self.template.text,
            "max_length": self.max_length,
            "begin_ids": begin_ids(self.tokens),
            "prompt_end_ids": list(self.common_prefix),
            "answer_ids": list(self.answer_ids),
        }

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the encoded columns."""
        rest = [self.template.text, self.common_prefix, self.max_length]
        return json.dumps(["prompt", 1, self.tokens.key, *rest])

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode prompts that end where the answer starts, with fields truncated to fit.

        Returns:
            ``input_ids`` int32 [N, L] and ``length`` int32 [N].

        Raises:
            InputError: The template leaves no room for its fields.
        """
        tokens, template = self.tokens, self.template
        prefix, suffix = begin_ids(tokens), list(self.common_prefix)
        limit = self.max_length - len(prefix) - len(suffix)
        prompts = PromptTokenizer(tokens, template, limit, add_special_tokens=False)

        def rows(start: int, stop: int) -> list[list[int]]:
            fields = field_rows(split, template, start, stop)
            return [prefix + ids + suffix for ids in prompts.ids(fields)]

        ids, length = tokens.padded_columns(len(split), self.max_length, rows, progress)
        return {"input_ids": ids, "length": length}

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert encoded rows to the model's inputs, padded to the left; ``dtype`` is not used.

        Returns:
            ``input_ids``, ``attention_mask`` (one on tokens) and ``position_ids`` (zero at the
            first token), int64 [b, W]; ``labels`` int64 [b]; ``group`` if the rows have it.
        """
        stored, length = batch["input_ids"], batch["length"].long()
        width = int(length.max())
        positions = torch.arange(width) - (width - length)[:, None]  # [b, W], negative on padding
        mask = (positions >= 0).long()
        positions = positions.clamp(min=0)
        # Padding repeats the row's first token. It is masked, but must be a valid id of the model.
        ids = stored.long().gather(1, positions)
        prepared = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return to_device(prepared | {"labels": batch["label"]}, device) | group_column(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> ModelInputs:
        """Return the prompt; logits are computed only at the last position, without a cache."""
        return super().inputs(batch) | {"logits_to_keep": 1, "use_cache": False}

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean cross-entropy over the vocabulary at the last position, in float32."""
        logits = self._answer_logits(outputs)
        return torch.nn.functional.cross_entropy(
            logits.float(), self._answer_columns(logits)[batch["labels"]]
        )

    def class_logits(self, outputs: Any) -> Tensor:
        """Return the logits of the verbalizers' tokens [b, K]."""
        logits = self._answer_logits(outputs)
        return logits[:, self._answer_columns(logits)]

    def score(self, outputs: Any, batch: Mapping[str, Tensor]) -> RowScores:
        """Compute the loss over the vocabulary, and the choice among verbalizers, of every row."""
        logits = self._answer_logits(outputs)
        return score_classes(logits, batch["labels"], self._answer_columns(logits))

    def _answer_columns(self, logits: Tensor) -> Tensor:
        return constant(self.answer_ids, torch.int64, logits.device)

    @staticmethod
    def _answer_logits(outputs: Any) -> Tensor:
        """Return the logits [b, V] of the last position, from outputs [b, 1 or more, V]."""
        logits = logits_of(outputs)
        return logits[:, -1] if logits.dim() == 3 else logits


def answer_tokens(
    tokens: TokenizerRef, template: Template, verbalizers: Sequence[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the common initial ids of all verbalizers, and the id that scores each of them.

    Raises:
        InputError: See :class:`Verbalizer`.
    """
    prompt = template.fill(["x"] * len(template.fields))
    prompt_ids = tokens.ids(prompt)
    answered_ids = []
    for word in verbalizers:
        gap = "" if not word or word[0].isspace() or prompt[-1].isspace() else " "
        answered_ids.append(tokens.ids(prompt + gap + word))
    columns = zip(*answered_ids, strict=False)  # up to the end of the shortest
    common = [column[0] for column in takewhile(lambda c: len(set(c)) == 1, columns)]
    if common[: len(prompt_ids)] != prompt_ids:
        raise InputError(
            f"task.template ends in {template.text[-12:]!r}, which the tokenizer joins with the "
            "answer after it; end it with a letter or a colon, without white space"
        )
    answers: dict[int, str] = {}
    for word, ids in zip(verbalizers, answered_ids, strict=True):
        token = ids[len(common)] if len(ids) > len(common) else None
        if token is None or token in answers:
            other = answers.get(token) if token is not None else "the others"
            raise InputError(
                f"task.verbalizers: {word!r} and {other!r} start with the same token, which "
                "scores the class: choose words with different beginnings"
            )
        answers[token] = word
    return tuple(common[len(prompt_ids) :]), tuple(answers)
