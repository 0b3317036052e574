"""Prompts of instructions and their responses, as token ids with the ranges that carry loss.

A prompt is either a text with ``{instruction}`` and ``{input}``, followed by the response and the
end token, or a chat template, which renders whole conversations. Generation starts from the same
ids as training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from trishul_ray.data.conversations import Conversation, Row, is_learned
from trishul_ray.errors import InputError, first_line
from trishul_ray.tasks.text import (
    PromptTokenizer,
    Template,
    TokenizerRef,
    begin_ids,
    shorten_longest,
    shortened,
)

#: Bundled templates of prompts, and of chats; ``chat`` is the tokenizer's template.
PROMPTS, CHATS = ("alpaca", "plain"), ("turns",)
#: Fields of a prompt.
FIELDS = ("instruction", "input")
#: Kinds of truncation of a row, as bits.
PROMPT_CUT, ANSWER_CUT, TURNS_DROPPED, LAST_TURN_ALONE = 1, 2, 4, 8
#: Number of tokens of a generation prompt that a response may replace, such as an empty thought.
REPLACED = 8
#: Date in chat templates, instead of today's: the default of LLaMA-3.
DATE = "26 Jul 2024"
_CLOCK = "{%- macro strftime_now(format) -%}" + DATE + "{%- endmacro -%}"


@dataclass(frozen=True)
class Encoded:
    """A row as token ids.

    Attributes:
        ids: Ids of the prompt and its responses.
        spans: Ranges of the ids that are labels, in order; the last range ends the ids.
        cut: Kinds of truncation, as bits.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    cut: int = 0


@dataclass(eq=False)
class Prompt(ABC):
    """Convert conversations to token ids.

    Attributes:
        tokens: The backbone's tokenizer.
        text: Text of the template.
        max_length: Maximum tokens of a row, including its responses.
        target_length: Maximum labels of a response. A longer response is truncated and loses its
            end token, because it must not teach to stop.
    """

    tokens: TokenizerRef
    text: str
    max_length: int
    target_length: int

    @abstractmethod
    def encode(self, rows: Sequence[Row], where: str) -> list[Encoded]:
        """Encode rows as token ids; messages refer to them as ``where``.

        Raises:
            InputError: The template does not support the rows, or leaves no room for them.
        """

    @abstractmethod
    def end_ids(self) -> set[int]:
        """Return the ids that end a response: the end token, and a template's control token."""

    def check_ends(self) -> None:
        """Raise an InputError unless a response ends with one of the ids that stop generation.

        A model trained on responses without an end never stops, which no loss shows.
        """
        probe = self.encode([Row.of("x", "", "y")], "the template")[0]
        start, stop = probe.spans[-1]
        if not self.end_ids() & {*probe.ids[start:stop]}:
            raise InputError(
                "task.template: no token ends a response, so a model trained with it would "
                "never stop: end the assistant's turn with the end token (eos_token)"
            )


@dataclass(eq=False)
class TextPrompt(Prompt):
    """A prompt with braces: one text, or separate texts for rows with and without an input.

    Attributes:
        short: The prompt of rows without an input.

    Raises:
        InputError: A text has an unknown field.
    """

    def __post_init__(self) -> None:
        forms = _forms(self.text)
        self._whole = Template(forms["with_input"], FIELDS, "instructions")
        self.short = self._whole
        if "without_input" in forms:
            self.short = Template(forms["without_input"], FIELDS[:1], "instructions")

    def encode(self, rows: Sequence[Row], where: str) -> list[Encoded]:
        """Encode rows of one turn; prompt and response are tokenized separately."""
        return [self._row(row, where) for row in rows]

    def _row(self, row: Row, where: str) -> Encoded:
        if len(row.messages) > 2:
            raise InputError(
                f"task.template is a prompt of one turn, but {where} has a row of "
                f"{len(row.messages)} messages: set task.template=turns, or chat if the "
                "tokenizer has a chat template"
            )
        template = self._whole if row.input.strip() else self.short
        if row.input.strip() and "input" not in template.fields:
            raise InputError(
                f"task.template has no {{input}}, but {where} has rows with an input: add it"
            )
        begin = begin_ids(self.tokens)
        labels = [*self.tokens.ids(row.output), self.tokens.eos_id]
        cut = ANSWER_CUT * (len(labels) > self.target_length)
        labels = labels[: self.target_length]
        named = {"instruction": row.instruction, "input": row.input}
        values = [named[name] for name in template.fields]
        room = self.max_length - len(labels) - len(begin)
        ids = self.tokens.ids(template.fill(values))
        if len(ids) > room:
            cut |= PROMPT_CUT
            prompts = PromptTokenizer(self.tokens, template, room, add_special_tokens=False)
            (ids,) = prompts.ids([values])
        prompt = begin + ids
        return Encoded(prompt + labels, [(len(prompt), len(prompt) + len(labels))], cut)

    def end_ids(self) -> set[int]:
        """Return the end token."""
        return {self.tokens.eos_id}


