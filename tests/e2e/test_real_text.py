"""Real texts from a mirror for each text task: a federated run lowers the test loss.

The language models have random weights, so the scores are meaningless. Without a mirror
(TRISHUL_HUB) these tests are skipped.
"""

import os
from pathlib import Path

import pytest

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run

HUB = Path(os.environ.get("TRISHUL_HUB", "/nonexistent"))


@pytest.fixture
def records(cache, tmp_path, drive_to_end):
    """``records(*words)`` returns the records of a run of two rounds."""

    def run(*words):
        experiment = load_experiment(
            None,
            [
                "model.init=random",
                "federation.clients=4",
                "federation.clients_per_round=2",
                "federation.rounds=2",
                "federation.local_steps=15",
                "federation.batch_size=8",
                "evaluation.limit=40",
                "evaluation.every=2",
                "optimizer.lr=0.02",
                "budget=4",
                "resources.backend=inline",
                "tracking.mlflow=false",
                f"storage.hub={HUB}",
                f"storage.cache={cache}",
                f"storage.runs={tmp_path}",
                *words,
            ],
        )
        return drive_to_end(
            InlineDriver(experiment, prepare_run(experiment), "a")
        ).checkpoint.records

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "folder", "words"),
    [
        ("glue/rte", "nyu-mll/glue/rte", ["model=llama-tiny"]),
        ("glue/sst2", "nyu-mll/glue/sst2", ["model=llama-tiny"]),
        ("mrqa", "mrqa-workshop/mrqa", ["model=t5-tiny"]),
        ("20newsgroups", "SetFit/20_newsgroups", ["model=t5-tiny", "task.target_length=32"]),
    ],
)
def test_the_loss_falls(records, dataset, folder, words):
    if not (HUB / folder).is_dir():
        pytest.skip(f"no mirror with {folder} (TRISHUL_HUB)")
    before, *_, after = records(f"dataset={dataset}", *words)
    assert after.scores["loss"] < before.scores["loss"] - 0.1
