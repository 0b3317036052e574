"""The folder of a run, ``<runs>/<id>``: find it, lock it, and store the run's attempt in it."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from trishul_ray.config.paths import LOCAL_FIELDS
from trishul_ray.errors import (
    BusyError,
    CorruptFileError,
    InputError,
    StorageRefusedError,
    did_you_mean,
    join_limited,
)
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import build_experiment
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.federation.checkpoint import CheckpointStore, open_checkpoints, run_folder
from trishul_ray.report.summary import ATTEMPT, RunSummary, read_note, run_ids, write_note
from trishul_ray.runs.mlflow_log import delete_logged
from trishul_ray.storage.locks import file_lock, lease
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store


@dataclass(frozen=True)
class RunFolder:
    """The folder of an experiment's run, which need not exist yet."""

    experiment: Experiment
    home: Store
    checkpoints: CheckpointStore

    @classmethod
    def of(cls, experiment: Experiment) -> "RunFolder":
        return cls(experiment, run_folder(experiment), open_checkpoints(experiment))

    @property
    def attempt(self) -> str:
        """The name of the attempt recorded in the folder, or an empty string."""
        if attempt := read_note(self.home, ATTEMPT):
            return attempt
        checkpoint = self.checkpoints.newest()
        return "" if checkpoint is None else checkpoint.attempt

    @contextmanager
    def accessible(self) -> Iterator[None]:
        """Convert permanent errors of the storage to an InputError."""
        try:
            yield
        except StorageRefusedError as error:
            shown = redact(self.experiment.storage.runs)
            raise InputError(f"storage.runs={shown!r}: {error}; choose another folder") from error

    @contextmanager
    def locked(self, *, read_only: bool) -> Iterator[None]:
        """Ensure that only one process drives a run, by a lock file or, in a bucket, a lease.

        With ``read_only``, a finished run may be in a folder without write permission.
        """
        runs, name = self.home.parent(), self.home.name
        file = Path(runs.root, f".{name}.lock")
        lock = file_lock(file) if runs.is_local else lease(runs.child(".leases"), name)
        with ExitStack() as held:
            try:
                with self.accessible():
                    held.enter_context(lock)
            except TimeoutError as error:
                raise BusyError(
                    f"run {name} is being driven by another process; wait for it or stop it"
                ) from error
            except InputError:
                if not (read_only and self.home.exists("result.json")):
                    raise
            yield

    def remove(self) -> list[str]:
        """Remove the run, also from MLflow; return the parts that MLflow rejected."""
        attempt = self.attempt
        self.home.remove("result.json")  # first, since without its files it is not a result
        rejected = delete_logged(self.experiment, attempt)
        self.home.remove_all()
        return rejected

    @contextmanager
    def begun(self) -> Iterator[str]:
        """Write the first files of a run, and yield its attempt, which is recorded or new.

        A run that is rejected before its first checkpoint leaves no files.
        """
        existed = self.home.exists(ATTEMPT)
        try:
            with self.accessible():
                self.home.remove_unfinished()
                # The attempt must exist before the MLflow run: a driver that is killed in between
                # finds the MLflow run by this name.
                attempt = self.attempt or uuid.uuid4().hex
                write_note(self.home, ATTEMPT, attempt)
                self.home.write("config.yaml", self.experiment.to_yaml())
            yield attempt
        except InputError:
            if not (existed or self.checkpoints.store.names()):
                self.remove()
            raise


def open_run(run: str, runs: str) -> tuple[Store, Experiment]:
    """Open the folder of a run, and load its experiment.

    ``run`` is an id in ``runs``, a prefix of an id, or the folder of a run. The cache, the hub's
    mirror and the MLflow store are those configured on this machine.

    Raises:
        InputError: No run matches, several runs match, or config.yaml describes another run.
    """
    folder, _, name = run.rstrip("/").rpartition("/")
    store = Store.open(folder or runs)
    if not name or not store.child(name).exists("config.yaml"):
        ids = run_ids(store)
        found = [id for id in ids if name and id.startswith(name)]
        if len(found) > 1:
            known = join_limited(found, 3)
            raise InputError(f"run {run!r} is ambiguous: it matches {known}; use a longer prefix")
        if not found or not store.child(found[0]).exists("config.yaml"):
            similar = did_you_mean(name, [id for id in ids if id not in found])
            raise InputError(
                f"run {run!r} does not exist: no config.yaml in {store.place(name)}, and "
                f"{store.uri} has {len(ids)} runs{similar}"
            )
        (name,) = found
    home = store.child(name)
    try:
        fields = parse_yaml(home.read("config.yaml"), texts=True)
        for section, names in LOCAL_FIELDS.items():
            fields[section] = {k: v for k, v in fields[section].items() if k not in names}
        fields["storage"]["runs"] = folder or runs
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
        place = home.place("config.yaml")
        raise CorruptFileError(f"{place} is corrupt; repeat the run to restore it") from error
    experiment = build_experiment(fields, note=False)
    if experiment.id != name:
        raise InputError(
            f"run {run!r}: its config.yaml now describes {experiment.id}, not {name}; repeat the "
            "run to restore it"
        )
    return home, experiment


def open_finished(run: str, runs: str) -> tuple[Store, Experiment, RunSummary]:
    """Open a finished run with its summary, or raise an InputError; see :func:`open_run`."""
    home, experiment = open_run(run, runs)
    try:
        return home, experiment, RunSummary.read(home)
    except FileNotFoundError:
        raise InputError(f"run {experiment.id} has not finished; repeat it to resume") from None
