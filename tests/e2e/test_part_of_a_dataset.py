"""A run on a part of a dataset is marked on the terminal, in the result and in MLflow."""

import json

import pytest
from mlflow.tracking import MlflowClient

from trishul_ray.cli import output

WORDS = [
    "data.train_limit=300",
    "resources.backend=inline",
    "tracking.mlflow=true",
    "federation.rounds=1",
    "federation.local_steps=2",
]
SENTENCE = (
    "part of digits: 300 of 1,000 training rows, 64 of 497 test rows scored; "
    "generated:scikit-learn load_digits"
)


@pytest.mark.slow
def test_a_part_is_marked_everywhere(called, small_words, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(output.out, "_width", 120)
    runs = tmp_path / "runs"
    paths = [f"storage.cache={cache}", f"storage.runs={runs}"]
    words = ["run", *(w for w in small_words if "mlflow" not in w), *paths, *WORDS]
    code, out, error = called(*words)
    assert code == 0, error
    assert f"data      {SENTENCE}" in out
    assert "trishul (part of the data)" in out
    assert SENTENCE in " ".join(error.split())  # before anything trains

    (file,) = runs.glob("*/result.json")
    result = json.loads(file.read_text())
    assert result["data"] == {
        "dataset": "digits",
        "source": "generated:scikit-learn load_digits",
        "revision": None,
        "train": {"used": 300, "held": 1000, "official": 1000},
        "test": {"used": 64, "held": 497, "official": 497},
        "part": True,
        "sentence": SENTENCE,
    }

    run = MlflowClient(f"sqlite:///{runs}/mlflow.db").get_run(result["mlflow_run_id"])
    assert run.data.tags["trishul.part"] == "True" and run.data.tags["trishul.data"] == SENTENCE
    assert run.data.params["rows.train.used"] == "300"
    assert run.data.params["rows.test.official"] == "497"
    inputs = {i.tags[0].value: i.dataset for i in run.inputs.dataset_inputs}
    assert inputs.keys() >= {"training", "evaluation"}
    assert json.loads(inputs["evaluation"].profile)["used"] == 64
