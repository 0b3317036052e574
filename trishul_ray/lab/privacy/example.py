"""Stage ``privacy`` with ``unit=example``: DP-SGD in the local steps of each client.

Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016, arXiv 1607.00133, Algorithm 1, on
all trainables together. In each local step, each of the n_c rows of client c joins the batch
independently, with probability ``q = min(1, batch_size / n_c)``. The gradient of the step is::

    g = (sum_i g_i min(1, S / ||g_i||) + N(0, (z S)^2)) / (q n_c)

The denominator is constant, and an empty batch is a step of noise.

The method's correction, the optimizer and a prox follow; they read no other data. The uploads of a
client, and the states that the server computes from them, have the guarantee of the client's steps.
The stage therefore supports every method that reads rows only through the gradients of local steps.

The accounting covers every upload and every broadcast of the run. Neighboring data sets differ by
adding or removing one example of one client. Cohorts are drawn from the run's seed, so the rounds
of each client are known before the run and do not amplify privacy. The sizes n_c are treated as
public. The noise follows from the seed: this is a simulation, not a deployment.

Legend: k examples of a chunk, P trainables of a client, N clients.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from trishul_ray.config.fields import FederationConfig
from trishul_ray.data.sampling import participants, uniform_cohort
from trishul_ray.errors import InputError
from trishul_ray.lab.privacy.accounting import MULTIPLIERS, multiplier, smallest_noise, spent
from trishul_ray.lab.privacy.config import (
    CLIP_NORM,
    CLIPPED,
    EPSILON,
    NORM,
    SIMULATION,
    PrivacyConfig,
)
from trishul_ray.methods.base import Method
from trishul_ray.methods.scaffold import Scaffold
from trishul_ray.runtime.lazy import torch
from trishul_ray.stages import (
    ArrayState,
    ClientRound,
    Cohort,
    LocalStep,
    Stage,
    StageSettings,
)
from trishul_ray.storage.durable import Json

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.tasks.base import Task

#: Name of the instruction with the noise multiplier.
NOISE = "privacy_noise"
#: Column of the record: norm of the sum of clipped gradients divided by z S sqrt(P).
SIGNAL = "privacy_signal_to_noise"
#: Name of the accounting method.
ACCOUNTANT = "PLD, Poisson sampling, add or remove one example"
#: Contents of a run's files that its epsilon does not cover.
OUTSIDE = (
    "train_loss, the mean norm of gradients, the fraction of clipped examples, the measured "
    "signal-to-noise ratio, sizes of shards, scores on validation rows and on clients' test rows, "
    "per_client, personal, the spectra and other diagnostics of clients, cohorts, traffic, "
    "simulated seconds"
)


@dataclass(frozen=True)
class Exposure:
    """Steps of a client that read its rows: their number, and the sampling rate q."""

    rate: float
    steps: int


def participations(settings: StageSettings, rounds: Iterable[int]) -> np.ndarray:
    """Count the rounds in which each client trains, int64 [clients], from the seed."""
    fed, seed = settings.federation, settings.draw_seed
    members = participants(fed, seed)
    found = np.zeros(fed.clients, dtype=np.int64)
    for number in rounds:
        found[members[uniform_cohort(seed, number, len(members), fed.clients_per_round)]] += 1
    return found


def exposures(fed: FederationConfig, sizes: np.ndarray, rounds: np.ndarray) -> list[Exposure]:
    """Return the exposure of each client, given its number of rows and of rounds."""
    pairs = zip(sizes.tolist(), rounds.tolist(), strict=True)
    return [exposure(fed, rows, number) for rows, number in pairs]


def exposure(fed: FederationConfig, rows: int, rounds: int) -> Exposure:
    """Return the exposure of a client, given its number of rows and of rounds."""
    steps, size = fed.steps_of(rows)
    return Exposure(min(1.0, size / rows), steps * rounds)


def most_exposed(found: Iterable[Exposure]) -> tuple[Exposure, ...]:
    """Select the exposures that no other exposure exceeds in both numbers.

    The client with the largest ε has one of them.
    """
    front: list[Exposure] = []
    for each in sorted(set(found), key=lambda e: (-e.rate, -e.steps)):
        if not front or each.steps > front[-1].steps:
            front.append(each)
    return tuple(front)


@lru_cache(maxsize=256)
def noise_for(target: float, front: tuple[Exposure, ...], delta: float) -> float:
    """Find the smallest noise multiplier with which no exposure has an ε above ``target``.

    Raises:
        InputError: The library is missing, or ε exceeds ``target`` at the largest multiplier.
    """

    def epsilon(noise: float) -> float:
        return max(spent(noise, each.rate, each.steps, delta) for each in front)

    largest = multiplier(MULTIPLIERS - 1)
    if (least := epsilon(largest)) > target:
        raise InputError(
            f"privacy.epsilon={target:g} is below the ε of the most exposed client at noise "
            f"multiplier {largest:g}; set at least {least:.3g}, fewer steps, or a smaller "
            "federation.batch_size"
        )
    return smallest_noise(epsilon, target)


class ExamplePrivacy(Stage):
    """DP-SGD in local steps; see :mod:`trishul_ray.lab.privacy.example`.

    The memory has ``noise``, z when the run began; ``trained``, the number of rounds of each client
    so far; and ``delta``, ``rate``, ``steps`` and ``median`` for the summary.
    """

    Config, name, wire, computes_gradients = PrivacyConfig, "privacy", 4, True
    config: PrivacyConfig

    @property
    def transforms_changes(self) -> bool:
        """False, because the stage acts on local steps."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """The sizes of shards, which determine sampling rates."""
        return frozenset({"shard_sizes"})

    @property
    def reads_rounds(self) -> bool:
        """Whether the noise follows from ``epsilon`` and the number of rounds."""
        return self.config.epsilon is not None

    def check(self, method: Method) -> None:
        """Reject methods that read rows other than through the gradients of local steps."""
        name = self.settings.method_as_set
        if method.survey_plan is not None:
            raise ValueError(
                f"privacy.unit='example': {name} reads rows in a survey, without noise; use "
                "another method or allocation"
            )
        if method.units_by_data:
            raise ValueError(
                f"privacy.unit='example': {method.units_by_data} may read rows outside of local "
                "steps; set method.selection=random"
            )
        if method.reads_rows:
            raise ValueError(
                f"privacy.unit='example': {name} reads rows outside of local steps; use another "
                "method"
            )
        if isinstance(method, Scaffold) and method.config.option == "I":
            raise ValueError(
                "privacy.unit='example': method.option='I' reads rows at the broadcast, outside of "
                "local steps; set auto or II"
            )

    def check_rows(self, task: "Task", sizes: np.ndarray) -> None:
        """Reject losses that are not means over examples, and an ε that no noise reaches."""
        if not task.means_rows:
            raise InputError(
                f"privacy.unit='example': the loss of {type(task).__name__} is a mean over the "
                "tokens of a batch, not over examples; set task.loss=rows with "
                "task.kind=instruction, or another task"
            )
        self.noise(sizes)

    def noise(self, sizes: np.ndarray) -> float:
        """Compute z for shards of these sizes [N]."""
        if self.config.epsilon is None:
            return self.config.noise or 0.0
        delta = self.config.delta_for(int(sizes.max()))
        return noise_for(self.config.epsilon, most_exposed(self.exposures(sizes)), delta)

    def exposures(self, sizes: np.ndarray) -> list[Exposure]:
        """Return the exposure of each client in the whole run."""
        fed = self.settings.federation
        return exposures(fed, sizes, participations(self.settings, range(1, fed.rounds + 1)))

    @property
    def norm(self) -> float:
        """S, the clip norm."""
        return 1.0 if self.config.clip == "auto" else self.config.clip

    def begin(self) -> Sequence[str]:
        """Store and report the noise and the guarantee of the run."""
        sizes, fed = self.plan.shard_sizes, self.settings.federation
        assert sizes is not None
        noise = self.memory.setdefault("noise", self.noise(sizes))
        if noise == 0:
            return ["privacy: ε = ∞ (privacy.noise=0): gradients of examples are clipped, nothing "
                    "is guaranteed"]  # fmt: skip
        found, delta = self.exposures(sizes), self.config.delta_for(int(sizes.max()))
        each = [spent(noise, e.rate, e.steps, delta) for e in found]
        worst, largest, median = found[int(np.argmax(each))], max(each), float(np.median(each))
        self.memory.update(delta=delta, rate=worst.rate, steps=worst.steps, median=median)
        sent = self.plan.sent_units(1)
        entries = np.array([unit.size for unit in self.plan.units], dtype=np.int64)
        numbers = int(entries.sum() if sent is None else entries[sent].sum())
        examples = min(fed.batch_size, int(sizes.max()))
        ratio = examples / (noise * math.sqrt(numbers))
        return [
            f"privacy: ε = {largest:.3g} at most ({median:.3g} for the median client), δ = "
            f"{delta:.2g} for each example after {fed.rounds} rounds ({ACCOUNTANT}), noise "
            f"multiplier z = {noise:g}, {worst.steps:,} steps of the most exposed client with "
            f"sampling rate q = {worst.rate:.3g}; every upload and broadcast is covered",
            f"privacy: signal-to-noise ratio of a step {ratio:.2g} at most, b / (z sqrt P) with b "
            f"= {examples:,} examples and P = {numbers:,} sent numbers; clip norm {self.norm:g}; "
            f"{SIMULATION}",
        ]

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Fix the cohort, which is drawn as :func:`participations` assumes."""
        return replace(cohort, fixed=True)

    def instruct(self, number: int) -> dict[str, float]:
        """Send z and the clip norm."""
        return {NOISE: self.memory["noise"], CLIP_NORM: self.norm}

    def gradient(self, step: LocalStep) -> "Tensor":
        """Compute the gradient of a DP-SGD step; see :mod:`trishul_ray.lab.privacy.example`.

        The loss of the step is the sum over the batch divided by q n_c, like the gradient.
        """
        noise, norm = step.instructions[NOISE], step.instructions[CLIP_NORM]
        count, grad = len(step.rows), step.grad.zero_()
        rate = min(1.0, step.batch_size / count)
        batch = step.rows[step.rng("example-batch").random(count) < rate]
        expected, clipped = rate * count, 0
        loss = total = grad.new_zeros((), dtype=torch.float64)
        for rows in np.array_split(batch, -(-len(batch) // self.config.chunk) or 1):
            if len(rows):
                losses, gradients = step.examples(rows)
                norms = row_norms(gradients)
                factors = clip_factors(norms, norm)
                grad += factors @ gradients
                loss = loss + losses.sum()
                total = total + norms.sum()
                clipped += int((factors < 1).sum())
        found = {CLIPPED: clipped / expected, NORM: float(total) / expected}
        if noise:
            numbers = len(grad) if step.trained is None else int(step.trained.sum())
            found[SIGNAL] = float(grad.norm()) / (noise * norm * math.sqrt(numbers))
            draws = step.rng("example-noise").standard_normal(len(grad), dtype=np.float32)
            grad.add_(torch.from_numpy(draws).to(grad.device), alpha=noise * norm)
        for name, value in found.items():  # means over the steps so far
            before = step.metrics.get(name, 0.0)
            step.metrics[name] = before + (value - before) / step.step
        grad /= expected
        return loss / expected

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Return the clip norm, and the largest ε of a client so far if it is finite."""
        sizes, noise = self.plan.shard_sizes, self.memory["noise"]
        assert sizes is not None
        if noise == 0:
            return {CLIP_NORM: self.norm}
        trained = self.memory.get("trained", np.zeros_like(sizes))
        self.memory["trained"] = trained = trained + participations(self.settings, [number])
        front = most_exposed(exposures(self.settings.federation, sizes, trained))
        epsilon = max(spent(noise, e.rate, e.steps, self.memory["delta"]) for e in front)
        return {CLIP_NORM: self.norm, EPSILON: epsilon}

    def report(self, last: Mapping[str, float]) -> Json:
        """Return the guarantee of the run, and the contents of its files that it does not cover."""
        epsilon, found = last.get(EPSILON), self.memory
        value = "ε = ∞ (privacy.noise=0)"
        if epsilon is not None:
            value = (
                f"ε = {epsilon:.3g} at most ({found['median']:.3g} for the median client), δ = "
                f"{found['delta']:.2g}"
            )
        return {
            "unit": "example",
            "epsilon": epsilon,
            "epsilon_median": found.get("median"),
            "delta": found.get("delta"),
            "noise": found["noise"],
            "accountant": ACCOUNTANT,
            "rate": found.get("rate"),
            "steps": found.get("steps"),
            "clip_norm": self.norm,
            "sentence": f"{value} for each example of a client ({ACCOUNTANT}); {SIMULATION}; "
            f"outside the guarantee: {OUTSIDE}",
        }


def row_norms(gradients: "Tensor") -> "Tensor":
    """Compute the norms of gradients [k, P], float64 [k]."""
    # Sum in parts: many squares lose digits in float32, and float64 is four times slower.
    parts = [torch.linalg.vector_norm(part, dim=1) for part in gradients.split(4096, dim=1)]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts, dim=1).double(), dim=1)
    return norms


def clip_factors(norms: "Tensor", bound: float) -> "Tensor":
    """Compute ``min(1, S / ||g_i||)``, float32 [k]."""
    return (bound / norms).clamp(max=1.0).float()
