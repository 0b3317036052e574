"""Federated least squares on the cores, in float64: a convex stand-in for training.

Client c has the loss

    f_c(H, s) = 1/2 sum_i tr((s_i H_i - M_ci) Sigma_ci (s_i H_i - M_ci)^T),

convex in the cores, with ``L = max_ci ||Sigma_ci||_2``. Gradients are of all rows (sigma = 0), so
that what exceeds a bound is not noise of mini-batches. A round is the paper's: S proximal steps on
each client of the cohort, the mean of the uploads ``s H``, scalars reset to 1.

Legend: C clients, m of them in a round, h core heads, r rank, S local steps, T rounds.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trishul_ray.runtime.random_streams import numpy_rng

Array = NDArray[np.float64]

#: s_max of the paper's clipping, our default.
SCALAR_MAX = 10.0


@dataclass(frozen=True)
class LeastSquares:
    """The stand-in: ``targets`` M and ``moments`` Sigma, each [C, h, r, r]."""

    targets: Array
    moments: Array

    @classmethod
    def draw(cls, seed: int, clients: int, heads: int, rank: int, spread: float) -> "LeastSquares":
        """Draw a target of rank 1 for each core head, and how clients differ from it.

        The differences have full rank, mean 0 over clients, and ``spread`` times the norm of the
        target. Moments are those of 8 r Gaussian rows.
        """
        rng = numpy_rng(seed, "theory", "least_squares")
        left, right = rng.standard_normal((2, heads, rank))
        common = left[:, :, None] * right[:, None, :]  # [h, r, r]
        common /= np.linalg.norm(common, axis=(1, 2), keepdims=True)
        others = rng.standard_normal((clients, heads, rank, rank))
        others -= others.mean(axis=0)
        others *= spread / np.sqrt(np.square(others).sum(axis=(2, 3)).mean())
        rows = rng.standard_normal((clients, heads, rank, 8 * rank))
        return cls(common + others, rows @ rows.swapaxes(2, 3) / (8 * rank))

    @property
    def clients(self) -> int:
        """C."""
        return len(self.targets)

    @property
    def smoothness(self) -> float:
        """L of every client's loss in the cores, with scalars of 1."""
        return float(np.linalg.eigvalsh(self.moments).max())

    def smoothness_at(self, cores: Array) -> float:
        """Return the largest curvature in cores and scalars at cores [h, r, r], scalars 1.

        With trained scalars the loss is not convex, and its curvature not bounded.
        """
        clients, heads, rank = self.targets.shape[:3]
        hessian = np.zeros((clients, heads, rank * rank + 1, rank * rank + 1))
        hessian[..., :-1, :-1] = np.einsum("ac,nhbd->nhabcd", np.eye(rank), self.moments).reshape(
            clients, heads, rank * rank, rank * rank
        )
        mixed = (2 * cores - self.targets) @ self.moments
        hessian[..., :-1, -1] = hessian[..., -1, :-1] = mixed.reshape(clients, heads, -1)
        hessian[..., -1, -1] = (cores @ self.moments * cores).sum(axis=(2, 3))
        return float(np.abs(np.linalg.eigvalsh(hessian)).max())

    def value(self, cores: Array) -> float:
        """Return F at cores [h, r, r] and scalars 1."""
        rest = cores - self.targets
        return float((rest @ self.moments * rest).sum()) / (2 * self.clients)

    def gradients(self, cores: Array, scalars: Array) -> tuple[Array, Array]:
        """Return the gradients [C, h, r, r] and [C, h] of every client at its own point."""
        rest = (scalars[..., None, None] * cores - self.targets) @ self.moments
        return scalars[..., None, None] * rest, (rest * cores).sum(axis=(-2, -1))

    def minimum(self, lam: float) -> tuple[Array, float]:
        """Return cores [h, r, r] that minimize ``F + lam sum ||H_i||_*``, and the minimum.

        Accelerated proximal gradient steps (Beck and Teboulle 2009), to rounding.
        """
        step = 1 / self.smoothness
        cores = ahead = np.zeros(self.targets.shape[1:])
        momentum = 1.0
        for _ in range(2000):
            slope = self.gradients(ahead[None], np.ones((1, len(cores))))[0].mean(axis=0)
            new = shrink(ahead - step * slope, lam * step)
            following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead = new + (momentum - 1) / following * (new - cores)
            cores, momentum = new, following
        return cores, self.value(cores) + lam * nuclear(cores)


