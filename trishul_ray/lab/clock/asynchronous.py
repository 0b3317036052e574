"""Stage ``async``: the server updates the model as soon as enough uploads have arrived.

Nguyen et al.: "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, arXiv
2106.06639 (FedBuff). Xie, Koyejo, Gupta: "Asynchronous Federated Optimization", 2019, arXiv
1903.03934 (FedAsync). Let x be the model after update t, and y_i the model that a client trained
from x_i, the model of version t - d_i. An update is ::

    fedbuff   x <- x + 1/K sum_i s(d_i) (y_i - x_i)          of K uploads
    fedasync  x <- (1 - a_t) x + a_t y,  a_t = a s(d)        of each upload

    constant    s(d) = 1
    polynomial  s(d) = (1 + d)^-p
    hinge       s(d) = 1 if d <= b, else 1 / (h (d - b) + 1)

With the default p = 1/2, ``polynomial`` is the weight of FedBuff. The server learning rate and the
momentum of FedBuff are fields of the section ``server``. The mean has the weights of
``federation.weighting``, and each unit is averaged over the clients that trained it, as in
synchronous rounds.

The simulated clock determines the order of uploads before training. A job therefore trains in the
round that uses its upload, from the stored broadcast of its start, and the result does not depend
on the number of actors. A checkpoint contains the jobs in flight and their broadcasts.

Legend: K uploads of an update (``federation.clients_per_round``), U units of aggregation.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.errors import InputError
from trishul_ray.lab.clock.devices import ClientClock, DevicesConfig
from trishul_ray.lab.clock.schedule import Job, Rules, Schedule, Update
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import (
    STAGES,
    ArrayState,
    BroadcastMessage,
    ClientRound,
    Cohort,
    Partial,
    Stage,
    StageSettings,
    Start,
    register_stage,
)
from trishul_ray.storage.durable import Json

#: Reasons why sections are not supported with this section.
_EXCLUDED = {
    "privacy": "its accounting needs independently sampled cohorts",
    "cohort": "it selects the clients of synchronous rounds",
    "uploads": "the schedule needs the size of an upload before the client trains",
    "downloads": "the schedule needs the size of a broadcast before the server sends it",
}
#: Fields that only one value of ``weight`` reads.
_READ_BY = {"polynomial": ("power",), "hinge": ("slope", "grace")}


class AsyncConfig(Section):
    """Asynchronous aggregation on the simulated clock."""

    kind: Literal["none", "fedbuff", "fedasync"] = Field(
        "none",
        description="none: synchronous rounds; fedbuff: an update for every "
        "federation.clients_per_round uploads; fedasync: an update for every upload",
    )
    concurrency: int | None = Field(
        None, ge=1, description="jobs in flight; default: twice federation.clients_per_round"
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="drop uploads whose jobs started more updates ago; default: use all uploads",
    )
    weight: Literal["constant", "polynomial", "hinge"] = Field(
        "polynomial", description="weight of an upload by its staleness"
    )
    power: float = Field(0.5, gt=0, description="weight=polynomial: (1 + staleness)^-power")
    slope: float = Field(
        10.0, gt=0, description="weight=hinge: 1 / (slope (staleness - grace) + 1) above grace"
    )
    grace: int = Field(4, ge=0, description="weight=hinge: largest staleness of weight 1")
    mixing: float = Field(
        0.6, gt=0, le=1, description="fedasync: fraction of the model that an upload without "
        "staleness replaces"
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "AsyncConfig":
        if self.kind == "none":
            names = [name for name in type(self).model_fields if name != "kind"]
            self.reject_unused(names, "with kind='none'")
        for weight, fields in _READ_BY.items():
            if self.weight != weight:
                self.reject_unused(fields, f"with weight={self.weight!r}")
        if self.kind == "fedbuff":
            self.reject_unused(["mixing"], "with kind='fedbuff'")
        return self

    def weight_of(self, staleness: int) -> float:
        """Compute s(d), the weight of an upload."""
        if self.weight == "polynomial":
            return float((1 + staleness) ** -self.power)
        if self.weight == "hinge" and staleness > self.grace:
            return 1.0 / (self.slope * (staleness - self.grace) + 1.0)
        return 1.0


@register_stage("async")
class Asynchronous(Stage):
    """Schedule the uploads of clients on the simulated clock, instead of synchronous rounds.

    The memory has ``seconds``, the clock; ``started``, the number of jobs so far; ``flying``, the
    jobs in flight; ``read``, the broadcasts of these jobs, keyed by round; and totals of the run:
    ``uploads``, ``dropped``, ``staleness`` (a sum) and ``most`` (the largest staleness).
    """

    Config, alters_mean = AsyncConfig, True
    wire = 5  # after every stage that changes the broadcast
    example: ClassVar = {"kind": "fedbuff", "concurrency": 4, "devices.kind": "lognormal"}
    numbers = frozenset({"simulated_seconds"})
    config: AsyncConfig

    def __init__(self, config: Section, settings: StageSettings) -> None:
        super().__init__(config, settings)
        self.devices = settings.section(DevicesConfig)
        self._read: ArrayState | None = None  # the broadcast of the current round
        self._numbers: dict[str, float] = {}  # of the current round

    @property
    def transforms_changes(self) -> bool:
        """False, because :meth:`rebase` supports values and changes."""
        return False

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """The kind, because uploads were trained from earlier models."""
        return (f"async.kind={self.config.kind!r}",)

    @property
    def needs(self) -> frozenset[str]:
        """FLOPs, which determine the duration of a local step."""
        return frozenset({"flops"})

    @property
    def concurrency(self) -> int:
        """Number of jobs in flight."""
        return self.config.concurrency or 2 * self.settings.federation.clients_per_round

    def check(self, method: Method) -> None:
        """Reject experiments without a clock, and methods and sections that need cohorts."""
        fed, name = self.settings.federation, f"async.kind={self.config.kind!r}"
        if not self.devices.on:
            raise ValueError(f"{name} needs a clock: set devices.kind=lognormal or file")
        for section in self.settings.stages:
            reason = _EXCLUDED.get(section, "")
            if STAGES[section].needs_client_changes:
                reason = "it compares changes since the same broadcast"
            if reason:
                raise ValueError(f"{name} is not supported with the section {section}: {reason}")
        own = "keeps a part of the model on the client" if method.personal else ""
        if method.mirrored:
            own = "keeps a client state that the server sums in every round"
        if not method.aggregates_mean_only:
            own = "needs more than the mean change of a round"
        if own:
            raise ValueError(
                f"{name} is not supported with {self.settings.method_as_set}: it {own}"
            )
        if self.config.kind == "fedasync" and fed.clients_per_round != 1:
            raise ValueError(
                f"{name} updates after each upload: federation.clients_per_round="
                f"{fed.clients_per_round} must be 1; async.concurrency sets the jobs in flight"
            )
        if self.concurrency > fed.participants:
            default = "" if self.config.concurrency else ", twice federation.clients_per_round,"
            raise ValueError(
                f"async.concurrency={self.concurrency}{default} exceeds the {fed.participants} "
                f"clients that may take part (federation.clients={fed.clients}); a client has at "
                "most one job at a time"
            )

    def begin(self) -> list[str]:
        """Start the clock, unless a checkpoint contains it.

        Raises:
            InputError: The method sends more than the shared part, or the devices cannot be read.
        """
        if more := sorted(self.plan.lengths.keys() - {"shared"}):
            raise InputError(
                f"async.kind={self.config.kind!r} supports only methods that send nothing but the "
                f"trained parameters, and {self.settings.method_as_set} also sends "
                f"{', '.join(more)}; use another method"
            )
        self.clock = ClientClock.of(self.devices, self.settings, self.plan)
        self._sizes = np.array([unit.size for unit in self.plan.units])
        if not self.memory:
            totals = dict.fromkeys(("uploads", "dropped", "staleness", "most"), 0)
            self.memory.update(vars(Schedule()), read={}, **totals)
        return []

    def broadcast(self, number: int, sent: BroadcastMessage) -> BroadcastMessage:
        """Store the broadcast for the clients that start in this round."""
        self._read = sent.read
        return sent

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Select the clients whose uploads the next update uses, with their broadcasts."""
        if number == 0:
            return cohort
        assert self._read is not None
        memory = self.memory
        flying = [Job(*job) for job in memory["flying"]]
        schedule = Schedule(memory["seconds"], memory["started"], flying)
        update = schedule.next_update(number, self._rules(number, cohort))
        broadcasts = {int(k): State(**v) for k, v in memory["read"].items()}
        broadcasts[number] = self._read
        needed = {str(job.round): vars(broadcasts[job.round]) for job in schedule.flying}
        self._count(number, schedule, update)
        memory.update(vars(schedule), read=needed)
        by_round: dict[int, list[int]] = {}
        for job in sorted(update.used, key=lambda job: (job.round, job.client)):
            by_round.setdefault(job.round, []).append(job.client)
        used = sorted(job.client for job in update.used)
        late = [job.client for job in update.late]
        return replace(
            cohort,
            clients=used,
            missing=dict.fromkeys(sorted({*late} - {*used}), "stale"),
            wasted=late,
            earlier=[Start(r, broadcasts[r], c) for r, c in by_round.items() if r < number],
            discarded=sum(self._upload_numbers(job.round) for job in update.late),
        )

    def _rules(self, number: int, cohort: Cohort) -> Rules:
        size = 4.0 * self._upload_numbers(number)

        def draw(free: np.ndarray, count: int, draws: int) -> list[int]:
            path = (number, draws) if draws else (number,)
            rng = numpy_rng(self.settings.draw_seed, "cohort", *path)
            return sorted(free[rng.choice(len(free), count, replace=False)].tolist())

        def seconds(clients: Sequence[int], dropped: Collection[int]) -> np.ndarray:
            traffic, chosen = cohort.traffic(clients), np.array(clients, dtype=np.int64)
            # A client whose upload was dropped has already received the one-time download.
            first = np.where(np.isin(chosen, [*dropped]), 0.0, traffic.first)
            return self.clock.moments(chosen, traffic.down + first, size).uploaded

        buffer, most = self.settings.federation.clients_per_round, self.config.max_staleness
        return Rules(self.plan.participants, buffer, self.concurrency, most, draw, seconds)

    def _upload_numbers(self, number: int) -> int:
        """Return the number of entries that a client of full capacity uploads in a round."""
        sent = self.plan.sent_units(number)
        unsent = 0 if sent is None else int(self._sizes[~sent].sum())
        return self.plan.lengths["shared"] - unsent

    def _count(self, number: int, schedule: Schedule, update: Update) -> None:
        """Record the numbers of a round, and add them to the totals of the run."""
        staleness, memory = [number - job.round for job in update.used], self.memory
        memory["uploads"] += len(staleness)
        memory["dropped"] += len(update.late)
        memory["staleness"] += sum(staleness)
        memory["most"] = max(memory["most"], *staleness)
        self._numbers = {
            "simulated_seconds": schedule.seconds,
            "async_staleness": float(np.mean(staleness)),
            "async_staleness_max": max(staleness),
            "async_dropped": len(update.late),
            "async_in_flight": update.in_flight,
        }

    def rebase(self, total: Partial, start: Start, now: Start, *, changes: bool) -> Partial:
        """Weight a sum of uploads by staleness, and convert it to the newest version."""
        mixes, staleness = self.config.kind == "fedasync", now.round - start.round
        weight = self.config.weight_of(staleness) * (self.config.mixing if mixes else 1.0)
        exact = staleness == 0 or (mixes and not changes)
        if total.sums is None or (weight == 1.0 and exact):
            return total
        # Weighted sums [W] over the clients: uploads, their broadcasts, and the newest version.
        sums, weights = total.sums, np.repeat(total.unit_weight, self._sizes)
        before, newest = weights * start.read.shared, weights * now.read.shared
        moved = sums.shared if changes else sums.shared - before
        if mixes:  # relative to the newest version: y - x
            moved = moved + (before - newest)
        shared = weight * moved + (0.0 if changes else newest)
        return replace(total, sums=replace(sums, shared=shared))

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Return the clock and the staleness of the round."""
        return self._numbers

    def report(self, last: Mapping[str, float]) -> Json:
        """Return the totals of the run."""
        names = "uploads", "dropped", "staleness", "most", "seconds"
        uploads, dropped, total, most, seconds = (self.memory[name] for name in names)
        mean = total / max(1, uploads)
        return {
            "uploads": uploads, "dropped": dropped, "staleness": mean, "staleness_max": most,
            "simulated_seconds": seconds,
            "sentence": f"{self.config.kind}: {uploads:,} uploads of mean staleness {mean:.2f} (at "
            f"most {most}), {dropped:,} dropped, {seconds:,.0f} simulated seconds",
        }  # fmt: skip
