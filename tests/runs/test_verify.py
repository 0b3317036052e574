"""``trishul verify``: repeat the rounds of a finished run."""

import dataclasses
import io
import re
import shutil

import pytest
from rich.console import Console

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.summary import RunSummary, write_result
from trishul_ray.runs.folder import open_run
from trishul_ray.runs.runner import run_experiment
from trishul_ray.runs.verify import verify_run
from trishul_ray.tracking.progress import RunProgress
from trishul_ray.version import NUMERICS

FLIPPED = str.maketrans("0123456789abcdef", "123456789abcdef0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache, small_words):
    """Return the folder of runs with one finished run of four rounds, and its id."""
    runs = tmp_path_factory.mktemp("runs")
    words = [*small_words, "resources.backend=inline", "tracking.mlflow=false"]
    experiment = load_experiment(None, [*words, "federation.rounds=4", f"storage.runs={runs}"])
    run_experiment(experiment, RunProgress(4, Console(file=io.StringIO())))
    return runs, experiment.id


@pytest.fixture
def copied(finished, tmp_path):
    """Copy the run's folder; ``copied(states=..., ...)`` changes the result."""
    runs, id = finished
    folder = tmp_path / "from elsewhere" / id
    shutil.copytree(runs / id, folder)

    def change(**fields):
        home, _ = open_run(str(folder), "unused")
        summary = RunSummary.read(home)
        new = {k: v(getattr(summary, k)) if callable(v) else v for k, v in fields.items()}
        write_result(home, dataclasses.replace(summary, **new))
        return str(folder)

    return change


def flip(position):
    """Change one digit of a digest."""
    return lambda states: [
        s.translate(FLIPPED) if n == position else s for n, s in enumerate(states)
    ]


def test_all_rounds_of_a_copied_run_are_equal(copied):
    found = verify_run(copied(), rounds=None)
    assert [each.round for each in found.rounds] == [0, 1, 2, 3, 4]
    assert found.equal and not found.stack


def test_two_rounds_are_the_default(copied, called):
    code, out, _ = called("verify", copied())
    assert code == 0 and len(re.findall(r"│ yes +│", out)) == 3


def test_a_planted_digest_is_found(copied, called):
    code, out, _ = called("verify", copied(states=flip(2)))
    assert code == 1
    assert len(re.findall(r"│ no +│", out)) == 1 and len(re.findall(r"│ yes +│", out)) == 2
    assert "the states differ; software and hardware are the same" in out


def test_the_first_difference_of_the_stack_is_named(copied, called):
    def older(stacks):
        return [dataclasses.replace(stack, torch="2.12.0", numpy="1.0") for stack in stacks]

    code, out, _ = called("verify", copied(states=flip(1), stacks=older))
    assert code == 1 and "the states differ; the run has torch 2.12.0 and not " in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": []}, "has no digests of its rounds; repeat it"),
        (
            {"versions": lambda v: v | {"numerics": "0"}},
            f"has numerics 0, this version has {NUMERICS}; install trishul-ray",
        ),
        ({"sources": lambda s: s | {"rows": "sha256:0"}}, "was trained on other data; restore"),
    ],
)
def test_runs_that_cannot_be_repeated_are_rejected(copied, called, change, message):
    code, _, error = called("verify", copied(**change))
    assert code == 2 and message in error and error.count("\n") == 1


def test_rounds_must_exist(copied, called):
    for given, message in (("5", "must be 1 to 4, or all"), ("few", "must be a number of rounds")):
        code, _, error = called("verify", copied(), "--rounds", given)
        assert code == 2 and message in error


def test_an_unfinished_run_is_rejected(copied, called, tmp_path):
    folder = copied()
    (tmp_path / "from elsewhere" / folder.rpartition("/")[2] / "result.json").unlink()
    code, _, error = called("verify", folder)
    assert code == 2 and "has not finished" in error
