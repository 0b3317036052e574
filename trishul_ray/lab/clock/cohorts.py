"""Strategies that choose the clients of a round.

A strategy is a class and its registration::

    @register_cohort("largest")
    class Largest(Strategy):
        \"\"\"Ask the clients with the most rows.\"\"\"

        def choose(self, now):
            return now.ready[np.argsort(-now.rows[now.ready], kind="stable")[: now.wanted]]

Legend: N clients, n that can be asked now, m that are wanted.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from trishul_ray.config.section import Section
from trishul_ray.errors import did_you_mean
from trishul_ray.plugins.registry import Registry


@dataclass(frozen=True)
class Past:
    """Records of the clients so far, [N] each.

    Attributes:
        asked: bool, whether it was ever asked.
        loss: float64, mean training loss of its last round that counted; NaN before.
        squared: float64, mean squared training loss over the local steps of that round.
        last: int64, number of that round; 0 before.
        joules: float64, all energy that it has spent.
    """

    asked: np.ndarray
    loss: np.ndarray
    squared: np.ndarray
    last: np.ndarray
    joules: np.ndarray

    @classmethod
    def of(cls, clients: int) -> "Past":
        """Return the record of N clients before round 1."""
        unknown, zeros = np.full(clients, math.nan), np.zeros(clients)
        return cls(zeros.astype(bool), unknown, unknown, zeros.astype(np.int64), zeros)

    def noted(self, clients: np.ndarray, **values: np.ndarray | float) -> "Past":
        """Return a copy with new values of some clients, by name."""
        found = {name: array.copy() for name, array in vars(self).items()}
        for name, new in values.items():
            found[name][clients] = new
        return Past(**found)


@dataclass(frozen=True)
class Situation:
    """Input of a strategy.

    Attributes:
        round: Number of the round, from 1.
        wanted: Clients to choose, m; at most n.
        ready: int64 [n], clients that can be asked, ascending.
        rng: The stream ``cohort`` of the round.
        options: The section ``cohort``.
        rows: int64 [N], training rows of all clients.
        loss: float64 [N], as in :class:`Past`; NaN for clients without.
        squared: float64 [N], likewise.
        last: int64 [N], likewise.
        utilities: float64 [rounds so far], sum over a round's kept clients of :func:`utility`.
        seconds: float64 [N], expected length of a client's round; empty without devices.
        battery: float64 [N], charge as a share of the full one; empty without batteries.
    """

    round: int
    wanted: int
    ready: np.ndarray
    rng: np.random.Generator
    options: "CohortConfig"
    rows: np.ndarray
    loss: np.ndarray
    squared: np.ndarray
    last: np.ndarray
    utilities: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    battery: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Strategy:
    """Base class of cohort strategies."""

    #: Its inputs beside the past: nothing, the devices, or their batteries as well.
    needs: ClassVar[Literal["nothing", "devices", "batteries"]] = "nothing"
    #: Fields of the section ``cohort`` that only it reads.
    reads: ClassVar[frozenset[str]] = frozenset()

    def choose(self, now: Situation) -> np.ndarray:
        """Return ``now.wanted`` different clients of ``now.ready``, int64, in any order."""
        raise NotImplementedError(f"{type(self).__name__} must define choose()")


COHORTS = Registry[type[Strategy]]("cohort.select", "cohort strategy")

#: Class decorator: ``@register_cohort("mine")`` makes a strategy available as
#: ``cohort.select=mine``.
register_cohort = COHORTS.register
#: The names of all strategies, and the class of a name.
cohort_names, strategy_class = COHORTS.names, COHORTS.__getitem__


class CohortConfig(Section):
    """Clients that are asked to take part in a round, and those of them that count."""

    select: str = Field(
        "uniform",
        description="uniform; power_of_choice: of some drawn by rows, those of the highest last "
        "loss; oort: by loss, age and speed; energy: by loss and battery; or a plug-in's",
    )
    candidates: float = Field(
        2.0, ge=1, description="power_of_choice: clients drawn for each one that is asked"
    )
    battery_weight: float = Field(
        0.5, ge=0, le=1, description="energy: weight of the battery; the rest is the loss's"
    )
    extra: float = Field(
        1.0,
        ge=1,
        le=10,
        description="clients asked for each one that is wanted; of those asked, only the first to "
        "come count",
    )
    deadline: float | None = Field(
        None, gt=0, description="seconds of the clock after which a round ends; default: none"
    )
    late: Literal["drop", "partial"] = Field(
        "drop",
        description="clients that would come after the deadline: drop them; partial: they make "
        "only the local steps that end before it",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that an asked client is lost: half of them after the download, "
        "half before the upload",
    )

    @field_validator("select")
    @classmethod
    def _check_select(cls, name: str) -> str:
        if name not in (known := cohort_names()):
            raise ValueError(
                f"unknown strategy {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}"
            )
        return name

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "CohortConfig":
        if self.late == "partial" and self.deadline is None:
            raise ValueError("cohort.late=partial needs cohort.deadline, in seconds")
        read = strategy_class(self.select).reads
        for strategy in COHORTS.items.values():
            self.reject_unused(sorted(strategy.reads - read), f"with select={self.select!r}")
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


def utility(rows: np.ndarray, squared: np.ndarray) -> np.ndarray:
    """Return Oort's statistical utility, ``|B| sqrt(mean loss^2)``, |B| the rows of a client."""
    product: np.ndarray = rows * np.sqrt(squared)
    return product


