"""Spectral diagnostics of a round's uploads, computed on the server.

They are computed for the uploaded cores s·H and for their difference from the broadcast (prefix
``delta_``), because cores with a large common global part always look aligned. In rounds of more
than ``MOST_CLIENTS``, only the first uploads by client id are compared.

Legend: m clients, W entries of the shared part, U units of aggregation, n core heads, r rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trishul_ray.experiment import Experiment
from trishul_ray.federation.aggregate import UploadReader
from trishul_ray.federation.messages import Arrays, TrainReport, Upload, WorkerSpec, as_tensor
from trishul_ray.federation.reduce import (
    Reducer,
    configured_weight,
    rejection_reason,
    round_units,
)
from trishul_ray.methods.base.adapters import lora_pairs, lora_scale
from trishul_ray.runtime.device import set_threads_of_thread, usable_cores
from trishul_ray.spectral.diagnostics import client_matrices, diagnose, left_spectrum, stack_spectra
from trishul_ray.spectral.svt import singular_values
from trishul_ray.stages import ArrayState, Start

#: Maximum number of threads for a comparison, given enough cores.
MOST_THREADS = 8


@dataclass(frozen=True)
class Diagnostics:
    """Diagnostics of one round's uploads.

    Attributes:
        uploads: The valid uploads among the first of the round, as values.
        metrics: Values, keyed by name.
        spectra: Singular values [n, r] of one client, in descending order, padded with NaN for
            cores of smaller rank. ``uploaded`` has those of the uploaded cores s·H, for every
            method with cores. ``before`` and ``after`` have those of its cores H in the last prox,
            and ``threshold`` [1] or [n] its threshold, only for methods with a prox. If the server
            shrinks cores, they are cores of the mean.
        matrices: Comparisons of the updates (uploads minus broadcast) of all pairs of clients:
            ``clients`` [m], and the matrices [m, m] of
            :func:`~trishul_ray.spectral.diagnostics.client_matrices`. Empty for methods without
            cores.
    """

    uploads: list[Upload] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    spectra: Arrays = field(default_factory=dict)
    matrices: Arrays = field(default_factory=dict)


class Comparison:
    """Comparison of one round's uploads in threads, as a context manager.

    It starts as soon as the clients have trained, during the evaluation of the model before the
    round. Its result is read, or its error raised, before the state changes. Clients that have read
    an earlier broadcast count with their change since that broadcast. Every thread uses
    ``resources.threads`` torch threads, like the server, so that sums are rounded identically.

    Attributes:
        number: The round.
        broadcast: The broadcast that its clients have read.
        is_due: Whether the round is diagnosed.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: WorkerSpec,
        uploads: UploadReader,
        number: int,
        broadcast: ArrayState,
        earlier: Sequence[Start] = (),
    ) -> None:
        self.number, self.broadcast, self._earlier = number, broadcast, earlier
        self.is_due = experiment.evaluation.diagnoses(number, experiment.federation.rounds)
        self._experiment, self._spec, self._reader = experiment, spec, uploads
        threads = experiment.resources.threads
        # One thread runs the comparison, and the others share its work.
        spare = max(1, min(MOST_THREADS, usable_cores() // threads - 1))
        self._pool = ThreadPoolExecutor(1 + spare, "comparison", set_threads_of_thread, (threads,))
        self._future: Future[Diagnostics] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, handles: Sequence[Any]) -> None:
        """Fetch uploads and start to compare them."""
        uploads = self._reader.fetch(handles)
        self._future = self._pool.submit(
            lambda: compare_uploads(
                self._valid(uploads), self.broadcast, self._spec, self._experiment, self._pool
            )
        )

    def result(self, handles: Sequence[Any]) -> Diagnostics:
        """Return the diagnostics of uploads; compare them now unless :meth:`begin` has."""
        if self._future is None:
            self.begin(handles)
        assert self._future is not None
        return self._future.result()

    def _valid(self, uploads: Sequence[Upload]) -> list[Upload]:
        expected = self._spec.expected
        valid = [each for each in uploads if rejection_reason(each, expected) is None]
        return self._reader.values(valid, self.broadcast, self._earlier)

    @property
    def is_of_everyone(self) -> bool:
        """Whether the last round also compares the clients that did not take part.

        Only methods with cores support this comparison.
        """
        units = self._spec.layout.units(self._spec.wire)
        return (
            self._experiment.evaluation.diagnostics_cohort == "all"
            and self.number == self._experiment.federation.rounds
            and any(unit.rank is not None for unit in units)
        )

    def of_everyone(self, handles: Sequence[Any]) -> Arrays:
        """Compare the updates of all clients, trained from one broadcast.

        Returns:
            ``everyone_clients`` [C], and each matrix [C, C] of
            :func:`~trishul_ray.spectral.diagnostics.client_matrices` as ``everyone_<name>``.
        """
        uploads = self._valid(self._reader.fetch(handles))
        uploads.sort(key=lambda upload: upload.client)
        if not uploads:
            return {}
        _, updates, active = _stacked(uploads, self.broadcast, self._spec)
        weights, top_k = torch.ones(len(uploads)), self._experiment.evaluation.top_k
        _, found = _over_ranks(updates, weights, active, self._spec, top_k, self._pool)
        found["clients"] = np.array([upload.client for upload in uploads], dtype=np.int64)
        return {f"everyone_{name}": values for name, values in found.items()}

    def aggregation_error(
        self, uploads: Sequence[Upload], reducer: Reducer, after: Callable[[], ArrayState]
    ) -> float | None:
        """Compute the error of aggregating all uploads of the round; see :func:`aggregation_error`.

        ``after`` returns the next broadcast. The result is None if clients have trained different
        units.
        """
        units = round_units(reducer.method, reducer.layout, self.number)
        alike = all(
            upload.active is None or (units is not None and np.array_equal(upload.active, units))
            for upload in uploads
        )
        if not alike:
            return None
        return aggregation_error(uploads, reducer, self.broadcast, after(), self._pool)


def reported_diagnostics(reports: Sequence[TrainReport]) -> Diagnostics:
    """Average the metrics that clients report, and return the first reported spectra."""
    reported: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for name, value in report.metrics.items():
            reported[name].append(value)
    metrics = {name: float(np.mean(values)) for name, values in reported.items()}
    spectra = next((r.spectra for r in reports if r.spectra), {})
    return Diagnostics(metrics=metrics, spectra=spectra)


def compare_uploads(
    uploads: list[Upload],
    broadcast: ArrayState,
    spec: WorkerSpec,
    experiment: Experiment,
    pool: Executor,
) -> Diagnostics:
    """Compute metrics of the uploaded cores, and spectra and matrices for the figures.

    Means over ranks are weighted by the number of core heads. The result is empty for a method
    without cores. The threads of ``pool`` share the work.
    """
    units = spec.layout.units(spec.wire)
    if not uploads or all(unit.rank is None for unit in units):
        return Diagnostics(uploads)
    weighting = experiment.federation.weighting
    weights = torch.tensor([configured_weight(weighting, upload) for upload in uploads])
    weights = weights.double() / weights.sum()
    sent, updates, active = _stacked(uploads, broadcast, spec)
    first = None if active is None else active[:1]
    spectrum = pool.submit(_uploaded_spectrum, sent[:1], first, spec)
    metrics: dict[str, float] = {}
    matrices: Arrays = {}
    for prefix, vectors in (("", sent), ("delta_", updates)):
        # The loop ends with the updates, so their matrices are returned.
        top_k = experiment.evaluation.top_k
        values, matrices = _over_ranks(vectors, weights, active, spec, top_k, pool)
        metrics |= {prefix + name: value for name, value in values.items()}
    matrices["clients"] = np.array([u.client for u in uploads], dtype=np.int64)
    return Diagnostics(uploads, metrics, spectrum.result(), matrices)


def append_round(matrices: Arrays, number: int, new: Arrays) -> Arrays:
    """Append the matrices of a round to the matrices of earlier rounds.

    They are ``round`` [R], ``clients`` [R, m] and matrices [R, m, m]; empty before the first round.
    If rounds differ in their number of clients, ``clients`` is padded with -1 and the matrices with
    NaN. Matrices of :meth:`Comparison.of_everyone` are dropped, because they apply only to the last
    round.
    """
    if not new:
        return matrices
    new = {key: value[None] for key, value in new.items()} | {"round": np.array([number])}
    if "round" not in matrices:
        return new
    width = max(matrices["clients"].shape[1], new["clients"].shape[1])

    def padded(key: str, value: np.ndarray) -> np.ndarray:
        if key == "round":
            return value
        empty = -1 if key == "clients" else np.nan
        pads = [(0, 0), *[(0, width - side) for side in value.shape[1:]]]
        return np.pad(value, pads, constant_values=empty)

    return {key: np.concatenate([padded(key, matrices[key]), padded(key, new[key])]) for key in new}


def _stacked(
    uploads: Sequence[Upload], broadcast: ArrayState, spec: WorkerSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stack uploads [m, W], their changes since the broadcast, and the trained units [m, U].

    The units are None if every client trained all of them.
    """
    sent = torch.stack([torch.from_numpy(np.array(u.arrays.shared)) for u in uploads])
    received = torch.from_numpy(np.array(broadcast.shared))
    if all(upload.active is None for upload in uploads):
        return sent, sent - received, None
    # A client of full capacity sends no mask, because it trained every unit.
    full = np.ones(len(spec.expected.unit_sizes), dtype=bool)
    masks = [full if u.active is None else np.array(u.active) for u in uploads]
    return sent, sent - received, torch.from_numpy(np.stack(masks))


def _uploaded_spectrum(vector: Tensor, active: Tensor | None, spec: WorkerSpec) -> Arrays:
    """Compute ``uploaded`` [n, r]: singular values of the cores in one client's vector [1, W]."""
    spectra = []
    for cores, mask in _banks(vector, active, spec):
        values = singular_values(cores[0])
        spectra.append(values if mask is None else values[mask[0]])
    return {"uploaded": stack_spectra(spectra).numpy()} if spectra else {}


def _banks(
    vectors: Tensor, active: Tensor | None, spec: WorkerSpec
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Iterate over the cores of each rank in [m, W] vectors, as [m, n, r, r].

    The second item is [m, n] bool, the trained core heads; the other core heads are zero.
    """
    units = enumerate(spec.layout.units(spec.wire))
    for rank, group in groupby(units, lambda item: item[1].rank):
        if rank is None:
            continue
        indices, heads = zip(*group, strict=True)
        cores = vectors[:, heads[0].wire.start : heads[-1].wire.stop]
        cores = cores.unflatten(1, (len(heads), rank, rank))  # [m, n, r, r]
        mask = None if active is None else active[:, indices[0] : indices[-1] + 1]
        if mask is not None:
            cores = cores.masked_fill(~mask[..., None, None], 0.0)
        yield cores, mask


def _over_ranks(
    vectors: Tensor,
    weights: Tensor,
    active: Tensor | None,
    spec: WorkerSpec,
    top_k: int,
    pool: Executor,
) -> tuple[dict[str, float], Arrays]:
    """Compute metrics and matrices of all cores in [m, W], averaged over ranks by heads."""
    sums: dict[str, float] = defaultdict(float)
    heads: dict[str, int] = defaultdict(int)
    totals: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for cores, mask in _banks(vectors, active, spec):
        count, cores = cores.shape[1], cores.double()
        spectrum = left_spectrum(cores, pool)
        for name, value in diagnose(cores, weights, top_k, mask, spectrum).items():
            sums[name] += count * value
            heads[name] += count
        for name, matrix in client_matrices(cores, top_k, mask, spectrum).items():
            # A similarity is NaN for a pair without a common core head.
            totals[name] = totals.get(name, torch.zeros_like(matrix)) + count * matrix.nan_to_num()
            counts[name] = counts.get(name, torch.zeros_like(matrix)) + count * ~matrix.isnan()
    metrics = {name: value / heads[name] for name, value in sums.items()}
    return metrics, {name: (total / counts[name]).numpy() for name, total in totals.items()}


def aggregation_error(
    uploads: Sequence[Upload],
    reducer: Reducer,
    before: ArrayState,
    after: ArrayState,
    pool: Executor,
) -> float | None:
    """Compute the relative error of the new global update to the mean of the clients' updates.

    It is ``||dW - sum_c w_c dW_c||_F / ||sum_c w_c dW_c||_F`` over all layers, with the weights of
    ``federation.weighting``: 0 up to rounding if aggregation is exact (eq. exact_agg). Changes of
    frozen weights are part of the update. If the update is linear in the trained parameters (cores
    between shared bases, B with a frozen A), the trained vectors themselves are compared; for
    orthonormal bases the result is the same.

    Args:
        uploads: Valid uploads of all clients of the round, with the same trained units.
        reducer: The method, the layout and the weighting.
        before: The broadcast from which the clients started.
        after: The next broadcast.
        pool: Threads, each of which processes one layer at a time.

    Returns:
        The error. None if a trained LoRA factor or core stays with the clients, because the updates
        are then not a function of the uploads.
    """
    weights = np.array([configured_weight(reducer.weighting, upload) for upload in uploads])
    weights /= weights.sum()
    layout, alpha = reducer.layout, reducer.method.lora_alpha

    def named(arrays: ArrayState) -> dict[str, Tensor]:
        return reducer.method.named_tensors(layout, as_tensor(arrays.shared).double())

    clients, new = [named(upload.arrays) for upload in uploads], named(after)
    kept = {entry.name for entry in layout.entries} - new.keys()
    if any(layout.entry(name).kind in ("adapter", "core") for name in kept):
        return None

    def update(tensors: dict[str, Tensor], name: str) -> Tensor:
        return _product(tensors, name, alpha) if layers else tensors[name].clone()

    def norms(name: str) -> tuple[float, float]:
        """Return the squared norms of the difference and of the mean."""
        mean, moved = update(clients[0], name).mul_(weights[0]), update(new, name)
        for weight, client in zip(weights[1:], clients[1:], strict=True):
            mean += update(client, name).mul_(weight)
        if name in after.base:
            moved += torch.from_numpy(after.base[name])
        if name in before.base:
            moved -= torch.from_numpy(before.base[name])
        return float(moved.sub_(mean).square_().sum()), float(mean.square_().sum())

    # Sort: float sums depend on the order.
    layers = sorted(layer for layer, _, _ in lora_pairs(new))
    # The classification head is not part of the update, except in full fine-tuning.
    keys = [key for key in new if layout.entry(key).kind != "classifier"] or list(new)
    error = exact = 0.0
    for difference, size in pool.map(norms, layers or keys):
        error += difference
        exact += size
    return (error / exact) ** 0.5 if exact else 0.0


def _product(tensors: dict[str, Tensor], layer: str, alpha: float | None) -> Tensor:
    factor_A = tensors[f"{layer}.lora_A"]
    return (tensors[f"{layer}.lora_B"] @ factor_A).mul_(lora_scale(alpha, factor_A.shape[0]))
