"""Read rows of instructions, which are single turns or conversations.

A single turn has the columns ``instruction``, ``output`` and, if some rows need it, ``input``. A
conversation has the column ``messages``, a JSON list of ``{"role": ..., "content": ...}``. A
message may have further keys, which chat templates read, and ``weight`` 0 if it has no labels.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import list_of_texts
from trishul_ray.errors import CorruptFileError

if TYPE_CHECKING:
    from trishul_ray.data.dataset import Split

#: Messages of a conversation, each with ``role``, ``content``, and keys for chat templates.
Conversation: TypeAlias = list[dict[str, Any]]

#: Column names in common instruction datasets, keyed by canonical name: messages, Alpaca, Dolly,
#: TRL, GSM8K and Flan. The first layout whose columns exist applies.
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

#: Canonical roles, keyed by their names in datasets.
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user"}
_ROLES |= {"gpt": "assistant"}

#: Keys of messages that every template supports.
_READ_KEYS = frozenset({"role", "content", "weight"})


def find_layout(existing: Sequence[str]) -> dict[str, str] | None:
    """Return the columns of the first layout that matches the data, or None."""
    for layout in LAYOUTS:
        if all(column in existing for name, column in layout.items() if name not in OPTIONAL):
            return {name: column for name, column in layout.items() if column in existing}
    return None


def has_context(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a system message or earlier turns in separate columns."""
    return any(row.get(name) not in (None, "", "[]", []) for name in ("system", "history"))


