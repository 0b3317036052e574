"""Prompts: a template with the dataset's fields in braces, filled and cut to a number of tokens.

Only fields are cut, the longest first, from their ends: what a template says after them stays.
"""

from collections.abc import Sequence
from string import Formatter
from typing import TYPE_CHECKING

from trishul_ray.errors import InputError
from trishul_ray.tasks.tokens import TokenizerRef, text_slice

if TYPE_CHECKING:
    from trishul_ray.data.base import Split

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
