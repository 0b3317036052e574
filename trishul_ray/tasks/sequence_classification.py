"""Classification of a text, or of a pair of texts, by a head on an encoder or a decoder.

The fields go in as the model's own tokenizer joins them; prompts and verbalizers have no part.

Legend of shapes: N rows, b rows of a batch, L and W tokens stored and in the batch, K classes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trishul_ray.errors import InputError
from trishul_ray.tasks.base import Task, class_sums, group_of, logits_of, merge_classes
from trishul_ray.tasks.text import TokenizerRef, text_slice, to_device, trim

if TYPE_CHECKING:
    from trishul_ray.data.prepare import Encoder
    from trishul_ray.data.prepared import Split


class SequenceClassification(Task):
    """One or two fields of text in, logits of K classes out.

    Args:
        tokens: the backbone's tokenizer.
        fields: the columns of text, one or two.
        num_classes: K.
        max_length: tokens of a row, the tokenizer's marks included; of a pair, the longer text is
            cut first.
        groups: names of parts of the test rows.
        decoder: the backbone reads from left to right. Its head takes the last token of a row
            that is not ``config.pad_token_id``, which must be that of the tokenizer.

    Raises:
        InputError: more than two fields.
    """

    architecture = "sequence-classification"
    targets = ("labels", "group")

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
        """Check the fields, and keep everything."""
        if not 1 <= len(fields) <= 2:
            raise InputError(
                f"task.kind='classification' takes one or two fields of text, not {len(fields)} "
                f"({', '.join(fields)})"
            )
        self.tokens = tokens
        self.fields = tuple(fields)
        self.num_classes = num_classes
        self.max_length = max_length
        self.groups = tuple(groups)
        self.decoder = decoder

    @property
    def encoder(self) -> "Encoder":
        """Texts to ``input_ids``, ``length`` and, where the model tells a pair apart, ``first``."""
        return PairEncoder(self.tokens, self.fields, self.max_length)

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Rows as encoded to ``input_ids``, ``attention_mask``, ``labels``; ``dtype`` has no part.

        Returns:
            ids and mask int64 [b, W], likewise ``token_type_ids`` where the rows have ``first``;
            labels int64 [b]; ``group`` where the rows have it.
        """
        ids, mask = trim(batch["input_ids"], batch["length"])
        prepared = {"input_ids": ids, "attention_mask": mask, "labels": batch["label"]}
        if "first" in batch:
            places = torch.arange(ids.shape[1])
            prepared["token_type_ids"] = (places >= batch["first"].long()[:, None]).long() * mask
        return to_device(prepared, device) | group_of(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Ids and mask; a decoder keeps no cache of keys and values."""
        return super().inputs(batch) | ({"use_cache": False} if self.decoder else {})

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of logits [b, K], in float32."""
        return F.cross_entropy(logits_of(outputs).float(), batch["labels"])

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss_sum``, ``correct`` and ``count``, in all and by group."""
        return class_sums(logits_of(outputs), batch, self.groups)

    def merge(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """``loss``, ``accuracy`` and ``accuracy`` by group.

        Raises:
            ValueError: nothing was counted.
        """
        return merge_classes(sums, self.groups)


class PairEncoder:
    """One or two columns of text to token ids as a tokenizer joins them.

    Args:
        tokens: the tokenizer.
        fields: one or two columns.
        max_length: tokens of a row.
    """

    def __init__(self, tokens: TokenizerRef, fields: Sequence[str], max_length: int) -> None:
        """Keep what decides the numbers."""
        self._tokens, self._fields, self._max_length = tokens, tuple(fields), max_length

    @property
    def key(self) -> str:
        """See :class:`~trishul_ray.data.prepare.Encoder`."""
        return json.dumps(["pair", 1, self._tokens.key, self._fields, self._max_length])

    def encode(self, split: "Split", progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """``input_ids`` int32 [N, L] and ``length`` int32 [N].

        Where the tokenizer marks the second text, also ``first`` int32 [N]: how many tokens belong
        to the first, separators included.
        """
        names = self._tokens.tokenizer.model_input_names
        marked = len(self._fields) == 2 and "token_type_ids" in names
        first = np.zeros(len(split), dtype=np.int32)

        def rows(start: int, stop: int) -> list[list[int]]:
            texts = [text_slice(split, name, start, stop) for name in self._fields]
            encoded = self._tokens.ids(
                *texts,
                truncation="longest_first",
                max_length=self._max_length,
                return_token_type_ids=marked,
            )
            if marked:
                first[start:stop] = [kinds.count(0) for kinds in encoded["token_type_ids"]]
            return encoded["input_ids"]

        ids, length = self._tokens.padded(len(split), self._max_length, rows, progress)
        return {"input_ids": ids, "length": length} | ({"first": first} if marked else {})
