"""The server's part of a private run: from the sum of clipped changes to what is released of it.

McMahan et al.: "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv
1710.06963, with the fixed denominator. With m clients of a round on average, of whom a share p_u
trains unit u, what moves the model is::

    mean_u = (sum_c change_cu / m + N(0, (z S)^2) / m~) / p_u

where m~ is m, or the cohort of the deployment that is accounted for (``privacy.cohort``). The
denominators are constants: a count of who came would be one more private number. Uploads that are
refused or missing are zeros in the sum.

All noise is drawn in float64 and from the run's seed, so that a run can be repeated: whoever knows
the seed can remove it. This is a simulation, not a deployment.

Legend: W numbers of the shared part, U units of aggregation, P all numbers sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trishul_ray.adapters.layout import Unit
from trishul_ray.lab.privacy import audit
from trishul_ray.lab.privacy.accounting import Guarantee, bit_deviation, change_noise
from trishul_ray.lab.privacy.clipping import next_norm
from trishul_ray.lab.privacy.config import PrivacyConfig
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.storage.durable import Json

#: Content of a run's files that its epsilon does not cover.
OUTSIDE = (
    "train_loss", "scores on validation rows and clients' own test rows", "per_client", "personal",
    "the spectra and other diagnostics of clients", "norms, coding errors and ranks of uploads",
    "how many of them and of their entries were clipped", "refused uploads", "cohorts", "traffic",
    "simulated seconds",
)  # fmt: skip
#: Clip norm of answers to a survey: far below the norm of any gradient, so that directions alone
#: count, and no data are needed to choose it.
SURVEY_NORM = 1e-6
#: Numbers of an audit in a record: the lower and the upper end of its interval.
LOW, HIGH = "privacy_audited_epsilon_low", "privacy_audited_epsilon_high"
#: Note of every summary of a private run.
SIMULATION = "simulation: noise is reproducible from the seed"


def reported(promised: Guarantee, simulated: tuple[int, int], last: Mapping[str, float]) -> Json:
    """Return what the summary of a run says of its privacy, as JSON values.

    Args:
        promised: Its guarantee.
        simulated: The clients and the cohort that were simulated.
        last: Numbers of stages in the last record, by name.
    """
    epsilon = last.get("privacy_epsilon")
    what = "ε = ∞ (privacy.noise=0)"
    if epsilon is not None:
        what = f"ε = {epsilon:.3g}, δ = {promised.delta:.2g}"
    audited = None
    if LOW in last:
        audited = [last[LOW], last[HIGH]]
        what += f" (an audit of the final model: {audited[0]:.3g} to {audited[1]:.3g})"
    return {
        "epsilon": epsilon,
        "delta": promised.delta,
        "noise": promised.noise,
        "sampling": promised.sampling,
        "accountant": promised.accountant,
        "population": promised.population,
        "cohort": promised.cohort,
        "simulated": simulated,
        "clip_norm": last["privacy_clip_norm"],
        "audited_epsilon": audited,
        "outside": OUTSIDE,
        "sentence": f"{what} for each client, accounted for {promised.cohorts}; {SIMULATION}; "
        f"simulation only, outside the guarantee: {', '.join(OUTSIDE)}",
    }


@dataclass(frozen=True)
class Mechanism:
    """Release of a round.

    Attributes:
        options: The section ``privacy``, which is on.
        seed: The experiment's.
        promised: Noise and guarantee.
        clients: N, simulated clients.
        cohort: m, simulated clients of a round on average.
        units: The units of the shared part, in the order of the wire.
        shares: [U] float64, p_u, the share of clients that train a unit.
        extra: Lengths of what the method adds, by name.
        first_norm: S of the first round.
        resting: Numbers of the shared part that no client sends in a round, at least.
    """

    options: PrivacyConfig
    seed: int
    promised: Guarantee
    clients: int
    cohort: int
    units: tuple[Unit, ...]
    shares: np.ndarray
    extra: Mapping[str, int]
    first_norm: float
    resting: int = 0

    @cached_property
    def noise(self) -> float:
        """The multiplier of the noise on changes."""
        return change_noise(self.options, self.promised)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Entries of each unit, [U] int64."""
        return np.array([unit.size for unit in self.units], dtype=np.int64)

    @property
    def numbers(self) -> int:
        """P, the most that a client sends in a round."""
        return int(self.sizes.sum()) + sum(self.extra.values()) - self.resting

    def signal_to_noise(self, numbers: int) -> float:
        """Return the largest ratio of a mean of so many numbers to its noise: ``m~ / (z sqrt P)``.

        All clients would have to send the same, of the clip norm.
        """
        return float(self.promised.cohort / (self.noise * np.sqrt(numbers)))

    def deviations(self, norm: float) -> np.ndarray:
        """Return the deviation of the noise on each unit's mean change, [U] float64."""
        deviations: np.ndarray = self.noise * norm / (self.promised.cohort * self.shares)
        return deviations

    def mean(
        self,
        number: int,
        shared: np.ndarray,
        extra: Mapping[str, np.ndarray],
        norm: float,
        sent: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the noisy mean change of a round, float64.

        Args:
            number: The round, from 1.
            shared: [W] float64, the sum of clipped changes; zeros if nobody came.
            extra: The sums of what the method adds, by name.
            norm: S of the round.
            sent: [U] bool, the units that clients train in this round; None means all. The others
                do not move, and get no noise. A unit that happens to be trained by nobody does.
        """
        rng = numpy_rng(self.seed, "dp-noise", number)
        deviations = self.deviations(norm)
        noise = rng.standard_normal(len(shared)) * np.repeat(deviations, self.sizes)
        change = shared / np.repeat(self.cohort * self.shares, self.sizes) + noise
        if sent is not None:
            change = np.where(np.repeat(sent, self.sizes), change, 0.0)
        deviation = self.noise * norm / self.promised.cohort
        found = {
            name: extra[name] / self.cohort + rng.standard_normal(length) * deviation
            for name, length in sorted(self.extra.items())
        }
        return change, found

    def surveyed(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the noisy mean answer to a survey, float64: a release before round 1.

        Args:
            sums: The sums of clipped answers, of any shape, by name.
        """
        rng = numpy_rng(self.seed, "dp-noise", 0)
        deviation = self.noise * SURVEY_NORM / self.promised.cohort
        return {
            name: total / self.cohort + rng.standard_normal(total.shape) * deviation
            for name, total in sorted(sums.items())
        }

    def next_norm(self, number: int, norm: float, balance: float) -> float:
        """Return S of the next round.

        Args:
            number: The round, from 1.
            norm: S of the round.
            balance: The sum over accepted uploads of 1/2 for one that was not clipped, and -1/2 for
                one that was. One client moves it by 1/2, as :func:`change_noise` assumes; it would
                move a count of those that were not clipped by 1.
        """
        options = self.options
        if not options.adaptive:
            return norm
        cohort = self.promised.cohort
        deviation = bit_deviation(options, cohort) if self.noise > 0 else 0.0
        noise = float(numpy_rng(self.seed, "dp-bit", number).standard_normal()) * deviation
        share = 0.5 + balance / self.cohort + noise / cohort
        return next_norm(norm, share, options.quantile, options.clip_lr)

    def canaries(self, number: int, norm: float) -> np.ndarray:
        """Return the sum of what the canaries that are drawn in a round send, [W] float64.

        Args:
            number: The round, from 1.
            norm: S of the round.
        """
        rate = self.cohort / self.clients
        total = np.zeros(int(self.sizes.sum()))
        drawn = numpy_rng(self.seed, "canary-cohort", number).random(self.options.canaries) < rate
        every = audit.canaries(self.seed, self.options.canaries, len(total))
        for direction, taken in zip(every, drawn, strict=True):
            if taken:
                total += norm * direction
        return total

    def audited(
        self, number: int, moved: np.ndarray, sent: np.ndarray, mean_square: float
    ) -> tuple[float, float] | None:
        """Return the interval of ε that canaries show; None if none has taken part.

        Args:
            number: The round, from 1.
            moved: [W] float64, the movement of the shared part in all rounds so far.
            sent: [W] float64, the sum of what canaries sent.
            mean_square: Mean of S^2 over these rounds.
        """
        if (found := audit.shift_interval(moved, sent)) is None:
            return None
        norm, rate = math.sqrt(mean_square), self.cohort / self.clients
        low, high = (
            audit.threshold_epsilon(norm * shift, rate, number, self.promised.delta)
            for shift in found
        )
        return low, high

    def lines(self) -> Sequence[str]:
        """Return what a reader must know before the run, a line each."""
        promised, how = self.promised, self.promised.accountant
        if self.options.population is not None:
            how = f"a deployment that {self.cohort:,} of {self.clients:,} simulate; {how}"
        if self.noise == 0:
            return ["privacy: ε = ∞ (privacy.noise=0): changes are clipped, nothing is promised"]
        epsilon, p = promised.epsilon(), self.numbers
        name = "m~" if self.options.cohort else "m"
        lines = [
            f"privacy: ε = {epsilon:.3g}, δ = {promised.delta:.2g} for each client after "
            f"{promised.rounds} rounds{' and a survey' * promised.surveys}, accounted for "
            f"{promised.cohorts} ({how}), noise multiplier z = {promised.noise:g}",
            f"privacy: signal-to-noise ratio of a round {self.signal_to_noise(p):.2g} at most, "
            f"{name} / (z sqrt P) with {promised.cohort:,} clients and P = {p:,}; "
            f"clip norm {self.first_norm:.4g}"
            + (" at the start" if self.options.adaptive else "")
            + (", lr sqrt(local_steps P)" if self.options.clip == "auto" else "")
            + f"; {SIMULATION}",
        ]
        if self.options.canaries:
            lines.append(
                f"privacy: an audit with {self.options.canaries} canaries: its model is of no use; "
                f"each end of its interval for ε is wrong with probability {audit.ERROR:g}"
            )
        return lines
