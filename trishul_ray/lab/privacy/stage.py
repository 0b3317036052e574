"""Stage ``privacy``: clients clip their changes, and the server releases their noisy mean.

McMahan et al.: "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv
1710.06963, flat clipping with the fixed denominator. With m clients per round on average, of which
a fraction p_u trains unit u, the released mean is::

    mean_u = (sum_c change_cu + N(0, (z S)^2)) / (m p_u)

The denominators are constant, because the number of clients that joined would be another private
number. Rejected and missing uploads count as zeros. The noise follows from the run's seed, so that
a run can be repeated: this is a simulation, not a deployment.

Legend: W numbers of the shared part, P all numbers that a client sends.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from trishul_ray.config.section import Section
from trishul_ray.data.sampling import uniform_cohort
from trishul_ray.errors import InputError
from trishul_ray.lab.privacy.accounting import Guarantee, with_noise_for
from trishul_ray.lab.privacy.config import (
    CLIP_NORM,
    CLIPPED,
    EPSILON,
    NORM,
    SIMULATION,
    PrivacyConfig,
)
from trishul_ray.lab.privacy.example import OUTSIDE as OUTSIDE_EXAMPLES
from trishul_ray.lab.privacy.example import ExamplePrivacy
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import State
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import (
    Change,
    ClientRoundInfo,
    Cohort,
    MeanChange,
    Partial,
    Stage,
    StageSettings,
    norm_of,
    register_stage,
)
from trishul_ray.storage.durable import Json

#: Clip norm of responses to a survey. It is far below the norm of any gradient, so that only
#: directions count, and choosing it needs no data.
SURVEY_NORM = 1e-6
#: Contents of a run's files that its epsilon does not cover.
OUTSIDE = (
    "train_loss, scores on validation rows and on clients' test rows, per_client, personal, the "
    "spectra and other diagnostics of clients, norms, coding errors and the number of clipped "
    "uploads, rejected uploads, cohorts, traffic, simulated seconds"
)


@register_stage("privacy")
class Privacy(Stage):
    """Clip the changes of clients, and add noise to their mean.

    The memory has ``noise``, z when the run began, because another version of the library may
    compute a different z for the same ε.
    """

    Config, wire, alters_mean, protects_clients = PrivacyConfig, 4, True, True
    example: ClassVar = {"noise": 1.0, "sampling": "fixed"}
    config: PrivacyConfig

    @classmethod
    def parts(cls, config: Section, settings: StageSettings) -> Sequence[Stage]:
        """Create the stage of the unit of privacy."""
        unit = settings.section(PrivacyConfig).unit
        return [(cls if unit == "client" else ExamplePrivacy)(config, settings)]

    def check(self, method: Method) -> None:
        """Reject experiments that the accounting does not cover."""
        if (weighting := self.settings.federation.weighting) != "uniform":
            raise ValueError(
                f"privacy: federation.weighting={weighting!r} lets a client with many rows exceed "
                "the clip norm; set federation.weighting=uniform"
            )
        if self.config.clip == "auto" and self.settings.federation.local_epochs is not None:
            raise ValueError(
                "privacy.clip='auto' depends on federation.local_steps; set a number, or local "
                "steps instead of federation.local_epochs"
            )
        if setting := method.units_by_data:
            raise ValueError(
                f"privacy: {setting} reveals which units a client's data select; set "
                "method.selection=random"
            )
        if (plan := method.survey_plan) is not None and plan.decides_adapters:
            raise ValueError(
                f"privacy: {self.settings.method_as_set} is not supported, because measurements of "
                "clients before round 1 determine the adapters without noise; for trishul, set "
                "method.allocation=waterfill or uniform"
            )

    @property
    def reads_rounds(self) -> bool:
        """Whether the noise follows from ``epsilon`` and the number of rounds."""
        return self.config.epsilon is not None

    def rounds(self, rounds: int) -> int:
        """Return the number of rounds that ``privacy.budget`` allows.

        Raises:
            InputError: The budget does not cover one round.
        """
        if (budget := self.config.budget) is None:
            return rounds
        found = guarantee(self.settings)
        if paid := bisect_right(range(1, rounds + 1), budget, key=found.epsilon):
            return paid
        raise InputError(
            f"privacy.budget={budget:g} is below the ε of one round, {found.epsilon(1):.3g}, at "
            f"privacy.noise={self.config.noise:g}; set a larger budget or more noise"
        )

    def prepare(self) -> Sequence[str]:
        """Compute the noise, so that errors occur before any file is written."""
        guarantee(self.settings)
        return ()

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee, with the noise at the start of the run."""
        return guarantee(self.settings, self.memory.get("noise"))

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of entries of each unit, [U] int64."""
        return np.array([unit.size for unit in self.plan.units], dtype=np.int64)

    def sent_units(self, number: int) -> np.ndarray:
        """Return the units that clients send in a round, [U] bool."""
        sent = self.plan.sent_units(number)
        return np.ones(len(self.sizes), dtype=bool) if sent is None else sent

    @cached_property
    def length(self) -> int:
        """P, the maximum number of entries that a client sends in a round."""
        unsent = min(int(self.sizes[~self.sent_units(number)].sum()) for number in (1, 2))
        return sum(self.plan.lengths.values()) - unsent

    @cached_property
    def norm(self) -> float:
        """S; by default the length of a random walk of Adam steps of size lr in P numbers."""
        if self.config.clip != "auto":
            return self.config.clip
        steps = self.settings.federation.local_steps
        return self.settings.optimizer.lr * math.sqrt(steps * self.length)

    def begin(self) -> Sequence[str]:
        """Store the noise, and report the guarantee of the run."""
        found = self.guarantee
        self.memory.setdefault("noise", found.noise)
        if found.noise == 0:
            return ["privacy: ε = ∞ (privacy.noise=0): changes are clipped, nothing is guaranteed"]
        ratio = found.cohort / (found.noise * math.sqrt(self.length))
        source = ", lr sqrt(local_steps P)" if self.config.clip == "auto" else ""
        return [
            f"privacy: ε = {found.epsilon():.3g}, δ = {found.delta:.2g} for each client after "
            f"{found.rounds} rounds{' and a survey' * found.surveys}, accounted for "
            f"{found.cohorts} ({found.accountant}), noise multiplier z = {found.noise:g}",
            f"privacy: signal-to-noise ratio of a round {ratio:.2g} at most, m / (z sqrt P) with "
            f"{found.cohort:,} clients and P = {self.length:,}; clip norm {self.norm:.4g}{source}; "
            f"{SIMULATION}",
        ]

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Sample the clients as the accounting assumes; a Poisson cohort may be empty."""
        seed, size = self.settings.draw_seed, self.settings.federation.clients_per_round
        sample = poisson_cohort if self.config.sampling == "poisson" else uniform_cohort
        members = self.plan.participants
        clients = members[sample(seed, number, len(members), size)].tolist()
        return replace(cohort, clients=clients, fixed=True)

    def instruct(self, number: int) -> dict[str, float]:
        """Send the clip norm."""
        return {CLIP_NORM: self.norm if number else SURVEY_NORM}

    def send(self, change: Change, sender: ClientRoundInfo) -> Change:
        """Clip the change; record its norm, and whether it was clipped."""
        norm = sender.instructions[CLIP_NORM]
        shared, extra, before = clip(change.shared, change.extra, norm)
        found = {CLIPPED: float(before > norm), NORM: before}
        return replace(change, shared=shared, extra=extra, metrics=change.metrics | found)

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Clip the responses; numbers that are not finite count as zeros."""
        finite = {k: np.nan_to_num(v, nan=0, posinf=0, neginf=0) for k, v in answers.items()}
        return clip(np.zeros(0, dtype=np.float32), finite, instructions[CLIP_NORM])[1]

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute the noisy mean responses, a release like the mean of a round."""
        rng, cohort = numpy_rng(self.settings.seed, "dp-noise", 0), self.guarantee.cohort
        deviation = self.guarantee.noise * SURVEY_NORM / cohort
        return {
            name: total / cohort + rng.standard_normal(total.shape) * deviation
            for name, total in sorted(sums.items())
        }

    def average(self, number: int, total: Partial) -> MeanChange:
        """Compute the noisy mean change; units that no client sends in the round do not change."""
        found, sent, lengths = self.guarantee, self.sent_units(number), dict(self.plan.lengths)
        sums, deviation = total.sums, found.noise * self.norm
        if sums is None:
            zeros = {name: np.zeros(length) for name, length in lengths.items()}
            sums = State(zeros.pop("shared"), zeros)
        rng = numpy_rng(self.settings.seed, "dp-noise", number)
        # Expected number of clients that train each entry.
        counts = np.repeat(found.cohort * self.plan.unit_shares(), self.sizes)
        noise = rng.standard_normal(len(sums.shared)) * (deviation / counts)
        shared = np.where(np.repeat(sent, self.sizes), sums.shared / counts + noise, 0.0)
        extra = {
            name: sums.extra[name] / found.cohort
            + rng.standard_normal(lengths[name]) * (deviation / found.cohort)
            for name in sorted(lengths.keys() - {"shared"})
        }
        metrics = {CLIP_NORM: self.norm}
        if (epsilon := found.epsilon(number)) < math.inf:
            metrics[EPSILON] = epsilon
        state = State(shared, {name: array.astype(np.float32) for name, array in extra.items()})
        return MeanChange(state, sent, found.cohort, metrics)

    def report(self, last: Mapping[str, float]) -> Json:
        """Return the guarantee of the run, and the contents of its files that it does not cover."""
        found, epsilon = self.guarantee, last.get(EPSILON)
        value = "ε = ∞ (privacy.noise=0)"
        if epsilon is not None:
            value = f"ε = {epsilon:.3g}, δ = {found.delta:.2g}"
        return {
            "epsilon": epsilon,
            "delta": found.delta,
            "noise": found.noise,
            "sampling": found.sampling,
            "accountant": found.accountant,
            "clients": found.clients,
            "cohort": found.cohort,
            "clip_norm": last[CLIP_NORM],
            "sentence": f"{value} for each client, accounted for {found.cohorts}; {SIMULATION}; "
            f"outside the guarantee: {OUTSIDE}",
        }

    @classmethod
    def remark(cls, reports: Sequence[Json]) -> str:
        """Describe the guarantees of the runs, and the contents that they do not cover."""
        examples = [each for each in reports if each["epsilon"] and "cohort" not in each]
        private = [each for each in reports if each["epsilon"] and "cohort" in each]
        of_examples = ""
        if examples:
            of_examples = (
                f"Privacy of examples ({len(examples)} runs): ε of the client with the largest ε, "
                "to add or remove one of its examples. It is a simulation: noise is reproducible "
                f"from the seed. Outside the guarantee: {OUTSIDE_EXAMPLES}."
            )
        if not private:
            return of_examples
        sizes = sorted({(each["clients"], each["cohort"]) for each in private})
        return (
            f"Privacy of clients ({len(private)} runs) is accounted for cohorts of "
            f"{', '.join(f'{m:,} of {n:,}' for n, m in sizes)}. It is a simulation: noise is "
            f"reproducible from the seed. Outside the guarantee: {OUTSIDE}. {of_examples}"
        ).rstrip()


