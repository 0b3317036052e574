"""`trishul submit`, `status` and `stop`: wrong input ends them before a cluster is asked."""

import os
from pathlib import Path

import pytest
from newcomers import unloaded_after
from ports import free_port
from ray.job_submission import JobDetails, JobStatus, JobType

from trishul_ray.cli.cluster import _describe_cells
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.jobs.cluster import Job
from trishul_ray.plugins.registry import load_plugin

CLUSTER = Path(__file__).parents[2] / "cluster"
TABLE = ["table", "vision", "--profile", "smoke"]
RUNS = ["--runs", "s3://mine/runs"]
SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", *RUNS, "--", "plan", "all"], "'plan' is not run on clusters; submit run,"),
        (["submit", *RUNS, "--", "table", "visoin"], "did you mean 'vision'?"),
        (["submit", *RUNS, "--", "table", "vision", "--profil", "smoke"], "--profil"),
        (["submit", *RUNS, "--", "sweep", "missing.yaml"], "missing.yaml: does not exist"),
        (["submit", *RUNS, "--", "sweep", "../mine.yaml"], "is not in ., which is what is shipped"),
        (["submit", *RUNS, "--working-dir", "nowhere", "--", *TABLE], "nowhere: is not a folder"),
        (["submit", "--", *TABLE], "say where the cluster stores runs: --runs s3://bucket/runs"),
        (["submit", "--runs", "runs", "--", *TABLE], "--runs 'runs': the job runs elsewhere"),
        (
            ["submit", "--cluster", "none.yaml", "--", *TABLE],
            "cluster file none.yaml: No such file",
        ),
        (["submit", "--cluster", CLUSTER / "aws.yaml", "--", *TABLE], "in place of CHANGE-ME"),
        (
            ["submit", "--", *TABLE, f"storage.runs=s3://AKIAABC:{SECRET}@mine/runs"],
            "no credentials in the command",
        ),
        (["submit", *RUNS, "--address", "ray://head:10001", "--", *TABLE], "name the dashboard"),
        (["status", "--address", "a:1", "--cluster", "b"], "give either --cluster or --address"),
        (["stop"], "give either the id of a job, or --all"),
        (["stop", "a", "--all"], "give either the id of a job, or --all"),
    ],
)
def test_wrong_input_is_one_line(called, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRISHUL_RUNS", raising=False)
    code, out, error = called(*words)
    assert (code, out) == (2, ""), error
    assert message in error and len(error.splitlines()) == 1
    assert SECRET not in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stat.py", "stat.py: hides Python's module 'stat' from the job"),
        ("queue/__init__.py", "queue: hides Python's module 'queue' from the job"),
        ("torch.py", "torch.py: hides the installed module 'torch' from the job"),
        ("datasets/__init__.py", "datasets: hides the installed module 'datasets' from the job"),
    ],
)
def test_what_hides_a_module_is_not_shipped(called, monkeypatch, tmp_path, name, message):
    (tmp_path / "trishul_ray").mkdir()  # a checkout of this package, and folders without code
    (tmp_path / "trishul_ray" / "__init__.py").touch()
    (tmp_path / "torch").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    code, _, error = called("submit", *RUNS, "--", *TABLE)
    assert code == 2 and message in error


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("runs/a/config.yaml", "runs/a/config.yaml: is not shipped: folders of data and results"),
        ("mine.yaml", "mine.yaml: is not shipped"),  # named by .gitignore
        ("credentials.yaml", "credentials.yaml: is not shipped"),
        ("plugins/no.py", "plugins/no.py: is not shipped"),
        ("../no.py", "../no.py: is not in ., which is what is shipped"),
    ],
)
def test_a_file_of_the_command_that_is_not_shipped_is_refused(
    called, monkeypatch, tmp_path, file, message
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("")
    Path(".gitignore").write_text("/mine.yaml\nplugins")
    words = ["--plugin", file] if file.endswith(".py") else [file]
    with unloaded_after():
        code, _, error = called("submit", *RUNS, "--", "run", *words)
    assert code == 2 and message in error


@pytest.mark.parametrize("words", [["submit", *RUNS, "--", *TABLE], ["status"], ["stop", "--all"]])
def test_a_cluster_that_does_not_answer_is_one_paragraph(called, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address = f"http://127.0.0.1:{free_port()}"
    code, _, error = called(words[0], "--address", address, *words[1:])
    assert code == 1 and f"no cluster answers at {address}" in error
    assert "Traceback" not in error


def test_the_command_that_continues_a_stopped_job_names_its_cluster_and_results(
    called, monkeypatch
):
    def job(status):
        details = JobDetails(type=JobType.SUBMISSION, status=status, entrypoint="")
        return Job("id", ("run", "rounds=3"), "s3://mine/my runs", details)

    class Asked:
        def __init__(self, address):
            self.jobs = lambda: [job(JobStatus.RUNNING)]
            self.stop = self.wait_for_end = lambda id: job(JobStatus.STOPPED)

    monkeypatch.setattr("trishul_ray.jobs.cluster.Cluster", Asked)
    code, out, _ = called("stop", "--address", "http://head:8265", "--all")
    again = "trishul submit --address http://head:8265 --runs 's3://mine/my runs' -- run rounds=3"
    assert code == 0 and out.endswith(f"to continue: {again}\n")


def cells_of(*words, runs, status=JobStatus.SUCCEEDED):
    details = JobDetails(type=JobType.SUBMISSION, status=status, entrypoint="")
    return _describe_cells(Job("id", words, str(runs), details))


def test_no_cell_of_a_job_that_has_ended_is_running(tmp_path):
    words = ["run", f"storage.runs={tmp_path}"]
    experiment = load_experiment(None, words[1:])
    run_folder(experiment).child("checkpoints").write("new", b"")  # a moment ago
    shown = "0 of 1 done, {} running, {} missing, 0 failed"
    assert cells_of(*words, runs=tmp_path, status=JobStatus.RUNNING) == shown.format(1, 0)
    assert cells_of(*words, runs=tmp_path, status=JobStatus.STOPPED) == shown.format(0, 1)


def test_cells_in_a_folder_that_only_the_cluster_has_are_not_called_missing(tmp_path):
    there = tmp_path / "shared" / "runs"
    said = f"cannot be read from here: there is no folder {there} on this machine"
    assert cells_of("run", runs=there) == said


def test_cells_that_a_search_samples_are_not_counted_as_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    search = "{kind: optuna, samples: 2, space: {optimizer.lr: {log: [1e-4, 1e-1]}}}"
    Path("mine.yaml").write_text(f"base: {{data.validation_share: 0.2}}\nsearch: {search}")
    said = "cannot be read from here: what a search by optuna samples depends on its results"
    assert cells_of("sweep", "mine.yaml", runs=tmp_path) == said


@pytest.fixture
def mine(monkeypatch, tmp_path):
    """A plug-in in the working directory, and files that name it; tells whether it has run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    (tmp_path / "mine.yaml").write_text("plugins: [mine.py]")
    (tmp_path / "sweep.yaml").write_text("base: {plugins: [mine.py]}\naxes: {seed: [0, 1]}")
    os.mkfifo(tmp_path / "fifo.py")
    os.mkfifo(tmp_path / "fifo.yaml")
    return (tmp_path / "ran").exists


@pytest.mark.parametrize(
    "words",
    [
        ["run", "plugins=[mine.py]"],
        ["run", "--plugin", "mine.py"],
        ["run", "mine.yaml"],
        ["sweep", "sweep.yaml"],
        ["sweep", "--axis", "seed=0..1", "plugins=[mine.py]"],
        ["table", "vision", "--plugin", "mine.py"],
        ["run", "--plugin", "fifo.py"],
        ["run", "fifo.yaml"],
        ["run", "/etc/elsewhere.yaml"],
        ["run", "--of-another-version"],
    ],
)
def test_no_plugin_that_a_job_names_is_run(mine, tmp_path, words):
    assert cells_of(*words, runs=tmp_path / "runs").startswith("cannot be read from here: ")
    assert not mine()


def test_a_plugin_of_ones_own_is_no_obstacle(mine, tmp_path):
    with unloaded_after():
        load_plugin("mine.py")
        assert mine()
        for words in (["run", "--plugin", "mine.py"], ["run", "mine.yaml"]):
            assert (
                cells_of(*words, runs=tmp_path / "runs")
                == "0 of 1 done, 0 running, 1 missing, 0 failed"
            )
        (tmp_path / "mine.py").write_text("raise SystemExit")  # changed since
        assert "mine.py is not run here" in cells_of("run", "--plugin", "mine.py", runs=tmp_path)


def test_what_a_terminal_would_obey_is_not_printed():
    details = JobDetails(type=JobType.SUBMISSION, status=JobStatus.SUCCEEDED, entrypoint="")
    command = Job("id", ("run", "name=\x1b]0;title\x07"), "runs", details).command
    assert command.isprintable() and "name=?]0;title?" in command
