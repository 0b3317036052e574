"""The comparison of a round's uploads in threads, beside the evaluation of the model before it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from trishul_ray.experiment import Experiment
from trishul_ray.federation.aggregate import UploadReader
from trishul_ray.federation.diagnostics import (
    Diagnostics,
    aggregation_error,
    compare_everyone,
    compare_uploads,
)
from trishul_ray.federation.messages import Arrays, Upload, WorkerSpec
from trishul_ray.federation.reduce import Reducer, rejection_reason, round_units
from trishul_ray.runtime.device import usable_cores
from trishul_ray.stages import ArrayState

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
    has not ended is given up. Every thread here has ``resources.threads`` of torch's, as the
    server's own, so that sums are rounded alike.

    Attributes:
        number: The round.
        broadcast: What its clients have read.
        is_due: Whether the round is diagnosed.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: WorkerSpec,
        uploads: UploadReader,
        number: int,
        broadcast: ArrayState,
    ) -> None:
        self.number, self.broadcast = number, broadcast
        self.is_due = experiment.evaluation.diagnoses(number, experiment.federation.rounds)
        self._experiment, self._spec, self._reader = experiment, spec, uploads
        threads = experiment.resources.threads
        spare = max(1, min(MOST_THREADS, usable_cores() // threads - 1))
        self._pool = ThreadPoolExecutor(spare, "comparison", torch.set_num_threads, (threads,))
        self._thread = ThreadPoolExecutor(1, "comparison", torch.set_num_threads, (threads,))
        self._handles: Sequence[Any] = ()
        self._future: Future[Compared] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._thread, self._pool):
            threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, handles: Sequence[Any]) -> None:
        """Fetch uploads and begin to compare them."""
        self._handles = handles
        self._future = self._thread.submit(self._compare, self._reader.fetch(handles))

    def result(self, handles: Sequence[Any]) -> Compared:
        """Return the comparison of uploads; it begins now unless it has begun with these."""
        if self._future is None or [*map(id, handles)] != [*map(id, self._handles)]:
            self.begin(handles)
        assert self._future is not None
        return self._future.result()

    def _compare(self, uploads: Sequence[Upload]) -> Compared:
        expected = self._spec.expected
        valid = [each for each in uploads if rejection_reason(each, expected) is None]
        values = self._reader.values(valid, self.broadcast)
        found = compare_uploads(values, self.broadcast, self._spec, self._experiment, self._pool)
        return Compared(values, found)

    @property
    def is_of_everyone(self) -> bool:
        """True if all clients are to be compared: after the last round, those that did not train.

        Only methods with cores have such a comparison.
        """
        units = self._spec.layout.units(self._spec.wire)
        return (
            self._experiment.evaluation.diagnostics_cohort == "all"
            and self.number == self._experiment.federation.rounds
            and any(unit.rank is not None for unit in units)
        )

    def of_everyone(self, handles: Sequence[Any]) -> Arrays:
        """Compare the uploads of all clients; see :func:`compare_everyone`."""
        spec, top_k = self._spec, self._experiment.evaluation.top_k
        uploads = self._reader.values(self._reader.fetch(handles), self.broadcast)
        valid = [u for u in uploads if rejection_reason(u, spec.expected) is None]
        valid.sort(key=lambda upload: upload.client)
        if not valid:
            return {}
        return compare_everyone(valid, self.broadcast, spec, top_k, self._pool)

    def aggregation_error(
        self, uploads: Sequence[Upload], reducer: Reducer, after: Callable[[], ArrayState]
    ) -> float | None:
        """Return the error of aggregating all uploads of the round; see :func:`aggregation_error`.

        None if clients have trained different units. ``after`` returns the next broadcast.
        """
        units = round_units(reducer.method, reducer.layout, self.number)
        alike = all(
            upload.active is None or (units is not None and np.array_equal(upload.active, units))
            for upload in uploads
        )
        if not alike:
            return None
        return aggregation_error(uploads, reducer, self.broadcast, after(), self._pool)