def clip(
    shared: np.ndarray, extra: Mapping[str, np.ndarray], bound: float
) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """Scale a change by ``min(1, S / norm)``; a change of norm 0 or not finite is unchanged.

    Args:
        shared: [W] float32.
        extra: Additional vectors of the method, float32, keyed by name.
        bound: S; 0 clips every change to zero.

    Returns:
        Both parts, whose norm after rounding is at most S, and the norm before clipping.
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
        factor *= (bound / after) * (1 - 2.0**-24)  # rounding increased the norm


def poisson_cohort(seed: int, number: int, clients: int, expected: int) -> list[int]:
    """Sample each client independently, with probability expected / clients."""
    sampled = numpy_rng(seed, "cohort-poisson", number).random(clients) < expected / clients
    return [int(client) for client in np.flatnonzero(sampled)]


def guarantee(settings: StageSettings, noise: float | None = None) -> Guarantee:
    """Compute the guarantee of a private experiment for each client.

    Args:
        settings: The experiment; its section ``privacy`` is set.
        noise: z of a run that has begun; None means to compute it.

    Raises:
        InputError: No noise multiplier reaches ε, or dp-accounting is missing.
    """
    fed, options = settings.federation, settings.section(PrivacyConfig)
    noise = options.noise if noise is None else noise
    clients, cohort = fed.participants, fed.clients_per_round
    delta = options.delta_for(clients)
    found = Guarantee(
        options.sampling, noise or 0, clients, cohort, delta, fed.rounds, settings.surveys
    )
    if noise is not None:
        return found
    assert options.epsilon is not None
    return with_noise_for(options.epsilon, found)
