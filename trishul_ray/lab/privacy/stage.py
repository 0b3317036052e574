"""The stage ``privacy``: differential privacy of each client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from trishul_ray.config.section import Section
from trishul_ray.data.sampling import uniform_cohort
from trishul_ray.lab.privacy.accounting import Guarantee, affordable, change_noise, guarantee
from trishul_ray.lab.privacy.clipping import (
    CLIPPED,
    automatic_norm,
    clip,
    clip_change,
)
from trishul_ray.lab.privacy.config import PrivacyConfig
from trishul_ray.lab.privacy.mechanism import HIGH, LOW, SURVEY_NORM, Mechanism, reported
from trishul_ray.methods.base import Method
from trishul_ray.methods.messages import State
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import (
    ArrayState,
    Change,
    ClientRound,
    Cohort,
    MeanChange,
    Partial,
    Sender,
    Sent,
    Stage,
    StageSettings,
    register_stage,
)
from trishul_ray.storage.durable import Json

#: The instruction that names the norm to clip to.
CLIP_NORM = "privacy_clip_norm"


@register_stage("privacy")
class Privacy(Stage):
    """Clients clip their changes, and the server releases their noisy mean.

    Its memory: ``clip_norm``, S of the next round; ``noise``, z, as it was found when the run
    began, since another version of the library may find another one; ``squared_norms``, the sum of
    S^2 over the rounds so far. With canaries: ``start``, float32 [W], the shared part before round
    1, and ``canaries``, float64 [W], the sum of what they sent.
    """

    Config, wire, moves_beyond_mean, hides_clients = PrivacyConfig, 4, True, True
    example: ClassVar = {"noise": 1.0, "sampling": "fixed"}
    config: PrivacyConfig

    def __init__(self, config: Section, settings: StageSettings) -> None:
        super().__init__(config, settings)
        self._surveyed: list[str] = []

    def check(self, method: Method) -> None:
        """Refuse what the accounting does not cover."""
        options, fed = self.config, self.settings.federation
        if fed.weighting != "uniform":
            raise ValueError(
                f"privacy: federation.weighting={fed.weighting!r} lets a client of many rows "
                "exceed the clip norm; allowed: uniform"
            )
        if options.population is not None and options.population < fed.participants:
            raise ValueError(
                f"privacy.population={options.population} is below the {fed.participants} clients "
                "that may take part: it is the population of a deployment, at least the simulated "
                "one"
            )
        if options.cohort is not None and options.cohort < fed.clients_per_round:
            raise ValueError(
                f"privacy.cohort={options.cohort} is below federation.clients_per_round="
                f"{fed.clients_per_round}: it is the cohort of a deployment, at least the "
                "simulated one"
            )
        if setting := method.units_by_data:
            raise ValueError(
                f"privacy: {setting} sends which units a client's data favour, in clear; let them "
                "be drawn"
            )
        if (plan := method.survey_plan) is not None and plan.decides_adapters:
            raise ValueError(
                f"privacy: {self.settings.method_as_set} lets what clients measure before round 1 "
                "decide the adapters, in clear; allowed for trishul: method.allocation="
                "waterfill or uniform"
            )

    @property
    def reads_rounds(self) -> bool:
        """The noise that an epsilon needs depends on the number of rounds."""
        return self.config.epsilon is not None

    def rounds(self, rounds: int) -> int:
        """Return as many rounds as ``privacy.budget`` pays."""
        fed, seed, surveys = self.settings.federation, self.settings.seed, self.settings.surveys
        clients, cohort = fed.participants, fed.clients_per_round
        return affordable(self.config, seed, clients, cohort, rounds, surveys)

    def prepare(self) -> Sequence[str]:
        """Find the noise before anything is written."""
        promised(self.settings)
        return ()

    @cached_property
    def mechanism(self) -> Mechanism:
        """The release of a round.

        Raises:
            InputError: As :func:`promised`.
        """
        fed, lengths = self.settings.federation, dict(self.plan.lengths)
        total = sum(lengths.values())
        resting = min(self._resting(number) for number in (1, 2))
        del lengths["shared"]
        norm = self.config.clip
        if norm == "auto":
            norm = automatic_norm(self.settings.optimizer.lr, fed.local_steps, total - resting)
        return Mechanism(
            options=self.config,
            seed=self.settings.seed,
            promised=promised(self.settings, self.memory.get("noise")),
            clients=fed.participants,
            cohort=fed.clients_per_round,
            units=self.plan.units,
            shares=self.plan.unit_shares(),
            extra=lengths,
            first_norm=norm,
            resting=resting,
        )

    def _resting(self, number: int) -> int:
        """Return how many numbers of the shared part clients do not send in a round."""
        sent = self.plan.sent_units(number)
        if sent is None:
            return 0
        return sum(unit.size for unit, on in zip(self.plan.units, sent, strict=True) if not on)

    def begin(self) -> Sequence[str]:
        """Find the noise and the first norm, and say what the run promises."""
        mechanism = self.mechanism
        self.memory.setdefault("clip_norm", mechanism.first_norm)
        self.memory.setdefault("noise", mechanism.promised.noise)
        self.memory.setdefault("squared_norms", 0.0)
        return [*self._surveyed, *mechanism.lines()]

    def broadcast(self, number: int, sent: Sent) -> Sent:
        """Keep the shared part before round 1 for an audit."""
        if self.config.canaries:
            self.memory.setdefault("start", sent.state.shared.copy())
        return sent

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Draw the clients as the accounting assumes; a Poisson cohort may be empty."""
        seed, size = self.settings.seed, self.settings.federation.clients_per_round
        draw = poisson_cohort if self.config.sampling == "poisson" else uniform_cohort
        drawn = self.plan.participants[draw(seed, number, len(self.plan.participants), size)]
        return replace(cohort, clients=drawn.tolist(), fixed=True)

    def instruct(self, number: int) -> dict[str, float]:
        """Send the round's clip norm."""
        return {CLIP_NORM: self.memory["clip_norm"] if number else SURVEY_NORM}

    def send(self, change: Change, sender: Sender) -> Change:
        """Return the clipped change."""
        return clip_change(change, sender.instructions[CLIP_NORM])

    def answer(
        self, answers: dict[str, np.ndarray], instructions: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Return the clipped answers; numbers that are not finite count as zeros."""
        finite = {k: np.nan_to_num(v, nan=0, posinf=0, neginf=0) for k, v in answers.items()}
        none = np.zeros(0, dtype=np.float32)
        return clip(none, finite, instructions[CLIP_NORM])[1]

    def survey(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the noisy mean answers: a release like those of rounds."""
        numbers = sum(answer.size for answer in sums.values())
        if self.mechanism.noise > 0:
            self._surveyed = [
                "privacy: signal-to-noise ratio of the survey "
                f"{self.mechanism.signal_to_noise(numbers):.2g} at most, with {numbers:,} numbers"
            ]
        return self.mechanism.surveyed(sums)

    def average(
        self, number: int, total: Partial, reported: Mapping[int, Mapping[str, float]]
    ) -> MeanChange:
        """Return the noisy mean change, and let the clip norm follow; how many came is private."""
        mechanism, memory = self.mechanism, self.memory
        norm, shared = memory["clip_norm"], np.zeros(int(mechanism.sizes.sum()))
        extra = {name: np.zeros(length) for name, length in mechanism.extra.items()}
        if total.sums is not None:
            shared, extra = total.sums.shared, total.sums.extra
        if self.config.canaries:
            canaries = mechanism.canaries(number, norm)
            memory["canaries"] = memory.get("canaries", 0.0) + canaries
            shared = shared + canaries
        sent = self.plan.sent_units(number)
        change, extra = mechanism.mean(number, shared, extra, norm, sent)
        balance = sum(0.5 - reported[client][CLIPPED] for client in total.clients)
        memory["squared_norms"] += norm**2
        memory["clip_norm"] = mechanism.next_norm(number, norm, balance)
        metrics = {"privacy_clip_norm": norm}
        if (epsilon := mechanism.promised.epsilon(number)) < np.inf:
            metrics["privacy_epsilon"] = epsilon
        state = State(change, {name: array.astype(np.float32) for name, array in extra.items()})
        moves = np.ones(len(mechanism.units), dtype=bool) if sent is None else sent
        return MeanChange(state, moves, mechanism.cohort, metrics)

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Return the interval of ε that canaries show."""
        if not self.config.canaries:
            return {}
        moved = state.shared.astype(np.float64) - self.memory["start"]
        mean_square = self.memory["squared_norms"] / number
        found = self.mechanism.audited(number, moved, self.memory["canaries"], mean_square)
        return {} if found is None else dict(zip((LOW, HIGH), found, strict=True))

    def report(self, last: Mapping[str, float]) -> Json:
        """Return the guarantee of the run, and its limits."""
        fed = self.settings.federation
        simulated = (fed.participants, fed.clients_per_round)
        return reported(promised(self.settings, self.memory["noise"]), simulated, last)

    @classmethod
    def remark(cls, reports: Sequence[Json]) -> str:
        """Return for which cohorts the guarantees hold, and what is outside of them."""
        private = [each for each in reports if each["epsilon"]]  # without noise nothing is promised
        if not private:
            return ""
        accounted = {(each["population"], each["cohort"]) for each in private}
        shown = ", ".join(
            f"{cohort:,} of {population:,}" for population, cohort in sorted(accounted)
        )
        return (
            f"Privacy of clients ({len(private)} runs) is accounted for cohorts of {shown}. It is "
            "a simulation: noise is reproducible from the seed. Simulation only, outside the "
            f"guarantee: {', '.join(private[0]['outside'])}."
        )


def poisson_cohort(seed: int, number: int, clients: int, expected: int) -> list[int]:
    """Return the clients of a round, each drawn by itself with probability expected / clients."""
    drawn = numpy_rng(seed, "cohort-poisson", number).random(clients) < expected / clients
    return [int(client) for client in np.flatnonzero(drawn)]


def promised(settings: StageSettings, noise: float | None = None) -> Guarantee:
    """Return what a private experiment promises each client.

    Args:
        settings: The experiment; its section ``privacy`` is on.
        noise: z of a run that has begun; None finds it.

    Raises:
        InputError: No noise that is tried keeps the promise, or dp-accounting is missing.
    """
    fed, options = settings.federation, settings.section(PrivacyConfig)
    if noise is not None:
        options = options.model_copy(update={"epsilon": None, "noise": noise})
    clients, cohort, surveys = fed.participants, fed.clients_per_round, settings.surveys
    found = guarantee(options, settings.seed, clients, cohort, fed.rounds, surveys)
    change_noise(options, found)  # the private count must leave some of it
    return found
