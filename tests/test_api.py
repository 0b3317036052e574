"""The Python interface: the same runs as the command's, from names, rows and modules."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from transformers import AutoModelForImageClassification

import trishul_ray
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.runs.runner import run_steps
from trishul_ray.tracking.progress import RunProgress

#: A run of a second, in this process.
TINY = {
    "model": {"init": "random"},
    "federation": {"clients": 3, "clients_per_round": 2, "local_steps": 2},
    "rounds": 2,
    "evaluation": {"limit": 32},
    "backend": "inline",
    "mlflow": False,
    "progress": "off",
}
#: The same for the command.
WORDS = [
    "model.init=random", "federation.clients=3", "federation.clients_per_round=2",
    "federation.local_steps=2", "federation.rounds=2", "evaluation.limit=32",
    "resources.backend=inline", "tracking.mlflow=false",
]  # fmt: skip


@pytest.fixture
def tiny(cache, tmp_path):
    """``tiny("digits", rounds=3)`` returns the result of a short run in this test's folder."""

    def run(*dataset, **fields):
        paths = {"runs": tmp_path / "runs", "cache": cache}
        return trishul_ray.run(*dataset, **(TINY | paths | fields))

    return run


def digits(count):
    """Return images uint8 [8, 8] and labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images[:count] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    return list(pixels), [int(label) for label in labels[:count]]


def seen_by(result, images):
    """Return the images as the model of a result receives them, float32 [N, 1, 8, 8]."""
    task = result._trained.context.task
    pixels = torch.from_numpy(np.stack(images)[:, None] / 255).float()
    return (pixels - task.mean[0]) / task.std[0]


def test_a_run_is_the_commands_and_says_nothing(tiny, called, tmp_path, cache, capsys):
    result = tiny("digits", method="fedit", seed=1)
    assert capsys.readouterr() == ("", "")
    paths = [f"storage.runs={tmp_path / 'runs'}", f"storage.cache={cache}"]
    words = ["method=fedit", "seed=1", *WORDS, *paths]
    assert result.id == load_experiment(None, words).id and not result.repeated
    code, _, error = called("run", *words)
    assert code == 0 and "this run has already finished" in error
    assert tiny(method="fedit", seed=1).repeated  # digits is the default.
    stored = json.loads((tmp_path / "runs" / result.id / "result.json").read_text())
    del stored["checksum"]
    assert result.summary == stored and "export" in stored
    loaded = trishul_ray.load(result.id, runs=str(tmp_path / "runs"))
    assert loaded.summary == stored and loaded.repeated
    assert trishul_ray.load(tmp_path / "runs" / result.id).final == result.final


def test_the_history_is_a_table_by_round(tiny):
    result = tiny(rounds=3, evaluation={"limit": 32, "every": 2})
    assert list(result.history.index) == [0, 1, 2, 3] and result.history.index.name == "round"
    accuracy = result.history["accuracy"]
    assert np.isnan(accuracy[1]) and accuracy[3] == result.final["accuracy"]
    assert accuracy.max() == result.best["accuracy"] and accuracy[0] == result.untuned["accuracy"]
    assert result.config["federation"]["rounds"] == 3
    assert result.id in repr(result) and "after round 3" in repr(result)


@pytest.mark.slow
def test_scores_of_rows_compare_two_runs(tiny):
    first = tiny("digits")
    scores = first.row_scores
    # The same 32 rows for every seed and batch size, in order.
    assert len(scores) == 32 and scores.index.is_monotonic_increasing
    assert set(scores) <= {0.0, 1.0}
    assert scores.mean() == pytest.approx(first.final["accuracy"])
    other = tiny("digits", seed=1, evaluation={"limit": 32, "batch_size": 5})
    assert other.row_scores.mean() == pytest.approx(other.final["accuracy"])
    found = first.compare(other)
    assert found.rows == 32
    difference = first.final["accuracy"] - other.final["accuracy"]
    assert found.difference == pytest.approx(difference)
    with pytest.raises(trishul_ray.InputError, match="scored different test rows"):
        first.compare(tiny("digits", evaluation={"limit": 16}))
    # One more round: the scores of rows belong to the last round.
    more = tiny("digits", rounds=3)
    assert more.row_scores.mean() == pytest.approx(more.final["accuracy"])


def test_the_model_predicts_as_the_exported_adapter_does(tiny):
    result = tiny(
        method={"name": "trishul", "lam": 0.0}, model={"init": "pretrained"}, local_steps=9
    )
    images, _ = digits(40)
    model = result.model()
    pixels = seen_by(result, images)
    with torch.no_grad():
        logits = model(pixel_values=pixels).logits
    assert result.predict(images) == [model.config.id2label[k] for k in logits.argmax(1).tolist()]
    probabilities = result.predict_probabilities(images, batch_size=7)
    torch.testing.assert_close(torch.from_numpy(probabilities), logits.softmax(1))
    base = AutoModelForImageClassification.from_pretrained(f"{result.adapter_path}/backbone")
    adapted = PeftModel.from_pretrained(base, result.adapter_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(pixels).logits, logits, atol=1e-4, rtol=1e-4)
    assert result.classes == tuple("0123456789") and result.model_path is None


def test_tuned_decoder_answers_and_reports_truncation(tiny, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": a}]}
        for n, a in enumerate(["yes", "no", "so it is and so it will be"] * 6)
    ]
    lengths = {"kind": "instruction", "max_length": 60, "target_length": 12, "template": "turns"}
    decoder = {"name": "llama-tiny", "init": "random"}
    result = tiny(rows, model=decoder, task=lengths, partition={"kind": "iid"}, rounds=1)
    stored = json.loads(next(tmp_path.glob("runs/*/result.json")).read_text())
    cut = r"rows: (\d+) of (\d+) answers cut"
    found = [re.findall(cut, line) for line in stored["data"]["cut"]]
    assert np.array(found).astype(int).sum(axis=0).tolist() == [[6, 18]]
    asked = ["say 1", "say 2"]
    answers = result.predict(asked)
    chats = [[{"role": "user", "content": text}] for text in asked]
    assert result.predict({"messages": chats}) == answers and len(answers) == 2
    settings = json.loads((Path(result.adapter_path) / "task.json").read_text())
    assert settings["date"] and "Assistant" in settings["template"]


def test_a_stopped_run_is_continued(tiny, tmp_path, cache, capsys):
    paths = [f"storage.runs={tmp_path / 'runs'}", f"storage.cache={cache}"]
    experiment = load_experiment(None, [*WORDS, *paths])
    steps = run_steps(experiment, RunProgress(2))
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()
    with pytest.raises(trishul_ray.InputError, match=r"has not finished: no result\.json"):
        trishul_ray.load(experiment.id, runs=str(tmp_path / "runs"))
    capsys.readouterr()
    result = tiny(progress="plain")
    said = capsys.readouterr().err
    assert result.id == experiment.id and "continuing after round 1" in said
    assert "round 2/2" in said and "\x1b" not in said
    assert tiny(fresh=True).summary["state_sha256"] == result.summary["state_sha256"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mehtod": "fedit"}, "unknown field 'mehtod'"),
        ({"alpha": 0.1}, "'alpha' is ambiguous: it may be partition.alpha or adapter.alpha"),
        ({"method": "fedit", "lam": 0.1}, "unknown field 'lam': only method="),
        ({"progress": "loud"}, "progress='loud': must be 'off', 'plain', 'rich'"),
        ({"model": 3}, "model of type int: it must be a name, a section, or an nn.Module"),
        ({"dataset": "digit"}, "unknown dataset 'digit'; .* did you mean 'digits'"),
        ({"dataset": [1, 2]}, "they are of type list, or empty; pass a Hugging Face Dataset"),
        ({"method": object()}, "method: object: must be a method's name, or a section"),
        ({"config": 3}, "config of type int: it must be a YAML file, or a dictionary"),
        ({"tokenizer": "bert"}, "tokenizer: only a model that is an nn.Module"),
        ({"on_round": 3}, "on_round of type int: it must be a function"),
        ({"dataset": {"test": [{"text": "a"}]}}, "have the splits test; pass train"),
    ],
)
def test_wrong_input_is_one_line(fields, message, tiny, tmp_path):
    with pytest.raises(trishul_ray.InputError, match=message) as caught:
        tiny(**fields)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/*"))
    with pytest.raises(trishul_ray.InputError, match=r"does not exist: no config\.yaml"):
        trishul_ray.load("0" * 12, runs=str(tmp_path))


def test_configuration_is_a_file_or_a_dictionary(tiny, tmp_path):
    content = {"method": "ffalora", "federation": {"clients": 4}}
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(content))
    federation = {"clients_per_round": 2, "local_steps": 2}
    one = tiny(config=str(file), federation=federation)
    assert one.config["method"]["name"] == "ffalora" and one.config["federation"]["clients"] == 4
    assert tiny(config=content, federation=federation).repeated


@pytest.mark.slow
def test_rows_are_a_dataset_named_by_content(tiny, tmp_path):
    import datasets

    images, labels = digits(60)
    names = [f"digit {label}" for label in labels]
    options = {"columns": {"image": "pixels"}, "budget": 4}
    options |= {"model": {"name": "vit-digits", "init": "random"}}
    rows = [{"pixels": i, "label": n} for i, n in zip(images, names, strict=True)]
    result = tiny(rows, **options)
    assert result.config["data"]["name"] == "rows"
    assert result.summary["data"]["train"]["used"] == 48  # the rest are test rows
    assert set(result.predict(images[:4])) <= set(names)
    file = tmp_path / "one.png"
    Image.fromarray(images[0]).save(file)
    for image in (file, str(file), Image.open(file), file.read_bytes()):
        assert result.predict([image]) == result.predict(images[:1])
    with pytest.raises(trishul_ray.InputError, match=f"{tmp_path}/no.png: not a readable image"):
        result.predict([file, tmp_path / "no.png"])
    assert tiny({"pixels": images, "label": names}, **options).id == result.id
    assert tiny(pd.DataFrame({"pixels": images, "label": names}), **options).id == result.id
    shuffled = [*names[1:], names[0]]
    assert tiny({"pixels": images, "label": shuffled}, **options).id != result.id
    # The location of the cache is not in the id.
    elsewhere = tiny({"pixels": images, "label": names}, cache=tmp_path / "cache", **options)
    assert elsewhere.id == result.id
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=[*"abcdefghij"])}
    words = {"text": [f"word {n}" for n in labels], "label": labels}
    dataset = datasets.Dataset.from_dict(words, datasets.Features(kinds)).shuffle(seed=0)
    parts = {"train": dataset.select(range(40)), "test": dataset.select(range(40, 60))}
    splits = datasets.DatasetDict(parts)
    texts = tiny(splits, model={"name": "bert-tiny", "init": "random"}, max_length=16, budget=2)
    assert texts.classes == tuple("abcdefghij")
    assert texts.summary["data"]["test"]["used"] == 20
    assert set(texts.predict(["word 1", "word 2"])) <= set("abcdefghij")
    assert texts.predict(dataset) == texts.predict({"text": dataset["text"]})
    for given, message in [
        ([{"words": "a"}], "requires the columns text; these rows have words"),
        ("word 1", "pass a list of rows"),
        ([], "the list of rows is empty"),
    ]:
        with pytest.raises(trishul_ray.InputError, match=message):
            texts.predict(given)


class Net(nn.Module):
    """A model that belongs to no library."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.hidden, self.classifier = nn.Linear(64, 24), nn.Linear(24, 10)
        for parameter in self.parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)

    def forward(self, images):
        return self.classifier(self.hidden(images.flatten(1)).relu())


