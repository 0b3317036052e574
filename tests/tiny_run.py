"""The overrides of the shortest run, for tests that run whole commands in this process."""

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
