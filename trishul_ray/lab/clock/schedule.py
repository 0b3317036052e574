"""Schedule of asynchronous rounds: the jobs of each server update, and their times.

A job is one local training of a client. It starts with the download of a version of the model, and
ends when its upload arrives. The schedule depends on durations and random draws, but not on the
results of jobs, so it is known before training.

At each moment, the server first reads the uploads that have arrived, by ascending job number, and
updates the model as soon as it has K uploads. If no more uploads have arrived at this moment,
replacements start from the newest version, and the clock advances to the next upload.

Legend: K uploads of an update, M jobs in flight.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Job(NamedTuple):
    """A job in flight.

    Attributes:
        number: Position in the order of starts, from 0.
        client: The client.
        round: The round of the broadcast that the client has read, from 1.
        ends: Simulated seconds at which the upload arrives.
    """

    number: int
    client: int
    round: int
    ends: float


@dataclass
class Schedule:
    """The jobs of a run at a moment of the clock.

    Attributes:
        seconds: The clock.
        started: Number of jobs started so far.
        flying: The jobs in flight, by ascending number.
    """

    seconds: float = 0.0
    started: int = 0
    flying: list[Job] = field(default_factory=list)

    def next_update(self, number: int, rules: "Rules") -> "Update":
        """Advance the clock to the next update, and return its jobs.

        Args:
            number: The round of this update, from 1.
            rules: The clients, limits, draws and durations of the run.
        """
        used: list[Job] = []
        late: list[Job] = []
        draws = 0
        while len(used) < rules.buffer:
            arrived = next((job for job in self.flying if job.ends <= self.seconds), None)
            if arrived is not None:
                self.flying.remove(arrived)
                most = rules.max_staleness
                stale = most is not None and number - arrived.round > most
                (late if stale else used).append(arrived)
                continue
            busy = [job.client for job in [*self.flying, *used]]
            free = np.setdiff1d(rules.clients, busy)
            if count := min(rules.concurrency - len(self.flying), len(free)):
                clients = rules.draw(free, count, draws)
                seconds = rules.seconds(clients, [job.client for job in late])
                self._start(number, clients, seconds)
                draws += 1
            self.seconds = min(job.ends for job in self.flying)
        return Update(used, late, len(self.flying))

    def _start(self, number: int, clients: Sequence[int], seconds: np.ndarray) -> None:
        for client, duration in zip(clients, seconds.tolist(), strict=True):
            self.flying.append(Job(self.started, client, number, self.seconds + duration))
            self.started += 1


@dataclass(frozen=True)
class Rules:
    """Inputs of the schedule in a round.

    Attributes:
        clients: The clients that may take part, ascending int64.
        buffer: K.
        concurrency: M.
        max_staleness: Maximum staleness of uploads that are used; None means any.
        draw: Function that samples clients, ascending, given the free clients, the number of
            clients to sample, and the number of earlier draws in the round.
        seconds: Function that returns the duration of a job of each client, given the clients, and
            the clients whose uploads were dropped since the last update.
    """

    clients: np.ndarray
    buffer: int
    concurrency: int
    max_staleness: int | None
    draw: Callable[[np.ndarray, int, int], Sequence[int]]
    seconds: Callable[[Sequence[int], Collection[int]], np.ndarray]


@dataclass(frozen=True)
class Update:
    """An update of the server.

    Attributes:
        used: The K jobs whose uploads it uses, in the order of arrival.
        late: The jobs whose uploads were dropped since the last update.
        in_flight: Number of jobs whose uploads have not been read.
    """

    used: list[Job]
    late: list[Job]
    in_flight: int
