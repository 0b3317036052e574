"""skeleton: a core whose spectrum was cut is sent as some of its columns and how they combine.

A core X [r, r] of rank k is ``X = X[:, J] [I T]``, up to the order of columns, where J are k
columns that a QR decomposition with column pivoting chooses (Golub and Van Loan, "Matrix
Computations", 2013, section 5.4.2; an interpolative decomposition). That is ``k r + k (r - k)``
numbers, ``(r - k)^2`` fewer than X for every k < r; singular vectors are ``k (2 r + 1)`` numbers,
which is less than r^2 only for k up to about r / 2.

The rank is the smallest k whose remainder, the norm of the rows of R after the first k, is at most
``tolerance ||X||_F``: rounding of float32. X is the change or the core itself, whichever is smaller
for a core; the receiver knows the core that was broadcast. (TRISHUL cuts the
core, or with ``method.prox_on=change`` its change. A trained scalar s makes ``s H`` minus the
broadcast a matrix of full rank again: the latter needs ``method.scalars=fixed``.) A core of full
rank is sent as it is, and so are other tensors.

With ``threshold``, singular values of the change up to it are left out first: the squared error of
a core is the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from trishul_ray.lab.codecs.base import Codec, Units, register_codec
from trishul_ray.runtime.lazy import scipy

#: Added to the rank of a core that is sent itself, in place of its change.
_ITSELF = 2**15


@register_codec("skeleton")
class Skeleton(Codec):
    """Send the columns that span a core, and the rest in terms of them."""

    fields_read = frozenset({"tolerance", "threshold"})

    def pack(
        self, values: np.ndarray, units: Units, known: np.ndarray, rng: np.random.Generator
    ) -> bytes:
        """Return the ranks of cores, two bytes each, then the parts of the units in order."""
        ranks, parts = [], []
        with _one_thread():
            for span, rank in _spans(units):
                if rank:
                    shape = (rank, rank)
                    code, part = self._core(values[span].reshape(shape), known[span].reshape(shape))
                    ranks.append(code)
                else:
                    part = values[span].astype("<f4").tobytes()
                parts.append(part)
        return b"".join([np.array(ranks, dtype="<u2").tobytes(), *parts])

    def unpack(self, body: bytes, units: Units, known: np.ndarray) -> np.ndarray:
        """Return cores from their columns, and other tensors as they are."""
        found = np.empty(units.length, dtype=np.float32)
        codes = iter(self._codes(body, units))
        place = 2 * int((units.ranks > 0).sum())
        for span, rank in _spans(units):
            code = int(next(codes)) if rank else 0
            itself, kept = divmod(code, _ITSELF)
            if not rank or kept == rank:
                size = 4 * (span.stop - span.start)
                found[span] = np.frombuffer(body[place : place + size], dtype="<f4")
            else:
                size = min(_place_bytes(kept, rank)) + 4 * kept * (2 * rank - kept)
                with _one_thread():
                    core = _rebuilt(body[place : place + size], kept, rank).ravel()
                found[span] = core - known[span] if itself else core
            place += size
        return found

    def bound(self, values: np.ndarray, units: Units, known: np.ndarray) -> np.ndarray:
        """Return twice the tolerance of the larger norm, and the norm of what is left out."""
        found = np.zeros(units.length)
        for span, rank in _spans(units):
            if rank:
                change = values[span].astype(np.float64)
                core = change + known[span]
                largest = max(np.linalg.norm(change), np.linalg.norm(core))
                cut = change.reshape(rank, rank) - self._cut(change.reshape(rank, rank))
                found[span] = 2 * self.fields.tolerance * largest + np.linalg.norm(cut)
        return found

    def metrics(self, payload: bytes, units: Units) -> dict[str, float]:
        """Return the mean rank of all cores: r where one is sent as it is, 0 where none is sent."""
        chosen, body = self.opened(payload, units)
        cores = int((units.ranks > 0).sum())
        ranks = self._codes(body, units.some(chosen)) % _ITSELF
        return {"codec_rank": float(ranks.sum()) / cores} if cores else {}

    def _codes(self, body: bytes, units: Units) -> np.ndarray:
        return np.frombuffer(body, dtype="<u2", count=int((units.ranks > 0).sum()))

    def _cut(self, change: np.ndarray) -> np.ndarray:
        """Return a change [r, r], float64, without its singular values up to the threshold."""
        if self.fields.threshold == 0:
            return change
        left, sizes, right = np.linalg.svd(change)
        kept = sizes > self.fields.threshold
        cut: np.ndarray = (left[:, kept] * sizes[kept]) @ right[kept]
        return cut

    def _core(self, change: np.ndarray, known: np.ndarray) -> tuple[int, bytes]:
        """Return the code of a core's rank, and its smallest part."""
        target = self._cut(change.astype(np.float64))
        found = [(len(target), target.astype("<f4").tobytes())]
        for code, core in ((0, target), (_ITSELF, target + known)):
            if (code == 0 or known.any()) and (skeleton := self._skeleton(core)) is not None:
                found.append((code + skeleton[0], skeleton[1]))
        return min(found, key=lambda each: len(each[1]))

    def _skeleton(self, core: np.ndarray) -> tuple[int, bytes] | None:
        """Return the rank k of a core [r, r] and its skeleton; None if it has full rank."""
        rank, norm = len(core), np.linalg.norm(core)
        upper, order = scipy.linalg.qr(core, mode="r", pivoting=True)
        # The remainder after k columns is what R has below row k.
        remainders = np.sqrt(np.cumsum(np.square(upper).sum(axis=1)[::-1])[::-1])
        kept = int((remainders > self.fields.tolerance * norm).sum())
        if kept == rank:
            return None
        combine = scipy.linalg.solve_triangular(upper[:kept, :kept], upper[:kept, kept:])
        combine = combine[np.argsort(order[:kept])][:, np.argsort(order[kept:])]
        chosen = np.sort(order[:kept])
        part = b"".join(
            [
                _places(chosen, rank),
                core[:, chosen].astype("<f4").tobytes(),
                combine.astype("<f4").tobytes(),
            ]
        )
        # Pivoting by columns can, in theory, make T so large that its rounding is visible.
        error = np.linalg.norm(_rebuilt(part, kept, rank) - core)
        return (kept, part) if error <= 2 * self.fields.tolerance * norm else None


