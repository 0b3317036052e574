"""Validate uploads and average them per unit.

``H_u <- sum_c w_c m_cu X_cu / sum_c w_c m_cu`` for every unit u (one core head, or one whole
tensor), over the clients that trained it (eq. server_aggregation). Sums are computed in float64
over clients in ascending order, in groups of ``FAN_IN`` whose sums are then added in order. This
tree depends only on the cohort, so the bytes do not depend on the number of workers. This module
does not need Ray.

Legend: W entries of the shared part, U units, m clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trishul_ray.adapters.layout import Layout
from trishul_ray.federation.messages import Expected, Upload, as_tensor, to_array
from trishul_ray.methods.base import Method
from trishul_ray.methods.base.messages import State
from trishul_ray.stages import ArrayState, Partial

#: Number of uploads that one worker sums. The server sums rounds of at most this many uploads.
FAN_IN = 16

#: Uploads with a larger entry are rejected: a float32 sum would soon overflow.
LARGEST_ENTRY = 1e12


def configured_weight(weighting: str, upload: Upload) -> float:
    """Return the weight of an upload according to ``federation.weighting``."""
    return float({"size": upload.rows, "tokens": upload.tokens}.get(weighting, 1))


@dataclass(frozen=True)
class Reducer:
    """Validate, weight and sum a method's uploads; it can be pickled to any worker.

    Without ``expected``, uploads are responses to a survey, summed without weights.
    """

    method: Method
    layout: Layout
    weighting: str
    expected: Expected | None

    def weight(self, upload: Upload) -> float:
        """Return w_c, the method's weight of an upload."""
        if self.expected is None:
            return 1.0
        weight = configured_weight(self.weighting, upload)
        return self.method.weight(upload.arrays.map(as_tensor), self.layout, weight)

    def unit_weight(self, upload: Upload, weight: float) -> np.ndarray | float:
        """Return w_c m_cu of an upload's units, [U] float64, or one number if all are equal."""
        if self.expected is None:
            return 0.0
        if self.method.weighs_classifier:
            return weight if upload.active is None else weight * upload.active
        units = self.layout.units(self.method.wire(self.layout))
        in_classifier = np.array([unit.kind == "classifier" for unit in units], dtype=bool)
        weights = np.where(in_classifier, configured_weight(self.weighting, upload), weight)
        return weights if upload.active is None else weights * upload.active

    def contribution(self, upload: Upload) -> ArrayState:
        """Return the tensors of an upload to average."""
        if self.expected is None:
            return upload.arrays
        state = self.method.contribution(upload.arrays.map(as_tensor), self.layout)
        return state.map(to_array)

    def term(self, upload: Upload, weight: float, unit_weight: np.ndarray | float) -> ArrayState:
        """Return the tensors of an upload to sum: its weighted contribution, in float64."""

        def scaled(array: np.ndarray, by: np.ndarray | float) -> np.ndarray:
            product: np.ndarray = array.astype(np.float64) * by
            return product

        found, by_entry, plain = self.contribution(upload), unit_weight, self.method.plain_mean
        if self.expected is not None and np.ndim(unit_weight):
            by_entry = np.repeat(unit_weight, self.expected.unit_sizes)
        return State(
            scaled(found.shared, by_entry),
            {n: scaled(a, 1.0 if n in plain else weight) for n, a in found.extra.items()},
            {layer: scaled(a, weight) for layer, a in found.base.items()},
        )


def unit_sizes(layout: Layout, wire: Sequence[str]) -> np.ndarray:
    """Return the number of entries of each unit, [U] int64."""
    return np.array([unit.size for unit in layout.units(wire)], dtype=np.int64)


def round_units(method: Method, layout: Layout, round_number: int) -> np.ndarray | None:
    """Return the units that clients train and send in a round, [U] bool; None means all.

    Raises:
        ValueError: The method returns names that are not in :meth:`Method.wire`.
    """
    wire, names = method.wire(layout), set(method.round_wire(layout, round_number))
    if unknown := sorted(names - set(wire)):
        raise ValueError(f"round_wire() of {type(method).__name__}: not in wire(): {unknown}")
    if len(names) == len(wire):
        return None
    return np.array([unit.tensor in names for unit in layout.units(wire)], dtype=bool)


