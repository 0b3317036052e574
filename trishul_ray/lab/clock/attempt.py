"""One attempt of a round: the clients that count, and its duration.

Legend: k selected clients, m clients that the round needs.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trishul_ray.lab.clock.devices import Moments

#: Outcome of a selected client: it counts, finishes after m other clients, finishes after the
#: deadline, disappears, or would have counted in an attempt that is abandoned.
Fate = Literal["kept", "surplus", "late", "lost", "abandoned"]


@dataclass(frozen=True)
class Attempt:
    """The selected clients and their outcomes, known before any client trains.

    Attributes:
        clients: int64 [k], ascending.
        moments: When the clients finish, with the expected bytes.
        fates: The outcome of each client.
        lost_at: [k], seconds after which a client disappears; infinite for other clients.
        wanted: m.
        deadline: Seconds that the server waits if fewer than m clients finish; None means no limit.
    """

    clients: np.ndarray
    moments: Moments
    fates: tuple[Fate, ...]
    lost_at: np.ndarray
    wanted: int
    deadline: float | None

    @property
    def kept(self) -> np.ndarray:
        """The clients that count, [k] bool."""
        return np.array([fate == "kept" for fate in self.fates], dtype=bool)

    def seconds(self, finished: np.ndarray) -> float:
        """Compute the duration: until all counted clients finish, or the server stops waiting.

        Args:
            finished: Seconds of the counted clients, for the expected or the transferred bytes.
        """
        last = float(finished.max(initial=0.0))
        if len(finished) >= self.wanted:
            return last
        if self.deadline is not None:
            return max(last, self.deadline)
        # The server detects that a client has disappeared, and waits only for other clients.
        lost = self.lost_at[np.isfinite(self.lost_at)]
        return max(last, float(lost.max(initial=0.0)))


def plan(
    clients: np.ndarray,
    moments: Moments,
    *,
    wanted: int,
    deadline: float | None = None,
    lost: np.ndarray | None = None,
) -> Attempt:
    """Select the clients that count: the first ``wanted`` to finish, ties by client.

    Args:
        clients: int64 [k], ascending.
        moments: When the clients finish, with the expected bytes.
        wanted: m.
        deadline: Seconds; None means no limit.
        lost: int [k]: 0 for clients that stay, 1 for clients that disappear after the download, 2
            for clients that disappear before the upload; None means that all stay.
    """
    total = moments.uploaded
    lost = np.zeros(len(clients), dtype=np.int64) if lost is None else lost
    never = np.full(len(clients), math.inf)
    lost_at = np.choose(lost, [never, moments.downloaded, moments.trained])
    finished = np.flatnonzero((total <= (math.inf if deadline is None else deadline)) & (lost == 0))
    first = finished[np.lexsort((clients[finished], total[finished]))]
    fates: list[Fate] = ["lost" if at else "late" for at in lost]
    for place, index in enumerate(first.tolist()):
        fates[index] = "kept" if place < wanted else "surplus"
    return Attempt(clients, moments, tuple(fates), lost_at, wanted, deadline)
