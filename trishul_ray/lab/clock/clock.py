"""Duration and energy of a client's round, and the clients that come in time.

Everything follows from counted FLOPs, counted bytes and the devices, never from a measured time.
With S local steps, a client's round takes::

    t = latency + 8 down_bytes / (10^6 down) + S flops / speed + 8 up_bytes / (10^6 up)

and costs ``power`` times its seconds of computing plus ``radio`` times its seconds of transfer.

Legend: k clients that are asked, m that are wanted.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

#: Bits of a byte over bits of a megabit.
_MEGABITS = 8 / 1e6

#: Outcome of a client that is asked: it is kept, comes after the m that are, comes after the
#: deadline, is lost on the way, or comes in time to an attempt that is given up.
ClientOutcome = Literal["kept", "surplus", "late", "lost", "abandoned"]


def _seconds(size: np.ndarray, megabits: np.ndarray) -> np.ndarray:
    seconds: np.ndarray = _MEGABITS * size / megabits
    return seconds


@dataclass(frozen=True)
class Times:
    """Parts of the duration of the clients' rounds, [k] each.

    Attributes:
        latency: Seconds that are neither transfer nor computing, and cost no energy.
        down: Mbit/s from the server.
        up: Mbit/s to the server.
        down_bytes: Bytes of the broadcast.
        up_bytes: Bytes of the upload.
        step: Seconds of one local step.
        steps: Local steps that are made, int64.
    """

    latency: float
    down: np.ndarray
    up: np.ndarray
    down_bytes: np.ndarray
    up_bytes: np.ndarray
    step: np.ndarray
    steps: np.ndarray

    @property
    def download(self) -> np.ndarray:
        """Seconds of the download."""
        return _seconds(self.down_bytes, self.down)

    @property
    def compute(self) -> np.ndarray:
        """Seconds of all steps."""
        seconds: np.ndarray = self.steps * self.step
        return seconds

    @property
    def upload(self) -> np.ndarray:
        """Seconds of the upload."""
        return _seconds(self.up_bytes, self.up)

    @property
    def total(self) -> np.ndarray:
        """Seconds from the start of the round until the server has the upload."""
        seconds: np.ndarray = self.latency + self.download + self.compute + self.upload
        return seconds

    def joules(self, power: np.ndarray, radio: float, stop: np.ndarray) -> np.ndarray:
        """Return the energy of clients that stop after so many seconds, [k] float64."""
        left = np.maximum(stop - self.latency, 0)
        down = np.minimum(left, self.download)
        computing = np.minimum(left - down, self.compute)
        up = np.minimum(left - down - computing, self.upload)
        joules: np.ndarray = power * computing + radio * (down + up)
        return joules


@dataclass(frozen=True)
class Plan:
    """Asked clients that count, before anyone has trained.

    Attributes:
        clients: Asked clients, int64 [k], ascending.
        times: Their times, with the expected bytes.
        fates: Outcome of each.
        lost_at: Seconds after which a client is lost, [k]; infinite for others.
        wanted: m.
        deadline: Seconds that the server waits if fewer come than are wanted; None to wait for all.
    """

    clients: np.ndarray
    times: Times
    fates: tuple[ClientOutcome, ...]
    lost_at: np.ndarray
    wanted: int
    deadline: float | None

    @property
    def accepted(self) -> np.ndarray:
        """Accepted clients, [k] bool."""
        return np.array([fate == "kept" for fate in self.fates], dtype=bool)

    def with_bytes(self, down: np.ndarray, up: np.ndarray) -> "Plan":
        """Return the plan with the bytes that the accepted clients have really transferred."""
        accepted, times = self.accepted, self.times
        down_bytes, up_bytes = times.down_bytes.copy(), times.up_bytes.copy()
        down_bytes[accepted], up_bytes[accepted] = down, up
        return replace(self, times=replace(times, down_bytes=down_bytes, up_bytes=up_bytes))

    @property
    def seconds(self) -> float:
        """Duration of the round: until the last accepted client is done, or the server gives up."""
        accepted, total = self.accepted, self.times.total
        last = float(total[accepted].max(initial=0.0))
        if accepted.sum() >= self.wanted:
            return last
        if self.deadline is not None:
            return max(last, self.deadline)
        # The server notices the loss of a client, and then waits for the others alone.
        lost = self.lost_at[np.isfinite(self.lost_at)]
        return max(last, float(lost.max(initial=0.0)))

    def joules(self, power: np.ndarray, radio: float) -> np.ndarray:
        """Return the energy of each client, [k]; others than accepted ones stop with the round."""
        stop = np.where(self.accepted, math.inf, np.minimum(self.lost_at, self.seconds))
        return self.times.joules(power, radio, stop)


def plan(
    clients: np.ndarray,
    times: Times,
    *,
    wanted: int,
    deadline: float | None = None,
    partial: bool = False,
    lost: np.ndarray | None = None,
) -> Plan:
    """Decide who of the asked clients counts: the first ``wanted`` that come, ties by client.

    With ``partial``, a client makes only as many steps as end before the deadline; one that cannot
    make a single step is late, like any that ends after the deadline without ``partial``.

    Args:
        clients: int64 [k], ascending.
        times: With all local steps, and the bytes that are expected.
        wanted: m.
        deadline: Seconds; None to wait for all.
        partial: Whether to make fewer steps rather than to be late.
        lost: int [k], 0 for clients that stay, 1 for those lost after the download, 2 for those
            lost before the upload; None if all stay.
    """
    limit = math.inf if deadline is None else deadline
    lost = np.zeros(len(clients), dtype=np.int64) if lost is None else lost
    if partial:
        room = limit - times.latency - times.download - times.upload
        possible = np.floor(room / times.step)
        steps = np.clip(possible, 1, times.steps).astype(times.steps.dtype)
        times = replace(times, steps=steps)
    before_upload = times.latency + times.download + times.compute
    moments = [np.full(len(clients), math.inf), times.latency + times.download, before_upload]
    lost_at = np.choose(lost, moments)
    in_time = times.total <= limit
    if partial:
        in_time = possible >= 1
    came = np.flatnonzero(in_time & (lost == 0))
    first = came[np.lexsort((clients[came], times.total[came]))]
    fates: list[ClientOutcome] = ["late"] * len(clients)
    for index in np.flatnonzero(lost).tolist():
        fates[index] = "lost"
    for place, index in enumerate(first.tolist()):
        fates[index] = "kept" if place < wanted else "surplus"
    return Plan(clients, times, tuple(fates), lost_at, wanted, deadline)


def jain(values: np.ndarray) -> float:
    """Return Jain's index of fairness, (sum x)^2 / (N sum x^2): 1 if equal, 1/N if one has all.

    Jain, Chiu and Hawe: DEC Research Report TR-301, 1984. 1 if all are zero.
    """
    squares = float(np.square(values).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0
