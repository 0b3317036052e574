"""Uploads -> weighted mean, unit by unit, with a judge at the door. No Ray here.

``H_u <- sum_c w_c m_cu X_cu / sum_c w_c m_cu`` for every unit u (one head's core, or one whole
tensor), over the clients that trained it (eq. server_aggregation). Sums run in float64 over clients
in ascending order, in groups of ``FAN_IN`` whose sums are then added in order: the shape of this
tree depends on the cohort alone, so the bits do not depend on how many workers shared the work.

Legend: W entries of the shared part, U units, m clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trishul_ray.adapters.layout import HEAD_PREFIX, Layout
from trishul_ray.federation.messages import Arrays, Expected, Upload, as_tensors
from trishul_ray.methods.base import Method

#: Uploads summed by one worker. Up to here a round is reduced where the server is.
FAN_IN = 16


#: An upload whose largest entry exceeds this is refused: a float32 sum would soon overflow.
LARGEST_ENTRY = 1e12


@dataclass(frozen=True)
class Reducer:
    """How a method's uploads are judged, weighed and summed; pickles to any worker."""

    method: Method
    layout: Layout
    weighting: str
    expected: Expected

    def given_weight(self, upload: Upload) -> float:
        """Return what ``federation.weighting`` says of an upload."""
        return float(upload.rows) if self.weighting == "size" else 1.0

    def weight(self, upload: Upload) -> float:
        """w_c: the method's say on what ``federation.weighting`` gives."""
        given = self.given_weight(upload)
        return self.method.weight(as_tensors(upload.arrays), self.layout, given)

    def unit_weight(self, upload: Upload, weight: float) -> np.ndarray | float:
        """Return w_c m_cu of an upload's units: [U] float64, or one number where all are equal.

        Args:
            upload: a sound one.
            weight: w_c, by :meth:`weight`.
        """
        if self.method.weighs_head:
            return weight if upload.active is None else weight * upload.active
        in_head = unit_in_head(self.layout, self.method.wire(self.layout))
        weights = np.where(in_head, self.given_weight(upload), weight)
        return weights if upload.active is None else weights * upload.active

    def contribution(self, upload: Upload) -> Arrays:
        """What of an upload is averaged."""
        found = self.method.contribution(as_tensors(upload.arrays), self.layout)
        return {key: value.numpy() for key, value in found.items()}


@dataclass
class Partial:
    """The running sum of a group of uploads."""

    sums: Arrays  # float64, weighted
    weights: dict[str, float]  # of each key but "shared": sum of w_c, or how many for a plain mean
    unit_weight: np.ndarray  # [U] float64, sum of w_c m_cu
    clients: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


def unit_sizes(layout: Layout, wire: Sequence[str]) -> np.ndarray:
    """[U] entries of each unit: r*r for every head of a core, the whole tensor otherwise."""
    sizes: list[int] = []
    for entry in (layout.entry(name) for name in wire):
        count = int(np.prod(entry.shape, dtype=np.int64))
        if entry.name.endswith(".core"):
            sizes += [count // entry.shape[0]] * entry.shape[0] if entry.shape[0] else []
        else:
            sizes.append(count)
    return np.asarray(sizes, dtype=np.int64)


def unit_in_head(layout: Layout, wire: Sequence[str]) -> np.ndarray:
    """[U] bool, which units are part of the classification head."""
    flags: list[bool] = []
    for entry in (layout.entry(name) for name in wire):
        units = entry.shape[0] if entry.name.endswith(".core") else 1
        flags += [entry.name.startswith(HEAD_PREFIX)] * units
    return np.asarray(flags, dtype=bool)


def judge(upload: Upload, expected: Expected) -> str | None:
    """Why this upload must not be added, or None if it is sound."""
    missing = sorted(set(expected.lengths) ^ set(upload.arrays))
    if missing:
        return f"keys differ from the method's: {', '.join(missing)}"
    for key, length in expected.lengths.items():
        array = upload.arrays[key]
        if array.shape != (length,):
            return f"{key} has shape {tuple(array.shape)}, expected ({length},)"
        if not np.isfinite(array).all():
            return f"{key} holds {int((~np.isfinite(array)).sum())} non-finite values"
        largest = float(np.abs(array).max(initial=0.0))
        if largest > LARGEST_ENTRY:
            return f"{key} holds a value of {largest:.3g}, above {LARGEST_ENTRY:.0e}"
    if upload.active is not None and upload.active.shape != expected.unit_sizes.shape:
        return f"active mask has {upload.active.size} units, expected {len(expected.unit_sizes)}"
    return None


def partial_sum(uploads: Sequence[Upload], reducer: Reducer) -> Partial:
    """Judge and sum one group of uploads, in the order given (ascending client)."""
    sizes = reducer.expected.unit_sizes
    total = Partial(sums={}, weights={}, unit_weight=np.zeros(len(sizes)))
    for upload in uploads:
        reason = judge(upload, reducer.expected)
        if reason is not None:
            total.refused[upload.client] = reason
            continue
        weight = reducer.weight(upload)
        unit_weight = reducer.unit_weight(upload, weight)
        for key, array in reducer.contribution(upload).items():
            term = array.astype(np.float64)
            if key == "shared":
                alike = np.ndim(unit_weight) == 0
                term *= unit_weight if alike else np.repeat(unit_weight, sizes)
            else:
                share = 1.0 if key in reducer.method.plain_mean else weight
                term *= share
                total.weights[key] = total.weights.get(key, 0.0) + share
            if key in total.sums:
                total.sums[key] += term
            else:
                total.sums[key] = term
        total.unit_weight += unit_weight
        total.clients.append(upload.client)
    return total


def combine(partials: Sequence[Partial]) -> Partial:
    """Add group sums, in the order given."""
    first, *rest = partials
    for other in rest:
        for key, array in other.sums.items():
            first.sums[key] = first.sums[key] + array if key in first.sums else array
        for key, weight in other.weights.items():
            first.weights[key] = first.weights.get(key, 0.0) + weight
        first.unit_weight = first.unit_weight + other.unit_weight
        first.clients += other.clients
        first.refused |= other.refused
    return first


def groups(clients: Sequence[int]) -> list[list[int]]:
    """Positions of a cohort in groups of at most ``FAN_IN``, in order."""
    positions = list(range(len(clients)))
    return [positions[i : i + FAN_IN] for i in range(0, len(positions), FAN_IN)]


def finish(total: Partial, before: Arrays, expected: Expected) -> tuple[Arrays, np.ndarray]:
    """Divide by the weights; a unit that nobody trained keeps its value from ``before``.

    Returns:
        The mean by key (``"shared"`` and what was uploaded in float32, what a method added to it
        in float64), and [U] bool, which units somebody trained.
    """
    trained = total.unit_weight > 0
    mean: Arrays = {}
    for key, sums in total.sums.items():
        if key != "shared":
            dtype = np.float32 if key in expected.lengths else np.float64
            mean[key] = (sums / total.weights[key]).astype(dtype)
            continue
        divisor = np.repeat(np.where(trained, total.unit_weight, 1.0), expected.unit_sizes)
        kept = np.repeat(~trained, expected.unit_sizes)
        mean[key] = np.where(kept, before[key], sums / divisor).astype(np.float32)
    return mean, trained