def rejection_reason(upload: Upload, expected: Expected | None) -> str | None:
    """Return the reason to reject an upload, or None if it is valid; see :class:`Reducer`."""
    arrays = {"shared": upload.arrays.shared, **upload.arrays.extra}
    lengths = {} if expected is None else expected.lengths
    if expected is not None and (differing := sorted(lengths.keys() ^ arrays.keys())):
        return f"keys differ from the method's: {', '.join(differing)}"
    for key, array in arrays.items():
        if expected is not None and array.shape != (lengths[key],):
            return f"{key} has shape {tuple(array.shape)}, expected ({lengths[key]},)"
        if not np.isfinite(array).all():
            return f"{key} has {int((~np.isfinite(array)).sum())} non-finite values"
        largest = float(np.abs(array).max(initial=0.0))
        if largest > LARGEST_ENTRY:
            return f"{key} has a value of {largest:.3g}, above {LARGEST_ENTRY:.0e}"
    if expected is None:
        return None
    if upload.active is not None and upload.active.shape != expected.unit_sizes.shape:
        return f"active mask has {upload.active.size} units, expected {len(expected.unit_sizes)}"
    return None


def partial_sum(uploads: Sequence[Upload], reducer: Reducer) -> Partial:
    """Validate and sum one group of uploads, in the given order (ascending client)."""
    units = 0 if reducer.expected is None else len(reducer.expected.unit_sizes)
    total = Partial(None, 0.0, np.zeros(units), np.zeros(units, dtype=np.int64))
    for upload in uploads:
        if (reason := rejection_reason(upload, reducer.expected)) is not None:
            total.refused[upload.client] = reason
            continue
        weight = reducer.weight(upload)
        unit_weight = reducer.unit_weight(upload, weight)
        term = reducer.term(upload, weight, unit_weight)
        total.sums = term if total.sums is None else _add(total.sums, term)
        total.weight += weight
        total.unit_weight += unit_weight
        total.unit_clients += 1 if upload.active is None else upload.active
        total.clients.append(upload.client)
    return total


def _add(first: ArrayState, second: ArrayState) -> ArrayState:
    """Add contributions, into ``first`` if it is writable."""

    def added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total: np.ndarray = np.add(a, b, out=a if a.flags.writeable else None)
        return total

    return State(
        added(first.shared, second.shared),
        {name: added(array, second.extra[name]) for name, array in first.extra.items()},
        {layer: added(array, second.base[layer]) for layer, array in first.base.items()},
    )


def combine(partials: Sequence[Partial]) -> Partial:
    """Add the sums of groups, in the given order."""
    first, *rest = partials
    for other in rest:
        if first.sums is None or other.sums is None:
            first.sums = first.sums or other.sums
        else:
            first.sums = _add(first.sums, other.sums)
        first.weight += other.weight
        first.unit_weight = first.unit_weight + other.unit_weight
        first.unit_clients = first.unit_clients + other.unit_clients
        first.clients += other.clients
        first.refused |= other.refused
    return first


def groups(cohort: Sequence[object]) -> list[list[int]]:
    """Divide the positions of a cohort into groups of at most ``FAN_IN``, in order."""
    positions = list(range(len(cohort)))
    return [positions[i : i + FAN_IN] for i in range(0, len(positions), FAN_IN)]


def sum_groups(uploads: Sequence[Upload], reducer: Reducer) -> list[Partial]:
    """Sum each group of uploads."""
    return [partial_sum([uploads[i] for i in group], reducer) for group in groups(uploads)]


def finish(total: Partial, before: ArrayState, reducer: Reducer) -> tuple[ArrayState, np.ndarray]:
    """Divide the sums by the weights; a unit that no client trained keeps its old value.

    Returns:
        The mean (uploaded tensors in float32, additional tensors of the method in float64), and [U]
        bool, the units whose sum has a positive weight.
    """
    assert total.sums is not None, "no upload is valid"
    trained, sums = total.unit_weight > 0, total.sums
    lengths = {} if reducer.expected is None else reducer.expected.lengths
    shared, plain = before.shared, reducer.method.plain_mean
    if reducer.expected is not None:
        sizes = reducer.expected.unit_sizes
        divisor = np.repeat(np.where(trained, total.unit_weight, 1.0), sizes)
        kept = np.repeat(~trained, sizes)
        shared = np.where(kept, shared, sums.shared / divisor).astype(np.float32)
    extra = {
        name: (array / (len(total.clients) if name in plain else total.weight)).astype(
            np.float32 if name in lengths else np.float64
        )
        for name, array in sums.extra.items()
    }
    base = {layer: array / total.weight for layer, array in sums.base.items()}
    return State(shared, extra, base), trained
