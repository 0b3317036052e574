"""The overrides of the shortest run, and the records of runs without what a clock says."""

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


def untimed(records):
    """The fields of each record, without what a clock says."""
    return [{k: v for k, v in vars(r).items() if not k.endswith("seconds")} for r in records]
