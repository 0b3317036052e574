"""Classify a text or a pair of texts with a classification head on an encoder or a decoder.

The model's tokenizer joins the fields; templates and verbalizers are not used.

Legend: N rows, b rows of a batch, L stored tokens, W tokens of the batch, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.base import Classification, ModelInputs, group_column, register, to_device
from trishul_ray.tasks.text import TokenizerRef, read_texts, trim_padding

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo, Split
    from trishul_ray.models.backbone import Backbone


@register("classification")
class SequenceClassification(Classification):
    """Map one or two fields of text to logits of K classes.

    Args:
        tokens: The backbone's tokenizer.
        fields: One or two columns of text.
        num_classes: K.
        max_length: Maximum tokens of a row, including special tokens. The longer text is truncated
            first.
        groups: Names of groups of test rows.
        decoder: Whether the backbone is a decoder. Its head reads the last token of a row that is
            not ``config.pad_token_id``, which must equal the tokenizer's padding id.

    Raises:
        InputError: There are more than two fields.
    """

    reads = "text"
    families = ("sequence-classification", "causal-lm")
    model_kind = "sequence-classification"
    fields_read = frozenset({"max_length"})
    tokens: TokenizerRef

    def __init__(
        self,
        tokens: TokenizerRef,
        *,
        fields: Sequence[str],
        num_classes: int,
        max_length: int,
        groups: Sequence[str] = (),
        decoder: bool = False,
    ) -> None:
        if not 1 <= len(fields) <= 2:
            raise InputError(
                f"task.kind='classification' supports one or two fields of text, not {len(fields)} "
                f"({', '.join(fields)})"
            )
        self.tokens, self.fields = tokens, tuple(fields)
        self.num_classes, self.max_length = num_classes, max_length
        self.groups, self.decoder = tuple(groups), decoder

    @classmethod
    def build(
        cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone
    ) -> SequenceClassification:
        """Create the task for the dataset's fields of text."""
        tokens = TokenizerRef.of(backbone)
        decoder = backbone.family == "causal-lm"
        if decoder:
            _check_padding(backbone, tokens)
        return cls(
            tokens,
            fields=info.fields,
            num_classes=info.num_classes,
            max_length=config.max_length,
            groups=info.groups,
            decoder=decoder,
        )

    def settings(self) -> Json:
        """Return the fields and their limit."""
        return {"fields": list(self.fields), "max_length": self.max_length}

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the encoded columns."""
        return json.dumps(["pair", 1, self.tokens.key, self.fields, self.max_length])

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode ``input_ids`` int32 [N, L] and ``length`` int32 [N].

        If the tokenizer marks the second text, also return ``first`` int32 [N]: the number of
        tokens of the first text, including separators.
        """
        names = self.tokens.tokenizer.model_input_names
        has_token_types = len(self.fields) == 2 and "token_type_ids" in names
        first = np.zeros(len(split), dtype=np.int32)

        def rows(start: int, stop: int) -> list[list[int]]:
            texts = [read_texts(split, name, start, stop) for name in self.fields]
            encoded = self.tokens.encode(
                *texts,
                truncation="longest_first",
                max_length=self.max_length,
                return_token_type_ids=has_token_types,
            )
            if has_token_types:
                first[start:stop] = [types.count(0) for types in encoded["token_type_ids"]]
            return encoded["input_ids"]

        ids, length = self.tokens.padded_columns(len(split), self.max_length, rows, progress)
        return {"input_ids": ids, "length": length} | ({"first": first} if has_token_types else {})

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert encoded rows to the model's inputs; ``dtype`` is not used.

        Returns:
            ``input_ids`` and ``attention_mask`` int64 [b, W]; ``token_type_ids`` int64 [b, W] if
            the rows have ``first``; ``labels`` int64 [b]; ``group`` if the rows have it.
        """
        ids, mask = trim_padding(batch["input_ids"], batch["length"])
        prepared = {"input_ids": ids, "attention_mask": mask, "labels": batch["label"]}
        if "first" in batch:
            positions = torch.arange(ids.shape[1])
            second = positions >= batch["first"].long()[:, None]
            prepared["token_type_ids"] = second.long() * mask
        return to_device(prepared, device) | group_column(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> ModelInputs:
        """Return ids and mask; a decoder runs without a key-value cache."""
        return super().inputs(batch) | ({"use_cache": False} if self.decoder else {})


def _check_padding(backbone: Backbone, tokens: TokenizerRef) -> None:
    """Check that decoder and tokenizer use the same padding, which marks a row's last token."""
    pad_id = backbone.architecture.pad_token_id
    if pad_id not in (None, tokens.pad_id):
        raise InputError(
            f"model.name={backbone.name!r}: config.json has pad_token_id={pad_id}, but its "
            f"tokenizer pads with {tokens.pad_id}: use the same id"
        )
