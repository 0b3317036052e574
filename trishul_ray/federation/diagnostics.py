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

from trishul_ray.adapters.layout import HEAD_PREFIX
from trishul_ray.experiment import Experiment
from trishul_ray.federation.jobs import Arrays, TrainReport, Upload, as_tensors
from trishul_ray.federation.reduce import Reducer
from trishul_ray.methods.base import BASE
from trishul_ray.methods.kinds import lora_pairs, lora_scale
from trishul_ray.spectral.diagnostics import diagnose

if TYPE_CHECKING:
    from trishul_ray.federation.contract import Blueprint


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
    if any(upload.active is not None for upload in uploads):
        # A client of full capacity beside limited ones sends no mask: it trained every unit.
        every = np.ones(len(blueprint.expected.unit_sizes), dtype=bool)
        masks = [every if u.active is None else np.array(u.active) for u in uploads]
        active = torch.from_numpy(np.stack(masks))  # [m, U]
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


def aggregation_error(
    uploads: list[Upload], reducer: Reducer, before: Arrays, after: Arrays
) -> float:
    """How far the new global update is from the weighted mean of the clients' updates, relative.

    ``||dW - sum_c w_c dW_c||_F / ||sum_c w_c dW_c||_F`` over all layers, with the weights of
    ``federation.weighting``: 0 but for rounding where aggregation is exact (eq. exact_agg). Frozen
    weights that the method moves count as part of the update. Where only what is linear in the
    update is trained (cores between shared bases, B beside a frozen A), the trained vectors
    themselves are compared; for orthonormal bases that is the same number.

    Args:
        uploads: sound ones, of all clients of the round; none with inactive heads.
        reducer: knows the method, its layout and the weighting.
        before: the broadcast that the clients started from.
        after: the next broadcast.
    """
    weights = np.array([float(u.rows) if reducer.weighting == "size" else 1.0 for u in uploads])
    weights /= weights.sum()
    name, alpha = reducer.method.named, reducer.method.lora_alpha
    clients = [name(reducer.layout, as_tensors(u.arrays)["shared"].double()) for u in uploads]
    found = name(reducer.layout, as_tensors(after)["shared"].double())
    # Sorted: the order of a set of names differs from process to process, and so would the sum.
    pairs = sorted({layer for layer, _, _ in lora_pairs(found)})
    error = exact = 0.0
    for layer in pairs:
        mean = sum(w * _product(c, layer, alpha) for w, c in zip(weights, clients, strict=True))
        moved = torch.from_numpy(after[BASE + layer]).double() if BASE + layer in after else 0.0
        held = torch.from_numpy(before[BASE + layer]).double() if BASE + layer in before else 0.0
        error += float((_product(found, layer, alpha) + moved - held - mean).square().sum())
        exact += float(mean.square().sum())
    if not pairs:
        # Full fine-tuning trains nothing but whole parameters; elsewhere the head is no update.
        keys = [key for key in found if not key.startswith(HEAD_PREFIX)] or list(found)
        for key in keys:
            mean = sum(w * c[key] for w, c in zip(weights, clients, strict=True))
            error += float((found[key] - mean).square().sum())
            exact += float(mean.square().sum())
    return (error / exact) ** 0.5 if exact else 0.0


def _product(named: dict[str, Tensor], layer: str, alpha: float | None) -> Tensor:
    factor_A = named[f"{layer}.lora_A"]
    return lora_scale(alpha, factor_A.shape[0]) * (named[f"{layer}.lora_B"] @ factor_A)
