"""Locks that one process at a time holds: a file on this machine, a lease in a bucket."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import tenacity
from filelock import FileLock, Timeout

from trishul_ray.errors import StorageError, StorageRefusedError
from trishul_ray.storage.durable import make_folder
from trishul_ray.storage.store import Store, reason

#: Seconds to wait for the holder of a lock file, such as a killed process that is still ending.
LOCK_SECONDS = 5.0
#: Seconds after which a holder writes its lease again, and after which an old lease has expired.
RENEW_SECONDS, EXPIRED_SECONDS = 5.0, 20.0


@contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Hold a lock file, which is removed at the end, as is a folder that was created for it.

    Raises:
        TimeoutError: Another process holds it.
        StorageRefusedError: The folder cannot be written.
    """
    lock, is_new = FileLock(file, fallback_to_soft=False), not file.parent.exists()
    try:
        make_folder(file.parent)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise
    except OSError as error:
        raise StorageRefusedError(f"cannot be written: {reason(error)}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # another run has begun
            file.unlink(missing_ok=True)  # a process that waits for the file opens a new one
            if is_new:  # the input was rejected: leave nothing
                file.parent.rmdir()
        lock.release()


@contextmanager
def lease(store: Store, name: str) -> Iterator[None]:
    """Hold the lease ``name``, an empty object in a folder that a thread writes again and again.

    A process writes its object and then lists the folder: it holds the lease if no other process
    has an object. Of processes that start together, at most one sees no other. The others remove
    their objects and try again until an abandoned lease would have expired. Ages are measured by
    the clock of the storage.

    Raises:
        TimeoutError: Another process holds it.
        StorageError: The storage fails.
    """
    mine, ended = f"{name}.{uuid.uuid4().hex}", threading.Event()
    hasty = replace(store, retry_seconds=0.0)  # a lease that is not written or removed expires

    def acquire() -> None:
        store.write(mine, b"")
        written = {k: t for k, t in store.written().items() if k.startswith(f"{name}.")}
        now = written.pop(mine, 0.0)
        if any(now - time < EXPIRED_SECONDS for time in written.values()):
            store.remove(mine)
            raise TimeoutError
        for expired in written:
            store.remove(expired)

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            with suppress(StorageError):
                hasty.write(mine, b"")

    tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TimeoutError),
        wait=tenacity.wait_random(1, 2),
        stop=tenacity.stop_after_delay(EXPIRED_SECONDS + RENEW_SECONDS),
        reraise=True,
    )(acquire)
    renewal = threading.Thread(target=renew, daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        with suppress(StorageError):
            hasty.remove(mine)
