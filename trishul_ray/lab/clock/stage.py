"""Stage ``devices``: rounds on a simulated clock, with the section ``cohort``."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.data.sampling import participants
from trishul_ray.errors import PermanentError
from trishul_ray.lab.clock.attempt import Attempt, plan
from trishul_ray.lab.clock.devices import ClientClock, Devices, DevicesConfig, Moments
from trishul_ray.methods.base import Method
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import (
    ArrayState,
    ClientRound,
    Cohort,
    Stage,
    StageSettings,
    register_stage,
)

#: Maximum number of attempts of a round.
MOST_ATTEMPTS = 100


class CohortConfig(Section):
    """The selection of clients for a round, and the clients that count."""

    select: Literal["uniform", "power_of_choice"] = Field(
        "uniform",
        description="uniform; power_of_choice: sample candidates in proportion to their rows, and "
        "select the candidates with the highest last loss",
    )
    candidates: float = Field(
        2.0, ge=1, description="power_of_choice: candidates per selected client"
    )
    extra: float = Field(
        1.0,
        ge=1,
        le=10,
        description="selected clients per client that the round needs; only the first to finish "
        "count",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="simulated seconds after which a round ends; later clients are dropped; "
        "default: none",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that a selected client disappears: half of them after the "
        "download, half before the upload",
    )

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "CohortConfig":
        if self.select == "uniform":
            self.reject_unused(["candidates"], "with select='uniform'")
        return self

    @property
    def policies(self) -> list[str]:
        """The fields that make a cohort depend on the clock, with their values."""
        found = {
            f"cohort.extra={self.extra:g}": self.extra > 1,
            f"cohort.deadline={self.deadline}": self.deadline is not None,
            f"cohort.dropout={self.dropout:g}": self.dropout > 0,
        }
        return [text for text, is_set in found.items() if is_set]


@register_stage("devices")
class Clock(Stage):
    """Select clients, and decide on a simulated clock which clients finish in time.

    The memory has ``seconds``, the clock, and ``loss`` float64 [N], the mean training loss of a
    client's last round, initially NaN.
    """

    Config: ClassVar[type[Section]] = DevicesConfig
    example: ClassVar = {"kind": "lognormal", "speed_spread": 0.5}
    wire = 1
    numbers = frozenset({"simulated_seconds", "asked", "came", "late", "lost", "abandoned"})

    def __init__(self, config: Section, settings: StageSettings) -> None:
        super().__init__(config, settings)
        self.devices = settings.section(DevicesConfig)
        self.options = settings.section(CohortConfig)
        self.clock: ClientClock | None = None
        self._attempts: list[Attempt] = []  # of the current round; the last one counts

    @property
    def transforms_changes(self) -> bool:
        """False, because the stage only selects and times clients."""
        return False

    def check(self, method: Method) -> None:
        """Reject unsupported combinations of sections."""
        policies, select = self.options.policies, self.options.select
        if self.settings.is_set("privacy"):
            policies += [f"cohort.select={select}"] * (select != "uniform")
            if policies:
                raise ValueError(
                    f"{policies[0]} is not supported with privacy, whose accounting only covers "
                    "how clients are sampled (privacy.sampling); set only one"
                )
        if policies and not self.devices.on:
            raise ValueError(f"{policies[0]} needs a clock: set devices.kind=lognormal or file")
        fed = self.settings.federation
        if self.devices.on and fed.local_epochs is not None:
            raise ValueError(
                f"devices.kind={self.devices.kind}: the clock computes the seconds of "
                "federation.local_steps; set them instead of federation.local_epochs"
            )
        if self.size > fed.participants:
            raise ValueError(
                f"cohort.extra={self.options.extra:g} selects {self.size} of "
                f"federation.clients={fed.clients} "
                + f"(less federation.held_out={fed.held_out:g}) " * (fed.held_out > 0)
                + "clients; reduce cohort.extra"
            )

    @property
    def is_idle(self) -> bool:
        """Whether the section ``async`` selects and times the clients instead."""
        return self.settings.is_set("async")

    @property
    def size(self) -> int:
        """Number of clients that a round selects, ``ceil(extra m)``."""
        wanted = self.settings.federation.clients_per_round
        return math.ceil(exact_fraction(wanted, self.options.extra))

    @property
    def files(self) -> dict[str, str]:
        """The file of devices."""
        return {} if self.devices.path is None else {"path": self.devices.path}

    def prepare(self) -> Sequence[str]:
        """Read the file of devices, and report the defaults that affect simulated seconds."""
        if not self.devices.on:
            return ()
        Devices.of(self.devices, self.settings.draw_seed, self.settings.federation.clients)
        line = "simulated seconds depend on our own defaults, not on measured devices: devices."
        return (f"{line}{{{self.devices.defaults}}}",) if self.devices.defaults else ()

    @property
    def needs(self) -> frozenset[str]:
        """FLOPs if the run has a clock, and the sizes of shards for power-of-choice."""
        found = {"flops": self.devices.on, "shard_sizes": self.options.select != "uniform"}
        return frozenset(name for name, needed in found.items() if needed)

    def begin(self) -> Sequence[str]:
        """Create the clock, and start it unless a checkpoint contains it."""
        if self.is_idle:
            return ()
        if self.devices.on:
            self.clock = ClientClock.of(self.devices, self.settings, self.plan)
        if self.needs and not self.memory:
            loss = np.full(self.settings.federation.clients, math.nan)
            self.memory.update(seconds=0.0, loss=loss)
        return ()

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Select clients until enough of them finish in time.

        Raises:
            PermanentError: Too few clients finish in time in every attempt.
        """
        if self.is_idle or not self.needs or number == 0:
            return cohort
        if self.clock is None:
            return replace(cohort, clients=self._sample((number,)).tolist())
        chosen = np.array(cohort.clients, dtype=np.int64)
        fed, wanted, self._attempts = self.settings.federation, len(chosen), []
        repeated: list[int] = []  # the clients of failed attempts
        while len(self._attempts) < MOST_ATTEMPTS:
            path = (number, len(self._attempts)) if self._attempts else (number,)
            clients = chosen if cohort.fixed else self._sample(path)
            traffic = cohort.traffic(clients.tolist())
            down = traffic.down + np.where(np.isin(clients, repeated), 0.0, traffic.first)
            moments = self.clock.moments(clients, down, traffic.up)
            self._attempts.append(last := self._plan(path, clients, wanted, moments))
            needed = max(math.ceil(exact_fraction(wanted, fed.quorum)), self.plan.quorum)
            if cohort.fixed or last.kept.sum() >= needed:
                return self._selected(cohort, repeated)
            self._advance(last, last.moments.uploaded[last.kept])
            repeated += clients.tolist()
        raise PermanentError(
            f"round {number}: in {MOST_ATTEMPTS} attempts fewer than {needed} of {wanted} clients "
            f"finished in time (federation.quorum={fed.quorum}, "
            f"{', '.join(self.options.policies)}; the fastest client of the last attempt takes "
            f"{last.moments.uploaded.min():.3g} s): set a longer deadline or a lower quorum"
        )

    def _selected(self, cohort: Cohort, repeated: Sequence[int]) -> Cohort:
        """Select the counted clients of the last attempt, with the outcomes of all others.

        ``repeated`` are the clients of earlier attempts, once per attempt.
        """
        fates = {
            c: f for a in self._attempts for c, f in zip(a.clients.tolist(), a.fates, strict=True)
        }
        last = self._attempts[-1]
        clients = last.clients[last.kept].tolist()
        missing = {c: fates[c] for c in sorted(fates.keys() - set(clients))}
        return replace(
            cohort,
            clients=clients,
            missing={c: "abandoned" if fate == "kept" else fate for c, fate in missing.items()},
            wasted=[*repeated, *last.clients[~last.kept].tolist()],
            repeated=frozenset(repeated),
        )

    def _sample(self, path: tuple[int, ...]) -> np.ndarray:
        """Sample the clients of an attempt, ascending int64."""
        members = participants(self.settings.federation, self.settings.draw_seed)
        rng, size = numpy_rng(self.settings.draw_seed, "cohort", *path), self.size
        if self.options.select == "uniform":
            return np.sort(members[rng.choice(len(members), size, replace=False)])
        assert self.plan.shard_sizes is not None
        rows, loss = self.plan.shard_sizes[members], self.memory["loss"][members]
        return np.sort(members[power_of_choice(rows, loss, self.options.candidates, size, rng)])

    def _plan(
        self, path: tuple[int, ...], clients: np.ndarray, wanted: int, moments: Moments
    ) -> Attempt:
        number, *attempt = path
        lost = None
        if self.options.dropout:
            streams = (
                numpy_rng(self.settings.draw_seed, "dropout-client", number, client, *attempt)
                for client in clients.tolist()
            )
            sampled, half = np.array([s.random() for s in streams]), self.options.dropout / 2
            lost = np.where(sampled < half, 1, np.where(sampled < 2 * half, 2, 0))
        return plan(clients, moments, wanted=wanted, deadline=self.options.deadline, lost=lost)

    def _advance(self, attempt: Attempt, finished: np.ndarray) -> None:
        """Advance the clock by an attempt whose counted clients took ``finished`` seconds."""
        self.memory["seconds"] += attempt.seconds(finished)

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Advance the clock to the end of the round, for the transferred bytes."""
        if self.is_idle or not self.needs:
            return {}
        done = np.array([each.client for each in clients], dtype=np.int64)
        loss = self.memory["loss"].copy()
        loss[done] = [each.loss for each in clients]
        self.memory["loss"] = loss
        if self.clock is None:
            return {}
        down, up = (np.array([getattr(c, n) for c in clients]) for n in ("down_bytes", "up_bytes"))
        self._advance(self._attempts[-1], self.clock.moments(done, down, up).uploaded)
        fates = [fate for attempt in self._attempts for fate in attempt.fates]
        return {
            "simulated_seconds": self.memory["seconds"],
            "asked": len(fates),
            "came": fates.count("kept") + fates.count("surplus"),
            "late": fates.count("late"),
            "lost": fates.count("lost"),
            "abandoned": len(self._attempts) - 1,
        }


@register_stage("cohort")
class Cohorts(Clock):
    """The same stage, for experiments that set the section ``cohort``."""

    Config = CohortConfig
    example: ClassVar = {"select": "power_of_choice"}

    @classmethod
    def parts(cls, config: Section, settings: StageSettings) -> Sequence[Stage]:
        """Create the clock, unless the section ``devices`` creates it."""
        return [] if settings.is_set("devices") else [Clock(DevicesConfig(), settings)]


def power_of_choice(
    rows: np.ndarray, loss: np.ndarray, candidates: float, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Sample candidates in proportion to their rows, and select the highest last losses.

    Cho, Wang and Joshi: AISTATS 2022, arXiv 2010.01243, the variant without polling. A client
    without a loss precedes all others.

    Args:
        rows: int64 [n], training rows of the clients that may take part.
        loss: float64 [n], last losses; NaN for clients without a loss.
        candidates: Candidates per selected client.
        size: Number of clients to select.
        rng: The random stream.
    """
    count = min(math.ceil(candidates * size), len(rows))
    sampled = rng.choice(len(rows), count, replace=False, p=rows / rows.sum())
    highest = np.argsort(-np.nan_to_num(loss[sampled], nan=math.inf), kind="stable")
    found: np.ndarray = sampled[highest[:size]]
    return found