def test_any_module_is_a_model(tiny, tmp_path):
    net = Net()
    result = tiny(model=net, method="fedit", budget=2, rounds=3)
    assert result.id == tiny(model=Net(), method="fedit", budget=2, rounds=3).id
    assert result.id != tiny(model=Net(seed=1), method="fedit", budget=2, rounds=3).id
    assert result.config["model"]["name"] == "python:Net"
    images, _ = digits(30)
    model = result.model()
    assert type(model) is Net and not torch.equal(model.hidden.weight, net.hidden.weight)
    pixels = seen_by(result, images)
    with torch.no_grad():
        logits = model(pixels)
        adapted = PeftModel.from_pretrained(Net(), result.adapter_path).eval()
        torch.testing.assert_close(adapted(pixels), logits, atol=1e-5, rtol=1e-5)
    assert result.predict(images) == [str(k) for k in logits.argmax(1).tolist()]
    # Another process does not have the module: the error requests it.
    script = (
        "import trishul_ray\n"
        f"result = trishul_ray.load({result.id!r}, runs={str(tmp_path / 'runs')!r})\n"
        "print(result.final['accuracy'])\n"
        "result.model()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert float(done.stdout) == result.final["accuracy"]
    assert "was passed from Python, and is not stored: pass the same model again" in done.stderr


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear(60, 10)], r"model python:Sequential, on 2 rows of dataset digits "
         r"\(pixel_values float32 \[2, 1, 8, 8\]\), fails: mat1 and mat2 shapes"),
        ([nn.Linear(64, 7)], r"returns float32 \[2, 7\]; .* each of the 10 classes: \[2, 10\]"),
        ([nn.Linear(64, 12)], r"returns float32 \[2, 12\]; .* each of the 10 classes: \[2, 10\]"),
        ([nn.LazyLinear(10)], r"layer '1' \(LazyLinear\) has no weights yet; call the model once"),
        ([nn.Linear(64, 10), nn.LSTM(10, 10)], r"returns tuple; return logits"),
    ],
)  # fmt: skip
def test_unfit_module_is_rejected_before_the_run(tiny, tmp_path, layers, message):
    with pytest.raises(trishul_ray.InputError, match=message) as caught:
        tiny(model=nn.Sequential(nn.Flatten(), *layers), method="fedit", budget=1)
    assert "\n" not in str(caught.value) and not list((tmp_path / "runs").glob("*"))
    with pytest.raises(trishul_ray.InputError, match="tokenizer of type str is not a fast tok"):
        tiny(model=nn.Linear(2, 2), tokenizer="bert")