@cache
def _blas() -> Any:
    assert scipy.linalg.qr  # what is not loaded yet is not found
    return ThreadpoolController()


def _one_thread() -> Any:
    """Let the BLAS of NumPy and SciPy use one thread inside: more change the last bits.

    ``resources.threads`` are torch's.
    """
    return _blas().limit(limits=1, user_api="blas")


def _spans(units: Units) -> Iterator[tuple[slice, int]]:
    """Iterate over the entries and the ranks of units."""
    for start, size, rank in zip(units.starts, units.sizes, units.ranks, strict=True):
        yield slice(int(start), int(start + size)), int(rank)


def _place_bytes(kept: int, rank: int) -> tuple[int, int, int]:
    """Return the bytes of a list of the k columns, of one of the others, and of a bitmap."""
    width = 1 if rank <= 256 else 2
    return width * kept, width * (rank - kept), -(-rank // 8)


def _places(chosen: np.ndarray, rank: int) -> bytes:
    """Return which of ``rank`` columns are chosen, in the form that takes fewest bytes."""
    mask = np.zeros(rank, dtype=bool)
    mask[chosen] = True
    sizes = _place_bytes(len(chosen), rank)
    form = sizes.index(min(sizes))
    if form == 2:
        return np.packbits(mask).tobytes()
    return np.flatnonzero(mask == (form == 0)).astype("<u1" if rank <= 256 else "<u2").tobytes()


def _rebuilt(part: bytes, kept: int, rank: int) -> np.ndarray:
    """Return the core [r, r] of a skeleton, float64."""
    sizes = _place_bytes(kept, rank)
    head, form = part[: min(sizes)], sizes.index(min(sizes))
    if form == 2:
        mask = np.unpackbits(np.frombuffer(head, dtype=np.uint8), count=rank).astype(bool)
    else:
        mask = np.full(rank, form == 1)
        mask[np.frombuffer(head, dtype="<u1" if rank <= 256 else "<u2")] = form == 0
    numbers = np.frombuffer(part[len(head) :], dtype="<f4").astype(np.float64)
    columns, combine = numbers[: rank * kept].reshape(rank, kept), numbers[rank * kept :]
    core = np.empty((rank, rank))
    core[:, mask] = columns
    core[:, ~mask] = columns @ combine.reshape(kept, rank - kept)
    return core
