"""A killed or interrupted driver leaves no processes, and the same command resumes the run."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import threading
import time

import psutil
import pytest

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROUNDS = 4
#: Rounds of half a second, so that a kill hits one in progress.
LONG = [
    *(f"federation.rounds={ROUNDS}", "federation.local_steps=20", "resources.actors=1"),
    "evaluation.diagnostics_every=0",  # Half of the figures, which take longer than all rounds.
]
#: Rounds that no test waits for: however late a signal arrives, the run has not ended.
MANY_ROUNDS = 1000
#: Seconds for a command to start or to end on a loaded machine.
LONG_WAIT = 200
#: Lines of Ray's own processes.
RAYS_OWN = re.compile(r"raylet|gcs_|core_worker|\(pid=|WARNING|INFO|Traceback")


@pytest.fixture
def words(small_words, mlflow_store):
    return [*small_words, *LONG, "storage.runs=runs"]


def result_of(tmp_path, experiment):
    return json.loads((tmp_path / "runs" / experiment.id / "result.json").read_text())


@pytest.mark.timeout(900)
def test_driver_killed_twice_keeps_bytes_and_mlflow_run(trishul, words, tmp_path, inline_result):
    from mlflow.tracking import MlflowClient

    words = [*words, "tracking.mlflow=true"]
    experiment = load_experiment(None, words)
    # Before the first checkpoint.
    first = trishul("run", *words)
    first.wait_for("starting clients")
    first.kill()
    # At a random round.
    number = random.Random().randint(1, ROUNDS - 1)
    print(f"killed after round {number}")
    second = trishul("run", *words)
    second.wait_for(f"round {number}/{ROUNDS}")
    time.sleep(random.Random().uniform(0, 0.5))
    second.kill()
    third = trishul("run", *words)
    code, out, errors = third.end()
    assert code == 0, errors
    # The second driver was killed in a later round, or between its last round and its figures.
    assert "continuing after round" in errors or "has already finished" in errors, errors
    assert RAYS_OWN.search(out + errors) is None, out + errors
    assert third.left_behind() == []

    reference = inline_result(experiment)
    result = result_of(tmp_path, experiment)
    assert result["state_sha256"] == reference.digest
    accuracies = [record.scores["accuracy"] for record in reference.checkpoint.records]
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (group,) = [e for e in client.search_experiments() if e.name == "trishul"]
    (run,) = client.search_runs([group.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "Score/accuracy")
    assert sorted((point.step, point.value) for point in history) == list(enumerate(accuracies))


def test_ctrl_c_on_terminal_prints_resume_command(trishul, words, tmp_path, inline_result):
    experiment = load_experiment(None, words)
    parent, child = pty.openpty()
    screen = bytearray()

    def read():
        while True:
            try:
                screen.extend(os.read(parent, 4096))
            except OSError:  # The other end is closed.
                return

    ends = dict.fromkeys(("stdin", "stdout", "stderr"), child)
    command = trishul(
        "run",
        *words,
        options={**ends, "text": False, "preexec_fn": lambda: own_terminal(child)},
        TERM="xterm-256color",
    )
    os.close(child)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + LONG_WAIT
    while not re.search(rb"round [12]/4", screen):
        assert time.monotonic() < deadline, screen.decode()
        assert command.process.poll() is None, screen.decode()
        time.sleep(0.05)
    os.write(parent, b"\x03")  # The key also signals every process of the foreground group.
    assert command.process.wait(timeout=60) == 130, screen.decode()
    assert command.left_behind() == []
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode()).replace("\r", "")
    assert f"checkpoints; to continue: trishul run {words[0]}" in text
    assert f"runs/{experiment.id}/checkpoints" in text
    assert RAYS_OWN.search(text) is None, text

    code, _, errors = trishul("run", *words, "resources.backend=inline").end()
    assert code == 0, errors
    assert "continuing after round" in errors
    assert result_of(tmp_path, experiment)["state_sha256"] == inline_result(experiment).digest


def own_terminal(descriptor):
    """Make the pseudo-terminal the controlling terminal, so that ^C becomes a signal."""
    import fcntl
    import termios

    # It is ignored if the tests run in the background.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def mlflow_status(tmp_path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (group,) = [e for e in client.search_experiments() if e.name == "trishul"]
    (run,) = client.search_runs([group.experiment_id])
    return run.info.status


def to_the_driver(command):
    return [command.process]


def to_all_processes(command):
    return command.processes()


def to_the_driver_last(command):
    """Signal Ray's processes first, and the driver when they have ended or are about to."""
    others = [process for process in command.processes() if process.pid != command.process.pid]
    yield from others
    psutil.wait_procs(others, timeout=0.5)
    yield command.process


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "signum", "receivers", "code"),
    [
        ("ray", signal.SIGTERM, to_the_driver, 143),  # Docker
        ("ray", signal.SIGTERM, to_all_processes, 143),  # Slurm, systemd
        ("ray", signal.SIGTERM, to_the_driver_last, 143),
        ("inline", signal.SIGTERM, to_the_driver, 143),
        ("inline", signal.SIGHUP, to_the_driver, 129),
    ],
    ids=["ray", "ray, all processes", "ray, the driver last", "inline", "inline, a lost terminal"],
)
def test_sigterm_stops_a_run_like_ctrl_c(
    trishul, words, tmp_path, backend, signum, receivers, code
):
    rounds = f"federation.rounds={MANY_ROUNDS}"
    words = [*words, rounds, "tracking.mlflow=true", f"resources.backend={backend}"]
    experiment = load_experiment(None, words)
    command = trishul("run", *words)
    command.wait_for(f"round 1/{MANY_ROUNDS}", LONG_WAIT)
    # `timeout` and Slurm send the signal twice.
    for _ in range(2):
        for process in receivers(command):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
    exit_code, out, errors = command.end(LONG_WAIT)
    assert exit_code == code, errors
    assert command.left_behind(60) == []
    # If Ray's processes also receive the signal, they may print a line about it.
    unwanted = RAYS_OWN if receivers is to_the_driver else re.compile(r"Traceback|\*\*\* SIG")
    assert unwanted.search(out + errors) is None, out + errors
    kept = f"runs/{experiment.id}/checkpoints; to continue: trishul run {words[0]}"
    assert kept in errors
    assert mlflow_status(tmp_path) == "KILLED"
    assert list((tmp_path / "runs" / experiment.id / "checkpoints").glob("round-*"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_while_ray_starts_leaves_nothing(trishul, words, signum, code):
    # With two threads, a native thread of OpenBLAS may receive the signal.
    command = trishul("run", *words, f"federation.rounds={MANY_ROUNDS}", OMP_NUM_THREADS="2")
    command.wait_for("starting Ray", LONG_WAIT)
    time.sleep(random.Random().uniform(0, 4))
    command.process.send_signal(signum)
    exit_code, _, errors = command.end(LONG_WAIT)
    assert exit_code == code, errors
    assert command.left_behind(60) == []


@pytest.mark.timeout(600)
def test_unfinished_bucket_writes_of_killed_coordinator_are_removed(
    trishul, words, s3_server, s3_bucket
):
    words = [*words, f"storage.runs={s3_bucket('runs')}", "federation.rounds=8"]
    bucket = s3_bucket("").split("/")[2]
    command = trishul("run", *words)
    command.wait_for("round 1/8", LONG_WAIT)
    left = f"runs/{load_experiment(None, words).id}/checkpoints/.round-000001.safetensors.1.tmp"
    s3_server.client().put_object(Bucket=bucket, Key=left, Body=b"half")
    ray_process(command, "ray::Coordinator").kill()
    code, _, errors = command.end(LONG_WAIT)
    assert code == 0 and "continues from the checkpoint" in errors, errors
    assert [key for key in s3_server.keys(bucket, "runs") if key.endswith(".tmp")] == []


def ray_process(command, name):
    (found,) = command.processes(name)
    return found


@pytest.mark.timeout(900)
def test_run_that_loses_ray_is_continued(trishul, words, tmp_path, inline_result):
    """Kill the raylet, which ends the driver; the next command resumes the run."""
    words = [*words, "tracking.mlflow=true"]
    experiment = load_experiment(None, words)
    command = trishul("run", *words)
    command.wait_for(f"round 1/{ROUNDS}", LONG_WAIT)
    ray_process(command, "raylet").kill()
    code, _, errors = command.end(LONG_WAIT)
    assert code != 0, errors
    assert command.left_behind(60) == []
    code, _, errors = trishul("run", *words, "resources.backend=inline").end(LONG_WAIT)
    assert code == 0, errors
    assert "continuing after round" in errors
    assert result_of(tmp_path, experiment)["state_sha256"] == inline_result(experiment).digest
    assert mlflow_status(tmp_path) == "FINISHED"
