"""Runs on storage that is missing, fails during a round, is read-only, or has lost files."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from s3_server import KEYS, S3Server
from tiny_run import TINY

import trishul_ray
from trishul_ray.errors import CorruptFileError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runs.runner import run_experiment
from trishul_ray.tracking.progress import RunProgress


@pytest.fixture
def trishul_here(monkeypatch, called, tmp_path, cache):
    """``trishul_here("run", ...)`` returns exit code, stdout, stderr in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.delenv("TRISHUL_HUB", raising=False)

    return called


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """Return the folder of a finished run; tests copy it and never change it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TRISHUL_CACHE", str(cache))
        run_experiment(load_experiment(None, TINY), RunProgress(2, Console(quiet=True)))
    (home,) = folder.glob("runs/*/")
    return home


@pytest.fixture
def home(finished, tmp_path):
    """Copy the finished run for one test."""
    target = tmp_path / "runs" / finished.name
    shutil.copytree(finished, target)
    return target


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def without_order(settings):
    fields = json.loads(settings)
    # The backbone is in the folder of the run, which may have been moved since.
    _, _, backbone = fields["base_model_name_or_path"].partition("/runs/")
    names = sorted(fields["target_modules"])
    return fields | {"target_modules": names, "base_model_name_or_path": backbone}


def words_of(text):
    return " ".join(text.split())


def test_a_finished_run_lists_its_files(home):
    listed = json.loads((home / "result.json").read_text())["files"]
    there = {name for name in contents(home) if not name.startswith("checkpoints/")}
    assert set(listed) == there - {"result.json", "attempt.json"}


@pytest.mark.parametrize(
    "lost",
    [["adapter"], ["adapter/README.md", "metrics.parquet"], ["config.yaml"]],
    ids=lambda names: "+".join(names),
)
def test_missing_files_of_a_finished_run_are_restored(trishul_here, home, lost):
    before = contents(home)
    for name in lost:
        path = home / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, out, error = trishul_here("run", *TINY)
    assert code == 0, error
    assert "from the last checkpoint" in words_of(error)
    after = contents(home)
    assert after.keys() == before.keys()
    # PEFT writes the module names in any order.
    settings = "adapter/adapter_config.json"
    assert without_order(before.pop(settings)) == without_order(after[settings])
    results = [json.loads(content["result.json"]) for content in (before, after)]
    before.pop("result.json")
    for result in results:
        result["sha256"].pop(settings)
        result.pop("checksum")
    assert results[0] == results[1]
    assert {name for name in before if before[name] != after[name]} == set()
    for line in out.splitlines():
        if line.startswith(("result ", "adapter ")):
            assert Path(line.split()[1]).exists(), line
    _, _, error = trishul_here("run", *TINY)
    assert "restored" not in error


@pytest.mark.parametrize(
    "name",
    ["adapter/adapter_model.safetensors", "adapter/README.md",
     "metrics.parquet", "diagnostics.npz", "test_rows.npz"],
)  # fmt: skip
def test_flipped_bit_of_a_finished_run_is_restored(trishul_here, home, name):
    before = (home / name).read_bytes()
    damaged = bytearray(before)
    damaged[len(damaged) // 2] ^= 1
    (home / name).write_bytes(damaged)
    with pytest.raises(CorruptFileError, match=rf"{name} is corrupt \(checksum differs\); run it"):
        trishul_ray.load(home)
    code, _, error = trishul_here("run", *TINY)
    assert code == 0, error
    restored = f"restored {name} (corrupt in {home}) from the last checkpoint"
    assert words_of(error).count(restored) == 1
    assert (home / name).read_bytes() == before
    assert trishul_ray.load(home).repeated
    _, _, error = trishul_here("run", *TINY)
    assert "restored" not in error


@pytest.mark.parametrize("kind", ["folder", "loop"])
def test_folder_named_like_a_file_hides_nothing(trishul_here, home, kind):
    file = home / "diagnostics.npz"
    file.unlink()
    file.mkdir() if kind == "folder" else file.symlink_to(file)
    code, _, error = trishul_here("run", *TINY)
    assert code == 0, error
    restored = "cannot restore" if kind == "folder" else "restored"
    assert f"{restored} diagnostics.npz (" in words_of(error)


@pytest.mark.parametrize("damage", ["gone", "corrupt"])
def test_lost_files_are_named_and_not_listed(trishul_here, home, damage):
    for file in (home / "checkpoints").iterdir():
        file.unlink() if damage == "gone" else file.write_bytes(b"short")
    shutil.rmtree(home / "adapter")
    code, out, error = trishul_here("run", *TINY)
    assert code == 0, error
    assert "cannot restore adapter/README.md" in words_of(error)
    assert "its last checkpoint is missing or corrupt" in words_of(error)
    assert f"{home}/adapter" not in out
    assert f"{home}/result.json" in out


def test_run_without_a_valid_checkpoint_starts_over(trishul_here, home):
    before = json.loads((home / "result.json").read_text())
    (home / "result.json").unlink()
    for file in (home / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    code, _, error = trishul_here("run", *TINY)
    assert code == 0, error
    assert "no valid checkpoint is left: the run starts over" in error
    after = json.loads((home / "result.json").read_text())
    assert after["state_sha256"] == before["state_sha256"]


@pytest.fixture
def mounted(tmp_path):
    """``mounted(*options)`` returns the folder of a new tmpfs; skips if mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        words = ["mount", *options, "-t", "tmpfs", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def test_finished_run_on_a_read_only_disk(trishul_here, home, mounted):
    disk = mounted("-o", "size=100m")
    place = f"storage.runs={disk}"
    shutil.copytree(home, disk / home.name)
    remount = ["mount", "-o", "remount,ro", str(disk)]
    subprocess.run(remount, check=True)
    code, out, error = trishul_here("run", *TINY, place)
    assert code == 0, error
    assert "has already finished" in error and f"{disk}/{home.name}/adapter" in out
    for more in (["--fresh"], ["seed=1"]):
        code, _, error = trishul_here("run", *TINY, place, *more)
        assert code == 2, error
        assert f"storage.runs='{disk}': cannot be written: Read-only file system" in error


def test_full_disk_names_the_command_to_continue(trishul_here, mounted, tmp_path):
    disk = mounted("-o", "size=100m")
    words = [*TINY, f"storage.runs={disk}", "storage.retry_seconds=0.3"]
    experiment = load_experiment(None, words)
    code, _, error = trishul_here("run", *words)
    assert code == 0, error
    shutil.copy(disk / experiment.id / "result.json", tmp_path)
    # Resume from the first checkpoint without a free byte on the disk.
    (disk / experiment.id / "result.json").unlink()
    newest = max((disk / experiment.id / "checkpoints").glob("round-*"))
    newest.unlink()
    with open(disk / "filler", "wb") as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(2**16))
            filler.flush()
    kept = contents(disk / experiment.id / "checkpoints")
    code, _, error = trishul_here("run", *words)
    assert code == 1, error
    message = words_of(error[error.index("error: ") :])
    assert "No space left on device" in message
    kept_in = f"{disk}/{experiment.id}/checkpoints"
    assert f"Finished rounds are kept in {kept_in}; to continue:" in message
    assert contents(disk / experiment.id / "checkpoints") == kept
    (disk / "filler").unlink()
    code, _, error = trishul_here("run", *words)
    assert code == 0, error
    assert "continuing after round" in error
    results = [disk / experiment.id / "result.json", tmp_path / "result.json"]
    first, second = (json.loads(path.read_text())["state_sha256"] for path in results)
    assert first == second