@dataclass(eq=False)
class ChatPrompt(Prompt):
    """A chat template.

    Attributes:
        every_turn: Whether the responses of all turns are labels, instead of only the last one.
    """

    every_turn: bool

    def encode(self, rows: Sequence[Row], where: str) -> list[Encoded]:
        """Encode rows with the template, without their oldest turns if they are too long.

        The labels of a turn are the tokens that the template adds to its generation prompt: the
        response, its end and the tokens after it.
        """
        found: list[Encoded | None] = [None] * len(rows)
        left = {number: (list(row.messages), 0) for number, row in enumerate(rows)}
        while left:
            rendered = self._render([row for row, _ in left.values()], where)
            longer = {}
            for (number, (row, cut)), encoded in zip(left.items(), rendered, strict=True):
                excess = len(encoded.ids) - self.max_length
                if excess <= 0:
                    ids, spans, known = encoded.ids, encoded.spans, encoded.cut
                    found[number] = Encoded(ids, spans, known | cut)
                else:
                    longer[number] = self._shorten(row, cut, excess, where)
            left = longer
        return [each for each in found if each is not None]

    def _shorten(
        self, row: Conversation, cut: int, excess: int, where: str
    ) -> tuple[Conversation, int]:
        """Shorten a conversation by its oldest turn, or by text if it has only one turn."""
        head = 1 if row[0]["role"] == "system" else 0
        if len(row) > head + 2:
            return row[:head] + row[head + 2 :], cut | TURNS_DROPPED
        texts = [message["content"] for message in row[:-1]]
        if not any(texts):
            raise InputError(
                f"task.max_length={self.max_length}: only the chat template and the response take "
                f"{self.max_length + excess} tokens in a row of {where}: raise it, or lower "
                "task.target_length"
            )
        parts = self.tokens.encode_with_offsets(texts)
        kept = shorten_longest([len(part) for part in parts], excess)
        texts = [shortened(*each) for each in zip(texts, parts, kept, strict=True)]
        if texts == [message["content"] for message in row[:-1]]:
            texts = [""] * len(texts)  # white space without a separate token
        new = [{**message, "content": text} for message, text in zip(row, texts, strict=False)]
        return [*new, row[-1]], cut | PROMPT_CUT

    def _render(self, rows: Sequence[Conversation], where: str) -> list[Encoded]:
        """Convert rows to ids and labels, regardless of their length."""
        turns = [[n for n, message in enumerate(row) if is_learned(message)] for row in rows]
        if not self.every_turn:
            turns = [numbers[-1:] for numbers in turns]
        pairs = [(row, n) for row, numbers in zip(rows, turns, strict=True) for n in numbers]
        prompts = self.ids([row[:n] for row, n in pairs], where, add_generation_prompt=True)
        answers = iter(self.ids([row[: n + 1] for row, n in pairs], where))
        starts = iter(prompts)
        return [
            self._labelled([(next(starts), next(answers)) for _ in numbers]) for numbers in turns
        ]

    def _labelled(self, turns: Sequence[tuple[list[int], list[int]]]) -> Encoded:
        """Return the whole conversation, the last response, with the labels of its turns."""
        whole, cut = turns[-1][1], 0
        spans = []
        for prompt, answer in turns:
            same = _common(prompt, answer)
            if same < len(prompt) - REPLACED:
                raise InputError(
                    "task.template: the chat template renders a response differently from its "
                    f"generation prompt ({len(prompt) - same} tokens differ): use another template"
                )
            if _common(answer, whole) < len(answer):
                # E.g. the template removes earlier thoughts from later turns.
                cut |= LAST_TURN_ALONE
                continue
            spans.append((same, len(answer)))
        if cut & LAST_TURN_ALONE:
            spans = spans[-1:]
        if any(stop - start > self.target_length for start, stop in spans):
            cut |= ANSWER_CUT
            spans = [(start, min(stop, start + self.target_length)) for start, stop in spans]
            whole = whole[: spans[-1][1]]
        return Encoded(whole, spans, cut)

    def ids(
        self, rows: Sequence[Conversation], where: str, *, add_generation_prompt: bool = False
    ) -> list[list[int]]:
        """Render conversations with the template, as ids.

        The date is fixed, and texts that spell control tokens get the tokens of their letters.
        """
        tokenizer: Any = self.tokens.tokenizer
        try:
            found = tokenizer.apply_chat_template(
                [list(row) for row in rows],
                chat_template=_CLOCK + self.text,
                add_generation_prompt=add_generation_prompt,
                sanitize_control_tokens=True,
                return_dict=True,
                tokenizer_kwargs={"return_attention_mask": False, "verbose": False},
                date_string=DATE,
                enable_thinking=False,
            )
        except Exception as error:  # Raised by Jinja, or by the template itself.
            raise InputError(
                f"task.template: the chat template cannot render the rows of {where}: "
                f"{first_line(error)}"
            ) from error
        return [list(ids) for ids in found["input_ids"]]

    def end_ids(self) -> set[int]:
        """Return the end token, and the first control token after a response's content.

        Other tokens there, such as a blank, can occur in responses and do not end them.
        """
        rows = [Row.of("x", "", answer) for answer in ("yes", "no")]
        first, second = self.ids([row.messages for row in rows], "the template")
        after = first[len(first) - _common(first[::-1], second[::-1]) :]
        tokenizer: Any = self.tokens.tokenizer
        added = tokenizer.added_tokens_decoder.items()
        control = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
        eos = tokenizer.eos_token_id
        return {*[id for id in after if id in control][:1], *([] if eos is None else [int(eos)])}


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def _forms(text: str) -> dict[str, str]:
    """Parse the prompts of a text: with_input, and without_input if it is different."""
    if not any(line.startswith("with_input:") for line in text.splitlines()):
        return {"with_input": text}
    try:
        forms = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"task.template: not YAML ({first_line(error)})") from error
    if not isinstance(forms, dict) or forms.keys() != {"with_input", "without_input"}:
        raise InputError("task.template: a file of prompts has only with_input and without_input")
    return {name: str(form) for name, form in forms.items()}


