"""Round checkpoints: everything the next round needs, in files with their checksums in the names.

A checkpoint is a safetensors file, ``round-<number>-<sha256>.safetensors``, of all arrays, and JSON
that names them. It is written to a temporary name and then renamed. A truncated or altered file is
reported and skipped, and the checkpoint before it is used.

The states of clients are in other files, because most of them do not change in a round. A changed
state is written once, to ``clients-<number>-<sha256>.safetensors``, before the checkpoints that
name that file. If less than half of the states in these files are still in use, all states are
written again: otherwise the files of cohorts of 100 of 1,000 clients are 5 times as large as the
states.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
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
from trishul_ray.stages import ArrayState, Memory
from trishul_ray.storage.durable import Json
from trishul_ray.storage.store import Store

_NAME = re.compile(r"round-(\d{6})-([0-9a-f]{64})\.safetensors")
#: Name of the tensor that holds the JSON, and the keys in the JSON that refer to an array, and to
#: the file of what a client keeps.
_META, _ARRAY, _FILE = "__meta__", "__array__", "__file__"
#: What reading fields of other types or names raises.
_ODD = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
#: A client in one of the two fields that hold what clients keep.
_Key = tuple[str, int]


def _file_name(kind: str, round_number: int, data: bytes) -> str:
    return f"{kind}-{round_number:06d}-{hashlib.sha256(data).hexdigest()}.safetensors"


def round_of(name: str) -> int | None:
    """Return the round of a checkpoint's file name; None for another file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


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
            last; see ``append_round`` and ``compare_everyone``.
        test_rows: ``row``, index in the test split, and ``score`` of every row scored after
            the last round, in order; empty before, and for a task without scores of rows.
        sources: hashes of data and weights; see ``WorkerSpec``.
        info: description of the data.
        stages: what each stage keeps, by its name.
        kept: what stages left with each client, by client.
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
    info: DatasetInfo | None = None
    stages: dict[str, Memory] = field(default_factory=dict, metadata=OPTIONAL)
    kept: dict[int, Arrays] = field(default_factory=dict, metadata=OPTIONAL)

    def is_last(self, rounds: int) -> bool:
        """Return whether a run of so many rounds is over: all are done, and the last is scored."""
        return self.round >= rounds and self.records[-1].scored

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        tensors: Arrays = {}

        def plain(value: Any) -> Json:
            """Return what JSON stores of an array or a dataclass."""
            if isinstance(value, np.ndarray):
                name = str(len(tensors))
                tensors[name] = np.asarray(value, order="C")
                return {_ARRAY: name}
            return _stored(value)

        meta = json.dumps(_stored(self), default=plain)
        # As a tensor of bytes: the order of entries in safetensors' own metadata is not fixed.
        return bytes(save_tensors(tensors | {_META: np.frombuffer(meta.encode(), dtype=np.uint8)}))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Checkpoint":
        """Return the checkpoint that :meth:`to_bytes` wrote.

        Raises:
            ValueError: the bytes are not a checkpoint.
        """
        try:
            tensors = load_tensors(data)
            meta = tensors.pop(_META).tobytes()
            found = json.loads(meta, object_hook=lambda d: tensors[d[_ARRAY]] if _ARRAY in d else d)
            info, states = found.pop("info"), found.pop("client_states")
            kept = found.pop("kept", {})
            if type(found["round"]) is not int:
                raise TypeError("its round is not a number")
            return cls(
                state=State(**found.pop("state")),
                client_states={int(client): state for client, state in states.items()},
                records=[RoundRecord(**record) for record in found.pop("records")],
                info=None if info is None else DatasetInfo.from_json(info),
                kept={int(client): arrays for client, arrays in kept.items()},
                **found,
            )
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
        digest.update(np.ascontiguousarray(state[key]).tobytes())
    return digest.hexdigest()


