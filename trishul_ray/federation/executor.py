"""Interface of executors, which run the jobs of a round in this process or on Ray actors."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trishul_ray.federation.messages import Arrays, Job, Outcome, Upload, WorkerSpec
from trishul_ray.federation.reduce import Reducer
from trishul_ray.runtime.stack import Stack
from trishul_ray.stages import ArrayState, Partial


class Executor(Protocol):
    """Run jobs, with results that depend only on the jobs, not on the process or the order.

    Attributes:
        stacks: The distinct stacks of its workers so far.
    """

    stacks: list[Stack]

    def describe(self, survey: Arrays) -> WorkerSpec:
        """Return the spec of the worker context that every worker builds, given the survey."""

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run all jobs with one broadcast.

        With a reducer, uploads of more than ``FAN_IN`` clients are validated and summed in groups
        as they arrive, and only the first ``MOST_CLIENTS`` are kept. ``trained`` is called with the
        first ``MOST_CLIENTS`` uploads when all clients have trained; evaluation may still be
        running.
        """

    def reduce(self, outcome: Outcome, reducer: Reducer) -> Partial:
        """Sum all uploads, in groups of ``FAN_IN``, in order."""

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Fetch uploads into this process, given their handles."""
