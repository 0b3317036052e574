"""`trishul table` and `trishul sweep`: wrong input ends them before any actor starts."""

import pytest

from trishul_ray.tuning import reproduce


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    def start():
        raise AssertionError("Ray was started")

    monkeypatch.setattr(reproduce, "ray_session", start)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table", "federation.rounds=2"], "name at least one table, or all"),
        (["table", "visoin", "--profile", "smoke"], "no sweep 'visoin'; did you mean 'vision'?"),
        (["table", "all", "--profile", "big"], "profile 'big' has no sweeps"),
        (["table", "vision", "--profile", "smoke", "federation.round=2"], "'federation.rounds'"),
        (["table", "vision", "--retries", "-1"], "'--retries'"),
        (["sweep"], "give either a sweep file, or at least one --axis"),
        (["sweep", "a.yaml", "--axis", "seed=0"], "give either a sweep file, or at least one"),
        (["sweep", "a.yaml", "b.yaml"], "one sweep file at a time, not a.yaml, b.yaml"),
        (["sweep", "missing.yaml"], "missing.yaml"),
        (["sweep", "--axis", "method.lamb=0,1"], "method.lam"),
        (["sweep", "--axis", "seed="], "axis 'seed' is empty"),
        (["sweep", "--axis", "budget=8,4000"], "cell 'sweep: budget=4000': adapter.heads x rank"),
    ],
)
def test_wrong_input_is_one_line(called, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    places = ["storage.runs=runs", "model.init=random", "tracking.mlflow=false"]
    code, out, error = called(*words, *places)
    assert (code, out) == (2, ""), error
    last = error.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not (tmp_path / "runs").exists()