def test_a_full_cache_disk_is_one_paragraph(trishul_here, mounted, monkeypatch):
    monkeypatch.setenv("TRISHUL_CACHE", str(mounted("-o", "size=300k")))
    code, _, error = trishul_here("run", *TINY)
    assert code == 1 and "Traceback" not in error, error
    assert "No space left on device: " in words_of(error)
    assert "to continue:" in words_of(error)


@pytest.mark.usefixtures("mlflow_store")
def test_full_disk_before_a_checkpoint_is_logged_once(trishul_here, mounted, tmp_path):
    from mlflow.tracking import MlflowClient

    disk, uri = mounted("-o", "size=16k"), f"sqlite:///{tmp_path}/runs/mlflow.db"
    words = [*TINY, f"storage.runs={disk}", "storage.retry_seconds=0.3", "tracking.mlflow=true"]
    code, _, error = trishul_here("run", *words, f"tracking.uri={uri}")
    assert code == 1, error
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
    code, _, error = trishul_here("run", *words, f"tracking.uri={uri}")
    assert code == 0, error
    client = MlflowClient(uri)
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "FINISHED"


def test_full_disk_of_mlflow_prints_no_traceback(trishul_here, mounted, empty_store, tmp_path):
    from mlflow.tracking import MlflowClient

    disk = mounted("-o", f"size={empty_store.stat().st_size + 40_000}")
    shutil.copy(empty_store, disk / "mlflow.db")
    words = [*TINY, "tracking.mlflow=true", f"tracking.uri=sqlite:///{disk}/mlflow.db"]
    code, _, error = trishul_here("run", *words)
    assert "Traceback" not in error and len(error.splitlines()) < 40, error
    assert "full" in error
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
    code, _, error = trishul_here("run", *words)
    assert code == 0 and "not logged" not in error, error
    client = MlflowClient(words[-1].partition("=")[2])
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "FINISHED"


