"""Rows of public chat datasets: tokens and labels of their chat templates."""

import json

import pytest

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError
from trishul_ray.tasks.instruction import Instruction

TEMPLATE = (
    "{% for m in messages %}{{ '<cls>' + m['role'] + '\n' }}{% if m['reasoning_content'] %}"
    "{{ '(' + m['reasoning_content'] + ') ' }}{% endif %}{{ m['content'] + '<sep>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<cls>assistant\n' }}{% endif %}"
)


def role(name, content, **more):
    return {"role": name, "content": content, **more}


def sharegpt(*pairs):
    return [{"from": name, "value": text} for name, text in pairs]


ASKED, SAID = role("user", "q"), role("assistant", "a")
#: Result of most rows: U, S and A are messages of the user, the system and the assistant. An A has
#: labels, and a B has none.
TURN = ["U q", "A a"]
TALK = ["S s", "U q", "A a", "U r", "A b"]
WHOLE = [role("system", "s"), ASKED, SAID, role("user", "r"), role("assistant", "b")]

READ = {
    "tatsu-lab/alpaca": (
        {"instruction": "q", "input": "i", "output": "a", "text": "Below is ..."},
        ["U q\n\ni", "A a"],
    ),
    "yahma/alpaca-cleaned": ({"instruction": "q", "input": "", "output": "a"}, TURN),
    "LLaMA-Factory alpaca": (
        {"instruction": "r", "input": "", "output": "b", "system": "s", "history": [["q", "a"]]},
        TALK,
    ),
    "LLaMA-Factory sharegpt": (
        {
            "conversations": sharegpt(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")),
            "system": "s",
            "tools": "[]",
        },
        TALK,
    ),
    "databricks/dolly-15k": (
        {"instruction": "q", "context": "i", "response": "a", "category": "qa"},
        ["U q\n\ni", "A a"],
    ),
    "TRL texts": ({"prompt": "q", "completion": " a"}, ["U q", "A  a"]),
    "TRL messages": ({"prompt": WHOLE[:-1], "completion": WHOLE[-1:]}, TALK),
    "openai/gsm8k": ({"question": "q", "answer": "a"}, TURN),
    "Muennighoff/flan": ({"inputs": "q", "targets": "a", "task": "t"}, TURN),
    "OpenAI messages": ({"messages": WHOLE}, TALK),
    "OpenAI weights": (
        {"messages": [*WHOLE[:2], SAID | {"weight": 0}, *WHOLE[3:]]},
        ["S s", "U q", "B a", "U r", "A b"],
    ),
    "Axolotl chat_template": (
        {"messages": [*WHOLE[:2], SAID | {"train": False}, *WHOLE[3:]]},
        ["S s", "U q", "B a", "U r", "A b"],
    ),
    "anon8231489123/ShareGPT": (
        {"id": "1", "conversations": sharegpt(("human", "q"), ("gpt", "a"))},
        TURN,
    ),
    "Open-Orca/SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": "s", "weight": None},
                {"from": "human", "value": "q", "weight": 0.0},
                {"from": "gpt", "value": "a", "weight": 1.0},
            ]
        },
        ["S s", *TURN],
    ),
    "HuggingFaceH4/ultrachat": ({"prompt": "q", "messages": [ASKED, SAID], "id": "1"}, TURN),
    "Magpie-Align/Magpie": (
        {
            "instruction": "q",
            "response": "a",
            "conversations": sharegpt(("human", "q"), ("gpt", "a")),
        },
        TURN,
    ),
    "OpenThoughts": (
        {"system": "s", "conversations": sharegpt(("user", "q"), ("assistant", "a"))},
        ["S s", *TURN],
    ),
    "joined ShareGPT and OpenAI": (
        {"messages": [m | {"from": None, "value": None} for m in (ASKED, SAID)]},
        TURN,
    ),
    "DeepSeek reasoning": (
        {"messages": [ASKED, SAID | {"reasoning_content": "why"}]},
        ["U q", "A (why) a"],
    ),
    "OpenAssistant empty turns": (
        {"messages": [ASKED, role("assistant", ""), role("user", "r"), role("assistant", "b")]},
        ["U q", "B ", "U r", "A b"],
    ),
    "unlearned last answer": (
        {"messages": [*WHOLE[:4], role("assistant", "b", weight=0)]},
        ["S s", *TURN],
    ),
    "code completion": (
        {"prompt": "def f():", "completion": "\n    return 1\n    # done\n"},
        ["U def f():", "A     return 1\n    # done"],
    ),
}

