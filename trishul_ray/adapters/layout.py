"""The flat vector of all trainables of a client, and its units of aggregation.

The order is: cores grouped by rank, the scalars of core heads, other adapter tensors, and
parameters of the model itself. All cores of one rank are adjacent, so one view [n, r, r] covers
them without a copy; the proximal map operates on this view after every local step.

Legend: P length of the vector, W length of its uploaded part, n core heads of one rank over all
layers, r rank, h heads of a layer, k clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Prefix of parameters of the model itself, ``head:<parameter>``: the classification head's
#: parameters or, in full fine-tuning, all parameters.
HEAD_PREFIX = "head:"

Kind = Literal["core", "scale", "adapter", "classifier"]

#: Order of the kinds in the vector.
_ORDER: tuple[Kind, ...] = ("core", "scale", "adapter", "classifier")


@dataclass(frozen=True)
class Entry:
    """A trainable tensor in the vector.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        offset: Position of its first element in the vector.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def kind(self) -> Kind:
        """``core`` [h, r, r], ``scale`` [h], another ``adapter`` tensor, or ``classifier``."""
        return _kind(self.name)


@dataclass(frozen=True)
class Unit:
    """A part of the vector that is trained and averaged as one: a core head or a whole tensor.

    Attributes:
        tensor: Name of the tensor that contains the unit.
        kind: Kind of the tensor.
        span: Positions in the vector [P].
        wire: Positions in the uploaded vector [W].
        rank: r of a core head [r, r]; None for a whole tensor.
        scalar: Position in the vector of the core head's scalar; None without a trained scalar.
    """

    tensor: str
    kind: Kind
    span: slice
    wire: slice
    rank: int | None = None
    scalar: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.span.stop - self.span.start)


def _kind(name: str) -> Kind:
    if name.startswith(HEAD_PREFIX):
        return "classifier"
    suffix = name.rpartition(".")[2]
    return suffix if suffix in ("core", "scale") else "adapter"  # type: ignore[return-value]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and positions of the tensors in a flat vector; created by :meth:`of`.

    Attributes:
        entries: The tensors, in the order of the vector.

    Example:
        >>> layout = Layout.of([("q.lora_B", (4, 2)), ("v.core", (3, 2, 2))])
        >>> [(entry.name, entry.offset) for entry in layout.entries]
        [('v.core', 0), ('q.lora_B', 12)]
        >>> layout.size
        20
        >>> layout.views(torch.zeros(20))["v.core"].shape
        torch.Size([3, 2, 2])
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
        """Create a layout of the given tensors; tensors of one kind keep their order.

        Args:
            shapes: Pairs of name and shape.

        Returns:
            The layout.

        Raises:
            InputError: A name is repeated.
        """
        named = list(shapes)
        names = [name for name, _ in named]
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise InputError(f"layout: repeated names: {', '.join(repeated)}")
        ranks = list(dict.fromkeys(shape[-1] for name, shape in named if _kind(name) == "core"))

        def position(item: tuple[str, tuple[int, ...]]) -> tuple[int, int]:
            kind = _kind(item[0])
            return _ORDER.index(kind), ranks.index(item[1][-1]) if kind == "core" else 0

        entries, offset = [], 0
        for name, shape in sorted(named, key=position):  # stable
            entries.append(Entry(name, tuple(shape), offset))
            offset += math.prod(shape)
        return cls(tuple(entries))

    @cached_property
    def size(self) -> int:
        """P, the length of the vector."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    def entry(self, name: str) -> Entry:
        """Return the entry of a tensor.

        Args:
            name: Name of the tensor.

        Raises:
            KeyError: The layout has no such tensor.
        """
        return self._by_name[name]

    def units(self, names: Iterable[str]) -> Iterator[Unit]:
        """Iterate over the units of the uploaded tensors, in the order of the upload.

        Args:
            names: Names of the uploaded tensors.

        Yields:
            One unit per head of a core, and one per other tensor.
        """
        sent = 0
        for entry in map(self.entry, names):
            count, rank, scale = 1, None, None
            if entry.kind == "core":
                count, rank, _ = entry.shape
                scale = self._by_name.get(entry.name.removesuffix("core") + "scale")
            size = entry.numel // max(count, 1)
            for index in range(count):
                first = entry.offset + index * size
                yield Unit(
                    tensor=entry.name,
                    kind=entry.kind,
                    span=slice(first, first + size),
                    wire=slice(sent, sent + size),
                    rank=rank,
                    scalar=None if scale is None else scale.offset + index,
                )
                sent += size

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Split a vector into its tensors.

        Args:
            vector: [P], or the vectors of several clients [k, P].

        Returns:
            Views that write through to ``vector``, keyed by name; of several clients, [k, ...].

        Raises:
            InputError: The last axis of the vector is not P.
        """
        self._check(vector[0] if vector.dim() == 2 else vector)
        clients = vector.shape[:-1]
        return {
            e.name: vector.narrow(-1, e.offset, e.numel).view((*clients, *e.shape))
            for e in self.entries
        }

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors into a new vector.

        Args:
            tensors: All tensors of the layout, keyed by name.

        Returns:
            [P] float32.

        Raises:
            InputError: A name is missing or unknown, or a shape is wrong.
        """
        differing = sorted(set(tensors) ^ set(self._by_name))
        if differing:
            raise InputError(f"layout: missing or unknown names: {', '.join(differing)}")
        for entry in self.entries:
            if tuple(tensors[entry.name].shape) != entry.shape:
                raise InputError(
                    f"layout: {entry.name} has shape {tuple(tensors[entry.name].shape)}, "
                    f"expected {entry.shape}"
                )
        if not self.entries:
            return torch.empty(0)
        return torch.cat([tensors[e.name].detach().float().reshape(-1) for e in self.entries])

    @cached_property
    def _heads_by_rank(self) -> dict[int, int]:
        heads: dict[int, int] = {}
        for entry in self.entries:
            if entry.kind == "core":
                heads[entry.shape[-1]] = heads.get(entry.shape[-1], 0) + entry.shape[0]
        return heads

    def core_banks(self, vector: Tensor) -> list[Tensor]:
        """Return the cores of each rank as one stacked view.

        Args:
            vector: [P].

        Returns:
            Views [n, r, r] into ``vector``, with the core heads in the order of the vector and of
            :meth:`units`.

        Raises:
            InputError: The vector is not [P].
        """
        self._check(vector)
        banks, end = [], 0
        for rank, heads in self._heads_by_rank.items():
            start, end = end, end + heads * rank * rank
            banks.append(vector[start:end].view(heads, rank, rank))
        return banks

    @cached_property
    def scalars(self) -> slice:
        """Positions of all scalars of core heads in the vector; they are adjacent."""
        entries = [entry for entry in self.entries if entry.kind == "scale"]
        first = entries[0].offset if entries else 0
        return slice(first, first + sum(entry.numel for entry in entries))

    def _check(self, vector: Tensor) -> None:
        if vector.shape != (self.size,):
            raise InputError(
                f"layout: vector has shape {tuple(vector.shape)}, expected ({self.size},)"
            )