class CheckpointStore:
    """The checkpoints of one run, in its ``checkpoints`` folder; the newest ``keep`` are kept."""

    def __init__(self, store: Store, experiment_id: str, keep: int = 2) -> None:
        self.store, self.experiment_id, self.keep = store, experiment_id, keep
        self.skipped: list[str] = []  # one line for each file that newest() could not use
        self._found = ""  # the file of newest()
        self._clients: dict[_Key, tuple[str, Arrays]] = {}  # the file of what clients keep now
        self._sizes: dict[str, int] = {}  # of these files, in bytes
        self._named: dict[str, set[str]] = {}  # files that a checkpoint names

    def _files(self) -> list[str]:
        return sorted(name for name in self.store.names() if _NAME.fullmatch(name))

    def save(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, remove all but the newest ``keep``, and return the file's name."""
        data = self._write_clients(checkpoint).to_bytes()
        name = _file_name("round", checkpoint.round, data)
        self.store.write(name, data)
        self._remove_others(name)
        return name

    def _remove_others(self, name: str) -> None:
        """Remove all files that are not needed beside those of the newest checkpoint, ``name``."""
        # The last round is saved again once it is evaluated: the new file replaces the old one.
        same = name[: len("round-000000-")]
        stale = [f for f in self._files() if f.startswith(same) and f != name]
        older = [f for f in self._files() if not f.startswith(same)]
        for old in stale + older[: -(self.keep - 1) or None]:
            self.store.remove(old)
        self._named[name] = {file for file, _ in self._clients.values()}
        if self._sizes:
            self._remove_unnamed()

    def _write_clients(self, checkpoint: Checkpoint) -> Checkpoint:
        """Write what clients keep that no file holds yet; return a checkpoint that names files."""
        kept = _kept_by_clients(checkpoint)
        held = self._clients
        self._clients = {k: v for k, v in held.items() if k in kept and v[1] is kept[k]}
        if new := {key: arrays for key, arrays in kept.items() if key not in self._clients}:
            files = {file for file, _ in self._clients.values()}
            total = sum(self._sizes[file] for file in files) + _size(new)
            if total > 2 * _size(kept):
                new, self._clients = kept, {}
            data = save_tensors(
                {
                    f"{part}/{client}/{name}": np.asarray(array, order="C")
                    for (part, client), arrays in new.items()
                    for name, array in arrays.items()
                }
            )
            file = _file_name("clients", checkpoint.round, data)
            self.store.write(file, data)
            self._sizes[file] = len(data)
            self._clients |= {key: (file, arrays) for key, arrays in new.items()}
        named: dict[_Key, Any] = {key: {_FILE: file} for key, (file, _) in self._clients.items()}
        return _with_kept(checkpoint, named)

    def _read_clients(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with what clients keep in place of the names of files.

        Raises:
            ValueError: A file is missing or corrupt, or none is named.
        """
        named = _files_of_clients(checkpoint)
        self._clients, self._sizes = {}, {}
        found: dict[str, dict[_Key, Arrays]] = {}
        for file in sorted(set(named.values())):
            try:
                data = self.store.read(file)
            except FileNotFoundError as error:
                raise ValueError(f"{file} is missing") from error
            if hashlib.sha256(data).hexdigest() not in file:
                raise ValueError(f"{file} is corrupt")
            held = found[file] = {}
            try:
                for path, array in load_tensors(data).items():
                    part, client, name = path.split("/", 2)
                    held.setdefault((part, int(client)), {})[name] = array
            except (SafetensorError, ValueError) as error:
                raise ValueError(f"{file} holds something else: {first_line(error)}") from error
            self._sizes[file] = len(data)
        if lost := [key for key, file in named.items() if key not in found[file]]:
            raise ValueError(f"{named[lost[0]]} lacks what client {lost[0][1]} keeps")
        self._clients = {key: (file, found[file][key]) for key, file in named.items()}
        return _with_kept(checkpoint, {key: arrays for key, (_, arrays) in self._clients.items()})

    def _remove_unnamed(self) -> None:
        """Remove the files of what clients kept that no checkpoint names any more."""
        used: set[str] = set()
        files = self.store.names()
        for name in filter(_NAME.fullmatch, files):
            if name not in self._named:  # of an earlier process
                try:
                    named = _files_of_clients(Checkpoint.from_bytes(self.store.read(name)))
                except ValueError:
                    named = {}
                self._named[name] = {*named.values()}
            used |= self._named[name]
        for file in files:
            if file.startswith("clients-") and file not in used:
                self.store.remove(file)
                self._sizes.pop(file, None)

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint of this experiment, or None.

        Of two of the same round, which a writer that was killed has left, the scored one counts.
        """
        self.skipped = []
        unscored = None
        for name in reversed(self._files()):
            if unscored is not None and round_of(name) != unscored.round:
                break
            if (found := self._read(name)) is not None and unscored is None:
                self._found = name
            if found is not None and found.records[-1].scored:
                self._found = name
                return found
            unscored = unscored or found
        return unscored

    def tidy(self) -> None:
        """Remove what a writer that was killed has left beside the checkpoint of :meth:`newest`."""
        if self._found:
            self._remove_others(self._found)

    def _read(self, name: str) -> Checkpoint | None:
        """Return the checkpoint in a file; None if it is of no use, which :attr:`skipped` says."""
        data = self.store.read(name)
        if hashlib.sha256(data).hexdigest() not in name:
            self.skipped.append(f"checkpoint {name} is corrupt (checksum differs): skipped")
            return None
        try:
            checkpoint = Checkpoint.from_bytes(data)
            if checkpoint.experiment_id == self.experiment_id:
                return self._read_clients(checkpoint)
        except ValueError as error:
            self.skipped.append(f"checkpoint {name} is unreadable ({error}): skipped")
            return None
        self.skipped.append(
            f"checkpoint {name} belongs to experiment {checkpoint.experiment_id}: skipped"
        )
        return None


def _kept_by_clients(checkpoint: Checkpoint) -> dict[_Key, Arrays]:
    """Return the arrays of both fields that hold what clients keep."""
    parts = {"state": checkpoint.client_states, "kept": checkpoint.kept}
    return {(part, c): arrays for part, held in parts.items() for c, arrays in held.items()}


def _files_of_clients(checkpoint: Checkpoint) -> dict[_Key, str]:
    """Return the files that a checkpoint as it is stored names in place of these arrays."""
    named: dict[_Key, Any] = {**_kept_by_clients(checkpoint)}
    if not all(_FILE in each for each in named.values()):
        raise ValueError("not a checkpoint of this version: it holds what clients keep")
    return {key: each[_FILE] for key, each in named.items()}


def _with_kept(checkpoint: Checkpoint, kept: Mapping[_Key, Arrays]) -> Checkpoint:
    """Return a checkpoint with other content of these fields."""
    parts: dict[str, dict[int, Arrays]] = {"state": {}, "kept": {}}
    for (part, client), arrays in kept.items():
        parts[part][client] = arrays
    return replace(checkpoint, client_states=parts["state"], kept=parts["kept"])


def _size(kept: Mapping[_Key, Arrays]) -> int:
    """Return the bytes of arrays."""
    return sum(array.nbytes for arrays in kept.values() for array in arrays.values())


def run_folder(experiment: Experiment) -> Store:
    """Return the folder of an experiment's run, under ``storage.runs``."""
    storage = experiment.storage
    return Store.open(storage.runs, storage.retry_seconds).child(experiment.id)


def open_checkpoints(experiment: Experiment) -> CheckpointStore:
    """Return the checkpoints of an experiment's run, under ``storage.runs``."""
    folder = run_folder(experiment).child("checkpoints")
    return CheckpointStore(folder, experiment.id, experiment.storage.keep_checkpoints)
