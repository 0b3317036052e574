"""Round checkpoints: everything the next round needs, in files with their checksums in the names.

A checkpoint is a safetensors file, ``round-<number>-<sha256>.safetensors``, of all arrays, and JSON
that names them. It is written to a temporary name and then renamed. A truncated or altered file is
reported and skipped, and the checkpoint before it is used.

Most states of clients do not change in a round. So the states that changed are in another file,
``clients-<number>-<sha256>.safetensors``, which is written before the checkpoints that name it and
removed once no checkpoint names it.
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
#: Name of the tensor that holds the JSON, and the key in the JSON that refers to an array.
_META, _ARRAY = "__meta__", "__array__"
#: Errors of reading fields of other types or names.
_ODD = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

#: State of a client, and memory of stages on it.
_Parts = tuple[Arrays | None, Arrays | None]


def _file_name(kind: str, round_number: int, data: bytes) -> str:
    return f"{kind}-{round_number:06d}-{hashlib.sha256(data).hexdigest()}.safetensors"


def round_of(name: str) -> int | None:
    """Return the round of a checkpoint's file name; None for another file."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match and match[1] == "round" else None


def _stored(value: Any) -> Json:
    """Return the fields of a dataclass that a file holds."""
    stored = vars(value)
    optional = [each.name for each in fields(value) if each.metadata == OPTIONAL]
    return {k: v for k, v in stored.items() if k not in optional or v}


@dataclass
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        experiment_id: id of the experiment.
        attempt: name of the run in the tracking server, so that a resumed run continues it.
        round: the last aggregated round (0: none yet).
        state: the global state.
        client_states: persistent states, by client.
        records: one record for each round so far; the first is of the pretrained backbone.
        spectra: singular values of the last diagnostics; see ``Diagnostics``.
        matrices: comparisons between clients in every diagnosed round, and of all clients in the
            last; see ``append_round`` and ``Comparison.of_everyone``.
        test_rows: ``row``, index in the test split, and ``score`` of every row scored after
            the last round, in order; empty before, and for a task without scores of rows.
        sources: hashes of data and weights; see ``WorkerSpec``.
        stacks: stacks that computed rounds, with the first round of each.
        info: description of the data.
        stages: memory of each stage, by its name.
        kept: memory of stages on each client, by client.
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
        """Return whether a run has ended: all ``rounds`` are done, and the last one is scored."""
        return self.round >= rounds and self.records[-1].scored

    def to_bytes(self, files: dict[int, str]) -> bytes:
        """Return the content of the file, with the names of the clients' files."""
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
        """Return a checkpoint without the states of clients, and the file of each client.

        Raises:
            ValueError: The bytes are not a checkpoint.
        """
        try:
            tensors = load_tensors(data)
            meta = tensors.pop(_META).tobytes()
            found = json.loads(meta, object_hook=lambda d: tensors[d[_ARRAY]] if _ARRAY in d else d)
            info, files = found.pop("info"), found.pop("files")
            if type(found["round"]) is not int:
                raise TypeError("its round is not a number")
            if not all(map(_NAME.fullmatch, files.values())):
                raise ValueError("it names files that are not of clients")
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
    """Return the hex SHA-256 of names, dtypes, shapes and bytes of a state, without its survey."""
    named = {"shared": state.shared, **state.extra}
    named |= {f"base/{layer}": array for layer, array in state.base.items()}
    for layer, arrays in state.constants.items():
        named |= {f"constant/{layer}/{name}": array for name, array in arrays.items()}
    return arrays_digest(named)


def arrays_digest(state: Arrays) -> str:
    """Return the hex SHA-256 of names, dtypes, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(f"{key} {state[key].dtype} {state[key].shape}\n".encode())
        digest.update(np.ascontiguousarray(state[key]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _parts_of(checkpoint: Checkpoint) -> dict[int, _Parts]:
    """Return the arrays of each client."""
    states, kept = checkpoint.client_states, checkpoint.kept
    return {client: (states.get(client), kept.get(client)) for client in sorted({*states, *kept})}


def _same(one: _Parts | None, other: _Parts) -> bool:
    return one is not None and one[0] is other[0] and one[1] is other[1]


class CheckpointStore:
    """The checkpoints of one run, in its ``checkpoints`` folder; the newest ``keep`` are kept."""

    def __init__(self, store: Store, experiment_id: str, keep: int = 2) -> None:
        self.store, self.experiment_id, self.keep = store, experiment_id, keep
        self.skipped: list[str] = []  # one line for each file that newest() could not use
        self._saved: dict[str, set[str]] = {}  # checkpoints to keep, and their files of clients
        self._files: dict[int, tuple[str, _Parts]] = {}  # file of each client, and its content

    def save(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, remove all but the newest ``keep``, and return the file's name."""
        files = self._write_clients(checkpoint)
        data = checkpoint.to_bytes(files)
        name = _file_name("round", checkpoint.round, data)
        self.store.write(name, data)
        # The last round is saved again once it is evaluated: the new file replaces the old one.
        earlier = {k: v for k, v in self._saved.items() if round_of(k) != checkpoint.round}
        saved = [*earlier.items(), (name, {*files.values()})]
        self._saved = dict(saved[-self.keep :])
        self.tidy()
        return name

    def tidy(self) -> None:
        """Remove all files except those of the newest ``keep`` checkpoints.

        Those before the one of :meth:`newest` count by their names. While one of them stays, so do
        all files of clients, since it may need them.
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
        """Write the changed states of clients, and return the file of each client."""
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
        """Read the states of clients into a checkpoint.

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
        """Return the checkpoint in a file; None if it is unusable, with a line in ``skipped``."""
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
    """Return the checkpoints of an experiment's run, under ``storage.runs``."""
    folder = run_folder(experiment).child("checkpoints")
    return CheckpointStore(folder, experiment.id, experiment.storage.keep_checkpoints)