def test_callback_gets_rounds_and_raises_its_own_errors(tiny):
    seen = []

    def stop(record):
        seen.append(record)
        if record["round"] == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tiny(on_round=stop)
    result = tiny(on_round=seen.append)  # continues after round 1
    assert [record["round"] for record in seen] == [0, 1, 2]
    assert [r["accuracy"] for r in seen] == result.history["accuracy"].tolist()
    assert tiny(on_round=seen.append).repeated and len(seen) == 3


def test_second_run_in_a_process_is_rejected(tiny):
    errors = []

    def second(record):
        def attempt():
            try:
                tiny(seed=1)
            except trishul_ray.InputError as error:
                errors.append(str(error))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()

    assert tiny(rounds=1, on_round=second).final["round"] == 1
    assert len(errors) == 2 and errors[0].startswith(
        "this process is already running an experiment"
    )
    assert tiny(rounds=1, seed=1).final["round"] == 1


def test_any_other_error_is_the_packages_own(tiny, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr("trishul_ray.runs.runner.prepare_run", broken)
    with pytest.raises(trishul_ray.RunError, match=r"^ZeroDivisionError: deep inside$") as caught:
        tiny()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_predict_takes_a_batch(tiny):
    result = tiny(rounds=1)
    images, _ = digits(5)
    want, batch = result.predict(images), np.stack(images)
    for rows in (batch, batch[..., None], torch.from_numpy(batch), tuple(images)):
        assert result.predict(rows) == want
    for rows, message in [
        (batch[0], "pass a list of rows, even for a single row"),
        (batch / 255, r"an image is an array float64 \(8, 8\); it must be uint8"),
        (batch[:, None], r"an image is an array uint8 \(1, 8, 8\); it must be uint8"),
        ([None], "row 0: image is null"),
        ([batch[0].tolist()], "predict, row 0: list is not an image"),
    ]:
        with pytest.raises(trishul_ray.InputError, match=message):
            result.predict(rows)
    for predict in (result.predict, result.predict_probabilities):
        for size in (0, -1):
            with pytest.raises(trishul_ray.InputError, match=f"batch_size={size}: must be at"):
                predict(batch, batch_size=size)


def test_runs_are_listed_and_loaded_by_prefix(tiny, tmp_path):
    store = str(tmp_path / "runs")
    assert trishul_ray.list_runs(store).empty
    results = [tiny(rounds=1, method="fedit", seed=seed) for seed in range(2)]
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "runs" / "mlflow.db").touch()
    table = trishul_ray.list_runs(store)
    assert set(table.index) == {result.id for result in results}
    assert table.loc[results[1].id, "seed"] == 1
    assert table.loc[results[1].id, "final"] == results[1].final["accuracy"]
    assert (table["uploaded_bytes"] > 0).all() and " kB up, " in results[0]._repr_html_()
    assert trishul_ray.load(results[0].id[:7], runs=store).id == results[0].id
    assert trishul_ray.load(results[0].id, runs=Path(store)).id == results[0].id
    assert trishul_ray.list_runs(Path(store)).equals(table)
    for prefix, message in [
        ("", "does not exist"),
        (results[0].id[:10] + "zz", f"did you mean '{results[0].id}'"),
    ]:
        with pytest.raises(trishul_ray.InputError, match=message):
            trishul_ray.load(prefix, runs=store)
    twin = results[0].id[:6] + "0" * 6
    (tmp_path / "runs" / twin).mkdir()
    with pytest.raises(trishul_ray.InputError, match=f"is ambiguous: it matches .*{results[0].id}"):
        trishul_ray.load(results[0].id[:6], runs=store)


