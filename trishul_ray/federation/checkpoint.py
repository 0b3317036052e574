"""Round checkpoints with the complete state of a run, in files named by their checksums.

A checkpoint is a safetensors file, ``round-<number>-<sha256>.safetensors``, of all arrays and of
JSON that refers to them. It is written under a temporary name and then renamed. Truncated or
altered files are reported and skipped in favor of the previous checkpoint.

Most client states do not change in a round. Changed states are therefore in a separate file,
``clients-<number>-<sha256>.safetensors``, which is written before the checkpoints that refer to it,
and removed with the last of them.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.errors import first_line
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import Arrays
from trishul_ray.federation.records import OPTIONAL, RoundRecord
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.stack import Stack
from trishul_ray.stages import ArrayState, Memory
from trishul_ray.storage.durable import Json
from trishul_ray.storage.store import Store

_NAME = re.compile(r"(round|clients)-(\d{6})-[0-9a-f]{64}\.safetensors")
#: Name of the tensor that contains the JSON, and JSON key of a reference to an array.
_META, _ARRAY = "__meta__", "__array__"
#: Errors of reading fields of other types or names.
_ODD = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

#: State of a client, and state of stages on the client.
_Parts = tuple[Arrays | None, Arrays | None]


def _file_name(kind: str, round_number: int, data: bytes) -> str:
    return f"{kind}-{round_number:06d}-{hashlib.sha256(data).hexdigest()}.safetensors"


def round_of(name: str) -> int | None:
    """Return the round in the file name of a checkpoint, or None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match and match[1] == "round" else None


def _stored(value: Any) -> Json:
    """Return the fields of a dataclass to store in a file."""
    stored = vars(value)
    optional = [each.name for each in fields(value) if each.metadata == OPTIONAL]
    return {k: v for k, v in stored.items() if k not in optional or v}


@dataclass
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        experiment_id: Id of the experiment.
        attempt: Name of the run in the tracking server, so that a resumed run continues it.
        round: The last aggregated round; 0 before round 1.
        state: The global state.
        client_states: Client states, keyed by client.
        records: One record per round so far; the first one is of the pretrained backbone.
        spectra: Singular values of the last diagnostics; see ``Diagnostics``.
        matrices: Comparisons between clients in every diagnosed round, and of all clients in the
            last round; see ``append_round`` and ``Comparison.of_everyone``.
        test_rows: ``row``, the index in the test split, and ``score`` of every row scored after the
            last round, in order. Empty before, and for a task without scores of rows.
        sources: Hashes of data and weights; see ``WorkerSpec``.
        stacks: Stacks that computed rounds, each with its first round.
        info: Description of the data.
        stages: State of each stage, keyed by stage name.
        kept: State of stages on each client, keyed by client.
    """

    experiment_id: str
    attempt: str
    round: int
    state: ArrayState
    client_states: dict[int, Arrays] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    spectra: Arrays = field(default_factory=dict)
    matrices: Arrays = field(default_factory=dict)
    test_rows: Arrays = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    info: DatasetInfo | None = None
    stages: dict[str, Memory] = field(default_factory=dict, metadata=OPTIONAL)
    kept: dict[int, Arrays] = field(default_factory=dict, metadata=OPTIONAL)

    def is_last(self, rounds: int) -> bool:
        """Return whether a run has ended: ``rounds`` are complete, and the last round is scored."""
        return self.round >= rounds and self.records[-1].scored

    def to_bytes(self, files: dict[int, str]) -> bytes:
        """Serialize the checkpoint, with the names of the clients' files."""
        tensors: Arrays = {}

        def plain(value: Any) -> Json:
            """Return the JSON of an array or a dataclass."""
            if isinstance(value, np.ndarray):
                name = str(len(tensors))
                tensors[name] = np.asarray(value, order="C")
                return {_ARRAY: name}
            return _stored(value)

        stored = {k: v for k, v in _stored(self).items() if k not in ("client_states", "kept")}
        meta = json.dumps({**stored, "files": files}, default=plain)
        # As a tensor of bytes: the order of entries in safetensors' own metadata is not fixed.
        return bytes(save_tensors(tensors | {_META: np.frombuffer(meta.encode(), dtype=np.uint8)}))

    @classmethod
    def from_bytes(cls, data: bytes) -> "tuple[Checkpoint, dict[int, str]]":
        """Parse a checkpoint without the client states, and the file of each client.

        Raises:
            ValueError: The bytes are not a checkpoint.
        """
        try:
            tensors = load_tensors(data)
            meta = tensors.pop(_META).tobytes()
            found = json.loads(meta, object_hook=lambda d: tensors[d[_ARRAY]] if _ARRAY in d else d)
            info, files = found.pop("info"), found.pop("files")
            if type(found["round"]) is not int:
                raise TypeError("round is not an integer")
            if not all(map(_NAME.fullmatch, files.values())):
                raise ValueError("the list of client files has other names")
            checkpoint = cls(
                state=State(**found.pop("state")),
                records=[RoundRecord(**record) for record in found.pop("records")],
                stacks=[Stack(**stack) for stack in found.pop("stacks")],
                info=None if info is None else DatasetInfo.from_json(info),
                **found,
            )
            return checkpoint, {int(client): file for client, file in files.items()}
        except (SafetensorError, *_ODD) as error:
            raise ValueError(f"not a checkpoint of this version: {first_line(error)}") from error