def plain_messages(
    rows: Sequence[Mapping[str, Any]], where: Sequence[str], column: str
) -> tuple[pa.LargeStringArray, list[str]]:
    """Convert conversations to JSON texts.

    Args:
        rows: Columns of each row (see :func:`read_conversation`), [N].
        where: Name of each row in messages.
        column: Name of the column in messages.

    Returns:
        The JSON texts [N], null if the last answer is blank, and notes about the rows.

    Raises:
        CorruptFileError: A row is not a conversation that ends with an answer.
    """
    texts: list[str | None] = []
    further: Counter[str] = Counter()
    unlearned = 0
    for row, name in zip(rows, where, strict=True):
        messages = read_conversation(row, f"{name}: {column}")
        learned = [n for n, message in enumerate(messages) if is_learned(message)]
        if not learned or not messages[-1]["content"].strip():
            texts.append(None)
            continue
        further.update(key for message in messages for key in message)
        unlearned += sum(message["role"] == "assistant" for message in messages) - len(learned)
        texts.append(json.dumps(messages[: learned[-1] + 1], ensure_ascii=False, default=str))
    notes = [f"{unlearned:,} answers without labels: blank, or weight 0"] if unlearned else []
    notes += [
        f"{count:,} messages with {key!r}, which only a chat template can read"
        for key, count in further.items()
        if key not in _READ_KEYS
    ]
    return pa.array(texts, pa.large_string()), notes


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer whose tokens may be labels."""
    answer = message["role"] == "assistant" and bool(message["content"].strip())
    return answer and message.get("weight") != 0


def plain_choices(
    values: Sequence[Any], right: Sequence[Any], where: Sequence[str], column: str
) -> dict[str, Any]:
    """Convert multiple-choice columns to ``choices`` and ``choice``.

    Returns:
        ``choices``, JSON lists of texts [N], and ``choice``, the index of the right one, int64 [N].
        Rows without choices have an empty list and -1.

    Raises:
        CorruptFileError: A value is not a list of at least two texts that contains the right one.
    """
    texts, numbers = [], []
    for value, number, row in zip(values, right, where, strict=True):
        found = _texts(value)
        number = int(number) if isinstance(number, str) and number.isdecimal() else number  # CSV
        if found is None or (found and not (len(found) > 1 and number in range(len(found)))):
            raise CorruptFileError(
                f"{row}: {column}={str(value)[:40]!r} with the right choice {number!r}; allowed: a "
                "list of at least two texts, and the index of one of them, from 0"
            )
        texts.append(json.dumps(found, ensure_ascii=False))
        numbers.append(int(number) if found else -1)
    return {"choices": pa.array(texts, pa.large_string()), "choice": np.array(numbers, np.int64)}


def plain_references(values: Sequence[Any], where: Sequence[str], column: str) -> pa.Array:
    """Convert further right answers to JSON lists of texts [N], which may be empty.

    Raises:
        CorruptFileError: A value is not a list of texts, or a text is blank.
    """
    rows = [_texts(value) for value in values]
    if None in rows:
        number = rows.index(None)
        raise CorruptFileError(
            f"{where[number]}: {column}={str(values[number])[:40]!r}; allowed: a list of nonblank "
            "texts, or no value"
        )
    texts = [json.dumps(found, ensure_ascii=False) for found in rows]
    return pa.array(texts, pa.large_string())


def _texts(value: Any) -> list[str] | None:
    """Parse a list of nonblank texts, which may be empty, or return None for other values."""
    found = [] if value in (None, "", "null") else list_of_texts(value)
    return found if found is not None and all(map(str.strip, found)) else None


def read_conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """Read the messages of a row: an optional system message, then user and assistant alternately.

    Args:
        row: ``messages``, a list or its JSON text; or ``instruction`` and ``output``, both texts or
            both lists of messages, with ``input`` and ``history``, a list of pairs of question and
            answer; and ``system``, a text. A message has ``role`` and ``content``, or ``from`` and
            ``value`` with the roles human and gpt.
        where: Name of the row in messages.

    Returns:
        The messages, or an empty list if the row has none.

    Raises:
        CorruptFileError: A value has another form, or the messages do not end with an answer.
    """
    asked: Any = row.get("messages", row.get("instruction")) or []
    answer: Any = row.get("output") or []
    if "messages" in row and isinstance(asked, str):
        asked = _from_json(asked, f"{where} is not a JSON list of messages")
    elif isinstance(asked, str) or isinstance(answer, str):
        turn = Row.of(asked or "", row.get("input") or "", answer or "").messages
        asked, answer = [*_earlier_turns(row.get("history"), where), turn[0]], turn[1:]
    if not isinstance(asked, list):
        raise CorruptFileError(f"{where} is not a list of messages")
    values = [*asked, *answer]
    if not values:
        return []
    if row.get("system"):
        values = [{"role": "system", "content": row["system"]}, *values]
    messages = [_read_message(value, f"{where}: message {n}") for n, value in enumerate(values)]
    turns = [message["role"] for message in messages]
    turns = turns[1:] if turns[0] == "system" else turns
    if not turns or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise CorruptFileError(
            f"{where} has the roles {', '.join(m['role'] for m in messages)}; allowed: user and "
            "assistant alternately, ending with assistant, after an optional system message"
        )
    return messages


def _from_json(text: str, fault: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CorruptFileError(fault) from None


def _earlier_turns(history: Any, where: str) -> Conversation:
    """Convert pairs of question and answer, a list or its JSON text, to messages."""
    fault = f"{where}: history is not a list of pairs of question and answer; rename it"
    pairs = _from_json(history or "[]", fault) if isinstance(history, str) else history or []
    if not isinstance(pairs, list) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise CorruptFileError(fault)
    roles = ("user", "assistant")
    return [{"role": r, "content": c} for p in pairs for r, c in zip(roles, p, strict=True)]


def _read_message(value: Any, where: str) -> dict[str, Any]:
    """Read a message with its role, its content, and its keys that are not null."""
    fields = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}
    role = fields.pop("role", None) or fields.pop("from", None)
    content = fields.pop("content", fields.pop("value", None))
    if str(role) not in _ROLES or not isinstance(content, str):
        raise CorruptFileError(
            f"{where} has role {role!r} and content of type {type(content).__name__}; allowed: a "
            "text of system, user or assistant"
        )
    weights = [fields.pop(name) for name in ("weight", "train") if name in fields]
    if any(weight not in (0, 1) for weight in weights):
        raise CorruptFileError(f"{where} has weight or train {weights}; allowed: 0, 1, true, false")
    message = {"role": _ROLES[role], "content": content, **fields}
    return message if all(weights) else message | {"weight": 0}


@dataclass(frozen=True)
class Row:
    """A row: its conversation, and the parts of its prompt if it is a single turn.

    Attributes:
        messages: The conversation, which ends with the answer. Blank lines before answers and white
            space after them are removed, since their tokens would differ from generated ones.
        instruction: The instruction, or the first message of the user.
        input: The text that the instruction refers to; may be empty.
    """

    messages: Conversation
    instruction: str
    input: str = ""

    @property
    def output(self) -> str:
        return str(self.messages[-1]["content"])

    @classmethod
    def of(cls, instruction: str, input: str, output: str) -> Row:
        """Build a row with a single turn; in a chat, its input follows a blank line."""
        asked = f"{instruction}\n\n{input}" if input.strip() else instruction
        return cls([{"role": "user", "content": asked}, _answer(output)], instruction, input)

    def answered(self, output: str) -> Row:
        """Return a copy with another answer."""
        return Row([*self.messages[:-1], _answer(output)], self.instruction, self.input)

    @classmethod
    def of_messages(cls, text: str) -> Row:
        """Build a row from a JSON list of messages."""
        messages = [
            message | _answer(message["content"]) if message["role"] == "assistant" else message
            for message in json.loads(text)
        ]
        return cls(messages, messages[0]["content"])


def _answer(text: str) -> dict[str, Any]:
    """Build the message of an answer, and keep the indentation of its first line."""
    return {"role": "assistant", "content": re.sub(r"\A\s*\n", "", text.rstrip())}


def read_rows(split: Split, start: int, stop: int) -> list[Row]:
    """Read the rows ``start`` to ``stop`` (exclusive) of a split of instructions."""

    def texts(name: str) -> list[str]:
        return list(split.texts(name)[start:stop].to_pylist())

    if "messages" in split.columns:
        return [Row.of_messages(text) for text in texts("messages")]
    asked, answers = texts("instruction"), texts("output")
    inputs = texts("input") if "input" in split.columns else [""] * len(asked)
    return [Row.of(*row) for row in zip(asked, inputs, answers, strict=True)]