@pytest.mark.slow
def test_a_sweep_is_a_table_of_its_cells(tiny, tmp_path, cache):
    images, labels = digits(60)
    paths = {"runs": tmp_path / "runs", "cache": cache}
    rows = {"image": images, "label": labels}
    fields = {k: v for k, v in TINY.items() if k != "backend"}
    model = {"name": "vit-digits", "init": "random"}
    fields |= {"dataset": rows, "model": model, "budget": 4, "resources": {"actors": 1}}
    table = trishul_ray.sweep(
        axes={"method": ["fedit", "trishul"], "seed": range(2)}, **paths, **fields
    )
    assert list(table["method"]) == ["fedit", "fedit", "trishul", "trishul"]
    assert set(table["status"]) == {"finished"} and table["accuracy"].between(0, 1).all()
    # The same cells from the content of a file, without running anything.
    content = {"axes": {"method": ["fedit", "trishul"], "seed": "0..1"}}
    again = trishul_ray.sweep(content, **paths, **fields)
    pd.testing.assert_frame_equal(again, table)
    inline = tiny(**{**fields, "resources": {}, "backend": "inline"}, method="fedit", seed=1)
    assert inline.id == table["id"][1] and inline.repeated
    with pytest.raises(trishul_ray.InputError, match="unknown field 'mehtod'"):
        trishul_ray.sweep(axes={"mehtod": ["fedit"]})
    with pytest.raises(trishul_ray.InputError, match="pass either a file, or its content, or axes"):
        trishul_ray.sweep(rounds=3)
    with pytest.raises(trishul_ray.InputError, match="'seed' is of type int: it must be a list"):
        trishul_ray.sweep(axes={"seed": 3})
    with pytest.raises(trishul_ray.InputError, match=r"^sweep.*: .*axess"):
        trishul_ray.sweep({"axess": {"seed": [0]}})


