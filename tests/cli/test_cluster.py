"""`trishul submit`, `status` and `stop`: wrong input ends them before a cluster is asked."""

from pathlib import Path

import pytest
from ports import free_port

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


def test_a_file_that_hides_a_module_of_python_is_not_shipped(called, monkeypatch, tmp_path):
    (tmp_path / "stat.py").write_text("")
    monkeypatch.chdir(tmp_path)
    code, _, error = called("submit", *RUNS, "--", *TABLE)
    assert code == 2 and "stat.py: hides Python's module 'stat'" in error


@pytest.mark.parametrize("words", [["submit", *RUNS, "--", *TABLE], ["status"], ["stop", "--all"]])
def test_a_cluster_that_does_not_answer_is_one_paragraph(called, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address = f"http://127.0.0.1:{free_port()}"
    code, _, error = called(words[0], "--address", address, *words[1:])
    assert code == 1 and f"no cluster answers at {address}" in error
    assert "Traceback" not in error
