"""Responses of a finished run: scored as texts, the same in any batch and in plain PEFT."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from damage import DAMAGE
from peft import PeftModel
from torchmetrics.functional.text.rouge import rouge_score
from transformers import AutoModelForCausalLM, AutoTokenizer

import trishul_ray
from trishul_ray.cli.trained import _print_scores
from trishul_ray.config.fields import DataConfig
from trishul_ray.data.conversations import Row
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.frame import cells_frame
from trishul_ray.report.layouts import Evaluated, TableLayout
from trishul_ray.report.outcomes import CellOutcome, SweepOutcome
from trishul_ray.report.summary import RunSummary
from trishul_ray.runs.evaluate import (
    ANSWERS,
    _read,
    best,
    draw_rows,
    evaluate_run,
    exact_match,
    repeated_share,
    rouge_l,
)
from trishul_ray.runs.harness import run_harness
from trishul_ray.runs.prediction import computing
from trishul_ray.storage.integrity import from_checked_json, to_checked_json
from trishul_ray.storage.store import Store
from trishul_ray.tasks.text import begin_ids

WORDS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def tuned(cache, tmp_path_factory, empty_store):
    """Run a run of a second on instructions."""
    runs = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, runs / "mlflow.db")
    return trishul_ray.run(
        "synthetic/instructions",
        method="fedit",
        model={"name": "llama-tiny", "init": "random"},
        budget=4,
        data={"test_groups": ["copy"]},
        federation={"clients": 3, "clients_per_round": 2, "local_steps": 20},
        rounds=2,
        task={"kind": "instruction", "target_length": 40},
        optimizer={"lr": 0.01},
        evaluation={"limit": 16},
        backend="inline",
        mlflow=True,
        progress="off",
        runs=runs,
        cache=cache,
    )


def answers_of(result):
    return [json.loads(line) for line in (Path(result.path) / ANSWERS).read_text().splitlines()]


def asked_of(row):
    """Return the instruction and the input of a row with a response."""
    asked, _, text = row["messages"][-1]["content"].partition("\n\n")
    return asked, text


def test_answers_and_scores_do_not_depend_on_batches(tuned):
    first = evaluate_run(tuned.path, rows=40, batch_size=1)
    single = answers_of(tuned)
    (Path(tuned.path) / "eval.json").unlink()
    whole = evaluate_run(tuned.path, rows=40, batch_size=8, untuned=True)
    assert [row["answer"] for row in answers_of(tuned)] == [row["answer"] for row in single]
    assert evaluate_run(tuned.path, rows=40) == whole  # read from the file
    scores = whole["tuned"]
    assert {k: v for k, v in scores.items() if not isinstance(v, dict)} == pytest.approx(
        {k: v for k, v in first["tuned"].items() if not isinstance(v, dict)}, rel=1e-5
    )
    assert scores["rows"] == len(single) == 40 and len(scores["groups"]) == 8
    assert scores["unseen"] == scores["groups"]["copy"]
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert scores["loss"] < whole["untuned"]["loss"] and "untuned" not in first
    bench = tuned._trained
    with computing(bench.context, bench.trained):
        rows = [Row.of(*asked_of(row), row["reference"]) for row in single]
        where = bench.context.device, bench.context.dtype
        likely = bench.context.task.log_likelihoods(bench.context.model, rows, *where)
    said = sum(len(row["reference"].encode()) for row in single)
    assert scores["bits_per_byte"] == pytest.approx(-likely.sum() / math.log(2) / said, rel=1e-5)
    by_row = [rouge_l(row["answer"], row["reference"]) for row in single]
    assert scores["rouge_l"] == pytest.approx(np.mean(by_row))

    peak = tuned.summary["peak_memory"]
    assert peak["of"] == "process" and peak["bytes"] > 10**8

    folder = Path(tuned.path)
    home = Store.open(str(folder.parent)).child(folder.name)
    cell = CellOutcome({}, tuned.id, "finished", "", "accuracy", RunSummary.read(home), home)

    def read(cells, **score):
        layout = TableLayout(name="answers", eval=Evaluated(**score))
        sweep = SweepOutcome("s", "S", "custom", "", {}, {}, (layout,), (), tuple(cells))
        return cells_frame(sweep, sweep.cells, layout)[0].replace({math.nan: None})

    assert [*read([cell], score="rouge_l", model="untuned")["shown"]] == [
        100 * whole["untuned"]["rouge_l"]
    ]
    for name in ("eval.json", ANSWERS):
        content = home.read(name)
        for damage in DAMAGE:
            home.write(name, DAMAGE[damage](content))
            if name == "eval.json":
                with pytest.raises(CorruptFileError, match=r"eval\.json "):
                    read([cell], score="rouge_l")
            assert _read(home, {"id": tuned.id}) == {}
        home.write(name, content)
    assert _read(home, {"id": tuned.id}) == whole
    lost = read([cell], score="loss")
    assert [*lost["value"], *lost["unit"]] == [scores["loss"], "loss"]

    # A run with longer responses is not compared with the other runs.
    other = Store.open(str(folder.parent)).child("other")
    changed = {**from_checked_json(home.read("eval.json"), "eval.json"), "new_tokens": 41}
    other.write("eval.json", to_checked_json({k: v for k, v in changed.items() if k != "checksum"}))
    longer = replace(cell, home=other)
    found = read([cell, longer, cell, replace(cell, summary=None)], score="rouge_l")
    assert [*found["value"]] == [scores["rouge_l"], None, scores["rouge_l"], None]
    assert [*found["gap"]] == ["", "evaluated differently", "", "not measured"]
    assert [*read([longer], score="rouge_l")["value"]] == [scores["rouge_l"]]


def test_evaluation_is_logged_when_mlflow_answers_again(tuned):
    from mlflow.tracking import MlflowClient

    database = Path(tuned.path).parent / "mlflow.db"
    content = database.read_bytes()
    database.write_bytes(b"this is not a database" * 99)
    with pytest.raises(InputError, match="MLflow store does not respond"):
        evaluate_run(tuned.path, rows=40)
    database.write_bytes(content)
    scores = evaluate_run(tuned.path, rows=40)["tuned"]
    run = MlflowClient(f"sqlite:///{database}").get_run(tuned.summary["mlflow_run_id"])
    assert run.data.metrics["eval/rouge_l"] == scores["rouge_l"]


def test_answers_are_limited_in_tokens(tuned):
    words = answers_of(tuned)
    short = evaluate_run(tuned.path, rows=40, new_tokens=2)
    assert short["new_tokens"] == 2 and short["tuned"]["answer_tokens"] <= 2
    for row, cut in zip(words, answers_of(tuned), strict=True):
        assert row["answer"].startswith(cut["answer"]) and row["reference"] == cut["reference"]
    assert short["tuned"]["loss"] == pytest.approx(
        evaluate_run(tuned.path, rows=40)["tuned"]["loss"]
    )
    with pytest.raises(
        InputError, match=r"answers of up to 9999 exceed the backbone's \d+ positions"
    ):
        evaluate_run(tuned.path, rows=40, new_tokens=9999)


def test_rows_are_drawn_in_equal_shares_of_groups(cache):
    test = prepare("synthetic/instructions", cache=cache, hub=None).test
    few, more = draw_rows(test, 40), draw_rows(test, 80)
    assert len(few) == len({*few.tolist()}) == 40 and (np.diff(few) > 0).all()
    assert {*few.tolist()} < {*more.tolist()}
    shares = np.bincount(test.column("group")[few]) / np.bincount(test.column("group"))
    assert np.ptp(shares) < 1 / np.bincount(test.column("group")).min()
    assert len(draw_rows(test, 10**6)) == len(test)


def test_repetition_is_the_share_of_repeated_tokens():
    assert repeated_share([7] * 10) == pytest.approx(6 / 7)  # One of seven runs is new.
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share(range(50)) == repeated_share([1, 1, 1]) == repeated_share([]) == 0


def test_endless_responses_are_reported(capsys):
    for ended, warns in ((0.6, False), (0.4, True)):
        scores = {"rows": 80, "ended": ended}
        _print_scores({"rows": 80, "of": 80, "split": "test", "tuned": scores})
        assert ("only 40% of the responses end" in capsys.readouterr().err) == warns


def test_rouge_equals_another_implementation():
    rng = np.random.default_rng(0)
    words = ["a", "the", "Cat", "sat.", "on-mat", "12", "ÄÖ", "x"]
    for _ in range(100):
        answer, reference = (
            " ".join(rng.choice(words, rng.integers(1, 9))) + " z" for _ in range(2)
        )
        wanted = float(rouge_score(answer, reference, rouge_keys="rougeL")["rougeL_fmeasure"])
        assert rouge_l(answer, reference) == pytest.approx(wanted, abs=1e-6)
    assert rouge_l("", "x") == 0 and math.isnan(rouge_l("x", "日本"))
    assert exact_match("The cat!", "cat") == 1 and exact_match("dog", "cat") == 0
    # These references are empty without articles and punctuation.
    found = {("", "A"): 0, ("the", "A"): 0, ("a.", "A"): 1, ("-", "+"): 0, (" + ", "+"): 1}
    assert {pair: exact_match(*pair) for pair in found} == found
    number = load_experiment(None, ["dataset=gsm8k"]).task.answer_pattern
    for said, right in {"so 3\n#### 1,200": 1, "#### 1200.": 1, "-1200": 0, "none": 0}.items():
        assert exact_match(said, "2 + <<2=2>>\n#### 1,200", number) == right
    assert math.isnan(exact_match("1", "no number", number))


def test_run_without_answers_is_rejected(cache, tmp_path):
    fields = {"runs": tmp_path, "cache": cache, "backend": "inline", "mlflow": False}
    fields["federation"] = {"clients": 2, "clients_per_round": 1, "local_steps": 1}
    model = {"init": "random"}
    result = trishul_ray.run("digits", model=model, rounds=1, progress="off", **fields)
    with pytest.raises(InputError, match="task ImageClassification"):
        evaluate_run(result.path)
    (Path(result.path) / "result.json").unlink()
    with pytest.raises(InputError, match="has not finished"):
        evaluate_run(result.path)


@pytest.fixture(scope="module")
def chosen(cache, tmp_path_factory):
    """Run on rows with choices; return the run and its folder."""
    rows = [
        {"instruction": f"say {word}", "output": word, "choices": WORDS, "choice": n}
        for _ in range(6)
        for n, word in enumerate(WORDS)
    ]
    rows += [{"instruction": "say it", "output": "it", "choices": [], "choice": None}] * 6
    further = [[]] * 6 + [["its", *WORDS]] * 2  # only of test rows
    test = zip(rows[:6] + rows[-2:], further, strict=True)
    return trishul_ray.run(
        {"train": rows, "test": [row | {"references": found} for row, found in test]},
        method="fedit",
        budget=4,
        model={"name": "llama-tiny", "init": "random"},
        federation={"clients": 2, "clients_per_round": 2, "local_steps": 20, "batch_size": 8},
        partition={"kind": "iid"},
        rounds=2,
        task={"kind": "instruction", "target_length": 16, "template": "{instruction} is:"},
        optimizer={"lr": 0.01},
        backend="inline",
        mlflow=False,
        progress="off",
        runs=tmp_path_factory.mktemp("runs"),
        cache=cache,
    )


def test_choices_are_scored_by_their_log_likelihoods(chosen):
    scores = evaluate_run(chosen.path)["tuned"]
    own = [row for row in answers_of(chosen) if row["reference"] != "it"]
    tokens, model = chosen._trained.context.task.tokens, chosen.model()
    right = {"acc": 0, "acc_norm": 0}
    for row in own:
        prompt = begin_ids(tokens) + tokens.ids(row["messages"][0]["content"] + " is:")
        sums = []
        for word in WORDS:
            ids = tokens.ids(word)
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
            sums.append(sum(float(logits[len(prompt) - 1 + n, k]) for n, k in enumerate(ids)))
        right["acc"] += WORDS[int(np.argmax(sums))] == row["reference"]
        normed = np.array(sums) / [len(word) for word in WORDS]
        right["acc_norm"] += WORDS[int(np.argmax(normed))] == row["reference"]
    assert scores["rows"] == 8 and scores["acc_rows"] == len(own) == 6
    for name, count in right.items():
        assert scores[name] == pytest.approx(count / len(own))


def test_choice_may_exceed_the_answer_limit(chosen):
    run, row = chosen._trained, Row.of("say it", "", "-")
    task, model = run.context.task, run.context.model
    choices = ["x" * task.target_length + end for end in ("", "a", "ab")]
    with computing(run.context, run.trained):
        rows = [row.answered(choice) for choice in choices]
        found = task.log_likelihoods(model, rows, run.context.device, run.context.dtype)
    assert found[0] > found[1] > found[2]


def test_the_best_of_several_right_answers_counts(chosen):
    scores = evaluate_run(chosen.path)["tuned"]
    rows = answers_of(chosen)
    for name, score in {"exact_match": exact_match, "rouge_l": rouge_l}.items():
        found = []
        for row in rows:
            right = [row["reference"], *row["references"]]
            found.append(max(score(row["answer"], each) for each in right))
        assert scores[name] == pytest.approx(np.mean(found))
    assert best(rouge_l, "b a", ["日本", "a", "a c"]) == pytest.approx(2 / 3)
    assert best(exact_match, "a", ["b", "A."]) == 1 and math.isnan(best(rouge_l, "x", ["日本"]))


def test_wrong_choices_and_references_are_rejected(tmp_path):
    row = {"instruction": "x", "output": "y", "choices": ["y", "z"], "choice": 0}
    file = tmp_path / "rows.jsonl"
    config = DataConfig(name="table", path=str(file))
    for wrong, said in (
        ({"choice": 2}, r"row 1: choices=.* right choice 2; allowed: a list"),
        ({"references": [" "]}, r"row 1: references=.*; allowed: a list of nonblank"),
    ):
        file.write_text("\n".join(map(json.dumps, [row | {"references": ["z"]}, row | wrong])))
        with pytest.raises(CorruptFileError, match=said):
            prepare(config, cache=tmp_path / "cache", hub=None)


def test_a_missing_harness_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"pip install '\.\[eval\]' in a clone .* 'lm-eval>="):
        run_harness("any", ["mine"])


@pytest.mark.slow
def test_the_harness_chooses_as_our_scores_do(chosen, tmp_path):
    """Without white space at the border, its log-likelihoods equal ours."""
    pytest.importorskip("lm_eval")
    ours = evaluate_run(chosen.path)["tuned"]
    asked = [
        {"q": row["messages"][0]["content"], "n": WORDS.index(row["reference"])}
        for row in answers_of(chosen)
        if row["reference"] != "it"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, asked)))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}} is:",
        "doc_to_choice": WORDS,
        "doc_to_target": "n",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
    theirs = run_harness(chosen.path, ["mine"], folder=tmp_path)["mine"]
    assert theirs["acc,none"] == pytest.approx(ours["acc"])
    assert theirs["acc_norm,none"] == pytest.approx(ours["acc_norm"])
    stored = json.loads((Path(chosen.path) / "harness.json").read_text())
    assert stored["results"]["mine"]["acc,none"] == theirs["acc,none"]


@pytest.mark.slow
def test_exported_adapter_answers_alike_in_plain_peft(tuned):
    evaluate_run(tuned.path, rows=40)
    folder = tuned.adapter_path
    task = json.loads((Path(folder) / "task.json").read_text())
    forms = yaml.safe_load(task["template"])
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/backbone")
    model = PeftModel.from_pretrained(base, folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in answers_of(tuned):
        asked, text = asked_of(row)
        prompt = forms["with_input"].format(instruction=asked, input=text)
        ids = [*task["begin_ids"], *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        found = model.generate(
            input_ids=torch.tensor([ids]),
            max_new_tokens=task["target_length"],
            do_sample=False,
            eos_token_id=task["end_ids"],
            pad_token_id=tokenizer.pad_token_id,
        )
        answer = tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True).strip()
        assert answer == row["answer"]
