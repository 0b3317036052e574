"""Availability of clients: windows of time on the simulated clock.

Two sources give windows: a generator, which draws from the seed for each day, and a file. Time 0 is
midnight of day 0. A client that has begun a round may finish it after its window has ended.

Legend: N clients, k windows.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from trishul_ray.lab.clock.devices import DevicesConfig, read_windows
from trishul_ray.runtime.random_streams import numpy_rng

HOUR, DAY = 3600.0, 86400.0

#: Days that the clock may jump ahead until enough clients can be asked.
MOST_DAYS = 366

#: The generator: no trace is shipped, and all of these numbers are our own.
NIGHT_BEGINS, NIGHT_SPREAD = 23 * HOUR, 1.5 * HOUR
NIGHT_LENGTH, NIGHT_LENGTH_SPREAD = 6 * HOUR, 0.5  # median, standard deviation of ln
NIGHT_PRESENT = 0.8
SHORT_PER_DAY, SHORT_LENGTH = 2.0, HOUR / 4  # mean number, mean length

#: A night's beginning is at most this far from the usual one, and no window is longer than a day.
_SHIFT, _LONGEST = 6 * HOUR, DAY
#: Days whose windows are kept.
_KEPT_DAYS = 8


@dataclass(frozen=True)
class Windows:
    """Windows of clients: int64 [k], float64 [k] and [k]; those of a client do not overlap."""

    client: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def of(self, clients: np.ndarray) -> "Windows":
        """Return the windows of some clients alone."""
        kept = np.isin(self.client, clients)
        return Windows(self.client[kept], self.start[kept], self.end[kept])

    def at(self, time: float, clients: int) -> np.ndarray:
        """Return which clients can be asked at a time, [N] bool."""
        there = np.zeros(clients, dtype=bool)
        there[self.client[(self.start <= time) & (time < self.end)]] = True
        return there

    def seconds(self, first: float, last: float, clients: int) -> np.ndarray:
        """Return for how many seconds of an interval each client can be asked, [N] float64."""
        length = np.clip(np.minimum(self.end, last) - np.maximum(self.start, first), 0, None)
        return np.bincount(self.client, weights=length, minlength=clients)

    def first_time(self, after: float, needed: int) -> float | None:
        """Return when, from ``after`` on, at least ``needed`` clients can be asked; None if never.

        ``needed`` is at least 1.
        """
        ahead = self.end > after
        start, end = np.maximum(self.start[ahead], after), self.end[ahead]
        time = np.concatenate([start, end])
        change = np.repeat([1, -1], len(start))
        order = np.lexsort((change, time))  # at equal times ends come first
        enough = np.flatnonzero(np.cumsum(change[order]) >= needed)
        return float(time[order[enough[0]]]) if enough.size else None


class Source(Protocol):
    """Availability windows of all clients."""

    def between(self, first: float, last: float) -> Windows:
        """Return all windows that meet an interval."""


@dataclass(frozen=True)
class Always:
    """All clients can be asked at any time."""

    clients: int

    def between(self, first: float, last: float) -> Windows:
        """Return one window for each client."""
        clients = self.clients
        return Windows(np.arange(clients), np.full(clients, -math.inf), np.full(clients, math.inf))


class Diurnal:
    """Draws windows from the seed: a client's nights, and short ones at any time.

    Each client has a time zone, uniform over 24 hours. Its window of a night begins at 23:00 plus
    N(0, 1.5 h), is lognormal with median 6 h, and occurs with probability 0.8. Short windows are a
    Poisson process of 2 a day, with exponential lengths of mean 15 minutes.
    """

    def __init__(self, seed: int, clients: int) -> None:
        self.seed, self.clients = seed, clients
        self._zone = numpy_rng(seed, "available", "zone").random(clients) * DAY
        self._kept = lru_cache(_KEPT_DAYS)(self._of_day)

    def between(self, first: float, last: float) -> Windows:
        """Return all windows that meet an interval."""
        # Windows of a day start between a day and _SHIFT before it and _SHIFT after its end.
        earliest = math.floor((first - _LONGEST - DAY - _SHIFT) / DAY)
        latest = math.floor((last + DAY + _SHIFT) / DAY)
        days = [self._kept(day) for day in range(earliest, latest + 1)]
        client, start, end = (np.concatenate(parts) for parts in zip(*days, strict=True))
        return _meeting(client, start, end, first, last)

    def _of_day(self, day: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the windows of a day. Row c of each draw is client c's, whatever N is."""

        def rng(what: str) -> np.random.Generator:
            return numpy_rng(self.seed, "available", day, what)

        everyone = np.arange(self.clients)
        normal = rng("night").standard_normal((self.clients, 2))
        shift = np.clip(NIGHT_SPREAD * normal[:, 0], -_SHIFT, _SHIFT)
        begins = day * DAY + NIGHT_BEGINS + shift - self._zone
        length = NIGHT_LENGTH * np.exp(NIGHT_LENGTH_SPREAD * normal[:, 1])
        present = rng("present").random(self.clients) < NIGHT_PRESENT
        owner = np.repeat(everyone, rng("count").poisson(SHORT_PER_DAY, self.clients))
        short = day * DAY + DAY * rng("short").random(len(owner))
        short_length = SHORT_LENGTH * rng("length").standard_exponential(len(owner))
        client = np.concatenate([everyone[present], owner])
        start = np.concatenate([begins[present], short])
        end = start + np.minimum(np.concatenate([length[present], short_length]), _LONGEST)
        return client, start, end


