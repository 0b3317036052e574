"""Sums in fixed point, in the ring of integers modulo 2^64.

Addition there is associative: the sum of a round has the same bits in every order and grouping of
its clients, which is what secure aggregation needs (Bonawitz et al., CCS 2017, Section 4) and what
a sum of floating-point numbers does not have. A client multiplies its change by its weight, rounds
it to multiples of 2^-f, and sends integers; the server adds them and divides once.

A sum cannot overflow: values beyond R = (2^63 - 1) / (m 2^f), for m clients at most, are clipped to
it, and counted. The rounding error of a mean is at most m 2^-(f+1) / (sum of weights).

Legend: W entries of the shared part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.methods.base import Method, method_class
from trishul_ray.runtime.lazy import scipy
from trishul_ray.stages import Change, Partial, Sender, Stage, StageSettings

#: Bytes of an element of the ring.
ELEMENT = 8
#: Share of units that too few clients train, on average, above which a run warns of it.
OFTEN = 0.05


class SumConfig(Section):
    """How uploads are added."""

    sum: Literal["float", "ring"] = Field(
        "float",
        description="float: in float64, by ascending client; ring: in fixed point modulo 2^64, "
        "equal to the bit in every order, as secure sums need it",
    )
    fraction_bits: int = Field(
        32, ge=8, le=48, description="f of sum=ring: values are multiples of 2^-f"
    )
    min_clients: int = Field(
        2,
        ge=1,
        description="sum=ring: what fewer clients have trained stays as it was, as the sum of one "
        "shows what it sent",
    )

    @model_validator(mode="after")
    def _check_sum(self) -> "SumConfig":
        if self.sum == "float":
            self.reject_unused(["fraction_bits", "min_clients"], "with sum='float'")
        return self


class RingSum(Stage):
    """Clients send fixed point, and the server adds integers; a part of the section ``server``."""

    name, wire = "ring", 5
    summed = frozenset({"clipped_entries"})
    config: SumConfig

    def __init__(self, config: Section, settings: StageSettings) -> None:
        super().__init__(config, settings)
        fed, plain = settings.federation, method_class(settings.method.name).plain_mean
        # With privacy, cohorts may be drawn client by client.
        self.private = settings.is_set("privacy")
        most = fed.participants if self.private else fed.clients_per_round
        self.ring = Ring(self.config.fraction_bits, most, plain)

    def check(self, method: Method) -> None:
        """Refuse a sum that would never be used, and a field that has no effect."""
        private, least = self.private, self.config.min_clients
        size = self.settings.federation.clients_per_round
        if not private and size < least:
            raise ValueError(
                f"server.min_clients={least} exceeds federation.clients_per_round={size}: no sum "
                "in the ring would ever be used"
            )
        if private and least != SumConfig.model_fields["min_clients"].default:
            raise ValueError(
                f"server.min_clients={least} has no effect with privacy, whose noise hides what "
                "single clients have trained; set only one"
            )

    @property
    def quorum(self) -> dict[str, int]:
        """A sum of fewer clients is not used; noise hides them without that."""
        return {} if self.private else {"server.min_clients": self.config.min_clients}

    def begin(self) -> Sequence[str]:
        """Say what is secure of it, and warn of units that few clients train."""
        lines = [
            "server.sum=ring: secure sums show nothing of single clients; what is recorded of them "
            "(diagnostics, losses, refused uploads) is the simulator's view"
        ]
        if self.private:
            return lines
        binom, least = scipy.stats.binom, self.config.min_clients
        size, shares = self.settings.federation.clients_per_round, self.plan.unit_shares()
        few = binom.cdf(least - 1, size, shares) - binom.pmf(0, size, shares)
        if (share := float(few.mean())) > OFTEN:
            lines.append(
                f"warning: server.min_clients={least}: so many of {size} clients do not train a "
                f"unit in {share:.0%} of cases, and it stays as it was: take larger cohorts or "
                "clients that train more heads"
            )
        return lines

    def send(self, change: Change, sender: Sender) -> Change:
        """Return the change in fixed point, times its weight."""
        return self.ring.encode_change(change, sender)

    def total(self, total: Partial) -> Partial:
        """Return the sum in float64; a unit that too few clients have trained has no weight."""
        if total.sums is None:
            return total
        sums = total.sums.map(self.ring.decode)
        if self.private:
            return replace(total, sums=sums)
        enough = total.unit_clients >= self.config.min_clients
        withheld = (total.unit_weight > 0) & ~enough
        return replace(
            total,
            sums=sums,
            unit_weight=np.where(enough, total.unit_weight, 0.0),
            metrics=total.metrics | {"withheld_units": float(withheld.sum())},
        )

    def restore(self, shared: np.ndarray, weight: float) -> np.ndarray:
        """Return the change of which this is the fixed point, times its weight."""
        return self.ring.decode(shared) / weight


@dataclass(frozen=True)
class Ring:
    """Fixed point with f fraction bits, and as many clients as a round may have.

    Attributes:
        fraction_bits: f.
        clients: m, the most changes that are ever added.
        plain: Names in ``extra`` that are added without weights.
    """

    fraction_bits: int
    clients: int
    plain: frozenset[str] = frozenset()

    @property
    def largest(self) -> float:
        """R, the largest absolute value that is not clipped."""
        # The float64 below (2^63 - 1) / m: rounded up, the largest sum could overflow.
        limit = math.nextafter((2**63 - 1) // self.clients, 0)
        return math.ldexp(limit, -self.fraction_bits)

    @property
    def step(self) -> float:
        """The distance of neighbouring values."""
        return math.ldexp(1.0, -self.fraction_bits)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, int]:
        """Return values as int64 in fixed point, and how many of them were clipped."""
        largest, exact = self.largest, values.astype(np.float64)
        clipped = int((np.abs(exact) > largest).sum())
        scaled = np.ldexp(np.clip(exact, -largest, largest), self.fraction_bits)
        return np.rint(scaled).astype(np.int64), clipped

    def decode(self, values: np.ndarray) -> np.ndarray:
        """Return integers, such as a sum, as float64."""
        return np.ldexp(values.astype(np.float64), -self.fraction_bits)

    def encode_change(self, change: Change, sender: Sender) -> Change:
        """Encode a change times its weight; clients send eight bytes for each number.

        A change that is not finite stays as it is, and the server refuses it.
        """
        if not all(np.isfinite(array).all() for array in (change.shared, *change.extra.values())):
            return change
        shared, clipped = self.encode(change.shared.astype(np.float64) * sender.weight)
        extra = {}
        for name, values in change.extra.items():
            weight = 1.0 if name in self.plain else sender.weight
            extra[name], more = self.encode(values.astype(np.float64) * weight)
            clipped += more
        numbers = sum(array.size for array in (shared, *extra.values()))
        if sender.active is not None:
            # A unit that was not trained is not sent; which ones were is, as their weights.
            numbers += len(sender.units) - sum(
                unit.size for unit, on in zip(sender.units, sender.active, strict=True) if not on
            )
        return replace(
            change,
            shared=shared,
            extra=extra,
            weighted=True,
            uploaded_bytes=ELEMENT * numbers,
            metrics=change.metrics | {"clipped_entries": float(clipped)},
        )
