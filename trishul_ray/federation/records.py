"""Records of rounds."""

from dataclasses import dataclass, field

#: Marks fields that a checkpoint omits if they are empty.
OPTIONAL = {"optional": True}


@dataclass
class RoundRecord:
    """The record of a round: a row of metrics.parquet, and values that are not numbers.

    It is complete one step later, after the model after the round has been scored.

    Attributes:
        round: Number of the round; 0 is the untuned backbone, before which clients may have
            responded to a survey.
        clients: The cohort, ascending.
        refused: Reasons for rejected uploads, keyed by client.
        missing: Reasons why selected clients did not train, keyed by client: not needed any more
            (surplus), after the deadline (late), or lost.
        accepted_uploads: Number of entries that each accepted client sent, in ascending order of
            clients.
        train_loss: Mean over the cohort and its local steps.
        uploaded_parameters: Number of entries that all clients sent.
        downloaded_parameters: Number of entries that all clients received.
        uploaded_bytes: Bytes that all clients sent, if they were encoded; None means 4 bytes per
            entry.
        downloaded_bytes: Bytes that all clients received, likewise.
        client_seconds: Mean duration of a client's local steps.
        diagnostics: Diagnostics of the uploads, keyed by name; empty if the round is not diagnosed.
        seconds: Duration of the round.
        scores: Metrics of the model after the round, keyed by name; empty if it was not scored.
        recall: Recall of each class on the test rows; None for a class without test rows.
        per_client: Primary metric on each client's test rows; only in the last scored round.
        personal: Primary metric of each client's personalized model on its test rows, likewise.
        participation: Number of rounds in which each client counted, likewise, except held-out
            clients.
        stages: Numbers of stages, keyed by name.
        state_sha256: Digest of the global state after the round; see ``state_digest``.
    """

    round: int
    clients: list[int] = field(default_factory=list)
    # prose: pet-verb: checkpoints store this name
    refused: dict[str, str] = field(default_factory=dict)
    accepted_uploads: list[int] = field(default_factory=list)
    train_loss: float | None = None
    uploaded_parameters: int | None = None
    downloaded_parameters: int | None = None
    uploaded_bytes: int | None = field(default=None, metadata=OPTIONAL)
    downloaded_bytes: int | None = field(default=None, metadata=OPTIONAL)
    client_seconds: float | None = None
    diagnostics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    recall: list[float | None] = field(default_factory=list)
    per_client: dict[str, float] = field(default_factory=dict)
    personal: dict[str, float] = field(default_factory=dict)
    participation: dict[str, int] = field(default_factory=dict, metadata=OPTIONAL)
    stages: dict[str, float] = field(default_factory=dict, metadata=OPTIONAL)
    state_sha256: str = field(default="", metadata=OPTIONAL)
    missing: dict[str, str] = field(default_factory=dict, metadata=OPTIONAL)

    @property
    def scored(self) -> bool:
        """Whether the model after the round has been scored."""
        return bool(self.scores)

    def _bytes(self, coded: int | None, numbers: int | None) -> int | None:
        return 4 * numbers if coded is None and numbers is not None else coded

    def metrics(self) -> dict[str, float]:
        """Return the known numbers, keyed by their names in MLflow and metrics.parquet."""
        up, down = self.uploaded_parameters, self.downloaded_parameters
        numbers = {
            "train_loss": self.train_loss,
            "uploaded_parameters": up,
            "downloaded_parameters": down,
            "uploaded_bytes": self._bytes(self.uploaded_bytes, up),
            "downloaded_bytes": self._bytes(self.downloaded_bytes, down),
            "client_seconds": self.client_seconds,
            **self.diagnostics,
            **self.stages,
            "seconds": self.seconds,
            **self.scores,
            "refused_uploads": len(self.refused),
        }
        return {name: float(value) for name, value in numbers.items() if value is not None}

    def row(self) -> dict[str, float]:
        """Return the number of the round and its metrics."""
        return {"round": self.round, **self.metrics()}