class FromFile:
    """The windows of a file, again and again: a period ends with the day of the last window."""

    def __init__(self, path: str, clients: int) -> None:
        self.client, self.start, self.end = read_windows(path, clients)
        self.period = math.ceil(float(self.end.max()) / DAY) * DAY

    def between(self, first: float, last: float) -> Windows:
        """Return all windows that meet an interval."""
        # A window may begin in one period only: its end is not beyond the period.
        periods = range(math.floor(first / self.period), math.floor(last / self.period) + 1)
        shifts = [period * self.period for period in periods]
        return _meeting(
            np.tile(self.client, len(shifts)),
            np.concatenate([self.start + shift for shift in shifts]),
            np.concatenate([self.end + shift for shift in shifts]),
            first,
            last,
        )


def source_of(options: DevicesConfig, seed: int, clients: int) -> Source:
    """Return what knows the windows of a configuration.

    Raises:
        InputError: ``devices.windows`` cannot be read.
    """
    if options.availability == "always":
        return Always(clients)
    if options.availability == "diurnal":
        return Diurnal(seed, clients)
    assert options.windows is not None  # the configuration sees to it
    return FromFile(options.windows, clients)


def next_time(
    source: Source, members: np.ndarray, now: float, needed: int, latest: float
) -> float | None:
    """Return when, from now on, ``needed`` members can be asked; None if not until ``latest``."""
    first, step = now, 2 * DAY
    while first < latest and len(members) >= needed:
        found = source.between(first, first + step).of(members).first_time(first, needed)
        if found is not None:
            return found if found <= latest else None
        first += step
    return None


def _meeting(
    client: np.ndarray, start: np.ndarray, end: np.ndarray, first: float, last: float
) -> Windows:
    """Return the windows that meet an interval, with those of a client that overlap merged."""
    meets = (end > first) & (start <= last)
    client, start, end = client[meets], start[meets], end[meets]
    order = np.lexsort((start, client))
    client, start, end = client[order], start[order], end[order]
    if not len(client):
        return Windows(client, start, end)
    # A window begins a group if no earlier one of its client reaches it. Ends are lifted so that
    # one running maximum serves all clients; the lifted ones are only compared.
    width = float(end.max() - start.min()) + 1.0
    reach = np.maximum.accumulate(end + client * width)
    begins = np.ones(len(client), dtype=bool)
    begins[1:] = start[1:] + client[1:] * width > reach[:-1]
    heads = np.flatnonzero(begins)
    return Windows(client[heads], start[heads], np.maximum.reduceat(end, heads))
