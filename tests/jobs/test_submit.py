"""`trishul submit`, `status` and `stop` against a real cluster on this machine."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobSubmissionClient
from tiny_run import TINY

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def project(tmp_path):
    """A working directory with what must be shipped, and what must not."""
    folder = tmp_path / "project"
    for name in ("data", "runs", ".git", ".venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "large.bin").write_bytes(os.urandom(1 << 20))
    (folder / "mine.yaml").write_text("axes: {seed: [0, 1]}\n")
    (folder / ".env").write_text("PASSWORD=1")
    (folder / "keys").mkdir()
    (folder / "keys" / "server.pem").write_text("secret")
    return folder


def tiny(*more):
    return [word for word in TINY if not word.startswith("storage.runs=")] + list(more)


def test_a_command_is_submitted_followed_and_not_repeated(
    cluster, trishul, project, tmp_path, cache
):
    address = cluster(TOKEN)
    token = {"RAY_AUTH_TOKEN": TOKEN, "HOME": str(tmp_path)}
    runs = tmp_path / "results"
    there = ["--address", address]
    words = ["sweep", "mine.yaml", *tiny(f"storage.cache={cache}")]
    assert_others_are_refused(address, trishul, project, tmp_path)

    def submit():
        command = trishul(
            "submit", *there, "--runs", runs, "--working-dir", project, "--", *words, **token
        )
        return command.end(240)

    code, out, errors = submit()
    assert code == 0, out + errors
    # The job's output. Its report is where the results are, not in a folder of Ray.
    assert f"report    {runs}/reports/trishul-sweep-" in out and "joining the Ray cluster" in out
    assert [page.parent.parent for page in runs.glob("reports/*/report.html")] == [runs / "reports"]
    assert "2 not shipped, as they may hold secrets: .env, keys/server.pem (to ship" in errors
    assert "INFO" not in errors
    results = sorted(runs.glob("*/result.json"))
    assert len(results) == 2
    for path in results:
        assert json.loads(path.read_text())["wall_seconds"] > 0

    # Everything was shipped but data, results and environments.
    (folder,) = shipped("mine.yaml")
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"]

    # The cluster shows no token, and no secret of this process.
    details = JobSubmissionClient(address, headers={"Authorization": f"Bearer {TOKEN}"})
    (job,) = [job for job in details.list_jobs() if job.submission_id]
    assert TOKEN not in job.model_dump_json()
    assert TOKEN not in details.get_job_logs(job.submission_id)
    assert job.submission_id.startswith("trishul-sweep-")

    code, out, errors = trishul("status", *there, "--price", "2", cwd=project, **token).end()
    assert code == 0, out + errors
    assert "succeeded after" in out and "trishul sweep mine.yaml" in out
    assert "2 of 2 done, 0 running, 0 missing, 0 failed" in out
    assert "spent" in out

    # Submitted again, nothing runs again.
    before = [path.stat().st_mtime_ns for path in results]
    code, out, errors = submit()
    assert code == 0, out + errors
    assert [path.stat().st_mtime_ns for path in results] == before


def test_a_cluster_without_this_package_is_named(cluster, trishul, project, tmp_path):
    """Its Ray was started with another Python on PATH than its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys._base_executable)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    address = cluster(TOKEN, PATH=path, PYTHONPATH="")
    token = {"RAY_AUTH_TOKEN": TOKEN, "HOME": str(tmp_path)}
    words = ["--runs", tmp_path / "r", "--working-dir", project, "--", "run", *tiny()]
    code, _, errors = trishul("submit", "--address", address, *words, **token).end()
    errors = " ".join(errors.split())
    assert code == 1 and "the Python of the cluster has no trishul_ray: install it" in errors
    assert "Finished cells and rounds are kept" not in errors
    code, out, errors = trishul("status", "--address", address, **token).end()
    assert code == 0 and "fault     the Python of the cluster has no trishul_ray" in out, errors


def shipped(name):
    """Return the working directories of jobs on this machine that hold a file."""
    sessions = Path("/tmp").glob(f"trishul-{os.getpid()}-*/session_2*")
    folders = [
        folder
        for session in sessions
        for folder in session.glob("runtime_resources/working_dir_files/*")
    ]
    return [folder for folder in folders if (folder / name).exists()]


def test_detach_attach_stop_continue(cluster, trishul, project, tmp_path, cache):
    address = cluster(TOKEN)
    token = {"RAY_AUTH_TOKEN": TOKEN, "HOME": str(tmp_path)}
    runs = tmp_path / "results"
    there = ["--address", address]
    long = tiny(f"storage.cache={cache}", "federation.rounds=5000")
    words = ["--runs", runs, "--working-dir", project, "--", "run", *long]

    code, out, errors = trishul("submit", *there, "--detach", *words, **token).end()
    assert code == 0, out + errors
    (id,) = [line.split()[1] for line in out.splitlines() if line.startswith("job ")]
    experiment = load_experiment(None, [*long, f"storage.runs={runs}"])
    checkpoints = runs / experiment.id / "checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("round-*"))) >= 2, 120)

    # The same command attaches; Ctrl-C ends only that.
    attached = trishul("submit", *there, *words, **token)
    attached.wait_for("runs already", 60)
    time.sleep(2)
    attached.process.send_signal(signal.SIGINT)
    code, _, errors = attached.end()
    assert code == 130 and "the job goes on" in errors
    assert f"trishul stop --address {address} {id}" in errors

    code, out, errors = trishul("status", *there, **token).end()
    assert code == 0, out + errors
    assert f"{id}: running" in out and "0 of 1 done, 1 running" in out and "rounds a minute" in out

    code, out, errors = trishul("stop", *there, id, **token).end()
    assert code == 0, out + errors
    wait_for(lambda: not coordinators(), 60)
    kept = max(path.name for path in checkpoints.glob("round-*"))
    code, out, errors = trishul("status", *there, **token).end()
    assert f"{id}: stopped" in out

    # Continued, not started over.
    code, out, errors = trishul("submit", *there, "--detach", *words, **token).end()
    assert code == 0, out + errors
    (second,) = [line.split()[1] for line in out.splitlines() if line.startswith("job ")]
    assert second != id
    client = JobSubmissionClient(address, headers={"Authorization": f"Bearer {TOKEN}"})
    going_on = f"continuing after round {int(kept[6:12])}"
    wait_for(lambda: going_on in client.get_job_logs(second), 120)
    code, out, errors = trishul("stop", *there, "--all", **token).end()
    assert code == 0 and f"{second}: ends" in out and id not in out, out + errors


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def coordinators():
    titles = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["environ"] or {}).get("TRISHUL_RUNS", "").startswith("/tmp"):
            titles += (process.info["cmdline"] or [""])[:1]
    return [title for title in titles if "Coordinator" in title or "ClientActor" in title]


def test_without_a_mode_the_token_in_the_home_directory_is_asked_for(
    cluster, trishul, project, tmp_path
):
    # Ray 2.61 will do so by itself.
    assert_others_are_refused(cluster(TOKEN, None), trishul, project, tmp_path)


def assert_others_are_refused(address, trishul, project, tmp_path):
    words = ["--runs", tmp_path, "--working-dir", project, "--", "run", *tiny()]
    for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "f" * 64}):
        command = trishul("submit", "--address", address, *words, HOME=str(tmp_path), **wrong)
        code, out, errors = command.end()
        assert (code, out) == (1, ""), errors
        assert "refuses the token of this machine" in " ".join(errors.split())
        assert TOKEN not in errors and "f" * 64 not in errors and "Traceback" not in errors
