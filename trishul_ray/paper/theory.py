"""The paper's theorems beside measured numbers, on a convex stand-in and on a finished run.

No run reads this. Where a bound fails, docs/what-the-paper-leaves-open.md says why.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from trishul_ray.config.older_fields import of_today
from trishul_ray.errors import InputError
from trishul_ray.methods.base import build_method, method_class, method_names
from trishul_ray.paper.stand_in import (
    Array,
    Course,
    LeastSquares,
    Setting,
    converge,
    local_rounds,
    nuclear,
)
from trishul_ray.report.summary import RunSummary, read_arrays, read_metrics
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.random_streams import numpy_rng, torch_rng
from trishul_ray.spectral.allocation import (
    best_integers,
    round_to_total,
    uniform,
    utility,
    water_fill,
)
from trishul_ray.spectral.bases import BasisInit, draw_bases
from trishul_ray.spectral.diagnostics import significant
from trishul_ray.storage.durable import Json

if TYPE_CHECKING:
    from trishul_ray.storage.store import Store

#: Relative rounding errors that no check counts: of float64, and of exported factors in float32.
ROUNDING, ROUNDING_OF_FLOAT32 = 1e-9, 1e-5
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
    yield _last_gradient_check(alike, fixed)
    yield _drift_check(problem)


def _last_gradient_check(alike: LeastSquares, fixed: Course) -> Check:
    """Compare the gradient without the penalty, after the last round, with the paper's bound."""
    slope = alike.gradients(fixed.cores[None], np.ones((1, len(fixed.cores))))[0].mean(axis=0)
    heads, rank = alike.targets.shape[1:3]
    return Check(
        "squared gradient at the end (eq. unregularized_stationarity)",
        f"all of {alike.clients} equal clients, fixed scalars, λ={LAM:g}, S=1",
        float(np.square(slope).sum()),
        "<=",
        2 * LAM**2 * heads * rank,
    )


def _drift_check(problem: LeastSquares) -> Check:
    """Compare the drift of a client within a round with the bound of the theorem's proof."""
    rate = 1 / (8 * problem.smoothness * DRIFT_STEPS)
    start = np.zeros(problem.targets.shape[1:])
    mine, _, size = local_rounds(problem, start, Setting(0.0, rate, DRIFT_STEPS, trained=False))
    return Check(
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


def run_checks(summary: RunSummary, home: "Store") -> list[Check]:
    """Return what the files of a finished run tell; empty for a method without core heads.

    ``diagnostics.npz`` has the spectra of one client in the last diagnosed round, so that M and ρ
    are of that client; nuclear norms need the exported adapter. Convergence needs gradients of all
    rows, which no run takes.
    """
    checks: list[Check] = []
    variance = summary.diagnostics.get("aggregation_variance")
    if variance is not None and home.exists("diagnostics.npz"):
        arrays = read_arrays(home, "diagnostics.npz")
        uploads = int((arrays["clients"][-1] >= 0).sum()) if "clients" in arrays else 0
        if uploads > 1:  # one alone has no variance, and would be below any bound
            setting = f"round {summary.diagnostics['round']:g}, one upload of {uploads}"
            unbiased = variance * uploads / (uploads - 1)  # for equal weights
            checks += _variance_checks(unbiased, arrays, setting, summary.config["method"])
    norms = [summary.block_squared_norms.get(block, 0.0) for block in summary.heads]
    if norms and min(norms) > 0:
        heads = _final_heads(summary.heads, read_metrics(home))
        checks += heads_checks(norms, heads, f"{len(heads)} blocks, {sum(heads)} heads")
    if summary.heads and home.exists("adapter/adapter_model.safetensors"):
        checks += _adapter_checks(summary, home.read("adapter/adapter_model.safetensors"))
    return checks


def _final_heads(heads: Mapping[str, int], rows: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the heads of each block in the last round, given those of round 1.

    The rows say how their numbers change where a method changes them.
    """
    trained = [row for row in rows if row["round"] > 0]
    first, last = trained[0], trained[-1]
    names = [f"heads/{block}" for block in heads]
    moved = [last.get(name, 0) - first.get(name, 0) for name in names]
    return [count + round(more) for count, more in zip(heads.values(), moved, strict=True)]


def _variance_checks(
    variance: float, arrays: Mapping[str, Array], setting: str, method: Json
) -> Iterator[Check]:
    statement = "variance of uploads (eq. variance_bound)"
    # s H and, after a client's prox, H itself, whose bound takes s_max.
    largest_scalars = {"uploaded": 1.0, "after": method.get("scalar_max")}
    if _reads_uploads(method):  # it is the server that shrinks, and their mean
        del largest_scalars["after"]
    for name, largest in largest_scalars.items():
        if f"spectrum_{name}" not in arrays or largest is None:
            continue
        values = torch.from_numpy(arrays[f"spectrum_{name}"]).nan_to_num()  # [n, r]
        rank = (significant(values) & (values > 0)).sum(dim=-1)  # [n]
        bound = largest**2 * float((rank * values.amax(dim=-1).square()).mean())
        note = f"s_max={largest:g}" if name == "after" else "the scalars of that client"
        note += f"; mean rank {float(rank.double().mean()):.3g} of {values.shape[1]}"
        yield Check(statement, setting, variance, "<=", bound, note)


def _reads_uploads(method: Json) -> bool:
    """Return whether the server of a stored section ``method`` reads each upload."""
    if method["name"] not in method_names():
        return False
    try:
        fields = of_today("method", method)
        return build_method(
            method_class(method["name"]).Config.model_validate(fields)
        ).needs_uploads
    except ValueError as error:
        raise InputError(f"the run's section method: {error}") from error


def _adapter_checks(summary: RunSummary, content: bytes) -> Iterator[Check]:
    from safetensors.torch import load

    tensors = {name: value.double().numpy() for name, value in load(content).items()}
    whole = heads = 0.0
    layers = 0
    for block, rank in summary.ranks.items():
        names = [name for name in tensors if ".lora_A." in name and f".{block}." in name]
        # The largest rank of its matrices. Each has as many heads: all that were ever trained.
        largest = max((len(tensors[name]) for name in names), default=0)
        count = len(rank) if isinstance(rank, list) else largest // rank
        for name in names:
            factor_A = tensors[name]
            factor_B = tensors[name.replace(".lora_A.", ".lora_B.")]  # [B_1 s_1 H_1, ...]
            each = rank if isinstance(rank, list) else [len(factor_A) // count] * count
            if sum(each) != len(factor_A):  # its ranks are others, or the core of one is all zero
                continue
            ends = np.cumsum(each)[:-1]
            layers += 1
            # R of each factor's QR: the singular values of the product, without the product.
            whole += _product_norm(factor_B, factor_A)
            parts = zip(np.split(factor_B, ends, axis=1), np.split(factor_A, ends), strict=True)
            heads += math.fsum(_product_norm(b, a) for b, a in parts)
    if layers:
        init = summary.config["adapter"].get("init") or "the method's"
        setting = f"{layers} layers, {init} bases"
        yield _nuclear_check(setting, whole, heads, "sums over layers", ROUNDING_OF_FLOAT32)


def _product_norm(factor_B: Array, factor_A: Array) -> float:
    upper_B, upper_A = (np.linalg.qr(factor)[1] for factor in (factor_B, factor_A.T))
    return nuclear(upper_B @ upper_A.T)
