"""Mutual exclusion of processes: lock files on one machine, and leases in a bucket."""

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

#: Seconds to wait for a lock file, for example of a killed process that is still exiting.
LOCK_SECONDS = 5.0
#: Seconds after which a holder renews its lease, and after which a lease expires.
RENEW_SECONDS, EXPIRED_SECONDS = 5.0, 20.0


@contextmanager
def file_lock(file: Path) -> Iterator[None]:
    """Acquire a lock file, and remove it on exit, including a folder created for it.

    Raises:
        TimeoutError: Another process holds the lock.
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
        with suppress(OSError):  # another run has started in the folder
            file.unlink(missing_ok=True)  # a waiting process creates a new file
            if is_new:  # the input was rejected, so leave no files
                file.parent.rmdir()
        lock.release()


@contextmanager
def lease(store: Store, name: str) -> Iterator[None]:
    """Acquire a lease, an empty object in a folder that a thread renews periodically.

    Each process writes its own object, and then lists the folder. It acquires the lease if all
    objects of other processes have expired. If several processes start at the same time, at most
    one succeeds. The others remove their objects, and retry until an abandoned lease would have
    expired. Ages are measured by the clock of the storage.

    Raises:
        TimeoutError: Another process holds the lease.
        StorageError: The storage failed.
    """
    mine, ended = f"{name}.{uuid.uuid4().hex}", threading.Event()
    hasty = replace(store, retry_seconds=0.0)  # on failure, the lease expires

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
