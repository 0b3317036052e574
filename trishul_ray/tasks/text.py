"""Tokenizers by reference, and rows of token ids as padded columns of numbers.

Legend of shapes: N rows, b rows of a batch, L the longest row stored, W the longest of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    from trishul_ray.config import ModelConfig
    from trishul_ray.data.prepared import Split


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


#: Tokens by which fields counted one by one may miss the prompt that they stand in.
NEAR = 16


class Template:
    """A prompt with each of some fields in it once.

    Args:
        text: e.g. ``"question: {question} context: {context}"``; a literal brace is doubled.
        fields: names that may stand in it.
        dataset: for messages.

    Attributes:
        fields: those that do, in the order of the template.

    Raises:
        InputError: braces do not match, an unknown field, one twice, or none at all.
    """

    def __init__(self, text: str, fields: Sequence[str], dataset: str) -> None:
        """Take the template apart and check it."""
        self.text = text
        known = ", ".join(f"{{{name}}}" for name in fields)
        try:
            pieces = list(Formatter().parse(text))
        except ValueError as error:
            raise InputError(
                f"task.template={text!r}: {error} (a literal brace is doubled)"
            ) from error
        used = []
        for _, name, spec, conversion in pieces:
            if name is None:
                continue
            if name not in fields or spec or conversion:
                asked = (
                    name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                )
                raise InputError(
                    f"task.template: {{{asked}}} is no field of dataset {dataset!r}; it has {known}"
                )
            if name in used:
                raise InputError(f"task.template: {{{name}}} stands in it twice")
            used.append(name)
        if not used:
            raise InputError(f"task.template={text!r} names no field; {dataset!r} has {known}")
        self.fields = tuple(used)

    def fill(self, values: Sequence[str]) -> str:
        """The prompt with ``values`` for :attr:`fields`."""
        return self.text.format(**dict(zip(self.fields, values, strict=True)))


class PromptRows:
    """Rows of a dataset as token ids of prompts, none longer than a limit.

    Args:
        tokens: the tokenizer.
        template: the prompt.
        limit: tokens a prompt may have.
        marks: with the tokenizer's own marks (begin, end) around it.

    Raises:
        InputError: the template alone leaves no token for its fields.
    """

    def __init__(self, tokens: TokenizerRef, template: Template, limit: int, marks: bool) -> None:
        """Check that there is room for the fields."""
        self._tokens, self._template, self._limit, self._marks = tokens, template, limit, marks
        bare = len(self._ids([template.fill([""] * len(template.fields))])[0])
        self._room = limit - bare
        if bare >= limit:
            raise InputError(
                f"task.max_length leaves {limit} tokens for the prompt, but task.template alone "
                f"takes {bare}: raise it, or shorten the template"
            )

    def ids(self, rows: Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of each row's prompt.

        Args:
            rows: values of the template's fields.
        """
        filled = [list(row) for row in rows]
        # What is far too long is cut before it is read as a whole. Counting fields one by one may
        # miss the whole by some tokens, so what is near the limit is left to the exact count.
        self._cut(filled, [None] * len(filled))
        found = self._ids([self._template.fill(row) for row in filled])
        long = [i for i, ids in enumerate(found) if len(ids) > self._limit]
        while long:
            # A cut text may tokenize a little longer than it was cut to: once more, then.
            self._cut([filled[i] for i in long], [len(found[i]) - self._limit for i in long])
            again = self._ids([self._template.fill(filled[i]) for i in long])
            for i, ids in zip(long, again, strict=True):
                found[i] = ids
            long = [i for i in long if len(found[i]) > self._limit]
        return found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokens.ids(texts, add_special_tokens=self._marks)["input_ids"]

    def _cut(self, rows: Sequence[list[str]], over: Sequence[int | None]) -> None:
        """Shorten rows' fields, in place, by so many tokens, and by at least one letter.

        Args:
            rows: values of the template's fields.
            over: tokens to take from each row; None estimates them, and leaves a row alone that
                may be within the limit.
        """
        width = len(self._template.fields)
        pieces = self._tokens.pieces([text for row in rows for text in row])
        for place, (row, excess) in enumerate(zip(rows, over, strict=True)):
            fields = pieces[place * width : (place + 1) * width]
            lengths = [len(field) for field in fields]
            if excess is None:
                excess = sum(lengths) - self._room
                if excess <= NEAR:
                    continue
            before = list(row)
            for field, keep in enumerate(levelled(lengths, excess)):
                if keep < lengths[field]:
                    span = fields[field].token_to_chars(keep)  # of the first token that goes
                    start = span[0] if span else 0
                    row[field] = row[field][: min(start, len(row[field]) - 1)].rstrip()
            if row == before:  # white space that alone is no token, but is one in its place
                row[:] = [""] * width


def levelled(lengths: Sequence[int], excess: int) -> list[int]:
    """``lengths`` less ``excess`` in all, always taken from whichever is longest."""
    kept = list(lengths)
    while excess > 0 and any(kept):
        longest = max(kept)
        tied = [i for i, length in enumerate(kept) if length == longest]
        below = max((length for length in kept if length < longest), default=0)
        step = max(1, min(longest - below, excess // len(tied)))
        for i in tied:
            taken = min(step, excess)
            kept[i] -= taken
            excess -= taken
    return kept


def field_rows(split: "Split", template: Template, start: int, stop: int) -> list[tuple[str, ...]]:
    """Values of a template's fields in rows ``start`` up to ``stop`` of a split."""
    columns = [text_slice(split, name, start, stop) for name in template.fields]
    return list(zip(*columns, strict=True))
