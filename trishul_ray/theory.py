"""The paper's theorems beside measured numbers, on a convex stand-in and on a finished run.

The stand-in is federated least squares on the cores, in float64. Client c has the loss

    f_c(H, s) = 1/2 sum_i tr((s_i H_i - M_ci) Sigma_ci (s_i H_i - M_ci)^T),

convex in the cores, with ``L = max_ci ||Sigma_ci||_2``. Gradients are of all rows (sigma = 0), so
that what exceeds a bound is not noise of mini-batches. A round is the paper's: S proximal steps on
each client of the cohort, the mean of the uploads ``s H``, scalars reset to 1.

Nothing here is read by a run. Where a bound fails, docs/what-the-paper-leaves-open.md says why.

Legend: C clients, m of them in a round, h core heads, r rank, S local steps, T rounds.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trishul_ray.lazy import torch
from trishul_ray.rng import numpy_rng, torch_rng
from trishul_ray.spectral.allocation import (
    best_integers,
    round_to_total,
    uniform,
    utility,
    water_fill,
)
from trishul_ray.spectral.bases import BasisInit, draw_bases
from trishul_ray.spectral.diagnostics import significant

if TYPE_CHECKING:
    from trishul_ray.runs.summary import RunSummary
    from trishul_ray.storage import Store

Array = NDArray[np.float64]

#: Relative rounding errors that no check counts: of float64, and of exported factors in float32.
ROUNDING, ROUNDING_OF_FLOAT32 = 1e-9, 1e-5
#: s_max of the paper's clipping, our default.
SCALAR_MAX = 10.0
#: λ of the checks of uploads: none, the paper's best, and such as cut more and more of the cores.
LAMBDAS = (0.0, 0.01, 0.1, 0.3, 1.0)
#: λ of the checks of convergence.
LAM = 0.3
#: Local steps of the check of drift: the paper's.
DRIFT_STEPS = 50


@dataclass(frozen=True)
class Check:
    """A statement of the paper: ``measured`` is at most, at least or equal to ``bound``."""

    statement: str
    setting: str
    measured: float
    relation: Literal["<=", ">=", "="]
    bound: float
    note: str = ""
    tolerance: float = ROUNDING

    @property
    def holds(self) -> bool:
        """Whether the statement is true of these numbers, up to rounding."""
        excess = self.measured - self.bound
        allowed = self.tolerance * max(abs(self.measured), abs(self.bound))
        if self.relation == "=":
            return abs(excess) <= allowed
        return excess <= allowed if self.relation == "<=" else excess >= -allowed

    @property
    def ratio(self) -> float:
        """``measured`` over ``bound``; NaN over 0."""
        return self.measured / self.bound if self.bound else math.nan


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

    def among(self, clients: NDArray[np.intp]) -> "LeastSquares":
        """Return the problem of some of the clients."""
        return LeastSquares(self.targets[clients], self.moments[clients])

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
    """How the clients of the stand-in train: see :func:`local_rounds`."""

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
        bound: Of the theorem on convergence (eq. stationary_bound), with sigma = 0.
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
            some = problem.among(rng.choice(problem.clients, cohort, replace=False))
        mine, scalars, largest = local_rounds(some, cores, setting)
        size = max(size, largest)
        cores = (scalars[..., None, None] * mine).mean(axis=0)
    # A penalty on H alone leaves s = s_max as the best scalar of any product s H.
    least = problem.minimum(setting.lam / (SCALAR_MAX if setting.trained else 1.0))[1]
    start = problem.value(np.zeros_like(cores))
    bound = 8 * (start - least) / (setting.rate * setting.steps * rounds)
    bound += 64 * (curvature * setting.rate) ** 2 * (setting.steps - 1) * (size + zeta)
    return Course(total / rounds, bound, cores, curvature)


def upload_checks(seed: int, clients: int = 64, cohort: int = 3) -> Iterator[Check]:
    """Compare the variance of the mean of m independent uploads with eq. variance_bound, over λ.

    The expectation is exact: over the clients of the stand-in. ρ, M and max |s| are the smallest
    that fit; both sides are means over core heads.
    """
    problem = LeastSquares.draw(seed, clients, heads=4, rank=8, spread=1.0)
    start = np.zeros(problem.targets.shape[1:])
    for lam in LAMBDAS:
        setting = Setting(lam, 0.1 / problem.smoothness, 100, trained=True)
        cores, scalars, _ = local_rounds(problem, start, setting)
        uploads = scalars[..., None, None] * cores
        mean = uploads.mean(axis=0)
        variance = np.square(uploads - mean).sum(axis=(2, 3)).mean(axis=0) / cohort  # [h]
        values = np.linalg.svd(cores, compute_uv=False)  # [C, h, r]
        rank = (values > ROUNDING).sum(axis=2).max(axis=0)
        bound = np.square(scalars).max(axis=0) * rank * np.square(values).max(axis=(0, 2)) / cohort
        signal = float(np.square(mean).sum())
        relative = f"{cohort * float(variance.sum()) / signal:.3g}" if signal else "none"
        note = f"rank {rank.max()}, largest scalar {scalars.max():.3g}; over the mean: {relative}"
        yield Check(
            "variance of uploads (eq. variance_bound)",
            f"λ={lam:g}, {cohort} of {clients} clients",
            float(variance.mean()),
            "<=",
            float(bound.mean()),
            note,
        )


def heads_checks(scores: Sequence[float], heads: Sequence[int], setting: str) -> Iterator[Check]:
    """Compare the utility of chosen heads with uniform, continuous and the best integer ones."""
    total = sum(heads)
    chosen, even = utility(scores, heads), utility(scores, uniform(len(scores), total))
    best = utility(scores, best_integers(scores, total))
    filled = utility(scores, water_fill(scores, total))
    statement = "utility of {} (eq. waterfill_dominates)"
    yield Check(statement.format("water-filling / uniform"), setting, filled, ">=", even)
    yield Check(statement.format("chosen heads / uniform"), setting, chosen, ">=", even)
    yield Check(statement.format("chosen heads / best integers"), setting, chosen, ">=", best)


def rounding_checks(seed: int, instances: int = 500) -> Iterator[Check]:
    """Return how often rounded water-filling is no worse than uniform, and the integer optimum."""
    rng = numpy_rng(seed, "theory", "rounding")
    above = optimal = 0
    worst = 1.0
    for _ in range(instances):
        layers = int(rng.integers(3, 9))
        scores = np.exp(0.5 * rng.standard_normal(layers)).tolist()
        total = int(rng.integers(layers, 6 * layers))
        chosen = utility(scores, round_to_total(water_fill(scores, total), total))
        even = utility(scores, uniform(layers, total))
        best = utility(scores, best_integers(scores, total))
        above += chosen >= even * (1 - ROUNDING)
        optimal += chosen >= best * (1 - ROUNDING)
        worst = min(worst, chosen / best)
    setting, note = f"{instances} random allocations", f"worst utility {worst:.5f} of the best"
    statement = "share in which rounded water-filling is {}"
    yield Check(statement.format("no worse than uniform"), setting, above / instances, ">=", 1.0)
    statement = statement.format("the best allocation of integers")
    yield Check(statement, setting, optimal / instances, ">=", 1.0, note)


def nuclear_checks(seed: int, heads: int = 4, rank: int = 8) -> Iterator[Check]:
    """Compare the nuclear norm of ``sum_i B_i H_i A_i`` with the sum over core heads, by bases."""
    cores = numpy_rng(seed, "theory", "cores").standard_normal((heads, rank, rank))
    for init in get_args(BasisInit):
        generator = torch_rng(seed, "theory", "bases", init)
        basis_B, basis_A = draw_bases(
            init, heads, rank, 48, 40, generator=generator, dtype=torch.float64
        )
        whole = nuclear(heads_matrix(basis_B.numpy(), cores) @ basis_A.numpy())
        yield _nuclear_check(f"{init} bases, {heads} heads", whole, nuclear(cores))


def heads_matrix(basis_B: Array, cores: Array) -> Array:
    """Return ``[B_1 H_1, ..., B_h H_h]`` [d, h r] of bases [d, h r] and cores [h, r, r]."""
    parts = np.split(basis_B, len(cores), axis=1)
    return np.concatenate([b @ core for b, core in zip(parts, cores, strict=True)], axis=1)


def _nuclear_check(
    setting: str, whole: float, heads: float, note: str = "", tolerance: float = ROUNDING
) -> Check:
    statement = "nuclear norm of the update / sum over heads"
    return Check(statement, setting, whole, "=", heads, note, tolerance)


def stationarity_checks(seed: int, rounds: int = 10000) -> Iterator[Check]:
    """Compare ``||G_eta||^2`` with the theorem on convergence, where it holds and where not.

    Three things break it one by one: a cohort that is not all clients, trained scalars that are
    reset, and a prox on each of clients that differ, whose mean is not the prox of the mean. Fixed
    scalars take the largest step that the theorem allows, ``1 / (8 L S)``; trained ones a quarter
    of it, as the curvature of their loss grows with the cores.
    """
    problem = LeastSquares.draw(seed, clients=8, heads=2, rank=3, spread=2.0)
    mean = (part.mean(axis=0, keepdims=True) for part in (problem.targets, problem.moments))
    alike = LeastSquares(*(np.repeat(part, problem.clients, axis=0) for part in mean))

    def course(of: LeastSquares, cohort: int, setting: Setting) -> Course:
        rate = (0.25 if setting.trained else 1.0) / (8 * of.smoothness * setting.steps)
        return converge(of, replace(setting, rate=rate), cohort, rounds, seed)

    def check(of: LeastSquares, cohort: int, setting: Setting, found: Course) -> Check:
        words = ["all" if cohort == of.clients else str(cohort), f"of {of.clients}"]
        words += ["equal"] * (of is alike) + ["clients,"]
        words += ["trained" if setting.trained else "fixed", "scalars,"]
        text = f"{' '.join(words)} λ={setting.lam:g}, S={setting.steps}"
        statement = "stationarity (eq. stationary_bound)"
        return Check(statement, text, found.measured, "<=", found.bound)

    everyone = problem.clients
    plain = Setting(0.0, math.nan, 1, trained=False)
    shrunk, both = replace(plain, lam=LAM), replace(plain, lam=LAM, trained=True)
    fixed, trained = (course(alike, everyone, setting) for setting in (shrunk, both))
    yield check(alike, everyone, shrunk, fixed)
    yield check(alike, everyone, both, trained)
    for cohort, setting in (
        (everyone, plain),
        (2, plain),
        (everyone, shrunk),
        (everyone, both),
        (2, both),
        # With more steps the last term of the bound exceeds what the others leave out.
        (2, replace(both, steps=4)),
    ):
        yield check(problem, cohort, setting, course(problem, cohort, setting))
    free, least = (nuclear(alike.minimum(lam)[0]) for lam in (0.0, LAM))
    yield Check(
        "share of the shrinkage that trained scalars undo",
        f"all of {everyone} equal clients, λ={LAM:g}, S=1",
        (nuclear(trained.cores) - least) / (free - least),
        "=",
        0.0,
        "of the nuclear norm, after the last round",
    )
    slope = alike.gradients(fixed.cores[None], np.ones((1, len(fixed.cores))))[0].mean(axis=0)
    heads, rank = problem.targets.shape[1:3]
    yield Check(
        "squared gradient at the end (eq. unregularized_stationarity)",
        f"all of {everyone} equal clients, fixed scalars, λ={LAM:g}, S=1",
        float(np.square(slope).sum()),
        "<=",
        2 * LAM**2 * heads * rank,
    )
    rate = 1 / (8 * problem.smoothness * DRIFT_STEPS)
    start = np.zeros(problem.targets.shape[1:])
    mine, _, size = local_rounds(problem, start, Setting(0.0, rate, DRIFT_STEPS, trained=False))
    yield Check(
        "squared drift of a client (proof of the theorem on convergence)",
        f"S={DRIFT_STEPS}, no prox",
        float(np.square(mine).sum(axis=(1, 2, 3)).max()),
        "<=",
        4 * rate**2 * DRIFT_STEPS * size,
    )


def stand_in_checks(seed: int = 0, rounds: int = 10000) -> list[Check]:
    """Return every check of the stand-in."""
    scores = np.exp(0.3 * numpy_rng(seed, "theory", "scores").standard_normal(12)).tolist()
    heads = round_to_total(water_fill(scores, 48), 48)
    return [
        *upload_checks(seed),
        *heads_checks(scores, heads, "12 blocks, 48 heads"),
        *rounding_checks(seed),
        *nuclear_checks(seed),
        *stationarity_checks(seed, rounds),
    ]


def run_checks(summary: "RunSummary", home: "Store") -> list[Check]:
    """Return what the files of a finished run tell; empty for a method without core heads.

    ``diagnostics.npz`` has the spectra of one client in the last diagnosed round, so that M and ρ
    are of that client; nuclear norms need the exported adapter. Convergence needs gradients of all
    rows, which no run takes.
    """
    checks: list[Check] = []
    variance = summary.diagnostics.get("aggregation_variance")
    if variance is not None and home.exists("diagnostics.npz"):
        with np.load(io.BytesIO(home.read("diagnostics.npz")), allow_pickle=False) as file:
            arrays = dict(file)
        setting = f"round {summary.diagnostics['round']:g}, one upload"
        checks += _variance_checks(variance, arrays, setting, summary.config["method"])
    norms = [summary.block_squared_norms.get(block, 0.0) for block in summary.heads]
    if norms and min(norms) > 0:
        heads = list(summary.heads.values())
        checks += heads_checks(norms, heads, f"{len(heads)} blocks, {sum(heads)} heads")
    if summary.heads and home.exists("adapter/adapter_model.safetensors"):
        checks += _adapter_checks(summary, home.read("adapter/adapter_model.safetensors"))
    return checks


def _variance_checks(
    variance: float, arrays: dict[str, Any], setting: str, method: dict[str, Any]
) -> Iterator[Check]:
    statement = "variance of uploads (eq. variance_bound)"
    # s H and, after a prox, H itself, whose bound takes s_max.
    for name, largest in (("uploaded", 1.0), ("after", method.get("scalar_max"))):
        if f"spectrum_{name}" not in arrays or largest is None:
            continue
        values = torch.from_numpy(arrays[f"spectrum_{name}"]).nan_to_num()  # [n, r]
        rank = (significant(values) & (values > 0)).sum(dim=-1)  # [n]
        bound = largest**2 * float((rank * values.amax(dim=-1).square()).mean())
        note = f"s_max={largest:g}" if name == "after" else "the scalars of that client"
        note += f"; mean rank {float(rank.double().mean()):.3g} of {values.shape[1]}"
        yield Check(statement, setting, variance, "<=", bound, note)


def _adapter_checks(summary: "RunSummary", content: bytes) -> Iterator[Check]:
    from safetensors.torch import load

    tensors = {name: value.double().numpy() for name, value in load(content).items()}
    whole = heads = 0.0
    layers = 0
    for name, factor_A in tensors.items():
        if ".lora_A." not in name:
            continue
        factor_B = tensors[name.replace(".lora_A.", ".lora_B.")]  # [B_1 s_1 H_1, ...]
        count = next((n for block, n in summary.heads.items() if f".{block}." in name), 0)
        if not count or len(factor_A) % count:
            continue
        layers += 1
        # R of each factor's QR: the singular values of the product, without the product.
        whole += _product_norm(factor_B, factor_A)
        parts = zip(np.split(factor_B, count, axis=1), np.split(factor_A, count), strict=True)
        heads += math.fsum(_product_norm(b, a) for b, a in parts)
    if layers:
        init = summary.config["adapter"].get("init") or "the method's"
        setting = f"{layers} layers, {init} bases"
        yield _nuclear_check(setting, whole, heads, "sums over layers", ROUNDING_OF_FLOAT32)


def _product_norm(factor_B: Array, factor_A: Array) -> float:
    upper_B, upper_A = (np.linalg.qr(factor)[1] for factor in (factor_B, factor_A.T))
    return nuclear(upper_B @ upper_A.T)
