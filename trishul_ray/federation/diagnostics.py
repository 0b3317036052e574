"""Spectral diagnostics of a round's uploads, on the server.

Measured twice: on the uploaded cores s·H themselves, and on their difference from the broadcast
(prefix ``delta_``), since cores that share a large global part look aligned for free. In rounds of
more than :data:`MOST_CLIENTS` the first uploads by client id stand for all.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.layout import HEAD_PREFIX
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import Arrays, TrainReport, Upload, as_tensors
from trishul_ray.federation.reduce import Reducer
from trishul_ray.methods.adapters import lora_pairs, lora_scale
from trishul_ray.methods.base import BASE
from trishul_ray.spectral.diagnostics import client_matrices, diagnose, left_spectrum, stack_spectra
from trishul_ray.spectral.svt import singular_values

if TYPE_CHECKING:
    from trishul_ray.federation.messages import Blueprint


#: Uploads of a round that are compared: as many as clients in the paper's covariance matrices.
MOST_CLIENTS = 20


@dataclass(frozen=True)
class Diagnosed:
    """What the uploads of one round look like.

    Attributes:
        metrics: by name.
        spectra: singular values [n, r] in descending order, of one client; NaN behind those of a
            core of smaller rank. ``uploaded``: of the cores s·H it sent, for every method that
            sends cores. ``before`` and ``after``: of its cores H at the last prox, with
            ``threshold`` [1]; only of methods that make one.
        matrices: of the updates (uploads less the broadcast), between each two clients: ``clients``
            [m], and [m, m] each of :func:`~trishul_ray.spectral.diagnostics.client_matrices`.
            Empty for methods that send no cores.
    """

    metrics: dict[str, float]
    spectra: Arrays
    matrices: Arrays


def upload_diagnostics(
    uploads: list[Upload],
    broadcast: Arrays,
    blueprint: "Blueprint",
    experiment: Experiment,
    reports: list[TrainReport],
) -> Diagnosed:
    """Metrics of the uploaded cores, and spectra and matrices for the figures.

    Heads of different ranks are averaged by their number. A method without cores has only the
    metrics that its clients report themselves.
    """
    metrics: dict[str, float] = {}
    told: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.notes.get("metrics", {}).items():
            told[name].append(value)
    metrics |= {name: float(np.mean(values)) for name, values in told.items()}
    spectra: Arrays = next((r.notes["spectra"] for r in reports if "spectra" in r.notes), {})
    if not uploads:
        return Diagnosed(metrics, spectra, {})
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
    matrices: Arrays = {}
    for prefix, vectors in (("", sent), ("delta_", sent - received)):
        found, matrices = _over_ranks(
            vectors, weights, active, blueprint, experiment.evaluation.top_k
        )
        metrics |= {prefix + name: value for name, value in found.items()}
    one = _uploaded_spectrum(sent[:1], None if active is None else active[:1], blueprint)
    if matrices:  # of the updates, which came last
        matrices["clients"] = np.array([u.client for u in uploads], dtype=np.int64)
    return Diagnosed(metrics, spectra | one, matrices)


def _uploaded_spectrum(vector: Tensor, active: Tensor | None, blueprint: "Blueprint") -> Arrays:
    """``uploaded`` [n, r]: singular values of the cores in one client's vector [1, W]."""
    values = []
    for cores, mask in _banks(vector, active, blueprint):
        found = singular_values(cores[0])
        values.append(found if mask is None else found[mask[0]])
    return {"uploaded": stack_spectra(values).numpy()} if values else {}


def append_round(matrices: Arrays, number: int, found: Arrays) -> Arrays:
    """Add one round's matrices to those of the rounds before.

    Args:
        matrices: ``round`` [R], ``clients`` [R, m] and [R, m, m] each; empty before the first.
        number: the round.
        found: see :class:`Diagnosed`; where empty, ``matrices`` come back as they are.

    Returns:
        The same with R + 1 rounds. Where rounds have had different numbers of clients, ``clients``
        is padded with -1 and a matrix with NaN.
    """
    if not found:
        return matrices
    new = {key: value[None] for key, value in found.items()} | {"round": np.array([number])}
    if not matrices:
        return new
    width = max(matrices["clients"].shape[1], new["clients"].shape[1])

    def padded(key: str, value: np.ndarray) -> np.ndarray:
        if key == "round":
            return value
        empty = -1 if key == "clients" else np.nan
        pads = [(0, 0), *[(0, width - side) for side in value.shape[1:]]]
        return np.pad(value, pads, constant_values=empty)

    return {key: np.concatenate([padded(key, matrices[key]), padded(key, new[key])]) for key in new}


def _banks(
    vectors: Tensor, active: Tensor | None, blueprint: "Blueprint"
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Cores of one rank in [m, W] vectors as [m, n, r, r], and [m, n] bool of the trained ones.

    Cores that were not trained are zero.
    """
    seen = 0
    for count, rank, start in _cores_on_the_wire(blueprint):
        stop = start + count * rank * rank
        # Cores stand first on the wire, so their units are the first ones.
        mask = None if active is None else active[:, seen : seen + count]
        cores = vectors[:, start:stop].unflatten(1, (count, rank, rank))  # [m, n, r, r]
        if mask is not None:
            cores = cores.masked_fill(~mask[..., None, None], 0.0)
        yield cores, mask
        seen += count


def _over_ranks(
    vectors: Tensor, weights: Tensor, active: Tensor | None, blueprint: "Blueprint", top_k: int
) -> tuple[dict[str, float], Arrays]:
    """Metrics and matrices of all cores in [m, W], averaged over ranks by number of heads."""
    sums: dict[str, float] = defaultdict(float)
    heads: dict[str, int] = defaultdict(int)
    totals: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for cores, mask in _banks(vectors, active, blueprint):
        count = cores.shape[1]
        spectrum = left_spectrum(cores)
        for name, value in diagnose(cores, weights, top_k, mask, spectrum).items():
            sums[name] += count * value
            heads[name] += count
        for name, matrix in client_matrices(cores, top_k, mask, spectrum).items():
            # A similarity is NaN for a pair without a core in common.
            totals[name] = totals.get(name, torch.zeros_like(matrix)) + count * matrix.nan_to_num()
            counts[name] = counts.get(name, torch.zeros_like(matrix)) + count * ~matrix.isnan()
    metrics = {name: value / heads[name] for name, value in sums.items()}
    return metrics, {name: (total / counts[name]).numpy() for name, total in totals.items()}


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
