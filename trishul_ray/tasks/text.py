"""Tokenize the texts of a dataset: templates, prompts truncated to a limit, padded token ids.

Legend: N rows, b rows of a batch, L tokens of the longest stored row, W of the longest in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch, transformers

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo, Split
    from trishul_ray.models.backbone import Backbone

#: Number of rows tokenized in one call.
CHUNK = 500

#: Prompts estimated to exceed their limit by at most this number of tokens are tokenized before
#: they are truncated: fields tokenized separately may have a few more tokens than in the prompt.
ESTIMATE_MARGIN = 16


class TokenizerRef:
    """The tokenizer of a backbone, loaded on first use in a process and never pickled.

    Args:
        backbone: The backbone that reads the tokens.
        vocabulary_size: Number of rows of the backbone's embedding; larger ids are rejected.
    """

    def __init__(self, backbone: Backbone, *, vocabulary_size: int) -> None:
        self.backbone, self.vocabulary_size = backbone, vocabulary_size

    @classmethod
    def of(cls, backbone: Backbone) -> TokenizerRef:
        """Return the tokenizer of a backbone for texts."""
        return cls(backbone, vocabulary_size=backbone.architecture.vocab_size)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; an InputError if the model cannot be found or has none."""
        return self.backbone.tokenizer

    @property
    def key(self) -> str:
        """Hash of everything that determines the tokenizer's output."""
        return self.backbone.tokenizer_key

    @property
    def pad_id(self) -> int:
        """Id of the padding token; every loaded tokenizer has one."""
        return int(self.tokenizer.pad_token_id)

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a text; an InputError if there is none."""
        if self.tokenizer.eos_token_id is None:
            raise InputError(
                f"model.name={self.backbone.name!r}: its tokenizer has no end token, which "
                "text-to-text targets need"
            )
        return int(self.tokenizer.eos_token_id)

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, **options: Any
    ) -> Mapping[str, list[list[int]]]:
        """Tokenize texts, or pairs of texts, without padding.

        A text that spells a special token gets the tokens of its letters instead.
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

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Return each text's tokens with their positions in it, without special tokens."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        encodings: list[Encoding] = backend.encode_batch(list(texts), add_special_tokens=False)
        return encodings

    def ids(self, text: str) -> list[int]:
        """Return the ids of one text, without special tokens around it."""
        return list(self.encode([text], add_special_tokens=False)["input_ids"][0])

    def padded_columns(
        self,
        count: int,
        max_length: int,
        rows: Callable[[int, int], Sequence[Sequence[int]]],
        progress: Callable[[float], None],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Collect the ids of all rows into one array, padded to the right.

        An empty row becomes one padding token, so that every row has a token to attend to.

        Args:
            count: N.
            max_length: Maximum length of a row.
            rows: ``rows(start, stop)`` returns the ids of the rows from ``start`` up to ``stop``.
            progress: Called with the completed fraction.

        Returns:
            Ids int32 [N, L] and lengths int32 [N].

        Raises:
            InputError: An id exceeds the backbone's embedding, even if it is only the padding id.
        """
        if self.pad_id >= self.vocabulary_size:
            raise InputError(
                f"model.name={self.backbone.name!r}: the padding token of its tokenizer, "
                f"{self.tokenizer.pad_token!r}, has id {self.pad_id}, but its embedding has "
                f"{self.vocabulary_size} rows, and it has no end token to pad with: set pad_token "
                "to a token that the model has"
            )
        ids = np.full((count, max_length), self.pad_id, dtype=np.int32)
        length = np.ones(count, dtype=np.int32)
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            for index, row in enumerate(rows(start, stop), start):
                ids[index, : len(row)] = row
                length[index] = max(1, len(row))
            progress(stop / count)
        if ids.max(initial=0) >= self.vocabulary_size:
            raise InputError(
                f"model.name={self.backbone.name!r}: its tokenizer gives id {ids.max()}, but its "
                f"embedding has {self.vocabulary_size} rows: use the tokenizer of this model"
            )
        return np.ascontiguousarray(ids[:, : length.max(initial=1)]), length


class Template:
    """A prompt in which each of its fields occurs once.

    Args:
        text: For example ``"question: {question} context: {context}"``; double a literal brace.
        fields: Names of the dataset's fields.
        dataset: Name of the dataset, for messages.

    Attributes:
        fields: The fields that occur, in the order of the template.

    Raises:
        InputError: Braces do not match, or a field is unknown, repeated or missing altogether.
    """

    def __init__(self, text: str, fields: Sequence[str], dataset: str) -> None:
        self.text = text
        known = ", ".join(f"{{{name}}}" for name in fields)
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            message = f"task.template={text!r}: {error} (a literal brace is doubled)"
            raise InputError(message) from error
        used = []
        for _, name, spec, conversion in parts:
            if name is None:
                continue
            if name not in fields or spec or conversion:
                placeholder = name + (f"!{conversion}" if conversion else "")
                placeholder += f":{spec}" if spec else ""
                raise InputError(
                    f"task.template: {{{placeholder}}} is not a field of dataset {dataset!r}; it "
                    f"has {known}"
                )
            if name in used:
                raise InputError(f"task.template: {{{name}}} occurs twice")
            used.append(name)
        if not used:
            raise InputError(f"task.template={text!r} has no field; {dataset!r} has {known}")
        self.fields = tuple(used)

    def fill(self, values: Sequence[str]) -> str:
        """Fill the prompt with the ``values`` of :attr:`fields`."""
        return self.text.format(**dict(zip(self.fields, values, strict=True)))


class PromptTokenizer:
    """Fill a template with rows and tokenize it, truncating fields so that prompts fit a limit.

    ``add_special_tokens`` sets whether the tokenizer adds its begin and end tokens.

    Raises:
        InputError: The template leaves no token for its fields.
    """

    def __init__(
        self, tokens: TokenizerRef, template: Template, limit: int, *, add_special_tokens: bool
    ) -> None:
        self._tokens, self._template, self._limit = tokens, template, limit
        self._add_special_tokens = add_special_tokens
        empty = len(self._ids([template.fill([""] * len(template.fields))])[0])
        self._room = limit - empty
        if empty >= limit:
            raise InputError(
                f"task.max_length leaves {limit} tokens for the prompt, but task.template without "
                f"fields takes {empty}: increase it, or shorten the template"
            )

    def ids(self, rows: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the token ids of the prompts with these values of the template's fields."""
        filled = [list(row) for row in rows]
        # Truncate very long texts before tokenizing whole prompts. The estimate per field may be
        # wrong by some tokens, so prompts near the limit are left to the exact count.
        self._cut(filled, [None] * len(filled))
        ids = self._ids([self._template.fill(row) for row in filled])
        too_long = [i for i, row in enumerate(ids) if len(row) > self._limit]
        while too_long:
            # A truncated text may have a few more tokens than requested, so repeat until it fits.
            self._cut([filled[i] for i in too_long], [len(ids[i]) - self._limit for i in too_long])
            shorter = self._ids([self._template.fill(filled[i]) for i in too_long])
            for i, row in zip(too_long, shorter, strict=True):
                ids[i] = row
            too_long = [i for i in too_long if len(ids[i]) > self._limit]
        return ids

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokens.encode(texts, add_special_tokens=self._add_special_tokens)
        return encoded["input_ids"]

    def _cut(self, rows: Sequence[list[str]], excesses: Sequence[int | None]) -> None:
        """Shorten the fields of rows in place, by at least one character.

        ``excesses`` are the numbers of tokens to remove from each row. None estimates them, and
        skips rows that may be within the limit.
        """
        width = len(self._template.fields)
        encodings = self._tokens.encode_with_offsets([text for row in rows for text in row])
        for index, (row, excess) in enumerate(zip(rows, excesses, strict=True)):
            fields = encodings[index * width : (index + 1) * width]
            lengths = [len(field) for field in fields]
            if excess is None:
                excess = sum(lengths) - self._room
                if excess <= ESTIMATE_MARGIN:
                    continue
            before = list(row)
            for field, keep in enumerate(shorten_longest(lengths, excess)):
                row[field] = shortened(row[field], fields[field], keep)
            if row == before:  # White space may have no token by itself, but one in the prompt.
                row[:] = [""] * width


def begin_ids(tokens: TokenizerRef) -> list[int]:
    """Return the begin token, if the tokenizer sets one; an end token would end the prompt."""
    begin_id = tokens.tokenizer.bos_token_id
    special_ids = tokens.encode([""])["input_ids"][0]
    return [begin_id] if begin_id is not None and special_ids[:1] == [begin_id] else []


def shortened(text: str, encoding: Encoding, keep: int) -> str:
    """Truncate a text to its first ``keep`` tokens, by at least one character if it has more."""
    if keep >= len(encoding):
        return text
    span = encoding.token_to_chars(keep)  # of the first removed token
    return text[: min(span[0] if span else 0, len(text) - 1)].rstrip()


def shorten_longest(lengths: Sequence[int], excess: int) -> list[int]:
    """Reduce ``lengths`` by ``excess`` in total, always taking from the longest."""
    kept = list(lengths)
    while excess > 0 and any(kept):
        longest = max(kept)
        tied = [i for i, length in enumerate(kept) if length == longest]
        below = max((length for length in kept if length < longest), default=0)
        step = max(1, min(longest - below, excess // len(tied)))
        for i in tied:
            removed = min(step, excess)
            kept[i] -= removed
            excess -= removed
    return kept


def default_template(fields: Sequence[str]) -> str:
    """Return each field after its name, as in T5's pretraining (Raffel et al. 2020).

    A single field has no name before it.
    """
    if len(fields) == 1:
        return f"{{{fields[0]}}}"
    return " ".join(f"{name}: {{{name}}}" for name in fields)


def class_texts(config: TaskConfig, info: DatasetInfo) -> tuple[str, ...]:
    """Return the text of each class: ``task.verbalizers``, or the names of the classes.

    Raises:
        InputError: The number of texts differs from the number of classes.
    """
    texts = config.verbalizers or info.classes
    if len(texts) != info.num_classes:
        raise InputError(
            f"task.verbalizers has {len(texts)} entries, but dataset {info.name!r} has "
            f"{info.num_classes} classes: {', '.join(info.classes[:6])}"
            + (", ..." if info.num_classes > 6 else "")
        )
    return texts


def field_rows(split: Split, template: Template, start: int, stop: int) -> list[tuple[str, ...]]:
    """Return the values of a template's fields in rows ``start`` up to ``stop`` of a split."""
    columns = [read_texts(split, name, start, stop) for name in template.fields]
    return list(zip(*columns, strict=True))


def read_texts(split: Split, name: str, start: int, stop: int) -> list[str]:
    """Return the texts of column ``name`` in rows ``start`` up to ``stop``."""
    texts: list[str] = split.texts(name)[start:stop].to_pylist()
    return texts


def generate_greedily(module: Any, inputs: Mapping[str, Any], **options: Any) -> Tensor:
    """Generate ids with a model of transformers, int64 [b, n].

    Args:
        module: The model.
        inputs: Keyword arguments of its ``generate``.
        **options: Fields of the generation configuration, such as limit and end.
    """
    greedy = transformers.GenerationConfig(do_sample=False, num_beams=1, **options)
    # The checkpoint's generation_config.json would fill in every option that is not set here.
    original, module.generation_config = module.generation_config, greedy
    try:
        found: Tensor = module.generate(**inputs)
    finally:
        module.generation_config = original
    return found


def trim_padding(ids: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Truncate stored rows, integers [b, L], to the longest of their lengths [b], each at least 1.

    Returns:
        Ids int64 [b, W], and a mask int64 [b, W] that is one on tokens.
    """
    positions = torch.arange(int(length.max()))
    return ids[:, : len(positions)].long(), (positions < length.long()[:, None]).long()
