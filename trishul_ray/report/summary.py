"""Load the result of a finished run: result.json and its tables.

:mod:`trishul_ray.runs.results` writes them.
"""

import hashlib
import io
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from trishul_ray.data.coverage import Coverage
from trishul_ray.errors import CorruptFileError, InputError, StorageRefusedError, own_errors
from trishul_ray.experiment.experiment import ID_LENGTH, Experiment
from trishul_ray.runtime.lazy import pd, pq
from trishul_ray.runtime.memory import PeakMemory
from trishul_ray.runtime.stack import Stack
from trishul_ray.storage.durable import Json
from trishul_ray.storage.integrity import from_checked_json, to_checked_json
from trishul_ray.storage.store import Store, check_name
from trishul_ray.tasks.sums import client_metrics

if TYPE_CHECKING:
    from pandas import DataFrame

#: Notes in a run's folder (see :func:`read_note`): the name of the attempt that wrote its files,
#: and the reason why it has no result.
ATTEMPT, FAILURE = "attempt.json", "failure.json"
#: File of a run with the scores of generated answers, written by ``trishul eval``.
EVALUATION = "eval.json"
#: Files with a finished run's numbers, which reports load.
NUMBERS = ("metrics.parquet", "diagnostics.npz")
#: Files of a finished run that can be restored without loading the backbone.
TABLES = ("config.yaml", *NUMBERS, "test_rows.npz")

#: Name of a file in the folder of a run.
FileName = Annotated[str, AfterValidator(check_name)]

#: Columns of :func:`list_runs`, and the fields that they show.
_COLUMNS = {
    **{"name": "name", "method": "method.name", "dataset": "data.name", "model": "model.name"},
    **{"budget": "budget", "partition": "partition.kind", "alpha": "partition.alpha"},
    **{"rounds": "federation.rounds", "seed": "seed"},
}


@dataclass(frozen=True)
class Hardware:
    """A machine, and the ``kernels`` that torch uses on it; see ``runs/results.py``."""

    machine: str
    system: str
    cpus: int | None
    memory_gib: float
    gpus: list[str]
    cpu_capability: str
    processor: str
    kernels: Json


