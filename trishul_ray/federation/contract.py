"""What the server and whoever runs its jobs promise each other. No Ray here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trishul_ray.adapters.layout import Layout
from trishul_ray.federation.jobs import Arrays, EvalReport, Job, TrainReport, Upload
from trishul_ray.federation.reduce import Expected, Partial, Reducer
from trishul_ray.tasks.base import Task


@dataclass(frozen=True)
class Blueprint:
    """What the server must know of a workbench, without holding a backbone itself.

    ``sources`` says what the run is made from beyond its configuration, which names places and
    not what lies there: the SHA-256 of the dataset's ``rows`` and, for texts, of their
    ``tokens``, and the weights of the ``backbone``. What is unknown is left out.
    """

    layout: Layout
    wire: tuple[str, ...]
    initial: np.ndarray  # [P] float32, the untrained vector
    expected: Expected
    task: Task
    test_rows: int
    parameters: dict[str, int]  # adapter, scalars, head
    heads: dict[str, int]  # heads on each adapted matrix, by transformer block (if any)
    block_norms: dict[str, float]  # ||W||_F^2 of the adapted matrices, summed by block
    sources: dict[str, str] = field(default_factory=dict)


#: Names of sources for people.
_SOURCES = {"rows": "data", "tokens": "tokens of the data", "backbone": "weights of the backbone"}


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Names of the sources that are known in both and differ, for a message; empty if none do."""
    both = [kind for kind in _SOURCES if kind in before and kind in now]
    changed = [kind for kind in both if before[kind] != now[kind]]
    if "rows" in changed and "tokens" in changed:
        changed.remove("tokens")  # of other rows
    return " and ".join(_SOURCES[kind] for kind in changed)


@dataclass
class Outcome:
    """What a set of jobs brought: handles to uploads stay wherever they were made."""

    uploads: list[Any]  # in the order of the training jobs
    reports: list[TrainReport]  # likewise
    evaluations: list[EvalReport]  # in the order of the evaluation jobs
    surveys: list[Arrays] = field(default_factory=list)  # in the order of the survey jobs
    events: list[str] = field(default_factory=list)  # restarts and the like, for people


class Executor(Protocol):
    """Runs jobs somewhere. Results depend on the jobs alone, never on where or in which order."""

    def describe(self, survey: Arrays) -> Blueprint:
        """The blueprint of the workbench that every worker builds, given the survey (or none)."""
        ...

    def run(self, broadcast: Arrays, jobs: Sequence[Job]) -> Outcome:
        """Run all jobs against one broadcast."""
        ...

    def reduce(self, uploads: list[Any], reducer: Reducer) -> Partial:
        """Judge and sum uploads in groups of ``FAN_IN``, in order."""
        ...

    def fetch(self, uploads: list[Any]) -> list[Upload]:
        """Bring a few uploads here, for diagnostics."""
        ...
