"""Round checkpoints: everything the next round needs, in one file that proves itself.

A checkpoint is one safetensors file, ``round-<number>-<sha256>.safetensors``, with the tensors of
the global state and of every client's persistent state, and JSON metadata (round, records, attempt,
experiment id). The checksum stands in the name, so one object is all there is: it is written
beside and renamed into place, and a torn or altered file is named and skipped in favour of the one
before it.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from trishul_ray.federation.messages import Arrays
from trishul_ray.storage import Store

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment

_NAME = re.compile(r"round-(\d{6})-([0-9a-f]{64})\.safetensors")
_META = "__meta__"


@dataclass
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        experiment_id: the experiment it belongs to.
        attempt: the tracking attempt, so that a resumed run continues the same MLflow run.
        round: the last round that was aggregated (0: none yet).
        state: the global state.
        client_states: persistent state of each client that has one.
        records: one record per round so far, the untouched backbone's first.
        spectra: singular values of the last diagnostics; see ``Diagnosed``.
        matrices: comparisons of each two clients in every diagnosed round; see ``append_round``.
        survey: what clients found out before round 1, averaged.
        sources: what the run is made from; see ``Blueprint.sources``.
    """

    experiment_id: str
    attempt: str
    round: int
    state: Arrays
    client_states: dict[int, Arrays] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    spectra: Arrays = field(default_factory=dict)
    matrices: Arrays = field(default_factory=dict)
    survey: Arrays = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """One safetensors image."""
        tensors = {f"state/{key}": value for key, value in self.state.items()}
        tensors |= {f"spectra/{key}": value for key, value in self.spectra.items()}
        tensors |= {f"matrices/{key}": value for key, value in self.matrices.items()}
        tensors |= {f"survey/{key}": value for key, value in self.survey.items()}
        for client, arrays in self.client_states.items():
            tensors |= {f"client/{client}/{key}": value for key, value in arrays.items()}
        meta = {
            "experiment_id": self.experiment_id,
            "attempt": self.attempt,
            "round": self.round,
            "records": self.records,
            "sources": self.sources,
        }
        # The metadata is a tensor of bytes: safetensors' own header holds strings unordered.
        tensors[_META] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        return bytes(save_tensors({k: np.ascontiguousarray(v) for k, v in tensors.items()}))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Checkpoint":
        """Read :meth:`to_bytes`.

        Raises:
            ValueError: the bytes are no checkpoint.
        """
        try:
            tensors = load_tensors(data)
            meta = json.loads(tensors.pop(_META).tobytes())
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"not a checkpoint: {error}") from error
        found = cls(
            experiment_id=meta["experiment_id"],
            attempt=meta["attempt"],
            round=meta["round"],
            state={},
            records=meta["records"],
            sources=meta.get("sources", {}),
        )
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "client":
                client, _, key = rest.partition("/")
                found.client_states.setdefault(int(client), {})[key] = value
            else:
                kinds = {
                    "state": found.state,
                    "spectra": found.spectra,
                    "matrices": found.matrices,
                    "survey": found.survey,
                }
                kinds[kind][rest] = value
        return found


def state_digest(state: Arrays) -> str:
    """SHA-256 over names, types and bytes of a state: equal states, equal digests."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(f"{key} {state[key].dtype} {state[key].shape}\n".encode())
        digest.update(np.ascontiguousarray(state[key]).tobytes())
    return digest.hexdigest()


class CheckpointStore:
    """The checkpoints of one run, newest last.

    Attributes:
        skipped: one line for each file that could not be used, filled by :meth:`newest`.
    """

    def __init__(self, store: Store, experiment_id: str, keep: int = 2) -> None:
        """Look into ``store``, the run's ``checkpoints`` folder."""
        self.store = store
        self.experiment_id = experiment_id
        self.keep = keep
        self.skipped: list[str] = []

    def _files(self) -> list[str]:
        return sorted(name for name in self.store.names() if _NAME.fullmatch(name))

    def save(self, checkpoint: Checkpoint) -> str:
        """Write, then drop all but the newest ``keep``; returns the file's name."""
        data = checkpoint.to_bytes()
        name = f"round-{checkpoint.round:06d}-{hashlib.sha256(data).hexdigest()}.safetensors"
        self.store.write(name, data)
        # Two files of one round differ by its evaluation: the one just written replaces the other.
        same = f"round-{checkpoint.round:06d}-"
        stale = [f for f in self._files() if f.startswith(same) and f != name]
        older = [f for f in self._files() if not f.startswith(same)]
        for old in stale + older[: -(self.keep - 1) or None]:
            self.store.remove(old)
        return name

    def newest(self) -> Checkpoint | None:
        """The newest sound checkpoint of this experiment, or None."""
        self.skipped = []
        for name in reversed(self._files()):
            data = self.store.read(name)
            if hashlib.sha256(data).hexdigest() not in name:
                self.skipped.append(f"checkpoint {name} is corrupt (checksum differs): skipped")
                continue
            try:
                found = Checkpoint.from_bytes(data)
            except ValueError as error:
                self.skipped.append(f"checkpoint {name} is unreadable ({error}): skipped")
                continue
            if found.experiment_id != self.experiment_id:
                self.skipped.append(
                    f"checkpoint {name} belongs to experiment {found.experiment_id}: skipped"
                )
                continue
            return found
        return None

    def clear(self) -> None:
        """Remove every checkpoint."""
        for name in self._files():
            self.store.remove(name)


def run_folder(experiment: "Experiment") -> Store:
    """Return the folder of an experiment's run, under ``storage.runs``."""
    storage = experiment.storage
    return Store.open(storage.runs, storage.retry_seconds).child(experiment.id)


def open_checkpoints(experiment: "Experiment") -> CheckpointStore:
    """Return the checkpoints of an experiment's run, under ``storage.runs``."""
    folder = run_folder(experiment).child("checkpoints")
    return CheckpointStore(folder, experiment.id, experiment.storage.keep_checkpoints)