@dataclass(frozen=True)
class RunSummary:
    """The content of result.json, which marks a run as finished.

    The primary result is the last round. The best round is the round with the largest primary
    metric on the validation rows, or on the test rows without validation rows (``chosen_on``). The
    untuned backbone is never selected as the best round.

    Attributes:
        headline: Name of the primary metric; see ``Task.primary_metric``.
        data: The rows that the run used.
        final: Metrics after the last round, and its number as ``round``.
        best: Metrics of the best round, its number as ``round``, and ``chosen_on``, the rows used
            to select it.
        untouched: Metrics of the untuned backbone.
        recall: Recall of each class on the test rows, after the last round.
        per_client: Primary metric of the global model on each client's test rows.
        personal: Primary metric of each client's personalized model on the same rows.
        participation: Number of rounds that aggregated an update of each client, without held-out
            clients.
        parameters: Number of trained parameters per group.
        round_seconds: Duration of each round.
        wall_seconds: Duration of the process that finished the run, plus the rounds before it.
        diagnostics: Spectral metrics of the last diagnosed round; empty for methods without cores.
        heads: Number of heads of each adapted block, if the method has heads.
        ranks: Rank of the heads of each block, for its matrix with the largest rank.
        block_squared_norms: Scores used to allocate heads.
        attempt: Name of this start of the experiment from scratch; restarting changes it.
        identity: The fields whose hash is the id.
        sources: Content behind names of public data and weights; see ``WorkerSpec``.
        export: The exported model, as ``Export``, or None if the export was skipped.
        files: Names of the run's files. ``sha256`` stores their SHA-256.
        unread_fields: Fields of the experiment that were never read.
        reports: Reports of stages, keyed by stage; see ``Stage.report``.
        peak_memory: Largest peak memory of a worker in the process that finished the run.
        states: Digest of the global state before round 1 and after each round; see
            ``state_digest``.
        stacks: Stacks that computed the rounds, with the first round of each.
        held: ``CPU`` and ``GPU`` of all actors; empty without actors, or if unknown.
        checksum: Hash of the bytes of all other fields; empty until the file is written.
    """

    id: str
    name: str
    status: str
    headline: str
    data: Coverage
    scored_rounds: list[int]
    final: dict[str, int | float]
    best: Json
    untouched: dict[str, float]
    recall: dict[str, float | None]
    per_client: dict[str, float]
    personal: dict[str, float]
    parameters: dict[str, int]
    uploaded_parameters: int
    downloaded_parameters: int
    uploaded_bytes: int
    downloaded_bytes: int
    refused_uploads: int
    round_seconds: list[float]
    wall_seconds: float
    diagnostics: dict[str, int | float]
    heads: dict[str, int]
    block_squared_norms: dict[str, float]
    state_sha256: str
    attempt: str
    mlflow_run_id: str | None
    versions: dict[str, str]
    hardware: Hardware
    config: Json
    identity: Json
    sources: dict[str, str]
    export: Json | None = None
    files: list[FileName] = field(default_factory=list)
    sha256: dict[FileName, str] = field(default_factory=dict)
    unread_fields: list[str] = field(default_factory=list)
    reports: dict[str, Json] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    participation: dict[str, int] = field(default_factory=dict)
    peak_memory: PeakMemory | None = None
    held: dict[str, float] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    checksum: str = ""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    @classmethod
    def read(cls, home: Store) -> "RunSummary":
        """Load and validate result.json of a run.

        Raises:
            FileNotFoundError: The run has not finished.
            CorruptFileError: The file does not match its checksum, has invalid fields, or
                belongs to another run.
        """
        place = home.place("result.json")
        content = home.read("result.json")
        fields = from_checked_json(content, place)
        if fields.get("id") != home.name:
            raise CorruptFileError(f"{place} belongs to run {fields.get('id')}")
        try:
            summary = _validator().validate_json(content, strict=True)
            _row_of(summary)  # raises if a field of the run list is missing
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise CorruptFileError(
                f"{place} has invalid fields ({name}: {first['msg']})"
            ) from error
        except (TypeError, KeyError, AttributeError) as error:  # the error names the field
            raise CorruptFileError(f"{place} has invalid fields ({error})") from error
        return summary

    def to_dict(self) -> Json:
        """Convert all fields except the checksum to plain JSON values."""
        fields = vars(self) | {"data": self.data.to_json(), "hardware": asdict(self.hardware)}
        fields["stacks"] = [asdict(stack) for stack in self.stacks]
        fields["peak_memory"] = None if self.peak_memory is None else asdict(self.peak_memory)
        del fields["checksum"]
        return fields

    def to_json(self) -> bytes:
        """Serialize to the bytes of result.json, including the checksum."""
        return to_checked_json(self.to_dict())

    @property
    def client_metrics(self) -> dict[str, float]:
        """Statistics over the clients' scores, or an empty dictionary without such scores."""
        if not self.per_client:
            return {}
        return client_metrics(self.per_client, self.personal, self.participation)

    @property
    def last_scores(self) -> dict[str, float]:
        """All metrics after the last round, including statistics over clients."""
        return self.final | self.client_metrics

    @property
    def seconds(self) -> float:
        return sum(self.round_seconds)

    def damaged_files(self, home: Store, among: Collection[str] | None = None) -> dict[str, str]:
        """Verify the checksums of the run's files, reading them completely.

        Args:
            home: Folder of the run.
            among: Names of the files to verify; all by default.

        Returns:
            ``missing``, ``unreadable`` or ``corrupt`` for each damaged file, keyed by name.
        """
        damaged: dict[str, str] = {}
        for name, expected in self.sha256.items():
            if among is not None and name not in among:
                continue
            try:
                content = home.read(name)
            except FileNotFoundError:
                damaged[name] = "missing"
            except (StorageRefusedError, CorruptFileError):  # it is a folder, link or pipe
                damaged[name] = "unreadable"
            else:
                if hashlib.sha256(content).hexdigest() != expected:
                    damaged[name] = "corrupt"
        return damaged