COLUMNS = {
    "Open-Orca/OpenOrca": (
        {"system_prompt": "s", "question": "q", "response": "a"},
        {"system": "system_prompt", "instruction": "question", "output": "response"},
        ["S s", *TURN],
    ),
    "meta-math/MetaMathQA": (
        {"query": "q", "response": "a", "type": "t"},
        {"instruction": "query", "output": "response"},
        TURN,
    ),
    "lmsys/lmsys-chat-1m": (
        {"conversation": [ASKED, SAID], "model": "m"},
        {"messages": "conversation"},
        TURN,
    ),
}

REJECTED = {
    "Open-Orca/OpenOrca": ({"system_prompt": "s", "question": "q", "response": "a"}, "columns"),
    "Anthropic/hh-rlhf": ({"chosen": "Human: q", "rejected": "Human: r"}, "columns"),
    "trl-lib/ultrafeedback": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "columns"),
    "OpenAssistant/oasst1": ({"text": "q", "role": "prompter", "parent_id": None}, "columns"),
    "glaiveai/glaive-v2": ({"system": "SYSTEM: s", "chat": "USER: q"}, "columns"),
    "LDJnr/Capybara": (
        {"messages": [{"input": "q", "output": "a"}]},
        "message 0 has role None and content of type NoneType",
    ),
    "tool calls": (
        {"conversations": sharegpt(("human", "q"), ("function_call", "f"), ("gpt", "a"))},
        "message 1 has role 'function_call'",
    ),
    "content in parts": (
        {
            "messages": [
                role(name, [{"type": "text", "text": "a"}]) for name in ("user", "assistant")
            ]
        },
        "message 0 has role 'user' and content of type list",
    ),
    "OpenAI developer": ({"messages": [role("developer", "s"), ASKED, SAID]}, "role 'developer'"),
    "answer of the user": ({"messages": WHOLE[:-1]}, "roles system, user, assistant, user; allo"),
}


def encoded(tmp_path, tokens, row, **fields):
    """Return the texts of an encoded row, whole and of its labels."""
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    config = DataConfig(name="table", path=str(tmp_path / "rows.jsonl"), test_share=0.5, **fields)
    split = prepare(config, cache=tmp_path / "cache", hub=None).train
    task = Instruction(tokens, template=TEMPLATE, max_length=200, target_length=60)
    found = task.encode(split, lambda done: None)
    ids = found["input_ids"][0, : found["length"][0]]
    assert not found["cut"].any()
    decode = tokens.tokenizer.decode
    return decode(ids), [decode(ids[a:z]) for a, z in found["spans"][0]]


def written(messages):
    """Return the expected texts for messages as in :data:`READ`."""
    roles = {"U": "user", "S": "system", "A": "assistant", "B": "assistant"}
    whole = "".join(f"<cls>{roles[each[0]]}\n{each[2:]}<sep>\n" for each in messages)
    return whole, [f"{each[2:]}<sep>\n" for each in messages if each[0] == "A"]


@pytest.mark.parametrize("name", READ)
def test_rows_of_public_data_are_read(tmp_path, byte_tokens, name):
    row, messages = READ[name]
    assert encoded(tmp_path, byte_tokens("llama"), row) == written(messages)


@pytest.mark.parametrize("name", COLUMNS)
def test_named_columns_are_read(tmp_path, byte_tokens, name):
    row, columns, messages = COLUMNS[name]
    found = encoded(tmp_path, byte_tokens("llama"), row, columns=columns)
    assert found == written(messages)


@pytest.mark.parametrize("name", REJECTED)
def test_other_rows_are_rejected(tmp_path, byte_tokens, name):
    row, message = REJECTED[name]
    with pytest.raises(InputError, match=message):
        encoded(tmp_path, byte_tokens("llama"), row)
