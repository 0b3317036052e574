"""The overrides of the shortest runs, and figures that take no time."""

from pathlib import Path

TINY = [
    "model.init=random",
    "federation.clients=3",
    "federation.clients_per_round=2",
    "federation.rounds=2",
    "federation.local_steps=2",
    "evaluation.limit=32",
    "resources.backend=inline",
    "tracking.mlflow=false",
]
#: A run of seconds: random weights, so that nothing needs pretraining.
SMALL = [
    "model.init=random",
    "federation.clients=4",
    "federation.clients_per_round=3",
    "federation.rounds=3",
    "federation.local_steps=4",
    "federation.batch_size=8",
    "evaluation.limit=64",
    "evaluation.batch_size=32",
    "tracking.mlflow=false",
    "optimizer.lr=0.01",
]


def write_numbers(chart, path, note=""):
    """Write the numbers of a run's figure in place of its picture, whose drawing takes longer
    than all else of a short run; for ``trishul_ray.runs.artifacts.save_png``.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"{note}\n{chart.csv('run')}", encoding="utf-8")