def shrink(cores: Array, threshold: float) -> Array:
    """Return the proximal map of ``threshold * ||.||_*`` (TRISHUL, eq. svt), in float64."""
    u, values, vt = np.linalg.svd(cores, full_matrices=False)
    result: Array = (u * np.maximum(values - threshold, 0.0)[..., None, :]) @ vt
    return result


def nuclear(cores: Array) -> float:
    """Return the sum of the nuclear norms of a stack of matrices."""
    return float(np.linalg.svd(cores, compute_uv=False).sum())


@dataclass(frozen=True)
class Setting:
    """Local training of the stand-in's clients: see :func:`local_rounds`."""

    lam: float
    rate: float
    steps: int
    trained: bool  # whether scalars are


def local_rounds(
    problem: LeastSquares, cores: Array, setting: Setting
) -> tuple[Array, Array, float]:
    """Train every client for S steps from cores [h, r, r] (Algorithm 1, lines 9 to 16).

    Returns:
        Cores [C, h, r, r] and scalars [C, h], and the largest squared norm of a gradient.
    """
    mine = np.broadcast_to(cores, problem.targets.shape)
    scalars = np.ones(mine.shape[:2])
    largest = 0.0
    for _ in range(setting.steps):
        slopes, tilts = problem.gradients(mine, scalars)
        size = np.square(slopes).sum(axis=(1, 2, 3))
        if setting.trained:
            size = size + np.square(tilts).sum(axis=1)
            scalars = np.clip(scalars - setting.rate * tilts, 0.0, SCALAR_MAX)
        largest = max(largest, float(size.max()))
        mine = mine - setting.rate * slopes
        mine = shrink(mine, setting.lam * setting.rate) if setting.lam else mine
    return mine, scalars, largest


@dataclass(frozen=True)
class Course:
    """A federated training of the stand-in.

    Attributes:
        measured: Mean over rounds of ``||G_eta||^2`` (eq. proximal_gradient_mapping).
        bound: Bound of the theorem on convergence (eq. stationary_bound), with sigma = 0.
        cores: [h, r, r] after the last round.
        curvature: The largest of the points at which rounds began.
    """

    measured: float
    bound: float
    cores: Array
    curvature: float


def converge(
    problem: LeastSquares, setting: Setting, cohort: int, rounds: int, seed: int
) -> Course:
    """Train for T rounds of ``cohort`` clients drawn uniformly, all of the same weight.

    The bound takes G^2, zeta^2 and L from the visited points, the smallest that fit.
    """
    rng = numpy_rng(seed, "theory", "cohorts")
    cores = np.zeros(problem.targets.shape[1:])
    ones = np.ones((1, len(cores)))
    total = zeta = size = 0.0
    curvature = problem.smoothness
    for number in range(rounds):
        slopes, tilts = problem.gradients(cores[None], ones)
        slope, tilt = slopes.mean(axis=0), tilts.mean(axis=0)
        after = shrink(cores - setting.rate * slope, setting.lam * setting.rate)
        spread = np.square(slopes - slope).sum(axis=(1, 2, 3))
        mapping = np.square((cores - after) / setting.rate).sum()
        if setting.trained:
            clipped = np.clip(1 - setting.rate * tilt, 0.0, SCALAR_MAX)
            mapping += np.square((1 - clipped) / setting.rate).sum()
            spread = spread + np.square(tilts - tilt).sum(axis=1)
            if number % 100 == 0 or number == rounds - 1:
                curvature = max(curvature, problem.smoothness_at(cores))
        total, zeta = total + float(mapping), max(zeta, float(spread.mean()))
        some = problem
        if cohort < problem.clients:
            drawn = rng.choice(problem.clients, cohort, replace=False)
            some = LeastSquares(problem.targets[drawn], problem.moments[drawn])
        mine, scalars, largest = local_rounds(some, cores, setting)
        size = max(size, largest)
        cores = (scalars[..., None, None] * mine).mean(axis=0)
    # A penalty on H alone leaves s = s_max as the best scalar of any product s H.
    least = problem.minimum(setting.lam / (SCALAR_MAX if setting.trained else 1.0))[1]
    start = problem.value(np.zeros_like(cores))
    bound = 8 * (start - least) / (setting.rate * setting.steps * rounds)
    bound += 64 * (curvature * setting.rate) ** 2 * (setting.steps - 1) * (size + zeta)
    return Course(total / rounds, bound, cores, curvature)
