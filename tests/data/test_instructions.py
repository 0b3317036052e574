"""Instructions with responses: columns that are read, and rows that are rejected."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.choose_rows import choose_rows
from trishul_ray.data.conversations import read_rows
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.prepare import coverage_of, prepare_run
from trishul_ray.runs.prediction import input_columns


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(folder, rows, suffix=".jsonl", name="rows"):
    file = folder / f"{name}{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def read(folder, file, **fields):
    data = DataConfig(name="table", path=str(file), test_share=0.5, **fields)
    return prepare(data, cache=folder / "cache", hub=None)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "asked", "fields"),
    [
        ({"instruction": "a", "input": "b", "output": "c"}, ("a", "b"), ("instruction", "input")),
        ({"instruction": "a", "context": "b", "response": "c"}, ("a", "b"), None),
        ({"prompt": "a", "completion": "c"}, ("a", ""), ("instruction",)),
        ({"prompt": [user("a")], "completion": [assistant("c")]}, ("a", ""), ("messages",)),
        ({"question": "a", "answer": "c"}, ("a", ""), ("instruction",)),
        ({"inputs": "a", "targets": "c"}, ("a", ""), ("instruction",)),
        ({"messages": [user("a"), assistant("c")]}, ("a", ""), ("messages",)),
        ({"messages": json.dumps([user("a"), assistant("c")])}, ("a", ""), ("messages",)),
        (
            {"messages": [m | {"from": None, "value": None} for m in (user("a"), assistant("c"))]},
            ("a", ""),
            ("messages",),
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}]},
            ("a", ""),
            ("messages",),
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_layouts_of_datasets_are_recognized(tmp_path, suffix, row, asked, fields):
    data = read(tmp_path, write(tmp_path, [row] * 4, suffix))
    assert data.info.kind == "instruction" and not data.info.classes
    assert data.info.fields == (fields or ("instruction", "input"))
    for split in (data.train, data.test):
        for found in read_rows(split, 0, 2):
            assert (found.instruction, found.input) == asked and found.output == "c"
    if data.info.fields != ("messages",):
        said = input_columns(data.info, {}, [row])
        assert said["instruction"].to_pylist() == ["a"]
        assert "input" not in said or said["input"].to_pylist() == [asked[1]]
    elif "messages" in row:
        form = json.dumps if isinstance(row["messages"], str) else list
        said = input_columns(data.info, {}, [{"messages": form([user("a")])}])
        assert json.loads(said["messages"][0].as_py()) == [user("a"), assistant("-")]


def test_scored_columns_may_exist_only_in_test_rows(tmp_path):
    rows = [{"instruction": str(n), "output": "yes"} for n in range(4)]
    scored = {"choices": ["no", "yes"], "choice": 1, "references": ["yeah"]}
    write(tmp_path, rows, name="train")
    write(tmp_path, [rows[0] | scored, {**rows[0], "instruction": "x", **scored}], name="test")
    data = read(tmp_path, tmp_path)
    assert data.test.column("choice").tolist() == [1, 1] and "choice" not in data.train.columns
    config = DataConfig(name="table", path=str(tmp_path), drop_repeated=True)
    assert len(choose_rows(data, config, cache=tmp_path / "cache").train) == 3
    lists = {name: json.dumps(value) for name, value in scored.items()}  # choice: "1"
    table = pa.Table.from_pylist([row | lists for row in rows])
    csv.write_csv(table, tmp_path / "rows.csv")
    data = read(tmp_path, tmp_path / "rows.csv")
    assert data.test.column("choice").tolist() == [1, 1]
    assert data.test.texts("choices").to_pylist() == [lists["choices"]] * 2


def test_dolly_categories_are_groups(tmp_path):
    rows = [
        {"instruction": "a", "context": "", "response": "c", "category": k, "who": w}
        for k, w in ("qx", "py", "qx", "py")
    ]
    data = read(tmp_path, write(tmp_path, rows), columns={"client": "who"})
    assert data.info.groups == ("p", "q") and data.info.clients == ("x", "y")
    named = [{"ask": "a", "say": "c"}] * 4
    columns = {"instruction": "ask", "output": "say"}
    assert read(tmp_path, write(tmp_path, named), columns=columns).info.kind == "instruction"


def test_texts_with_labels_stay_a_classification(tmp_path):
    rows = [{"text": str(n), "label": n % 2, "prompt": "a", "completion": ""} for n in range(4)]
    assert read(tmp_path, write(tmp_path, rows)).info.kind == "text"


def test_rows_without_an_answer_are_counted(tmp_path):
    good, talk = [user("a"), assistant("c")], [user("a"), assistant("c"), user("b")]
    rows = [{"messages": found} for found in (good, good, [*talk, assistant(" ")], good)]
    file = write(tmp_path, rows)
    with pytest.raises(InputError, match=r"messages \(column 'messages'\) is missing in 1 of 4"):
        read(tmp_path, file)
    notes = read(tmp_path, file, skip_broken=True).info.origin.notes
    assert notes == ("1 rows without messages skipped",)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([user("a")], "has the roles user; allowed"),
        ([assistant("c"), user("a")], "has the roles assistant, user; allowed"),
        ([user("a"), {"role": "tool", "content": "c"}], "message 1 has role 'tool'"),
        ([user("a"), {"role": "assistant", "content": ["c"]}], "content of type list"),
        ([user("a"), assistant("c") | {"weight": 0.5}], "weight or train .*allowed: 0, 1"),
        ("hello", "is not a JSON list of messages"),
        ({"role": "user"}, "is not a list of messages"),
    ],
)
def test_malformed_conversation_is_reported_with_its_row(tmp_path, messages, said):
    if not isinstance(messages, str):
        messages = json.dumps(messages)
    rows = [{"messages": json.dumps([user("a"), assistant("c")])}, {"messages": messages}]
    with pytest.raises(InputError, match=rf"rows\.jsonl, train row 1: messages.*{said}"):
        read(tmp_path, write(tmp_path, rows))


def test_prompt_messages_need_completion_messages(tmp_path):
    talk = [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]
    rows = [{"prompt": talk, "completion": [assistant("d")]}] * 4
    (found,) = read_rows(read(tmp_path, write(tmp_path, rows)).train, 0, 1)
    assert found.messages == [*talk, assistant("d")]
    with pytest.raises(InputError, match=r"row 3: instruction\+output has the roles user; allowed"):
        read(tmp_path, write(tmp_path, [*rows[:3], {"prompt": [user("a")], "completion": []}]))
    for row in (
        {"prompt": "a", "completion": [assistant("d")]},
        {"prompt": talk, "completion": "d"},
    ):
        with pytest.raises(InputError, match="must be both texts, or both lists of messages"):
            read(tmp_path, write(tmp_path, [row] * 4))


SYSTEM = {"role": "system", "content": "be loud"}
PAIRS = [["one?", "1"], ["two?", "2"]]
TURNS = [SYSTEM, *(m for q, a in PAIRS for m in (user(q), assistant(a))), user("a"), assistant("c")]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "a", "output": "c", "system": "be loud", "history": PAIRS}, TURNS),
        (
            {"instruction": "a", "output": "c", "system": "be loud", "history": json.dumps(PAIRS)},
            TURNS,
        ),
        ({"conversations": TURNS[1:], "system": "be loud"}, TURNS),
        ({"prompt": [user("a")], "completion": [assistant("c")], "system": "be loud"},
         [SYSTEM, user("a"), assistant("c")]),
    ],
)  # fmt: skip
def test_system_messages_and_histories_are_read(tmp_path, row, messages):
    data = read(tmp_path, write(tmp_path, [row] * 4))
    (found,) = read_rows(data.train, 0, 1)
    assert found.messages == messages
    asked = {k: v for k, v in row.items() if k not in ("output", "completion")}
    if "conversations" in row:
        asked["conversations"] = TURNS[1:-1]
    said = input_columns(data.info, {}, [asked])["messages"][0].as_py()
    assert json.loads(said) == [*messages[:-1], assistant("-")]


def test_blank_system_messages_change_nothing(tmp_path):
    row = {"instruction": "a", "output": "c", "system": "", "history": [], "tools": "[...]"}
    data = read(tmp_path, write(tmp_path, [row] * 4))
    assert data.info.fields == ("instruction",)
    assert data.info.origin.notes == ("columns not read: 'tools' (4 rows)",)
    with pytest.raises(InputError, match=r"row 3: .*history is not a list of pairs"):
        read(tmp_path, write(tmp_path, [*[row] * 3, row | {"history": ["x"]}]))


def test_unlearned_answers_are_kept_and_counted(tmp_path):
    talk = [user("a"), assistant("bad") | {"weight": 0}, user("b"), assistant(" ")]
    good = [user("c"), assistant("good") | {"reasoning_content": "hm", "from": None, "weight": 1}]
    after = [user("d"), assistant("bad") | {"train": False}]
    data = read(tmp_path, write(tmp_path, [{"messages": [*talk, *good, *after]}] * 4))
    (found,) = read_rows(data.train, 0, 1)
    assert [m.get("weight") for m in found.messages] == [None, 0, *[None] * 4]
    assert found.messages[-1] == assistant("good") | {"reasoning_content": "hm"}
    assert data.info.origin.notes == (
        "12 answers without labels: blank, or weight 0",
        "4 messages with 'reasoning_content', which only a chat template can read",
    )
    for rows in ([{"messages": [*talk, *after]}], [{"messages": [user("a"), talk[1]]}]):
        with pytest.raises(InputError, match=r"messages .* is missing in 1 of 1"):
            read(tmp_path, write(tmp_path, rows))


def test_indentation_of_answers_stays(tmp_path):
    rows = [{"prompt": "def f():\n", "completion": "\n \n    return 1\n    # done \n\n"}] * 4
    (found,) = read_rows(read(tmp_path, write(tmp_path, rows)).train, 0, 1)
    assert found.output == "    return 1\n    # done"


def test_instructions_ask_for_their_task(tmp_path):
    file = write(tmp_path, [{"prompt": "a", "completion": "c"}] * 4)
    words = ["dataset=table", f"data.path={file}", "model=llama-tiny", "partition.kind=iid"]
    words += ["federation.clients=2", "federation.clients_per_round=2", "model.init=random"]
    with pytest.raises(InputError, match=r"set task\.kind=instruction"):
        prepare_run(load_experiment(None, words))
    tuned = load_experiment(None, [*words, "task.kind=instruction"])
    assert (tuned.task.max_length, tuned.task.target_length) == (512, 256)
    with pytest.raises(InputError, match=r"'table' has instructions with answers"):
        prepare_run(load_experiment(None, [*words, "task.kind=verbalizer"]))


def test_template_text_is_in_the_id(tmp_path):
    file = tmp_path / "mine.jinja"
    words = ["dataset=synthetic/instructions", f"task.template={file}"]
    ids = set()
    for end in ("", "\n"):
        text = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}" + end
        file.write_text(text)
        experiment = load_experiment(None, words)
        assert experiment.task.template == text
        ids.add(experiment.id)
    assert len(ids) == 2
    file.unlink()
    with pytest.raises(InputError, match="cannot be read as a template"):
        load_experiment(None, words)


def test_unseen_groups_and_repeated_rows(small):
    rows = small("dataset=synthetic/instructions", "task.kind=instruction", "model.name=llama-tiny")

    def changed(**data):
        return rows.model_copy(update={"data": rows.data.model_copy(update=data)})

    def prepared(**data):
        return prepare_run(changed(**data))

    whole, apart = prepared(), prepared(test_groups=("copy", "sort"))
    groups = whole.dataset.info.groups
    chosen = [groups.index("copy"), groups.index("sort")]

    def count(split):
        return int(np.isin(split.column("group"), chosen).sum())

    assert count(apart.dataset.train) == 0 < count(whole.dataset.train)
    total = count(whole.dataset.train) + count(whole.dataset.test)
    assert count(apart.dataset.test) == total
    scored = coverage_of(changed(test_groups=("copy", "sort")), apart).test
    assert scored.official == scored.held == len(apart.dataset.test)
    assert len(apart.shards.permutation) == len(whole.dataset.train) - count(whole.dataset.train)

    (said,) = [line for line in whole.cut if "also test rows" in line]
    repeated = int(said.split()[0].replace(",", ""))
    distinct = prepared(drop_repeated=True)
    assert not any("also test rows" in line for line in distinct.cut)
    assert len(distinct.dataset.train) == len(whole.dataset.train) - repeated > 0
    assert distinct.dataset.info.origin.notes[-1].startswith(f"{repeated:,} training rows skipped")

    with pytest.raises(InputError, match=r"test_groups=cpoy: 'cpoy' is not a group of.*copy"):
        prepared(test_groups=("cpoy",))
    with pytest.raises(InputError, match=r"no training rows of .* remain"):
        prepared(test_groups=groups)
    with pytest.raises(InputError, match="drop_repeated requires instructions"):
        prepare_run(small("data.drop_repeated=true"))


def test_cut_answers_are_counted_per_split(small):
    words = ["dataset=synthetic/instructions", "task.kind=instruction", "model.name=llama-tiny"]
    words += ["task.target_length=2", "data.validation_share=0.2"]
    cut = [line.split()[0] for line in prepare_run(small(*words)).cut if "answers cut" in line]
    assert cut == ["train", "validation", "test"]