def state_digest(state: ArrayState) -> str:
    """Return the hex SHA-256 of a state's names, dtypes, shapes and bytes, except its survey."""
    named = {"shared": state.shared, **state.extra}
    named |= {f"base/{layer}": array for layer, array in state.base.items()}
    for layer, arrays in state.constants.items():
        named |= {f"constant/{layer}/{name}": array for name, array in arrays.items()}
    return arrays_digest(named)


def arrays_digest(state: Arrays) -> str:
    """Return the hex SHA-256 of the names, dtypes, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(f"{key} {state[key].dtype} {state[key].shape}\n".encode())
        digest.update(np.ascontiguousarray(state[key]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _parts_of(checkpoint: Checkpoint) -> dict[int, _Parts]:
    states, kept = checkpoint.client_states, checkpoint.kept
    return {client: (states.get(client), kept.get(client)) for client in sorted({*states, *kept})}


def _same(one: _Parts | None, other: _Parts) -> bool:
    return one is not None and one[0] is other[0] and one[1] is other[1]


class CheckpointStore:
    """The newest ``keep`` checkpoints of a run, in its ``checkpoints`` folder."""

    def __init__(self, store: Store, experiment_id: str, keep: int = 2) -> None:
        self.store, self.experiment_id, self.keep = store, experiment_id, keep
        self.skipped: list[str] = []  # one line per file that newest() could not use
        self._saved: dict[str, set[str]] = {}  # checkpoints to keep, and their client files
        self._files: dict[int, tuple[str, _Parts]] = {}  # file of each client, and its content

    def save(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, remove all but the newest ``keep``, and return the file's name."""
        files = self._write_clients(checkpoint)
        data = checkpoint.to_bytes(files)
        name = _file_name("round", checkpoint.round, data)
        self.store.write(name, data)
        # The last round is saved again after its evaluation: the new file replaces the old one.
        earlier = {k: v for k, v in self._saved.items() if round_of(k) != checkpoint.round}
        saved = [*earlier.items(), (name, {*files.values()})]
        self._saved = dict(saved[-self.keep :])
        self.tidy()
        return name

    def tidy(self) -> None:
        """Remove all files except those of the newest ``keep`` checkpoints.

        Checkpoints before the one from :meth:`newest` are counted by their names. While one of them
        is kept, all client files are also kept, because it may need them.
        """
        names = [name for name in self.store.names() if _NAME.fullmatch(name)]
        needed = {*self._saved}.union(*self._saved.values())
        oldest = min(round_of(name) or 0 for name in self._saved)
        earlier = [n for n in names if (number := round_of(n)) is not None and number < oldest]
        missing = self.keep - len(self._saved)
        if missing and earlier:
            needed |= {*earlier[-missing:], *(name for name in names if round_of(name) is None)}
        for name in names:
            if name not in needed:
                self.store.remove(name)

    def _write_clients(self, checkpoint: Checkpoint) -> dict[int, str]:
        """Write the changed client states, and return the file of each client."""
        parts = _parts_of(checkpoint)
        files = {c: held for c, held in self._files.items() if _same(parts.get(c), held[1])}
        changed = {client: own for client, own in parts.items() if client not in files}
        if changed:
            data = save_tensors(
                {
                    f"{client}/{part}/{name}": np.asarray(array, order="C")
                    for client, own in changed.items()
                    for part, arrays in zip(("state", "kept"), own, strict=True)
                    for name, array in (arrays or {}).items()
                }
            )
            file = _file_name("clients", checkpoint.round, data)
            self.store.write(file, data)
            files |= {client: (file, own) for client, own in changed.items()}
        self._files = files
        return {client: file for client, (file, _) in files.items()}

    def _read_clients(self, checkpoint: Checkpoint, files: dict[int, str]) -> None:
        """Read the client states into a checkpoint.

        Raises:
            ValueError: A file is missing or corrupt.
        """
        parts = {"state": checkpoint.client_states, "kept": checkpoint.kept}
        for file in sorted({*files.values()}):
            try:
                data = self.store.read(file)
            except FileNotFoundError as error:
                raise ValueError(f"{file} is missing") from error
            if hashlib.sha256(data).hexdigest() not in file:
                raise ValueError(f"{file} is corrupt")
            for path, array in load_tensors(data).items():
                client, part, name = path.split("/", 2)
                if files.get(int(client)) == file:
                    parts[part].setdefault(int(client), {})[name] = array

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint of this experiment, or None.

        A killed writer may leave two files of the last round; the scored one is returned.
        """
        self.skipped, self._saved = [], {}
        best: Checkpoint | None = None
        for name in reversed(self.store.names()):
            number = round_of(name)
            if number is None or (best is not None and best.round != number):
                continue
            found = self._read(name)
            if found is not None and (best is None or found[0].records[-1].scored):
                best, files = found
                self._files = {c: (files[c], own) for c, own in _parts_of(best).items()}
                self._saved = {name: {*files.values()}}
        return best

    def _read(self, name: str) -> tuple[Checkpoint, dict[int, str]] | None:
        """Read a checkpoint; if it is unusable, add a line to ``skipped`` and return None."""
        data = self.store.read(name)
        if hashlib.sha256(data).hexdigest() not in name:
            self.skipped.append(f"checkpoint {name} is corrupt (checksum differs): skipped")
            return None
        try:
            checkpoint, files = Checkpoint.from_bytes(data)
            if (owner := checkpoint.experiment_id) == self.experiment_id:
                self._read_clients(checkpoint, files)
                return checkpoint, files
        except ValueError as error:
            self.skipped.append(f"checkpoint {name} is unreadable ({error}): skipped")
            return None
        self.skipped.append(f"checkpoint {name} belongs to experiment {owner}: skipped")
        return None


def run_folder(experiment: Experiment) -> Store:
    """Return the folder of an experiment's run, under ``storage.runs``."""
    storage = experiment.storage
    return Store.open(storage.runs, storage.retry_seconds).child(experiment.id)


def open_checkpoints(experiment: Experiment) -> CheckpointStore:
    """Open the checkpoints of an experiment's run, under ``storage.runs``."""
    folder = run_folder(experiment).child("checkpoints")
    return CheckpointStore(folder, experiment.id, experiment.storage.keep_checkpoints)
