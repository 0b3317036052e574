"""Tokenizers by reference, and rows of token ids as padded columns of numbers.

Legend of shapes: N rows, b rows of a batch, L the longest row stored, W the longest of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from trishul_ray.data.base import Split
    from trishul_ray.sections import ModelConfig

#: Rows that are tokenized in one call.
CHUNK = 500


class TokenizerRef:
    """A tokenizer by where it lies: loaded at the first use in a process, never pickled.

    Args:
        model: names the backbone whose tokenizer it is.
        hub: a local mirror.
        cache: folder of built-in backbones.
        vocabulary: rows of the backbone's embedding; an id beyond is refused.
    """

    def __init__(
        self, model: "ModelConfig", *, hub: Path | None, cache: Path, vocabulary: int
    ) -> None:
        """Remember the place; nothing is loaded yet."""
        self.model, self.hub, self.cache, self.vocabulary = model, hub, cache, vocabulary

    def __getstate__(self) -> dict[str, Any]:
        """Without what was loaded: another process loads its own."""
        return {
            k: v for k, v in self.__dict__.items() if k in ("model", "hub", "cache", "vocabulary")
        }

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer itself.

        Raises:
            InputError: the model has none, or cannot be found.
        """
        # Loaded here, so that a task can be merged with where transformers is not.
        from trishul_ray.models.tokenizers import load_tokenizer

        return load_tokenizer(self.model, hub=self.hub, cache=self.cache)

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides its output."""
        from trishul_ray.models.tokenizers import tokenizer_key

        return tokenizer_key(self.tokenizer)

    @property
    def pad_id(self) -> int:
        """The padding token; every tokenizer that is loaded has one."""
        return int(self.tokenizer.pad_token_id)

    @property
    def eos_id(self) -> int:
        """The token that ends a text.

        Raises:
            InputError: there is none.
        """
        if self.tokenizer.eos_token_id is None:
            raise InputError(
                f"model.name={self.model.name!r}: its tokenizer has no end token, which targets of "
                "text to text need"
            )
        return int(self.tokenizer.eos_token_id)

    def ids(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, **options: Any
    ) -> Mapping[str, list[list[int]]]:
        """The tokenizer's columns for ``texts``, or for pairs of texts; not padded.

        A text that spells a special token gets the pieces of its letters, not the token.
        """
        if not texts:
            return {"input_ids": []}
        encoded: Mapping[str, list[list[int]]] = self.tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
            **options,
        )
        return encoded

    def pieces(self, texts: Sequence[str]) -> "list[Encoding]":
        """Tokens of each text without marks, counted and placed."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        found: list[Encoding] = backend.encode_batch(list(texts), add_special_tokens=False)
        return found

    def plain(self, text: str) -> list[int]:
        """Ids of one text, without marks around it."""
        return list(self.ids([text], add_special_tokens=False)["input_ids"][0])

    def padded(
        self,
        count: int,
        width: int,
        rows: Callable[[int, int], Sequence[Sequence[int]]],
        progress: Callable[[float], None],
    ) -> tuple[np.ndarray, np.ndarray]:
        """``rows(start, stop)`` for all of ``count`` rows, padded to the right.

        An empty row becomes one padding token, so that every row has a token to attend to.

        Args:
            count: N.
            width: the longest a row may be.
            rows: ids of the rows from ``start`` up to ``stop``.
            progress: called with the fraction done.

        Returns:
            ids int32 [N, L] and lengths int32 [N].

        Raises:
            InputError: an id that the backbone's embedding does not have.
        """
        ids = np.full((count, width), self.pad_id, dtype=np.int32)
        length = np.ones(count, dtype=np.int32)
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            for place, row in enumerate(rows(start, stop), start):
                ids[place, : len(row)] = row
                length[place] = max(1, len(row))
            progress(stop / count)
        if ids.max(initial=0) >= self.vocabulary:
            raise InputError(
                f"model.name={self.model.name!r}: its tokenizer gives id {ids.max()}, but its "
                f"embedding has {self.vocabulary} rows: tokenizer and model do not belong together"
            )
        return np.ascontiguousarray(ids[:, : length.max(initial=1)]), length


def text_slice(split: "Split", name: str, start: int, stop: int) -> list[str]:
    """Texts ``start`` up to ``stop`` of column ``name``."""
    texts: list[str] = split.texts(name)[start:stop].to_pylist()
    return texts


def trim(ids: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Stored rows without the padding that none of them needs.

    Args:
        ids: integers [b, L].
        length: integers [b], each at least 1.

    Returns:
        ids int64 [b, W] and mask int64 [b, W], one on tokens.
    """
    width = int(length.max())
    places = torch.arange(width)
    return ids[:, :width].long(), (places < length.long()[:, None]).long()


def to_device(batch: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Every tensor on ``device``."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