def bundled(name: str) -> str:
    """Return the text of a bundled template."""
    folder = files("trishul_ray.tasks") / "templates"
    suffix = "yaml" if name in PROMPTS else "jinja"
    return (folder / f"{name}.{suffix}").read_text(encoding="utf-8")


def build_prompt(
    template: str | None, tokens: TokenizerRef, lengths: tuple[int, int], *, every_turn: bool
) -> Prompt:
    """Create the prompt of ``task.template``.

    Args:
        template: A bundled name, ``chat``, or a text. None means the tokenizer's chat template, or
            ``alpaca`` without one.
        tokens: The backbone's tokenizer, which is loaded.
        lengths: ``task.max_length`` and ``task.target_length``.
        every_turn: See :class:`ChatPrompt`.

    Raises:
        InputError: The tokenizer has no chat template, or a response would have no end.
    """
    own = tokens.tokenizer.chat_template
    name = template or ("chat" if own else "alpaca")
    if name == "chat":
        if not isinstance(own, str):
            raise InputError(
                f"task.template=chat: the tokenizer of {tokens.backbone.name!r} has "
                f"{'several chat templates' if own else 'no chat template'}; allowed: "
                f"{', '.join((*PROMPTS, *CHATS))}, or a custom text or file"
            )
        text = own
    else:
        text = bundled(name) if name in (*PROMPTS, *CHATS) else name
        if name in CHATS and begin_ids(tokens):
            text = "{{- bos_token -}}" + text
    prompt: Prompt
    if "{%" in text:
        prompt = ChatPrompt(tokens, text, *lengths, every_turn)
    else:
        prompt = TextPrompt(tokens, text, *lengths)
    prompt.check_ends()
    return prompt
