"""Exports of finished runs, used with only transformers and peft installed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import metadata_load
from method_runs import SINGLE
from transformers import pipeline

import trishul_ray
import trishul_ray.runs.export
from trishul_ray import InputError
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.runs.export import export_run

#: Runs the code of each model card and prints the score of the given rows.
STRANGER = """
import io, json, os, re, sys
for name in ("trishul_ray", "ray", "mlflow"):
    sys.modules[name] = None
import torch
from PIL import Image

def prompt_ids(task, row):
    ids = tokenizer(task["template"].format(**row), add_special_tokens=False)["input_ids"]
    return torch.tensor([[*task["begin_ids"], *ids, *task["prompt_end_ids"]]])

for folder, rows, classes in json.load(sys.stdin):
    os.chdir(folder)
    card = open("README.md").read()
    exec(re.search("```python\\n(.*?)```", card, re.S).group(1))
    task = json.load(open("task.json"))
    right = 0
    with torch.no_grad():
        for row in rows:
            if task["task"] == "ImageClassification":
                image = Image.new("L", (8, 8))
                image.putdata(row["pixels"])
                logits = model(**processor(image, return_tensors="pt")).logits
            elif task["task"] == "SequenceClassification":
                inputs = tokenizer(*(row[f] for f in task["fields"]), return_tensors="pt",
                                   truncation="longest_first", max_length=task["max_length"])
                logits = model(**inputs).logits
            elif task["task"] == "Verbalizer":
                logits = model(prompt_ids(task, row)).logits[:, -1, task["answer_ids"]]
            else:
                inputs = tokenizer(task["template"].format(**row), return_tensors="pt")
                out = model.generate(**inputs, max_new_tokens=task["target_length"])
                text = tokenizer.decode(out[0], skip_special_tokens=True)
                right += text.strip().lower() == task["class_texts"][int(row["label"])]
                continue
            if model.config.id2label.get(0) != "LABEL_0":
                assert list(model.config.id2label.values()) == classes
            right += int(logits.argmax()) == row["label"]
    print(right / len(rows))
