"""The clients of a run on its simulated clock: whom a round asks, who counts, what it costs.

Everything is a function of the configuration, the seed, the round and what is recorded of earlier
rounds, so a resumed run goes on with the same clock.

Legend: N clients, m that a round wants.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trishul_ray.config.fields import FederationConfig
from trishul_ray.data.sampling import participants
from trishul_ray.errors import FailsAgainError
from trishul_ray.lab.clock import DECILES
from trishul_ray.lab.clock.availability import DAY, MOST_DAYS, next_time, source_of
from trishul_ray.lab.clock.clock import ClientOutcome, Plan, Times, jain, plan
from trishul_ray.lab.clock.cohorts import (
    CohortConfig,
    Past,
    Situation,
    strategy_class,
    utility,
)
from trishul_ray.lab.clock.devices import Devices, DevicesConfig
from trishul_ray.runtime.proportions import exact_share
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import ClientRound, Memory, StepFlops, Traffic

#: Largest number of attempts of a round if too few clients come in time.
MOST_ATTEMPTS = 100

#: Least seconds until the server looks again at batteries that are low.
_LOOK_AGAIN = 600.0


@dataclass(frozen=True)
class ClockState:
    """State of the clock between rounds, a part of the checkpoint.

    Attributes:
        seconds: The clock.
        past: Records of the clients.
        utilities: float64 [rounds], see ``Situation``.
        kept: int64 [10], kept clients so far by decile of speed.
        battery: float64 [N], joules left; empty without batteries.
    """

    seconds: float = 0.0
    past: Past = field(default_factory=lambda: Past.of(0))
    utilities: np.ndarray = field(default_factory=lambda: np.zeros(0))
    kept: np.ndarray = field(default_factory=lambda: np.zeros(DECILES, dtype=np.int64))
    battery: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, memory: Memory) -> "ClockState":
        """Return the state that a checkpoint holds."""
        return cls(**memory | {"past": Past(**memory["past"])})

    def to_memory(self) -> Memory:
        """Return the state as a checkpoint holds it."""
        return vars(self) | {"past": vars(self.past)}


@dataclass(frozen=True)
class Asked:
    """A round after its clients are chosen, and before they train.

    Attributes:
        clients: Clients that train, ascending.
        steps: Local steps of the clients that do not make all.
        state: State when the last attempt begins.
        plans: Plan of each attempt; the last one counts. Empty without devices.
        spent: Joules of the attempts before.
    """

    clients: list[int]
    steps: dict[int, int] = field(default_factory=dict)
    state: ClockState = field(default_factory=ClockState)
    plans: tuple[Plan, ...] = ()
    spent: float = 0.0

    @property
    def missing(self) -> dict[int, ClientOutcome]:
        """Outcome of the asked clients that do not train, by client, ascending."""
        found = {
            client: fate
            for each in self.plans
            for client, fate in zip(each.clients.tolist(), each.fates, strict=True)
        }
        missing = sorted(found.keys() - set(self.clients))
        # Clients of an abandoned attempt count as abandoned.
        return {c: "abandoned" if found[c] == "kept" else found[c] for c in missing}

    @property
    def wasted(self) -> int:
        """Number of broadcasts that clients have received and do not train with."""
        asked = sum(len(each.clients) for each in self.plans)
        return asked - len(self.clients) if self.plans else 0


class Fleet:
    """The clients of a run.

    Args:
        devices: The section ``devices``.
        cohort: The section ``cohort``.
        federation: The section ``federation``.
        seed: The experiment's.
        rows: int64 [N], training rows of all clients; empty if no strategy reads them.
        capacity: float64 [N], share of the budget that each client trains.
        flops: FLOPs of a step; needed with devices.
        least: Clients that a round needs, whatever ``federation.quorum`` is.

    Raises:
        InputError: A file of devices or windows cannot be used.
    """

    def __init__(
        self,
        devices: DevicesConfig,
        cohort: CohortConfig,
        federation: FederationConfig,
        seed: int,
        *,
        rows: np.ndarray,
        capacity: np.ndarray,
        flops: StepFlops | None,
        least: int = 1,
    ) -> None:
        self.least = least
        self.options, self.cohort, self.federation = devices, cohort, federation
        self.seed, self.rows, self.clients = seed, rows, federation.clients
        self.members = participants(federation, seed)
        self.strategy = strategy_class(cohort.select)()
        self.wanted, self.steps = federation.clients_per_round, federation.local_steps
        self.asks = asked_clients(cohort, federation)
        self.devices = Devices.of(devices, seed, self.clients) if devices.on else None
        self.source = source_of(devices, seed, self.clients)
        self._capacity, self._flops = capacity, flops

    @cached_property
    def step_seconds(self) -> np.ndarray:
        """Seconds of one local step of every client, [N]."""
        assert self.devices is not None and self._flops is not None
        flops = self._flops.backbone + self._capacity * self._flops.adapter
        seconds: np.ndarray = flops / self.devices.speed
        return seconds

    def start(self) -> ClockState:
        """Return the state before round 1."""
        full = np.full(self.clients, self.options.battery) if self.options.battery else np.zeros(0)
        return ClockState(past=Past.of(self.clients), battery=full)

    def ask(
        self,
        number: int,
        state: ClockState,
        traffic: Traffic,
        chosen: Sequence[int] | None = None,
    ) -> Asked:
        """Choose the clients of a round; ask anew if too few come in time.

        Args:
            number: The round, from 1.
            state: State of the clock.
            traffic: Expected traffic of each client.
            chosen: Clients that another stage has drawn; they are asked whoever they are.

        Raises:
            FailsAgainError: Too few can ever be asked, or come in time.
        """
        quorum, plans, spent = self.federation.quorum, [], 0.0
        for attempt in range(MOST_ATTEMPTS):
            path = (number,) if attempt == 0 else (number, attempt)
            if chosen is None:
                state, ready = self._wait(state)
                clients = np.sort(self._choose(number, path, state, ready, traffic))
            else:
                clients = np.sort(np.asarray(chosen, dtype=np.int64))
            if self.devices is None:
                return Asked(clients.tolist(), state=state)
            wanted = self.wanted if chosen is None else len(clients)
            plans.append(self._plan(path, clients, wanted, state, traffic))
            accepted = plans[-1].accepted
            needed = max(math.ceil(exact_share(wanted, quorum)), self.least)
            if chosen is not None or accepted.sum() >= needed:
                steps, found = plans[-1].times.steps[accepted].tolist(), clients[accepted].tolist()
                fewer = {c: s for c, s in zip(found, steps, strict=True) if s < self.steps}
                return Asked(found, fewer, state, tuple(plans), spent)
            joules = self._joules(plans[-1])
            spent += float(joules.sum())
            state = self._after(state, plans[-1], joules)
        settings = ", ".join(self.cohort.policies)
        raise FailsAgainError(
            f"round {number}: in {MOST_ATTEMPTS} attempts fewer than {needed} of {self.wanted} "
            f"clients came in time (federation.quorum={quorum}, {settings}; the last attempt's "
            f"fastest takes {plans[-1].times.total.min():.3g} s): try a longer deadline or a lower "
            "quorum"
        )

    def close(
        self,
        asked: Asked,
        number: int,
        done: Sequence[ClientRound],
    ) -> tuple[ClockState, dict[str, float]]:
        """Return the state after a round, and numbers for its record.

        Args:
            asked: The round before its clients trained.
            number: The round.
            done: The parts of its clients.
        """
        state, numbers = asked.state, {}
        clients = np.array(asked.clients, dtype=np.int64)
        _, down_bytes, up_bytes, loss, squared = np.array(done, dtype=np.float64).reshape(-1, 5).T
        if self.devices is not None:
            last = asked.plans[-1].with_bytes(down_bytes, up_bytes)
            joules = self._joules(last)
            state = self._after(state, last, joules)
            kept = np.bincount(self.devices.deciles[clients], minlength=DECILES)
            state = replace(state, kept=state.kept + kept)
            numbers = self._numbers(asked, state, asked.spent + float(joules.sum()))
        past = state.past.noted(clients, asked=True, loss=loss, squared=squared, last=number)
        useful = float(utility(self.rows[clients], squared).sum()) if len(self.rows) else 0.0
        return replace(state, past=past, utilities=np.append(state.utilities, useful)), numbers

    def _wait(self, state: ClockState) -> tuple[ClockState, np.ndarray]:
        """Move the clock to when enough clients can be asked; return them, int64 [n]."""
        now, latest = state.seconds, state.seconds + MOST_DAYS * DAY
        while True:
            state = self._charged(state, now)
            charged, more = self._charge(state)
            there = self.source.between(now, now).of(charged).at(now, self.clients)
            if there.sum() >= self.asks:
                return state, np.flatnonzero(there)
            found = next_time(self.source, charged, now, self.asks, min(more, latest))
            now = more if found is None else found
            if now > latest:
                raise FailsAgainError(
                    f"devices.availability={self.options.availability}: {self.asks} clients can "
                    "never be asked at once in a year of the clock: try fewer "
                    "(federation.clients_per_round, cohort.extra) or other devices"
                )

    def _charge(self, state: ClockState) -> tuple[np.ndarray, float]:
        """Return who has enough charge, int64 [n], and before when it cannot be enough more."""
        full, watts = self.options.battery, self.options.charging
        if full is None:
            return self.members, math.inf
        lack = np.maximum(self.options.battery_low * full - state.battery[self.members], 0)
        charged = self.members[lack == 0]
        needed = max(self.asks, len(charged) + 1)
        if needed > len(self.members) or watts == 0:
            return charged, math.inf
        seconds = np.partition(lack, needed - 1)[needed - 1] / watts  # if it is always charged
        return charged, state.seconds + max(float(seconds), _LOOK_AGAIN)

    def _choose(
        self,
        number: int,
        path: tuple[int, ...],
        state: ClockState,
        ready: np.ndarray,
        traffic: Traffic,
    ) -> np.ndarray:
        none, needs = np.zeros(0), self.strategy.needs
        seconds = none if needs == "nothing" else self._expected(traffic)
        battery = none if needs != "batteries" else state.battery / (self.options.battery or 1.0)
        return self.strategy.choose(
            Situation(
                round=number,
                wanted=self.asks,
                ready=ready,
                rng=numpy_rng(self.seed, "cohort", *path),
                options=self.cohort,
                rows=self.rows,
                loss=state.past.loss,
                squared=state.past.squared,
                last=state.past.last,
                utilities=state.utilities,
                seconds=seconds,
                battery=battery,
            )
        )

    def _expected(self, traffic: Traffic) -> np.ndarray:
        """Return the expected seconds of every client's round, [N]."""
        everyone = np.arange(self.clients)
        return self._times(everyone, np.full(self.clients, traffic.down), traffic.up, None).total

    def _times(
        self, clients: np.ndarray, down_bytes: np.ndarray, up: float, jitter: np.ndarray | None
    ) -> Times:
        assert self.devices is not None
        factor = 1.0 if jitter is None else np.exp(self.options.network_jitter * jitter)
        return Times(
            latency=self.options.latency,
            down=self.devices.down[clients] * factor,
            up=self.devices.up[clients] * factor,
            down_bytes=down_bytes,
            up_bytes=np.full(len(clients), up),
            step=self.step_seconds[clients],
            steps=np.full(len(clients), self.steps),
        )

    def _plan(
        self,
        path: tuple[int, ...],
        clients: np.ndarray,
        wanted: int,
        state: ClockState,
        traffic: Traffic,
    ) -> Plan:
        number, *attempt = path

        def stream(purpose: str, client: int) -> np.random.Generator:
            return numpy_rng(self.seed, purpose, number, client, *attempt)

        everyone = clients.tolist()
        jitter = lost = None
        if self.options.network_jitter:
            jitter = np.array([stream("network", c).standard_normal() for c in everyone])
        if self.cohort.dropout:
            drawn = np.array([stream("dropout-client", c).random() for c in everyone])
            half = self.cohort.dropout / 2
            lost = np.where(drawn < half, 1, np.where(drawn < 2 * half, 2, 0))
        new = ~state.past.asked[clients]
        return plan(
            clients,
            self._times(clients, traffic.down + traffic.first * new, traffic.up, jitter),
            wanted=wanted,
            deadline=self.cohort.deadline,
            partial=self.cohort.late == "partial",
            lost=lost,
        )

    def _joules(self, of: Plan) -> np.ndarray:
        assert self.devices is not None
        return of.joules(self.devices.power[of.clients], self.options.radio)

    def _after(self, state: ClockState, done: Plan, joules: np.ndarray) -> ClockState:
        """Return the state at the end of an attempt, in which clients have spent this energy."""
        spent = state.past.joules[done.clients] + joules
        past = state.past.noted(done.clients, asked=True, joules=spent)
        state = self._charged(replace(state, past=past), state.seconds + done.seconds)
        if len(state.battery):
            left = state.battery.copy()
            left[done.clients] = np.maximum(left[done.clients] - joules, 0)
            state = replace(state, battery=left)
        return state

    def _charged(self, state: ClockState, now: float) -> ClockState:
        """Return the state at a later time, with batteries charged while their clients could be."""
        if self.options.battery is not None and now > state.seconds:
            windows = self.source.between(state.seconds, now)
            gained = self.options.charging * windows.seconds(state.seconds, now, self.clients)
            battery = np.minimum(state.battery + gained, self.options.battery)
            state = replace(state, battery=battery)
        return replace(state, seconds=now)

    def _numbers(self, asked: Asked, state: ClockState, joules: float) -> dict[str, float]:
        fates = [fate for each in asked.plans for fate in each.fates]
        numbers = {
            "simulated_seconds": state.seconds,
            "joules": joules,
            "asked": len(fates),
            "came": fates.count("kept") + fates.count("surplus"),
            "late": fates.count("late"),
            "lost": fates.count("lost"),
            "abandoned": len(asked.plans) - 1,
            "jain_joules": jain(state.past.joules[self.members]),
        }
        if self.cohort.late == "partial":
            numbers["partial"] = len(asked.steps)
        if len(state.battery):
            battery = float(state.battery[self.members].mean())
            numbers["battery"] = battery / (self.options.battery or 1.0)
        shares = state.kept / max(int(state.kept.sum()), 1)
        return numbers | {f"kept_decile_{d}": share for d, share in enumerate(shares.tolist(), 1)}


def asked_clients(cohort: CohortConfig, federation: FederationConfig) -> int:
    """Return how many clients a round asks, ``ceil(extra m)``."""
    return math.ceil(exact_share(federation.clients_per_round, cohort.extra))
