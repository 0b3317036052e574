"""Read rows of instructions: an instruction with its answer, or a conversation.

A row has one turn, in the columns ``instruction``, ``output`` and, if some rows need it, ``input``;
or a conversation in the column ``messages``, a JSON list of ``{"role": ..., "content": ...}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import list_of_texts
from trishul_ray.errors import CorruptFileError

if TYPE_CHECKING:
    from trishul_ray.data.dataset import Split

#: Messages of a conversation, each with ``role`` and ``content``.
Conversation: TypeAlias = list[dict[str, str]]

#: Columns of instruction rows as datasets name them, by the platform's names: messages, Alpaca,
#: Dolly, TRL, GSM8K and Flan. The first of these layouts whose columns exist is read.
LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"instruction": "instruction", "output": "output", "input": "input"},
    {"instruction": "instruction", "output": "response", "input": "context", "group": "category"},
    {"instruction": "prompt", "output": "completion"},
    {"instruction": "question", "output": "answer"},
    {"instruction": "inputs", "output": "targets"},
)

#: Columns that a layout may lack.
OPTIONAL = frozenset({"input", "group"})

#: Roles of messages, by the names that datasets give them.
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user"}
_ROLES |= {"gpt": "assistant"}


def find_layout(existing: Sequence[str]) -> dict[str, str] | None:
    """Return the columns of the first layout that the data have; None if they have none."""
    for layout in LAYOUTS:
        if all(column in existing for name, column in layout.items() if name not in OPTIONAL):
            return {name: column for name, column in layout.items() if column in existing}
    return None


def plain_messages(values: Sequence[Any], where: Sequence[str], column: str) -> pa.LargeStringArray:
    """Return conversations as JSON texts [N]; null where the last answer is blank.

    Args:
        values: Lists of messages, or JSON texts of them, [N].
        where: Name of each row in messages.
        column: Name of the column in messages.

    Raises:
        CorruptFileError: A row is not a conversation that ends with an answer.
    """
    rows: list[str | None] = []
    for value, row in zip(values, where, strict=True):
        if value is None or value == "":
            rows.append(None)
            continue
        messages = read_conversation(value, f"{row}: {column}")
        answered = bool(messages[-1]["content"].strip())
        rows.append(json.dumps(messages, ensure_ascii=False) if answered else None)
    return pa.array(rows, pa.large_string())


def plain_choices(
    values: Sequence[Any], right: Sequence[Any], where: Sequence[str], column: str
) -> dict[str, Any]:
    """Return ``choices``, lists as JSON texts [N], and ``choice``, which one is right, int64 [N].

    Rows without choices have an empty list and -1.

    Raises:
        CorruptFileError: Choices are not a list of at least two texts that contains the right one.
    """
    texts, numbers = [], []
    for value, number, row in zip(values, right, where, strict=True):
        found = _texts(value)
        number = int(number) if isinstance(number, str) and number.isdecimal() else number  # CSV
        if found is None or (found and not (len(found) > 1 and number in range(len(found)))):
            raise CorruptFileError(
                f"{row}: {column}={str(value)[:40]!r} with the right one {number!r}; allowed: a "
                "list of two texts or more, and the number of one of them, from 0"
            )
        texts.append(json.dumps(found, ensure_ascii=False))
        numbers.append(int(number) if found else -1)
    return {"choices": pa.array(texts, pa.large_string()), "choice": np.array(numbers, np.int64)}


def plain_references(values: Sequence[Any], where: Sequence[str], column: str) -> pa.Array:
    """Return further right answers, lists as JSON texts [N]; rows without any have an empty list.

    Raises:
        CorruptFileError: They are not a list of texts, or one of them is blank.
    """
    rows = [_texts(value) for value in values]
    if None in rows:
        number = rows.index(None)
        raise CorruptFileError(
            f"{where[number]}: {column}={str(values[number])[:40]!r}; allowed: a list of texts, "
            "none of them blank, or nothing"
        )
    texts = [json.dumps(found, ensure_ascii=False) for found in rows]
    return pa.array(texts, pa.large_string())


def _texts(value: Any) -> list[str] | None:
    """Return a list of texts or an empty list, or None if a text is blank or not a text."""
    found = [] if value in (None, "", "null") else list_of_texts(value)
    return found if found is not None and all(map(str.strip, found)) else None


def read_conversation(value: Any, where: str) -> Conversation:
    """Return the messages of a row: after an optional system message, user and assistant alternate.

    Args:
        value: A list of messages, or its JSON text. A message has ``role`` and ``content``, or
            ``from`` and ``value`` with the roles human and gpt.
        where: What the row is called in messages.

    Raises:
        CorruptFileError: The value is another one, or does not end with an answer.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise CorruptFileError(f"{where} is not a JSON list of messages") from None
    if not isinstance(value, list) or not value:
        raise CorruptFileError(f"{where} is not a list of messages")
    messages: Conversation = []
    for message in value:
        fields = message if isinstance(message, Mapping) else {}
        role = fields.get("role") or fields.get("from")
        content = fields.get("value") if "value" in fields else fields.get("content")
        if role not in _ROLES or not isinstance(content, str):
            raise CorruptFileError(
                f"{where}: message {len(messages)} has role {role!r} and content of type "
                f"{type(content).__name__}; allowed: a text of system, user or assistant"
            )
        messages.append({"role": _ROLES[role], "content": content})
    turns = [message["role"] for message in messages]
    turns = turns[1:] if turns[0] == "system" else turns
    if not turns or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise CorruptFileError(
            f"{where} has the roles {', '.join(m['role'] for m in messages)}; allowed: user and "
            "assistant alternately, after an optional system message, the last one assistant"
        )
    return messages


@dataclass(frozen=True)
class Row:
    """A row: its conversation, and the parts of its prompt if it has one turn.

    Attributes:
        messages: The conversation; the last message is the answer. White space around answers is
            removed: the tokens would differ from generated ones.
        instruction: Its instruction, or the user's only message.
        input: What the instruction is about; may be empty.
    """

    messages: Conversation
    instruction: str
    input: str = ""

    @property
    def output(self) -> str:
        """The answer."""
        return self.messages[-1]["content"]

    @classmethod
    def of(cls, instruction: str, input: str, output: str) -> Row:
        """Return a row of one turn; in a chat, its input stands below a blank line."""
        asked = f"{instruction}\n\n{input}" if input.strip() else instruction
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": output.strip()},
        ]
        return cls(messages, instruction, input)

    def answered(self, output: str) -> Row:
        """Return the row with another answer."""
        answer = {"role": "assistant", "content": output.strip()}
        return Row([*self.messages[:-1], answer], self.instruction, self.input)

    @classmethod
    def of_messages(cls, text: str) -> Row:
        """Return the row of a JSON list of messages."""
        messages = json.loads(text)
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = message["content"].strip()
        return cls(messages, messages[0]["content"])


def read_rows(split: Split, start: int, stop: int) -> list[Row]:
    """Return rows ``start`` up to ``stop`` of a split of instructions."""

    def texts(name: str) -> list[str]:
        return list(split.texts(name)[start:stop].to_pylist())

    if "messages" in split.columns:
        return [Row.of_messages(text) for text in texts("messages")]
    asked, answers = texts("instruction"), texts("output")
    inputs = texts("input") if "input" in split.columns else [""] * len(asked)
    return [Row.of(*row) for row in zip(asked, inputs, answers, strict=True)]
