"""Spectral diagnostics of a round's uploads, on the server.

Measured twice: on the uploaded cores s·H themselves, and on their difference from the broadcast
(prefix ``delta_``), since cores that share a large global part look aligned for free. In wide
rounds the first uploads by client id stand for all.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trishul_ray.experiment import Experiment
from trishul_ray.federation.jobs import Arrays, TrainReport, Upload
from trishul_ray.spectral.diagnostics import diagnose

if TYPE_CHECKING:
    from trishul_ray.federation.server import Blueprint


def upload_diagnostics(
    uploads: list[Upload],
    broadcast: Arrays,
    blueprint: "Blueprint",
    experiment: Experiment,
    reports: list[TrainReport],
) -> tuple[dict[str, float], Arrays]:
    """Metrics of the uploaded cores, and spectra for the figure.

    Heads of different ranks are averaged by their number. A method without cores has only the
    metrics that its clients report themselves.

    Returns:
        Metrics by name, and ``before``, ``after`` [n, r] and ``threshold`` [1] of one client's
        last prox (empty if no client made one).
    """
    metrics: dict[str, float] = {}
    told: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.notes.get("metrics", {}).items():
            told[name].append(value)
    metrics |= {name: float(np.mean(values)) for name, values in told.items()}
    spectra: Arrays = next((r.notes["spectra"] for r in reports if "spectra" in r.notes), {})
    if not uploads:
        return metrics, spectra
    uniform = experiment.federation.weighting == "uniform"
    weights = torch.tensor([1.0 if uniform else float(u.rows) for u in uploads])
    weights = weights.double() / weights.sum()
    sent = torch.stack([torch.from_numpy(np.array(u.arrays["shared"])) for u in uploads])  # [m, W]
    received = torch.from_numpy(np.array(broadcast["shared"]))  # [W]
    active = None
    if uploads[0].active is not None:
        active = torch.stack([torch.from_numpy(np.array(u.active)) for u in uploads])  # [m, U]
    for prefix, vectors in (("", sent), ("delta_", sent - received)):
        found = _over_ranks(vectors, weights, active, blueprint, experiment.evaluation.top_k)
        metrics |= {prefix + name: value for name, value in found.items()}
    return metrics, spectra


def _over_ranks(
    vectors: Tensor, weights: Tensor, active: Tensor | None, blueprint: "Blueprint", top_k: int
) -> dict[str, float]:
    """Diagnostics of all cores in [m, W] vectors, averaged over ranks by number of heads."""
    sums: dict[str, float] = defaultdict(float)
    heads: dict[str, int] = defaultdict(int)
    seen = 0
    for count, rank, start in _cores_on_the_wire(blueprint):
        stop = start + count * rank * rank
        cores = vectors[:, start:stop].unflatten(1, (count, rank, rank))  # [m, n, r, r]
        # Cores stand first on the wire, so their units are the first ones.
        mask = None if active is None else active[:, seen : seen + count]
        for name, value in diagnose(cores, weights, top_k, mask).items():
            sums[name] += count * value
            heads[name] += count
        seen += count
    return {name: value / heads[name] for name, value in sums.items()}


def _cores_on_the_wire(blueprint: "Blueprint") -> list[tuple[int, int, int]]:
    """(heads, rank, first entry) of each run of equal-rank cores in the shared vector."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for entry in (blueprint.layout.entry(name) for name in blueprint.wire):
        if entry.name.endswith(".core") and entry.shape[0]:
            count, rank, _ = entry.shape
            if runs and runs[-1][1] == rank and runs[-1][2] + runs[-1][0] * rank**2 == start:
                runs[-1] = (runs[-1][0] + count, rank, runs[-1][2])
            else:
                runs.append((count, rank, start))
        start += entry.numel
    return runs
