"""The stage ``privacy``: clients clip their changes, and the server releases their noisy mean.

McMahan et al.: "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv
1710.06963, flat clipping with the fixed denominator. With m clients of a round on average, of whom
a fraction p_u trains unit u, the released mean is::

    mean_u = (sum_c change_cu + N(0, (z S)^2)) / (m p_u)

The denominators are constants: a count of the clients that joined would be one more private number.
Rejected and missing uploads are zeros in the sum. The noise follows from the run's seed, so that a
run can be repeated: this is a simulation, not a deployment.

Legend: W numbers of the shared part, P all numbers that a client sends.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from trishul_ray.config.section import Section
from trishul_ray.data.sampling import uniform_cohort
from trishul_ray.lab.privacy.accounting import Guarantee, affordable, guarantee
from trishul_ray.lab.privacy.config import PrivacyConfig
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import (
    Change,
    Cohort,
    MeanChange,
    Partial,
    Sender,
    Stage,
    StageSettings,
    norm_of,
    register_stage,
)
from trishul_ray.storage.durable import Json

#: The instruction with the norm to clip to.
CLIP_NORM = "privacy_clip_norm"
#: What a client reports: whether its change was clipped, and the norm before.
CLIPPED, NORM = "privacy_clipped", "privacy_norm"
#: Clip norm of answers to a survey: far below the norm of any gradient, so that only directions
#: count, and no data are needed to choose it.
SURVEY_NORM = 1e-6
#: Content of a run's files that its epsilon does not cover.
OUTSIDE = (
    "train_loss", "scores on validation rows and clients' own test rows", "per_client", "personal",
    "the spectra and other diagnostics of clients", "norms, coding errors and the number of "
    "clipped uploads", "rejected uploads", "cohorts", "traffic", "simulated seconds",
)  # fmt: skip
#: Note of every summary of a private run.
SIMULATION = "simulation: noise is reproducible from the seed"


@register_stage("privacy")
class Privacy(Stage):
    """Clients clip their changes, and the server releases their noisy mean.

    Its memory: ``noise``, z when the run began, since another version of the library may compute
    another z for the same ε.
    """

    Config, wire, moves_beyond_mean, hides_clients = PrivacyConfig, 4, True, True
    example: ClassVar = {"noise": 1.0, "sampling": "fixed"}
    config: PrivacyConfig

    def __init__(self, config: Section, settings: StageSettings) -> None:
        super().__init__(config, settings)
        self._survey_numbers = 0

    def check(self, method: Method) -> None:
        """Reject what the accounting does not cover."""
        if (weighting := self.settings.federation.weighting) != "uniform":
            raise ValueError(
                f"privacy: federation.weighting={weighting!r} lets a client with many rows exceed "
                "the clip norm; set uniform"
            )
        if setting := method.units_by_data:
            raise ValueError(
                f"privacy: {setting} sends which units a client's data select, in clear; select "
                "them at random"
            )
        if (plan := method.survey_plan) is not None and plan.decides_adapters:
            raise ValueError(
                f"privacy: {self.settings.method_as_set} lets measurements of clients before round "
                "1 decide the adapters, in clear; set method.allocation=waterfill or uniform for "
                "trishul"
            )

    @property
    def reads_rounds(self) -> bool:
        """The noise for an epsilon depends on the number of rounds."""
        return self.config.epsilon is not None

    def rounds(self, rounds: int) -> int:
        """Return how many rounds are within ``privacy.budget``."""
        fed, surveys = self.settings.federation, self.settings.surveys
        return affordable(self.config, fed.participants, fed.clients_per_round, rounds, surveys)

    def prepare(self) -> Sequence[str]:
        """Compute the noise before anything is written."""
        promised(self.settings)
        return ()

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee, with the noise that the run began with."""
        return promised(self.settings, self.memory.get("noise"))

    @cached_property
    def sizes(self) -> np.ndarray:
        """Entries of each unit, [U] int64."""
        return np.array([unit.size for unit in self.plan.units], dtype=np.int64)

    @cached_property
    def length(self) -> int:
        """P, the most that a client sends in a round."""
        resting = min(self._resting(number) for number in (1, 2))
        return sum(self.plan.lengths.values()) - resting

    def _resting(self, number: int) -> int:
        """Return how many numbers of the shared part clients do not send in a round."""
        sent = self.plan.sent_units(number)
        return 0 if sent is None else int(self.sizes[~sent].sum())

    @cached_property
    def norm(self) -> float:
        """S; by default the length of a walk of Adam's steps of size lr in P numbers."""
        if self.config.clip != "auto":
            return self.config.clip
        steps = self.settings.federation.local_steps
        return self.settings.optimizer.lr * math.sqrt(steps * self.length)

    def begin(self) -> Sequence[str]:
        """Store the noise, and return the guarantee of the run."""
        found = self.guarantee
        self.memory.setdefault("noise", found.noise)
        if found.noise == 0:
            return ["privacy: ε = ∞ (privacy.noise=0): changes are clipped, nothing is guaranteed"]
        survey = []
        if asked := self._survey_numbers:
            survey.append(
                f"privacy: signal-to-noise ratio of the survey {self._ratio(asked):.2g} at most, "
                f"with {asked:,} numbers"
            )
        source = ", lr sqrt(local_steps P)" if self.config.clip == "auto" else ""
        return [
            *survey,
            f"privacy: ε = {found.epsilon():.3g}, δ = {found.delta:.2g} for each client after "
            f"{found.rounds} rounds{' and a survey' * found.surveys}, accounted for "
            f"{cohorts(found)} ({found.accountant}), noise multiplier z = {found.noise:g}",
            f"privacy: signal-to-noise ratio of a round {self._ratio(self.length):.2g} at most, "
            f"m / (z sqrt P) with {found.cohort:,} clients and P = {self.length:,}; clip norm "
            f"{self.norm:.4g}{source}; {SIMULATION}",
        ]

    def _ratio(self, numbers: int) -> float:
        """Return the largest ratio of a mean of so many numbers to its noise."""
        return float(self.guarantee.cohort / (self.guarantee.noise * np.sqrt(numbers)))

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Sample the clients as the accounting assumes; a Poisson cohort may be empty."""
        seed, size = self.settings.seed, self.settings.federation.clients_per_round
        sample = poisson_cohort if self.config.sampling == "poisson" else uniform_cohort
        members = self.plan.participants
        clients = members[sample(seed, number, len(members), size)].tolist()
        return replace(cohort, clients=clients, fixed=True)

    def instruct(self, number: int) -> dict[str, float]:
        """Send the clip norm."""
        return {CLIP_NORM: self.norm if number else SURVEY_NORM}

    def send(self, change: Change, sender: Sender) -> Change:
        """Clip the change; report its norm, and whether it was clipped."""
        norm = sender.instructions[CLIP_NORM]
        shared, extra, before = clip(change.shared, change.extra, norm)
        found = {CLIPPED: float(before > norm), NORM: before}
        return replace(change, shared=shared, extra=extra, metrics=change.metrics | found)

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Clip the answers; numbers that are not finite count as zeros."""
        finite = {k: np.nan_to_num(v, nan=0, posinf=0, neginf=0) for k, v in answers.items()}
        return clip(np.zeros(0, dtype=np.float32), finite, instructions[CLIP_NORM])[1]

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the noisy mean answers: a release like the mean of a round."""
        self._survey_numbers = sum(answer.size for answer in sums.values())
        rng, cohort = numpy_rng(self.settings.seed, "dp-noise", 0), self.guarantee.cohort
        deviation = self.guarantee.noise * SURVEY_NORM / cohort
        return {
            name: total / cohort + rng.standard_normal(total.shape) * deviation
            for name, total in sorted(sums.items())
        }

    def average(self, number: int, total: Partial) -> MeanChange:
        """Return the noisy mean change."""
        found, units = self.guarantee, len(self.plan.units)
        shared, extra = np.zeros(int(self.sizes.sum())), None
        if total.sums is not None:
            shared, extra = total.sums.shared, total.sums.extra
        sent = self.plan.sent_units(number)
        rng, deviation = numpy_rng(self.settings.seed, "dp-noise", number), found.noise * self.norm
        counts = found.cohort * self.plan.unit_shares()  # expected clients of each unit, [U]
        noise = rng.standard_normal(len(shared)) * np.repeat(deviation / counts, self.sizes)
        change = shared / np.repeat(counts, self.sizes) + noise
        if sent is not None:  # units that no client trains in this round do not move
            change = np.where(np.repeat(sent, self.sizes), change, 0.0)
        more = {
            name: (0.0 if extra is None else extra[name] / found.cohort)
            + rng.standard_normal(length) * (deviation / found.cohort)
            for name, length in sorted(self.plan.lengths.items())
            if name != "shared"
        }
        metrics = {CLIP_NORM: self.norm}
        if (epsilon := found.epsilon(number)) < math.inf:
            metrics["privacy_epsilon"] = epsilon
        state = State(change, {name: array.astype(np.float32) for name, array in more.items()})
        moves = np.ones(units, dtype=bool) if sent is None else sent
        return MeanChange(state, moves, found.cohort, metrics)

    def report(self, last: Mapping[str, float]) -> Json:
        """Return the guarantee of the run, and what it does not cover."""
        found, epsilon = promised(self.settings, self.memory["noise"]), last.get("privacy_epsilon")
        what = "ε = ∞ (privacy.noise=0)"
        if epsilon is not None:
            what = f"ε = {epsilon:.3g}, δ = {found.delta:.2g}"
        return {
            "epsilon": epsilon,
            "delta": found.delta,
            "noise": found.noise,
            "sampling": found.sampling,
            "accountant": found.accountant,
            "clients": found.clients,
            "cohort": found.cohort,
            "clip_norm": last[CLIP_NORM],
            "sentence": f"{what} for each client, accounted for {cohorts(found)}; {SIMULATION}; "
            f"outside the guarantee: {', '.join(OUTSIDE)}",
        }

    @classmethod
    def remark(cls, reports: Sequence[Json]) -> str:
        """Return for which cohorts the guarantees hold, and what is outside of them."""
        private = [each for each in reports if each["epsilon"]]  # nothing is guaranteed without ε
        sizes = sorted({(each["clients"], each["cohort"]) for each in private})
        if not sizes:
            return ""
        return (
            f"Privacy of clients ({len(private)} runs) is accounted for cohorts of "
            f"{', '.join(f'{m:,} of {n:,}' for n, m in sizes)}. It is a simulation: noise is "
            f"reproducible from the seed. Outside the guarantee: {', '.join(OUTSIDE)}."
        )


def clip(
    shared: np.ndarray, extra: Mapping[str, np.ndarray], bound: float
) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """Scale a change by ``min(1, S / norm)``; a change of norm 0 or not finite stays as it is.

    Args:
        shared: [W] float32.
        extra: What the method adds, float32, by name.
        bound: S; 0 leaves nothing.

    Returns:
        Both parts, whose norm after rounding is at most S, and the norm before.
    """
    before = norm_of([shared, *extra.values()])
    if not (bound < before < math.inf):
        return shared, dict(extra), before
    factor = bound / before
    while True:
        first = (shared * np.float64(factor)).astype(np.float32)
        rest = {k: (v * np.float64(factor)).astype(np.float32) for k, v in extra.items()}
        after = norm_of([first, *rest.values()])
        if after <= bound:
            return first, rest, before
        factor *= (bound / after) * (1 - 2.0**-24)  # rounding has added to the norm


def poisson_cohort(seed: int, number: int, clients: int, expected: int) -> list[int]:
    """Return the clients of a round, each independently with probability expected / clients."""
    sampled = numpy_rng(seed, "cohort-poisson", number).random(clients) < expected / clients
    return [int(client) for client in np.flatnonzero(sampled)]


def cohorts(found: Guarantee) -> str:
    """Return the cohorts that the accountant assumes."""
    which = f"{found.cohort:,} of {found.clients:,} clients"
    poisson = found.sampling == "poisson"
    return f"Poisson cohorts of {which} on average" if poisson else f"cohorts of exactly {which}"


def promised(settings: StageSettings, noise: float | None = None) -> Guarantee:
    """Return the guarantee of a private experiment to each client.

    Args:
        settings: The experiment; its section ``privacy`` is on.
        noise: z of a run that has begun; None computes it.

    Raises:
        InputError: No noise that is tried reaches ε, or dp-accounting is missing.
    """
    fed, options = settings.federation, settings.section(PrivacyConfig)
    if noise is not None:
        options = options.model_copy(update={"epsilon": None, "noise": noise})
    clients, cohort = fed.participants, fed.clients_per_round
    return guarantee(options, clients, cohort, fed.rounds, settings.surveys)