@cache
def _validator() -> TypeAdapter[RunSummary]:
    return TypeAdapter(RunSummary)


def read_metrics(home: Store) -> list[dict[str, float]]:
    """Load the rows of metrics.parquet, omitting metrics that were not measured in a round."""
    rows = pq.read_table(io.BytesIO(home.read("metrics.parquet"))).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def read_arrays(home: Store, name: str) -> dict[str, np.ndarray]:
    """Load the arrays of a run's file, such as diagnostics.npz."""
    with np.load(io.BytesIO(home.read(name)), allow_pickle=False) as file:
        return dict(file)


def read_test_rows(home: Store) -> dict[str, np.ndarray]:
    """Load ``row`` and ``score`` [rows] from test_rows.npz; raise InputError if it is missing."""
    try:
        return read_arrays(home, "test_rows.npz")
    except FileNotFoundError:
        raise InputError(
            f"{home.uri} has no test_rows.npz, because its task does not score single rows"
        ) from None


def missing_scores(experiment: Experiment, scored: Iterable[int]) -> str:
    """Describe the required scores that a run with these scored rounds lacks.

    A run that scored additional rounds is valid, because its numbers are equal.

    Returns:
        The description, or an empty string if no score is missing.
    """
    missing = experiment.scored_rounds - {*scored}
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    every = experiment.evaluation.every
    return f"no score of round {min(missing)}{more}, which evaluation.every={every} requires"


def flatten(fields: Json, prefix: str = "") -> Json:
    """Flatten nested sections to a dictionary with dotted names."""
    flat: Json = {}
    for key, value in fields.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def read_note(home: Store, name: str) -> str:
    """Load a note, or return an empty string if it is missing, damaged or of another run."""
    with suppress(FileNotFoundError, CorruptFileError):
        found = from_checked_json(home.read(name), name)
        if found.get("id") == home.name:
            return str(found.get("text", ""))
    return ""


def write_note(home: Store, name: str, text: str) -> None:
    home.write(name, to_checked_json({"id": home.name, "text": text}))


def write_result(home: Store, summary: RunSummary) -> RunSummary:
    """Write result.json, which marks the run as finished, and return its validated content."""
    content = summary.to_json()
    written = _validator().validate_json(content)
    home.write("result.json", content)
    return written


def run_ids(store: Store) -> list[str]:
    """List the ids of the runs in a storage, sorted."""
    pattern = re.compile(f"[0-9a-f]{{{ID_LENGTH}}}")
    return [name for name in store.names() if pattern.fullmatch(name)]


def list_runs(store: str | Path = "runs") -> "DataFrame":
    """List the finished runs in a folder or storage URI.

    Args:
        store: The folder or URI that contains the runs.

    Returns:
        One row per run, indexed by id. The columns are the fields in which runs usually differ,
        the name of the primary metric (``primary_metric``), its value after the last round
        (``final``) and in the best round (``best``), and the bytes that all clients sent and
        received. Runs with an unreadable result are skipped.

    Raises:
        InputError: The storage cannot be opened.
        RunError: The storage failed.

    Example:
        >>> import trishul_ray
        >>> runs = trishul_ray.list_runs("runs")  # doctest: +SKIP
        >>> runs.groupby("method")["final"].mean()  # doctest: +SKIP
    """
    rows = []
    with own_errors():
        opened = Store.open(str(store))
        for name in run_ids(opened):
            with suppress(FileNotFoundError, CorruptFileError):
                rows.append(_row_of(RunSummary.read(opened.child(name))))
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["id"]).set_index("id")


def _row_of(summary: RunSummary) -> Json:
    fields, metric = flatten(summary.config), summary.headline
    return {
        "id": summary.id,
        **{name: fields[field] for name, field in _COLUMNS.items()},
        "primary_metric": metric,
        "final": summary.final[metric],
        "best": summary.best[metric],
        "uploaded_bytes": summary.uploaded_bytes,
        "downloaded_bytes": summary.downloaded_bytes,
    }