def test_a_module_reads_texts_with_its_tokenizer(tiny):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(400, 16)
            self.hidden, self.classifier = nn.Linear(16, 16), nn.Linear(16, 2)
            for number, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.data = torch.randn(parameter.shape, generator=generator)

        def forward(self, input_ids, attention_mask):
            mask = attention_mask[..., None]
            mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
            return self.classifier(self.hidden(mean).relu())

    rows = [{"text": f"{'left' if n % 2 else 'right'} {n}", "label": str(n % 2)} for n in range(40)]
    result = tiny(rows, model=Reader(), tokenizer=byte_tokenizer("bert"), method="trishul",
                  budget=2, max_length=16, heads=2, rank=4)  # fmt: skip
    assert set(result.predict(["left 1", "right 2"])) <= {"0", "1"}


@pytest.mark.slow
def test_module_and_rows_reach_ray_workers(tiny, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    images, labels = digits(60)
    rows = [{"image": i, "label": str(n)} for i, n in zip(images, labels, strict=True)]
    inline = tiny(rows, model=net, method="fedit", budget=2)
    ray = tiny(rows, model=net, method="fedit", budget=2, backend="ray", runs=tmp_path / "ray",
               resources={"actors": 2})  # fmt: skip
    assert ray.summary["state_sha256"] == inline.summary["state_sha256"]