def test_disk_too_full_for_mlflow_is_unchanged(trishul_here, mounted):
    disk = mounted("-o", "size=100k")
    code, _, error = trishul_here("run", *TINY, f"storage.runs={disk}", "tracking.mlflow=true")
    assert code == 2, error
    assert "disk is full" in error
    assert [path.name for path in disk.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("place", "says"),
    [("file", "File exists"), ("file/runs", "Not a directory"), ("/proc/x", "No such file")],
)
def test_unwritable_folder_is_an_input_error(trishul_here, tmp_path, place, says):
    (tmp_path / "file").write_text("mine")
    code, _, error = trishul_here("run", *TINY, f"storage.runs={place}")
    assert code == 2, error
    (line,) = error.strip().splitlines()[-1:]
    assert line.startswith(f"error: storage.runs='{place}': cannot be written: {says}")
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_missing_bucket_is_wrong_input(trishul_here, s3_bucket):
    code, _, error = trishul_here(
        "run", *TINY, f"storage.runs={s3_bucket('runs', bucket='no-such-bucket')}"
    )
    assert code == 2, error
    line = error.strip().splitlines()[-1]
    assert line.startswith("error: storage.runs='s3://no-such-bucket/runs?")
    assert "bucket 'no-such-bucket' does not exist" in line


@pytest.mark.slow
@pytest.mark.chaos
def test_a_run_on_s3_is_killed_and_continued(trishul, s3_bucket, inline_result):
    from trishul_ray.federation.checkpoint import run_folder

    runs = f"storage.runs={s3_bucket('runs')}"
    longer = ["federation.rounds=4", "federation.local_steps=20", "resources.actors=1"]
    words = [*TINY, *longer, runs]
    experiment = load_experiment(None, words)
    first = trishul("run", *words, "resources.backend=ray")
    first.wait_for("round 2/4")
    first.kill()
    home = run_folder(experiment)
    assert home.child("checkpoints").names() != []
    assert not home.exists("result.json")
    code, out, errors = trishul("run", *words, "resources.backend=inline").end()
    assert code == 0, errors
    assert "continuing after round" in errors
    result = json.loads(home.read("result.json"))
    assert result["state_sha256"] == inline_result(experiment).digest
    assert home.place("adapter") in out
    assert all(home.exists(name) for name in result["files"])


@pytest.mark.slow
@pytest.mark.chaos
def test_failing_object_store_is_one_paragraph(trishul, monkeypatch, inline_result):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = S3Server()
    server.start()
    bucket = server.new_bucket()
    longer = ["federation.rounds=4", "federation.local_steps=20", "storage.retry_seconds=1"]
    words = [*TINY, *longer, f"storage.runs={server.uri(bucket, 'runs')}"]
    command = trishul("run", *words)
    command.wait_for("round 1/4")
    server.end()
    code, _, errors = command.end()
    assert code == 1, errors
    message = words_of(errors[errors.index("error: ") :])
    assert f"cannot write s3://{bucket}/runs/" in message and "Traceback" not in errors
    assert f"Finished rounds are kept in s3://{bucket}/runs/" in message
    assert "; to continue: trishul run" in message
