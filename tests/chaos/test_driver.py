"""The driver killed or interrupted: nothing left behind, the same command continues the run."""

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

from trishul_ray.loading import load_experiment

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROUNDS = 4
#: Rounds of half a second, so that a kill finds one under way.
LONG = [f"federation.rounds={ROUNDS}", "federation.local_steps=20", "resources.actors=1"]
#: What Ray's own processes print.
RAYS_OWN = re.compile(r"raylet|gcs_|core_worker|\(pid=|WARNING|INFO|Traceback")


@pytest.fixture
def words(small_words):
    return [*small_words, *LONG, "storage.runs=runs"]


def result_of(tmp_path, experiment):
    return json.loads((tmp_path / "runs" / experiment.id / "result.json").read_text())


def test_a_driver_killed_twice_gives_the_same_bytes_and_one_mlflow_run(
    trishul, words, tmp_path, inline_result
):
    from mlflow.tracking import MlflowClient

    words = [*words, "tracking.mlflow=true"]
    experiment = load_experiment(None, words)
    # Before there is any checkpoint.
    first = trishul("run", *words)
    first.wait_for("starting clients")
    time.sleep(random.Random().uniform(0, 2))
    first.process.kill()
    assert first.left_behind() == []
    # At a random round.
    number = random.Random().randint(1, ROUNDS - 1)
    print(f"killed after round {number}")
    second = trishul("run", *words)
    second.wait_for(f"round {number}/{ROUNDS}")
    time.sleep(random.Random().uniform(0, 0.5))
    second.process.kill()
    assert second.left_behind() == []
    third = trishul("run", *words)
    code, out, errors = third.end()
    assert code == 0, errors
    assert "continuing after round" in errors
    assert RAYS_OWN.search(out + errors) is None, out + errors
    assert third.left_behind() == []

    reference = inline_result(experiment)
    result = result_of(tmp_path, experiment)
    assert result["state_sha256"] == reference.digest
    accuracies = [record["accuracy"] for record in reference.records]
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (group,) = [e for e in client.search_experiments() if e.name == "trishul"]
    (run,) = client.search_runs([group.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "accuracy")
    assert sorted((point.step, point.value) for point in history) == list(enumerate(accuracies))


def test_ctrl_c_on_a_terminal_stops_everything_and_says_how_to_go_on(
    trishul, words, tmp_path, inline_result
):
    experiment = load_experiment(None, words)
    parent, child = pty.openpty()
    screen = bytearray()

    def read():
        while True:
            try:
                screen.extend(os.read(parent, 4096))
            except OSError:  # the other side is closed
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
    deadline = time.monotonic() + 90
    while not re.search(rb"round [12]/4", screen):
        assert time.monotonic() < deadline, screen.decode()
        assert command.process.poll() is None, screen.decode()
        time.sleep(0.05)
    os.write(parent, b"\x03")  # the key itself: every process of the foreground group gets it
    assert command.process.wait(timeout=20) == 130, screen.decode()
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
    """Make the pseudo-terminal the controlling one, so that ^C becomes a signal."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


def test_ctrl_c_while_ray_starts_leaves_nothing(trishul, words):
    command = trishul("run", *words)
    command.wait_for("starting Ray")
    time.sleep(random.Random().uniform(0, 1.5))
    command.process.send_signal(signal.SIGINT)
    code, _, errors = command.end()
    assert code == 130, errors
    assert command.left_behind() == []


def mlflow_status(tmp_path):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (group,) = [e for e in client.search_experiments() if e.name == "trishul"]
    (run,) = client.search_runs([group.experiment_id])
    return run.info.status


def to_the_driver(command, signum):
    command.process.send_signal(signum)


def to_everyone(command, signum):
    for process in command.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


@pytest.mark.parametrize(
    ("backend", "signum", "send", "code"),
    [
        ("ray", signal.SIGTERM, to_the_driver, 143),  # Docker
        ("ray", signal.SIGTERM, to_everyone, 143),  # Slurm, systemd
        ("inline", signal.SIGTERM, to_the_driver, 143),
        ("inline", signal.SIGHUP, to_the_driver, 129),
    ],
    ids=["ray", "ray, all its processes", "inline", "inline, a lost terminal"],
)
def test_a_run_asked_to_end_stops_as_with_ctrl_c(
    trishul, words, tmp_path, backend, signum, send, code
):
    words = [*words, "tracking.mlflow=true", f"resources.backend={backend}"]
    experiment = load_experiment(None, words)
    command = trishul("run", *words)
    command.wait_for(f"round 1/{ROUNDS}")
    send(command, signum)
    send(command, signum)  # `timeout` and Slurm send it twice
    ended, out, errors = command.end(30)
    assert ended == code, errors
    assert command.left_behind() == []
    # Ray, too, may say in a line that its processes were ended.
    unwanted = RAYS_OWN if send is to_the_driver else re.compile(r"Traceback|\*\*\* SIG")
    assert unwanted.search(out + errors) is None, out + errors
    place = f"runs/{experiment.id}/checkpoints; to continue: trishul run {words[0]}"
    assert place in errors
    assert mlflow_status(tmp_path) == "KILLED"
    assert list((tmp_path / "runs" / experiment.id / "checkpoints").glob("round-*"))


def test_a_run_asked_to_end_while_ray_starts_leaves_nothing(trishul, words):
    command = trishul("run", *words)
    command.wait_for("starting Ray")
    time.sleep(random.Random().uniform(0, 1.5))
    command.process.send_signal(signal.SIGTERM)
    code, _, errors = command.end(30)
    assert code == 143, errors
    assert command.left_behind() == []
