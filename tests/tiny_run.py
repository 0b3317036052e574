"""The overrides of the shortest runs."""

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
#: A run that takes seconds: random weights need no pretraining.
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
