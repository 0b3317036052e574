"""Validate uploads and average them unit by unit.

``H_u <- sum_c w_c m_cu X_cu / sum_c w_c m_cu`` for every unit u (one core head, or one whole
tensor), over the clients that trained it (eq. server_aggregation). Sums run in float64 over clients
in ascending order, in groups of ``FAN_IN`` whose sums are then added in order. This tree depends on
the cohort alone, so the bytes do not depend on the number of workers. Nothing here needs Ray.

Legend: W entries of the shared part, U units, m clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trishul_ray.adapters.layout import Layout
from trishul_ray.federation.messages import Arrays, Expected, Upload, as_tensors
from trishul_ray.methods.base import Method

#: Uploads summed by one worker. A round of no more uploads is reduced on the server.
FAN_IN = 16

#: Uploads with a larger entry are refused: a float32 sum would soon overflow.
LARGEST_ENTRY = 1e12


@dataclass(frozen=True)
class Reducer:
    """How a method's uploads are validated, weighted and summed; can be pickled to any worker."""

    method: Method
    layout: Layout
    weighting: str
    expected: Expected

    def configured_weight(self, upload: Upload) -> float:
        """Return the weight of an upload by ``federation.weighting``."""
        return float(upload.rows) if self.weighting == "size" else 1.0

    def weight(self, upload: Upload) -> float:
        """Return w_c, the method's weight of an upload."""
        weight = self.configured_weight(upload)
        return self.method.weight(as_tensors(upload.arrays), self.layout, weight)

    def unit_weight(self, upload: Upload, weight: float) -> np.ndarray | float:
        """Return w_c m_cu of an upload's units, [U] float64, or one number if all are equal."""
        if self.method.weighs_classifier:
            return weight if upload.active is None else weight * upload.active
        units = self.layout.units(self.method.wire(self.layout))
        in_classifier = np.array([unit.kind == "classifier" for unit in units], dtype=bool)
        weights = np.where(in_classifier, self.configured_weight(upload), weight)
        return weights if upload.active is None else weights * upload.active

    def contribution(self, upload: Upload) -> Arrays:
        """Return what of an upload is averaged."""
        state = self.method.contribution(as_tensors(upload.arrays), self.layout)
        return {key: value.numpy() for key, value in state.items()}


@dataclass
class Partial:
    """The running sum of a group of uploads."""

    sums: Arrays  # float64, weighted
    weights: dict[str, float]  # by key but "shared": sum of w_c, or the count for a plain mean
    unit_weight: np.ndarray  # [U] float64, sum of w_c m_cu
    clients: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)  # the reason, by client


def unit_sizes(layout: Layout, wire: Sequence[str]) -> np.ndarray:
    """Return the number of entries of each unit, [U] int64."""
    return np.array([unit.size for unit in layout.units(wire)], dtype=np.int64)


def round_units(method: Method, layout: Layout, round_number: int) -> np.ndarray | None:
    """Return the units that clients train and send in a round, [U] bool; None if all.

    Raises:
        ValueError: The method names tensors that are not on its wire.
    """
    wire, names = method.wire(layout), set(method.round_wire(layout, round_number))
    if unknown := sorted(names - set(wire)):
        raise ValueError(f"round_wire() of {type(method).__name__}: not in wire(): {unknown}")
    if len(names) == len(wire):
        return None
    return np.array([unit.tensor in names for unit in layout.units(wire)], dtype=bool)


def rejection_reason(upload: Upload, expected: Expected) -> str | None:
    """Return why an upload must not be added, or None if it is valid."""
    differing = sorted(set(expected.lengths) ^ set(upload.arrays))
    if differing:
        return f"keys differ from the method's: {', '.join(differing)}"
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
    """Validate and sum one group of uploads, in the order given (ascending client)."""
    sizes = reducer.expected.unit_sizes
    total = Partial(sums={}, weights={}, unit_weight=np.zeros(len(sizes)))
    for upload in uploads:
        reason = rejection_reason(upload, reducer.expected)
        if reason is not None:
            total.refused[upload.client] = reason
            continue
        weight = reducer.weight(upload)
        unit_weight = reducer.unit_weight(upload, weight)
        for key, array in reducer.contribution(upload).items():
            term = array.astype(np.float64)
            if key == "shared":
                equal = np.ndim(unit_weight) == 0
                term *= unit_weight if equal else np.repeat(unit_weight, sizes)
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
    """Add the sums of groups, in the order given."""
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
    """Divide the positions of a cohort into groups of at most ``FAN_IN``, in order."""
    positions = list(range(len(clients)))
    return [positions[i : i + FAN_IN] for i in range(0, len(positions), FAN_IN)]


def finish(total: Partial, before: Arrays, expected: Expected) -> tuple[Arrays, np.ndarray]:
    """Divide the sums by the weights; a unit that no client trained keeps its old value.

    Returns:
        The mean by key (uploaded keys in float32, keys that the method added in float64), and [U]
        bool, the units that at least one client trained.
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
