"""The prox on stacks of cores: every route's time, and its error against float64 on the CPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from _gpu import Place, captured, experiment_at, milliseconds, on_device, per_call
from _results import Goal, Section
from torch import Tensor

from trishul_ray.federation.determinism import deterministic
from trishul_ray.rng import torch_rng
from trishul_ray.spectral.svt import svt, svt_by_iteration, svt_stats

#: Cores of a client of ViT-B/16 at both budgets, and of one that trains a part of them.
STACKS = ((96, 110), (96, 156), (36, 110))
#: Thresholds as shares of the largest singular value.
SHARES = (5e-6, 1e-3)
#: What :func:`trishul_ray.spectral.svt.svt` promises, as a share of the largest singular value.
PROMISE = 1e-6


@dataclass
class Eigh:
    """The route of the CPU without its branches; ``residual`` is that of its last eigenvectors."""

    dtype: torch.dtype
    residual: float = 0.0

    def __call__(self, cores: Tensor, threshold: float) -> Tensor:
        """Apply the proximal map."""
        x = cores.to(self.dtype)
        gram = x.mT @ x
        squares, vectors = torch.linalg.eigh(gram)
        values = squares.clamp(min=0).sqrt()
        gains = 1 - threshold / values.clamp(min=threshold)
        return (((x @ vectors) * gains.unsqueeze(-2)) @ vectors.mT).to(cores.dtype)

    def check(self, cores: Tensor) -> float:
        """``max ||G V - V D|| / ||G||`` over the cores: eigenvectors have been wrong on GPUs."""
        x = cores.to(self.dtype)
        gram = x.mT @ x
        squares, vectors = torch.linalg.eigh(gram)
        wrong = torch.linalg.matrix_norm(gram @ vectors - vectors * squares.unsqueeze(-2))
        return float((wrong / torch.linalg.matrix_norm(gram)).max())


def measure(place: Place) -> None:
    """Every stack, route and threshold."""
    stacks = ((3, 8), (2, 12)) if place.rehearsal else STACKS
    rows, data, goals = [], [], []
    for n, r in stacks:
        cores = trained_cores(n, r)
        on_gpu = cores.to(place.device)
        for share in SHARES:
            exact, largest = reference(cores, share)
            threshold = share * largest
            best: tuple[float, str] = (float("inf"), "none")
            for name, route in routes(place, on_gpu, threshold).items():
                try:
                    error = float(spectral_norm(route().cpu().double() - exact).max())
                    seconds = on_device(place, route)
                except RuntimeError as failure:  # e.g. no such kernel in this build
                    rows.append([f"{n} x {r}", f"{share:g}", name, str(failure)[:60], "", "", ""])
                    continue
                residual = None
                if name.startswith("eigh") and "captured" not in name:
                    residual = Eigh(dtype_of(name)).check(on_gpu)
                rows.append(
                    [
                        *(f"{n} x {r}", f"{share:g}", name, f"{seconds * 1e3:.3f}"),
                        *(f"{error / threshold:.1e}", f"{error / largest:.1e}"),
                        "" if residual is None else f"{residual:.1e}",
                    ]
                )
                data.append(
                    {
                        "cores": n,
                        "rank": r,
                        "share": share,
                        "route": name,
                        "seconds": seconds,
                        "error_of_tau": error / threshold,
                        "error_of_sigma": error / largest,
                        "residual": residual,
                    }
                )
                if error <= PROMISE * largest:
                    best = min(best, (seconds, name))
                if name == "library":
                    title = f"error of the library's route / sigma_1, {n} x {r}, tau {share:g}"
                    goals.append(Goal(title, error / largest, PROMISE))
            rows.append(
                [f"{n} x {r}", f"{share:g}", f"fastest that is exact: {best[1]}", *[""] * 4]
            )
            place.add(_section(rows, goals, data))

    with deterministic(experiment_at(place)):
        place.add(statistics_of(place, stacks))


def statistics_of(place: Place, stacks: Iterable[tuple[int, int]]) -> Section:
    """Spectra that a client reports once a round: decomposed on the device, or on the host."""
    rows, data = [], []
    for n, r in stacks:
        cores = trained_cores(n, r).to(place.device)
        threshold = 1e-3 * float(spectral_norm(cores).max())
        here = per_call(place, partial(svt_stats, cores, threshold), 2, 3)
        host = per_call(place, partial(_stats_on_host, cores, threshold), 2, 3)
        rows.append([f"{n} x {r}", milliseconds(here), milliseconds(host)])
        data.append({"cores": n, "rank": r, "device": here, "host": host})
    return Section(
        "Statistics of the prox, once a round of a client",
        ["cores", "on the device, ms", "copied to the host, ms"],
        rows,
        ["median (min-max); the library takes the first; the host's threads are those of a run"],
        data={"statistics": data},
    )


def _stats_on_host(cores: Tensor, threshold: float) -> None:
    svt_stats(cores.cpu(), threshold)


def _section(rows: list[list[str]], goals: list[Goal], data: list[dict[str, object]]) -> Section:
    return Section(
        "The prox",
        ["cores", "tau / sigma_1", "route", "ms", "error / tau", "error / sigma_1", "residual"],
        rows,
        [
            "between two events of the device, medians of 3 to 20; errors are spectral norms, "
            "the largest over the cores, against an SVD in float64 on the CPU",
            f"exact: within {PROMISE:g} of sigma_1; residual: max ||G V - V D|| / ||G|| of eigh",
            "library: what svt() does on this device",
        ],
        goals,
        {"routes": data},
    )


def routes(place: Place, cores: Tensor, threshold: float) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute the prox, by name; each takes nothing and returns the result."""

    def iteration(dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: svt_by_iteration(cores, threshold, dtype)

    def graph(dtype: torch.dtype) -> Callable[[], Tensor]:
        results: list[Tensor] = []
        replays: list[Callable[[], object]] = []

        def call() -> None:
            results[:] = [svt_by_iteration(cores, threshold, dtype)]

        def run() -> Tensor:
            if not replays:
                replays.append(captured(place, call))
            replays[0]()
            return results[0]

        return run

    wide, narrow = torch.float64, torch.float32
    return {
        "library": lambda: svt(cores, threshold),
        "eigh float64": lambda: Eigh(wide)(cores, threshold),
        "eigh float32": lambda: Eigh(narrow)(cores, threshold),
        "iteration float64": iteration(wide),
        "iteration float32": iteration(narrow),
        "iteration float64, captured": graph(wide),
        "iteration float32, captured": graph(narrow),
    }


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a route's name says."""
    return torch.float32 if "float32" in name else torch.float64


def trained_cores(n: int, r: int) -> Tensor:
    """[n, r, r] float32 on the CPU, singular values from 1e-2 down to 1e-8, log-uniform."""
    generator = torch_rng(0, "cores", n, r)
    u, v = (
        torch.linalg.qr(torch.randn(n, r, r, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    values = 10 ** (-2 - 6 * torch.rand(n, 1, r, generator=generator, dtype=torch.float64))
    return ((u * values) @ v.mT).float()


def reference(cores: Tensor, share: float) -> tuple[Tensor, float]:
    """The exact result, float64 on the CPU, and the largest singular value."""
    u, s, vh = torch.linalg.svd(cores.double())
    largest = float(s.max())
    return (u * (s - share * largest).clamp(min=0).unsqueeze(-2)) @ vh, largest


def spectral_norm(x: Tensor) -> Tensor:
    """The largest singular value of every matrix."""
    return torch.linalg.matrix_norm(x, ord=2)