"""


def score(exports, tmp_path):
    """Score ``(folder, rows, classes)`` of every export in one process without this package."""
    done = subprocess.run(
        [sys.executable, "-c", STRANGER], input=json.dumps(exports), capture_output=True,
        text=True, cwd=tmp_path, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def run_card(folder):
    """Run the code of a model card, and return its variables."""
    blocks = re.findall("```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    found = {}
    for block in blocks:
        exec(block.replace('folder = "."', f"folder = {str(folder)!r}"), found)
    return found


@pytest.fixture
def run(cache, tmp_path):
    def make(*dataset, **fields):
        paths = {"runs": tmp_path / "runs", "cache": cache}
        shape = {"clients": 3, "clients_per_round": 2, "local_steps": 3}
        common = {"federation": shape, "rounds": 2, "lr": 0.02, "backend": "inline"}
        common |= {"mlflow": False, "progress": "off"}
        return trishul_ray.run(*dataset, **(common | paths | fields))

    return make


@pytest.mark.slow
def test_exports_of_every_method_score_alike_elsewhere(run, tmp_path):
    methods = [{"name": name} for name in SINGLE]
    methods.append({"name": "flexlora", "truncate": False})
    results = [run(method=method, evaluation={"limit": 100}) for method in methods]
    context = results[0]._trained.context
    test = trishul_ray_rows(results[0])
    exports = []
    for method, result in zip(methods, results, strict=True):
        export = result.summary["export"]
        folder = result.adapter_path or result.model_path
        if method["name"] == "fullft":
            assert export["form"] == "model" and "fullft trains all weights" in export["note"]
            assert result.adapter_path is None
        else:
            assert export["form"] == "adapter" and result.model_path is None
            folded = (
                method["name"] in ("federa", "fedex", "flora", "frlora") or "truncate" in method
            )
            assert ("changes of the frozen weights" in export["note"]) == folded
            assert export["relative_error"] <= 1e-6 and export["ranks"][1] <= 64
        exports.append((folder, test, list(context.info.classes)))
    found = score(exports, tmp_path)
    for result, accuracy in zip(results, found, strict=True):
        # One row may be at the border of two classes.
        assert accuracy == pytest.approx(result.final["accuracy"], abs=0.0101), result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_backbone_is_exported_dequantized(kind, run, tmp_path):
    result = run(method="fedex", model={"quantize": kind}, evaluation={"limit": 100})
    adapter, test = Path(result.adapter_path), trishul_ray_rows(result)
    note = trishul_ray.runs.export.export_run(
        result.id, tmp_path / "merged", merged=True, runs=str(tmp_path / "runs")
    ).note
    assert f"dequantized from {kind}" in note
    assert f"{kind}; backbone/ contains the same" in result.summary["export"]["note"]
    for folder in (adapter, tmp_path / "merged"):
        assert f"\n- quantized: {kind}\n" in (folder / "README.md").read_text()
    classes = list(result.classes)
    found = score([(str(f), test, classes) for f in (adapter, tmp_path / "merged")], tmp_path)
    assert found == pytest.approx([result.final["accuracy"]] * 2, abs=0.0101)


@pytest.mark.parametrize("method", ["local", "fedsa", "trishul-private"])
def test_personalized_model_scores_as_in_its_evaluation(method, run, tmp_path):
    result = run(method=method, evaluation={"limit": 100, "per_client": True, "every": 0})
    note = result.summary["export"]["note"]
    card = (Path(result.adapter_path) / "README.md").read_text()
    for text in (note, card):
        assert "the global model, in" in text and "export" in text and "--client N" in text
    if method == "local":  # It has no global parameters.
        assert re.search(r"in which the ([\d,]+) of \1 ", note)
    rows, runs = trishul_ray_rows(result), str(tmp_path / "runs")
    pixels = np.array([row["pixels"] for row in rows], np.uint8).reshape(-1, 8, 8)
    labels = np.array([row["label"] for row in rows])
    asked = [client for client, rounds in result.participation.items() if rounds]
    mix = class_mix_of(result)
    for client in asked:
        found = result.predict_probabilities(pixels, client=client)
        right = found.argmax(axis=1) == labels
        recall = np.array([right[labels == k].mean() for k in range(10)])
        weights = mix[int(client)]
        assert (recall * weights).sum() / weights.sum() == pytest.approx(result.personal[client])
        written = export_run(result.id, tmp_path / client, merged=False, runs=runs, client=client)
        assert f"model of client {client}" in written.note
        card = (tmp_path / client / "README.md").read_text()
        assert f"- model: the personalized model of client {client}" in card
        loaded = loaded_by_peft(tmp_path / client)
        with torch.no_grad():
            inputs = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
            exported = loaded(inputs).logits
            own, shared = (result.model(c)(inputs).logits for c in (client, None))
        torch.testing.assert_close(exported, own, atol=1e-5, rtol=1e-5)
        assert not (tmp_path / client / "config.json").exists()
        by_itself = pipeline("image-classification", model=str(tmp_path / client)).model
        assert list(by_itself.config.id2label.values()) == list(result.classes)
        torch.testing.assert_close(by_itself(inputs).logits, own, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(own, shared, atol=1e-3)
    for wrong, said in ((7, "not one of the run's 3 clients; allowed: "), ("a", "client=a is not")):
        with pytest.raises(InputError, match=said):
            result.model(client=wrong)


def test_missing_personalized_model_is_rejected(run, tmp_path):
    result = run(method="fedit", evaluation={"limit": 10}, rounds=1)
    with pytest.raises(InputError, match="client=0: method=fedit has no personalized models"):
        result.model(client=0)
    assert "global" not in result.summary["export"]["note"]
    shape = {"clients": 3, "clients_per_round": 1, "local_steps": 1}
    scores = {"limit": 10, "per_client": True, "every": 0}
    result = run(method="local", evaluation=scores, rounds=1, federation=shape)
    asked, *others = sorted(result.participation, key=result.participation.get, reverse=True)
    with pytest.raises(InputError, match=f"has not taken part yet.*allowed: {asked}$"):
        export_run(
            result.id, tmp_path / "o", merged=True, runs=str(tmp_path / "runs"), client=others[0]
        )
    assert not (tmp_path / "o").exists()


def class_mix_of(result):
    """Return the rows of each client and class [C, K]."""
    from trishul_ray.data.partition import class_mix
    from trishul_ray.federation.prepare import prepare_run

    prepared = prepare_run(result._experiment)
    return class_mix(prepared.shards, prepared.dataset.train.labels, 10)


def loaded_by_peft(folder):
    from peft import PeftModel
    from transformers import AutoModelForImageClassification

    base = AutoModelForImageClassification.from_pretrained(folder / "backbone")
    return PeftModel.from_pretrained(base, folder).eval()


def trishul_ray_rows(result):
    """Return the test rows that a run on digits scored."""
    from trishul_ray.federation.prepare import prepare_run
    from trishul_ray.federation.worker.context import build_context

    context = build_context(result._experiment, prepare_run(result._experiment))
    batch = context.test.batch(context.scored["test"][1])
    return [
        {"pixels": pixels.flatten().tolist(), "label": int(label)}
        for pixels, label in zip(batch["pixels"], batch["label"], strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_text_models_are_exported_with_their_tokenizer(merged, run, called, tmp_path):
    labels = np.arange(60) % 2
    rows = [
        {"text": f"{('left', 'right')[label]} {n}", "label": int(label)}
        for n, label in enumerate(labels)
    ]
    splits = {
        split: [{**row, "label": ("left", "right")[row["label"]]} for row in part]
        for split, part in {"train": rows[:40], "test": rows[40:]}.items()
    }
    own = tmp_path / "cache"
    results = [
        run(splits, model={"name": name, "init": "random"}, method="fedit", budget=2, cache=own,
            max_length=24, target_length=8, local_steps=20, template="say {text}:")
        for name in ("bert-tiny", "t5-tiny", "llama-tiny")
    ]  # fmt: skip
    shutil.rmtree(own / "rows")
    shutil.rmtree(own / "data")
    exports = []
    for number, result in enumerate(results):
        folder = tmp_path / f"export{number}"
        words = ["export", result.path, folder, *(["--merged"] if merged else [])]
        code, said, error = called(*words)
        assert code == 0 and "after round 2" in said, error
        assert (folder / "tokenizer.json").is_file()
        card = (folder / "README.md").read_text()
        assert "- needs: transformers >= 5" + " and peft >= 0.21.2" * (not merged) + "\n" in card
        kind = re.search(r"pipeline_tag: (.*)", card)[1]
        if kind == "text2text-generation":  # transformers 5 has no pipeline for it.
            assert run_card(folder)["prompt"] == "say ...:"
        else:
            names = [name for name, _ in pipeline(kind, model=str(folder)).model.named_modules()]
            assert any("lora_A" in name for name in names) == (not merged)
        exports.append((str(folder), rows[40:], ["left", "right"]))
    for result, accuracy in zip(results, score(exports, tmp_path), strict=True):
        assert accuracy == pytest.approx(result.final["accuracy"], abs=0.0501), result


def test_exported_adapter_finds_its_backbone(run, tmp_path, vit_folder):
    from transformers import AutoModelForImageClassification, ViTConfig

    config = ViTConfig.from_pretrained(vit_folder())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        backbone = AutoModelForImageClassification.from_config(config)
    backbone.save_pretrained(tmp_path / "mine")
    result = run(model=str(tmp_path / "mine"), method="fedit", budget=2, evaluation={"limit": 16})
    saved = json.loads((tmp_path / "runs" / result.id / "adapter/adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "mine")
    assert "base_model" not in metadata_load(f"{result.adapter_path}/README.md")
    assert not (tmp_path / "runs" / result.id / "adapter/backbone").exists()
    by_itself = AutoModelForImageClassification.from_pretrained(
        result.adapter_path,
        config=ViTConfig.from_pretrained(f"{result.adapter_path}/config"),
        ignore_mismatched_sizes=True,
    )
    assert list(by_itself.config.id2label.values()) == list(result.classes)
    with torch.no_grad():
        inputs = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        found, right = by_itself(inputs).logits, result.model()(inputs).logits
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    test = trishul_ray_rows(result)
    (accuracy,) = score([(result.adapter_path, test, list("0123456789"))], tmp_path)
    assert accuracy == pytest.approx(result.final["accuracy"], abs=0.0626)


@pytest.mark.parametrize(
    ("method", "template"), [("fullft", "chat"), ("fedit", "chat"), ("fedit", "plain")]
)
def test_exported_decoder_stops_at_template_ends(method, template, run, tmp_path, monkeypatch):
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    ends = {"bos_token_id": 5, "eos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=400, num_attention_heads=2, **small, **ends)
    backbone = tmp_path / "hub/owner/chat"
    LlamaForCausalLM(config).save_pretrained(backbone)
    (backbone / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Chat\n")
    tokenizer = byte_tokenizer("llama")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<sep>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(backbone)
    result = run(
        "synthetic/instructions", model="owner/chat", hub=tmp_path / "hub", method=method,
        template=template, rounds=1, evaluation={"limit": 8},
        **({"budget": 2} if method == "fedit" else {}),
    )  # fmt: skip
    folder = tmp_path / "whole"
    monkeypatch.setenv("TRISHUL_HUB", str(tmp_path / "hub"))
    export_run(result.id, folder, merged=True, runs=str(tmp_path / "runs"))
    ends = ["</s>", "<sep>"] if template == "chat" else ["</s>"]
    stops = tokenizer.convert_tokens_to_ids(ends)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == sorted(stops)
    assert result.model().generation_config.eos_token_id == sorted(stops)
    assert json.loads((folder / "task.json").read_text())["end_ids"] == sorted(stops)
    home = Path(result.adapter_path or folder)
    known = metadata_load(home / "README.md")
    assert (known["base_model"], known["license"]) == ("owner/chat", "apache-2.0")
    assert known["library_name"] == ("transformers" if method == "fullft" else "peft")
    assert ("lora" in known["tags"]) == (method == "fedit")
    found = run_card(home)
    prompt = tokenizer.decode(found["inputs"]["input_ids"][0])
    assert "Name three rivers." in prompt and prompt.endswith(
        "t:" if template == "chat" else "s.\n"
    )
    assert found["output"].shape[1] <= found["task"]["target_length"]