@register_cohort("uniform")
class Uniform(Strategy):
    """Draw uniformly without replacement."""

    def choose(self, now: Situation) -> np.ndarray:
        """Return the drawn clients."""
        return now.ready[now.rng.choice(len(now.ready), now.wanted, replace=False)]


@register_cohort("power_of_choice")
class PowerOfChoice(Strategy):
    """Draw candidates by their rows, and take those of the highest last loss.

    Cho, Wang and Joshi: AISTATS 2022, arXiv 2010.01243, the variant that needs no polling: a client
    that has not taken part yet comes before all others.
    """

    reads = frozenset({"candidates"})

    def choose(self, now: Situation) -> np.ndarray:
        """Return the candidates of the highest loss; of equal ones, those drawn first."""
        count = min(math.ceil(now.options.candidates * now.wanted), len(now.ready))
        share = now.rows[now.ready] / now.rows[now.ready].sum()
        drawn = now.ready[now.rng.choice(len(now.ready), count, replace=False, p=share)]
        loss = np.nan_to_num(now.loss[drawn], nan=math.inf)
        return drawn[np.argsort(-loss, kind="stable")[: now.wanted]]


@register_cohort("oort")
class Oort(Strategy):
    """Exploit clients of high loss that are not slow, explore fast ones that are new.

    Lai et al.: "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021,
    Algorithm 1, without its noise. A client's score is its utility, clipped and scaled to [0, 1],
    plus ``sqrt(0.1 ln t / last round)``, times ``(T / seconds)^2`` if it takes longer than T.
    """

    needs = "devices"

    #: Share of new clients: ``max(EXPLORE x EXPLORE_DECAY^t, EXPLORE_LEAST)``.
    EXPLORE, EXPLORE_DECAY, EXPLORE_LEAST = 0.9, 0.98, 0.3
    #: Quantile at which utilities are clipped; share of the last exploited score that is enough.
    CLIP, CUT_OFF = 0.95, 0.95
    #: The percentile of all clients' seconds that is T; it rises every so many rounds by so much.
    PREFERRED, PACE, PACE_ROUNDS = 30.0, 5.0, 20
    #: Power of the penalty of slow clients.
    PENALTY = 2.0

    def choose(self, now: Situation) -> np.ndarray:
        """Return exploited clients, drawn by score, and new ones, drawn by speed."""
        seen = now.ready[now.last[now.ready] > 0]
        new = now.ready[now.last[now.ready] == 0]
        share = max(self.EXPLORE * self.EXPLORE_DECAY**now.round, self.EXPLORE_LEAST)
        exploited = min(now.wanted - min(int(now.wanted * share), len(new)), len(seen))
        chosen = []
        if exploited:
            scores = self.scores(now, seen)
            least = self.CUT_OFF * np.partition(scores, -exploited)[-exploited]
            good = np.flatnonzero(scores >= least)
            p = scores[good] / scores[good].sum()
            chosen.append(seen[good[now.rng.choice(len(good), exploited, replace=False, p=p)]])
        if explored := now.wanted - exploited:
            p = 1 / now.seconds[new]
            chosen.append(new[now.rng.choice(len(new), explored, replace=False, p=p / p.sum())])
        return np.concatenate(chosen)

    def scores(self, now: Situation, clients: np.ndarray) -> np.ndarray:
        """Return the scores of clients that have taken part, float64, above 0 from round 2 on."""
        found = utility(now.rows[clients], now.squared[clients])
        found = np.minimum(found, np.quantile(found, self.CLIP))
        low, high = found.min(), found.max()
        scaled = (found - low) / (high - low) if high > low else np.ones(len(found))
        scores: np.ndarray = scaled + np.sqrt(0.1 * math.log(now.round) / now.last[clients])
        preferred, seconds = self.preferred(now), now.seconds[clients]
        slow = seconds > preferred
        scores[slow] *= (preferred / seconds[slow]) ** self.PENALTY
        return scores

    def preferred(self, now: Situation) -> float:
        """Return T; longer if the utility of the last rounds is below that of those before."""
        percentile, window = self.PREFERRED, self.PACE_ROUNDS
        for end in range(2 * window, len(now.utilities) + 1, window):
            before, recent = now.utilities[end - 2 * window : end].reshape(2, window).sum(axis=1)
            if before > recent:
                percentile = min(percentile + self.PACE, 100.0)
        return math.inf if percentile == 100 else float(np.percentile(now.seconds, percentile))


@register_cohort("energy")
class Energy(Strategy):
    """Weigh a client's utility against the charge of its battery, and take the best.

    Arouj and Abdelmoniem: "Towards Energy-Aware Federated Learning on Battery-Powered Clients",
    2022, arXiv 2208.04505: ``f utility + (1 - f) battery``, utilities as shares of the highest. A
    client that has not taken part yet has the highest. The default f is our own.
    """

    needs = "batteries"
    reads = frozenset({"battery_weight"})

    def choose(self, now: Situation) -> np.ndarray:
        """Return the clients of the highest scores; equal ones in an order drawn anew."""
        drawn = now.rng.permutation(now.ready)
        found = utility(now.rows[drawn], now.squared[drawn])
        seen = ~np.isnan(found)
        highest = found[seen].max(initial=0.0)
        share = np.where(seen, found / highest if highest else 1.0, 1.0)
        weight = now.options.battery_weight
        score = (1 - weight) * share + weight * now.battery[drawn]
        return drawn[np.argsort(-score, kind="stable")[: now.wanted]]
