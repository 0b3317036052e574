"""Invalid input prints one line, exits with 2 and writes nothing; a failed run exits with 1.

A failed run prints a paragraph. Most cases call the entry point in this process; a few run the
command as a separate process.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TINY

from trishul_ray import cli
from trishul_ray.errors import RunError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def trishul(monkeypatch, called, tmp_path, cache):
    """``trishul("run", ...)`` returns (exit code, standard error), in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRISHUL_HUB", raising=False)

    def call(*words):
        code, _, error = called(*words)
        return code, error

    return call


def one_line(text):
    """Return the error, without the progress lines before it."""
    lines = [line for line in text.strip().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    assert text.strip().splitlines()[-1] == lines[0], "nothing may follow the error"
    assert "Traceback" not in text
    return lines[0]


COMMAND_LINES = [
    (["run", "nosuch.yaml"], "config file nosuch.yaml does not exist"),
    (["run", "rounds", "3"], "as one word, rounds=VALUE"),
    (["run", "--frsh"], "No such option: --frsh"),
    (["rum"], "No such command 'rum'"),
    (["run", "dataset=mnist"], "unknown dataset 'mnist'"),
    (["run", "dataset=rows.csv"], "to read a file, set dataset=table data.path=FILE"),
    (["run", "resources.backend=inline", "gpus_per_actor=0.5"], "gpus_per_actor=0.5: torch"),
    (["sweep", "--axis", "lr=log(1e-4,1e-2)"], "define a search in a sweep file"),
    (["run", "budget=60"], "heads x rank"),
    (["run", "budget=4", "adapter.heads=10"], "heads x rank"),
    (["run", "adapter.rank=65"], "adapter.rank"),
    (["run", "adapter.targets=[qproj]"], "no module is named 'qproj'; nearest: q_proj"),
    (["run", "model=no/such-model"], "model.name='no/such-model' not found"),
    (["run", "model.name=./nowhere"], "model.name='./nowhere'"),
    (["run", "partition.min_size=500"], "partition.min_size"),
    (["run", "federation.clients=2000"], "federation.clients"),
    (["run", "storage.runs=nosuch://x"], "storage.runs='nosuch://x' cannot be opened"),
    (["run", "storage.runs=s3://"], "storage.runs='s3://' must name a bucket or folder"),
    (["table", "vision", "--report", "nosuch://x"], "--report='nosuch://x' cannot be opened"),
    (["run", "tracking.uri=file:///x", "tracking.mlflow=true"], "tracking.uri='file:///x'"),
    (["run", "dataset=cifar100", "model=vit-digits", "budget=4"], "set TRISHUL_HUB or storage.hub"),
    (["run", "storage.hub=/no/such/place"], "is not a folder"),
    (["run", "resources.device=cuda", "resources.backend=ray"], "torch finds no GPU"),
    (["run", "--method", "fedit"], "No such option: --method; write a field as method=VALUE"),
    (["run", "--local-steps=3"], "write a field as local_steps=VALUE"),
    (["sweep", "--lr", "1e-3"], "write a field as lr=VALUE"),
    (["export", "nosuch", "out"], "run 'nosuch' does not exist"),
    (["list", "datasets", "mnist"], "unknown dataset 'mnist'"),
    (["list", "datasets", "digit"], "did you mean 'digits'?"),
    (["list", "datasets", "digits", "partition.alpha=-1"], "partition.alpha=-1"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    COMMAND_LINES,
    ids=lambda v: " ".join(v)[:50] if isinstance(v, list) else "",
)
def test_command_lines(trishul, words, message, tmp_path):
    if words[0] == "run" and "=" in words[-1]:
        words = ["run", *TINY, *words[1:]]
    code, error = trishul(*words)
    assert code == 2, error
    assert message in one_line(error)
    assert not (tmp_path / "runs").exists(), "not even a lock"


def test_a_truncated_model_file_is_named(trishul, tmp_path):
    from trishul_ray.models.builtin import BUILTINS
    from trishul_ray.models.pretraining import new_backbone

    folder = tmp_path / "model"
    new_backbone(BUILTINS["vit-digits"]).save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    words = [w for w in TINY if w != "model.init=random"]
    code, error = trishul("run", *words, f"model={folder}")
    assert code == 2, error
    assert str(folder) in one_line(error)


@pytest.mark.slow
def test_truncated_checkpoints_are_reported_and_skipped(trishul, tmp_path):
    code, error = trishul("run", *TINY)
    assert code == 0, error
    (home,) = tmp_path.glob("runs/*/")
    before = json.loads((home / "result.json").read_text())
    (home / "result.json").unlink()
    for file in (home / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    code, error = trishul("run", *TINY)
    assert code == 0, error
    assert error.count("is corrupt (checksum differs): skipped") == 2
    after = json.loads((home / "result.json").read_text())
    assert after["state_sha256"] == before["state_sha256"]


def test_an_unreadable_result_is_made_again(trishul, tmp_path):
    trishul("run", *TINY)
    (home,) = tmp_path.glob("runs/*/")
    before = json.loads((home / "result.json").read_text())
    (home / "result.json").write_text("{")
    code, error = trishul("run", *TINY)
    assert code == 0
    assert "result.json is unreadable" in error
    assert json.loads((home / "result.json").read_text())["state_sha256"] == before["state_sha256"]


def test_a_diverging_run_fails_in_a_paragraph(trishul, tmp_path):
    code, error = trishul("run", *TINY, "optimizer.name=sgd", "optimizer.lr=1e30")
    assert code == 1
    paragraph = error[error.index("error: ") :]
    assert "not finite" in paragraph
    assert "optimizer.lr" in paragraph
    said = " ".join(paragraph.split())
    assert "The same command would fail again" in said and "to continue" not in said
    assert "Traceback" not in paragraph


def test_a_paragraph_keeps_its_line_breaks(trishul, monkeypatch):
    def fail(*_, **__):
        raise RunError(f"the cause, in two lines:\nthe second, {'long ' * 30}")

    monkeypatch.setattr("trishul_ray.runs.runner.run_experiment", fail)
    code, error = trishul("run", *TINY)
    assert code == 1
    paragraph = error[error.index("error: ") :].splitlines()
    assert paragraph[0] == "error: the cause, in two lines:"
    assert paragraph[1].startswith("the second, long") and max(map(len, paragraph)) <= 107
    assert "checkpoints; to continue: trishul run" in " ".join(paragraph)


def test_export_does_not_overwrite(trishul, tmp_path):
    trishul("run", *TINY)
    (home,) = tmp_path.glob("runs/*/")
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("mine")
    code, error = trishul("export", home.name, str(target))
    assert code == 2
    assert "is not an empty folder" in one_line(error)
    assert (target / "precious").read_text() == "mine"
    shutil.rmtree(home / "checkpoints")
    code, error = trishul("export", home.name, str(tmp_path / "new"))
    assert code == 1
    assert "no usable checkpoint" in error


def test_two_drivers_of_one_run_do_not_meet(trishul, tmp_path):
    from filelock import FileLock

    trishul("run", *TINY)
    (home,) = tmp_path.glob("runs/*/")
    with FileLock(tmp_path / "runs" / f".{home.name}.lock"):
        code, error = trishul("run", *TINY)
    assert code == 1
    assert "is being driven by another process" in " ".join(error.split())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "method.lam=-1"], 2, "error: method.lam=-1: input should be greater than"),
        (["nonsense"], 2, "error: No such command 'nonsense'"),
        (["--help"], 0, ""),
        (["run", "-h"], 0, ""),
    ],
)
def test_as_a_process(words, code, message, tmp_path):
    package = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "trishul_ray.cli", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": package},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
