"""The folder of a run, ``<runs>/<id>``: how to find it, who may write into it, and its attempt."""

import difflib
import errno
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from trishul_ray.errors import (
    BusyError,
    CorruptFileError,
    InputError,
    StorageError,
    StorageRefusedError,
    join_limited,
)
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import build_experiment
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.federation.checkpoint import CheckpointStore, open_checkpoints, run_folder
from trishul_ray.report.summary import attempt_of, run_ids, write_attempt
from trishul_ray.storage.durable import make_folder
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store, reason

#: Seconds to wait for a process that drives the run, such as a killed one that is still ending.
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run; ``runs`` is the folder of runs, as the user names it."""

    id: str
    runs: str
    home: Store
    checkpoints: CheckpointStore

    @classmethod
    def of(cls, experiment: Experiment) -> "RunFolder":
        """Return the folder of an experiment's run, which need not exist yet."""
        checkpoints = open_checkpoints(experiment)
        return cls(experiment.id, experiment.storage.runs, run_folder(experiment), checkpoints)

    @property
    def attempt(self) -> str:
        """Name of the attempt that it belongs to, by its files; empty without one."""
        if attempt := attempt_of(self.home):
            return attempt
        checkpoint = self.checkpoints.newest()
        return "" if checkpoint is None else checkpoint.attempt

    @contextmanager
    def accessible(self) -> Iterator[None]:
        """Raise a permanent error of the storage as an InputError."""
        try:
            yield
        except StorageRefusedError as error:
            shown = redact(self.runs)
            raise InputError(f"storage.runs={shown!r}: {error}; choose another folder") from error

    @contextmanager
    def locked(self, *, read_only: bool) -> Iterator[None]:
        """Allow one process at a time to drive a run in a local folder.

        With ``read_only``, a finished run may be in a folder that cannot be written.
        """
        if not self.home.is_local:
            yield
            return
        folder = Path(self.home.root).parent
        lock, is_new = FileLock(folder / f".{self.id}.lock"), not folder.exists()
        try:
            make_folder(folder)
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout as error:
            raise BusyError(
                f"run {self.id} is being driven by another process; wait for it or stop it"
            ) from error
        except OSError as error:
            message = f"storage.runs={self.runs!r} cannot be written: {reason(error)}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(message) from error
            if not (read_only and self.home.exists("result.json")):
                raise InputError(f"{message}; choose a writable folder") from error
        try:
            yield
        finally:
            with suppress(OSError):  # nothing can be written there, or another run has begun
                if lock.is_locked:  # a process that waits for the removed file opens a new one
                    Path(lock.lock_file).unlink(missing_ok=True)
                if is_new and not self.home.names():  # the input was rejected: leave nothing
                    folder.rmdir()
            lock.release()

    def remove_result(self) -> None:
        """Make the run an unfinished one, before other files are removed."""
        self.home.remove("result.json")  # first: without its files, it is no result

    @contextmanager
    def begun(self, config: bytes, new: str) -> Iterator[str]:
        """Write what a run begins with, and yield its attempt: that of its files, else ``new``.

        A run that fails by wrong input or a full disk before its first checkpoint leaves no files.
        """
        home = self.home
        existed = home.exists("attempt.json")
        try:
            with self.accessible():
                home.remove_unfinished()
                # Before there is a run in MLflow: a driver killed in between finds it by this name.
                if not (attempt := attempt_of(home)):
                    attempt = self.attempt or new
                    write_attempt(home, attempt)
                home.write("config.yaml", config)
            yield attempt
        except (InputError, StorageError) as error:
            # A remote storage that has just failed is not asked again.
            answers = home.is_local or isinstance(error, InputError)
            if not existed and answers and not home.child("checkpoints").names():
                home.remove_all()
            raise


def open_run(run: str, runs: str) -> tuple[Store, Experiment]:
    """Return the folder of a run and its experiment.

    ``run`` is an id in ``runs``, the beginning of an id, or the folder of a run.

    Raises:
        InputError: There is no such run, several begin so, or its config.yaml describes another.
    """
    folder, _, name = run.rstrip("/").rpartition("/")
    store = Store.open(folder or runs)
    if not name or not store.child(name).exists("config.yaml"):
        ids = run_ids(store)
        found = [each for each in ids if name and each.startswith(name)]
        if len(found) != 1 or not store.child(found[0]).exists("config.yaml"):
            close = difflib.get_close_matches(name, ids, n=3, cutoff=0.5)
            near = f"the nearest are {', '.join(close)}" if close else f"it holds {len(ids)} runs"
            near = f"several begin so: {join_limited(found, 3)}" if len(found) > 1 else near
            missing = f"no config.yaml in {store.place(name)}"
            raise InputError(f"run {run!r} does not exist: {missing}; {near}")
        (name,) = found
    home = store.child(name)
    try:
        fields = parse_yaml(home.read("config.yaml"))
        fields["storage"]["runs"] = folder or runs
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        place = home.place("config.yaml")
        raise CorruptFileError(f"{place} is damaged: repeat the run, which restores it") from error
    experiment = build_experiment(fields, note=False)
    if experiment.id != name:
        raise InputError(
            f"run {run!r}: its config.yaml now describes {experiment.id}, not {name}: repeat the "
            "run, which restores it"
        )
    return home, experiment


def remove_locks(runs: str, finished: Collection[str]) -> None:
    """Remove the locks of finished runs whose processes were killed."""
    store = Store.open(runs)
    for path in Path(store.root).glob(".*.lock") if store.is_local else ():
        if path.name[1 : -len(".lock")] in finished:
            with suppress(OSError), FileLock(path, timeout=0):  # nobody holds it
                path.unlink(missing_ok=True)
