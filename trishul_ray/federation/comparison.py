"""The comparison of a round's uploads in threads, beside the evaluation of the model before it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch

from trishul_ray.cpu import usable_cores
from trishul_ray.federation.diagnostics import Diagnostics
from trishul_ray.federation.messages import Upload

#: Threads that share a comparison, if there are as many cores.
MOST_THREADS = 8


@dataclass(frozen=True)
class Compared:
    """The valid uploads among the first of a round, as values, and their diagnostics."""

    uploads: list[Upload]
    diagnostics: Diagnostics


class Comparison:
    """The comparison of one round's uploads, in a thread; use it as a context manager.

    It begins as soon as the clients have trained, and its result is read, or its error raised,
    before the state changes: the record of a round is complete when it is written. On leaving, what
    has not ended is given up.

    Args:
        compare: Compares uploads, given :attr:`pool`.
        fetch: Brings uploads into this process, given their handles.
        threads: ``resources.threads``: how many torch uses in each of the threads here, as in the
            server's own, so that sums are rounded alike.

    Attributes:
        pool: Threads that share the work: as many as the server leaves cores.
    """

    def __init__(
        self,
        compare: Callable[[Sequence[Upload], ThreadPoolExecutor], Compared],
        fetch: Callable[[list[Any]], list[Upload]],
        threads: int,
    ) -> None:
        self._compare, self._fetch = compare, fetch
        spare = max(1, min(MOST_THREADS, usable_cores() // threads - 1))
        self.pool = ThreadPoolExecutor(spare, "comparison", torch.set_num_threads, (threads,))
        self._thread = ThreadPoolExecutor(1, "comparison", torch.set_num_threads, (threads,))
        self._uploads: Sequence[Any] = ()
        self._future: Future[Compared] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._thread, self.pool):
            threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, uploads: Sequence[Any]) -> None:
        """Fetch uploads, given by their handles, and begin to compare them."""
        self._uploads = uploads
        self._future = self._thread.submit(self._compare, self._fetch([*uploads]), self.pool)

    def result(self, uploads: Sequence[Any]) -> Compared:
        """Return the comparison of uploads; it begins now unless it has begun with these."""
        if self._future is None or [*map(id, uploads)] != [*map(id, self._uploads)]:
            self.begin(uploads)
        assert self._future is not None
        return self._future.result()
