"""Names for the one flat vector that holds every trainable of a client.

Order: cores grouped by rank, then scales, then other adapter tensors, then the classification
head. All cores of one rank therefore lie side by side and are seen as one stack [n, r, r] without
a copy, which is what the proximal map works on after every step.

Legend: P length of the vector, n heads of one rank over all layers, r rank.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trishul_ray.errors import InputError

#: Entries of the classification head are named ``head:<parameter>``.
HEAD_PREFIX = "head:"


@dataclass(frozen=True)
class Entry:
    """One trainable tensor: its name, its shape and where it starts in the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BankMember:
    """One layer's heads inside a bank: the bank's rows ``first : first + heads``."""

    name: str
    first: int
    heads: int


@dataclass(frozen=True)
class CoreBank:
    """All cores of one rank: ``heads`` matrices [rank, rank] starting at ``offset``."""

    rank: int
    offset: int
    heads: int
    members: tuple[BankMember, ...]


def _kind(name: str) -> int:
    if name.startswith(HEAD_PREFIX):
        return 3
    return {"core": 0, "scale": 1}.get(name.rpartition(".")[2], 2)


@dataclass(frozen=True)
class Layout:
    """Ordered, named pieces of a flat vector. Build one with :meth:`of`."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> "Layout":
        """A layout of the given tensors; inside each group they keep the order given.

        Raises:
            InputError: a name stands twice.
        """
        named = list(shapes)
        names = [name for name, _ in named]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InputError(f"layout: names stand twice: {', '.join(twice)}")
        ranks: dict[int, int] = {}  # rank -> order of first appearance
        for name, shape in named:
            if _kind(name) == 0:
                ranks.setdefault(shape[-1], len(ranks))
        ordered = sorted(  # stable: equal keys keep the order given
            named, key=lambda item: (k := _kind(item[0]), ranks[item[1][-1]] if k == 0 else 0)
        )
        entries, offset = [], 0
        for name, shape in ordered:
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
        """The entry of that name.

        Raises:
            KeyError: there is none.
        """
        return self._by_name[name]

    def slice(self, name: str) -> slice:
        """Where a tensor lies in the vector."""
        entry = self.entry(name)
        return slice(entry.offset, entry.offset + entry.numel)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Every tensor by name, as views into ``vector`` [P]: writing to one writes to it.

        Raises:
            InputError: the vector's shape is not [P].
        """
        self._check(vector)
        return {e.name: vector.narrow(0, e.offset, e.numel).view(e.shape) for e in self.entries}

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors of all names in one new float32 vector [P].

        Raises:
            InputError: a name is missing, unknown, or of another shape.
        """
        wrong = sorted(set(tensors) ^ set(self._by_name))
        if wrong:
            raise InputError(f"layout: names differ from the layout's: {', '.join(wrong)}")
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
    def banks(self) -> tuple[CoreBank, ...]:
        """The cores grouped by rank, in the vector's order."""
        groups: dict[int, list[Entry]] = {}
        for entry in self.entries:
            if _kind(entry.name) == 0:
                groups.setdefault(entry.shape[-1], []).append(entry)
        banks = []
        for rank, cores in groups.items():
            members, first = [], 0
            for core in cores:
                members.append(BankMember(core.name, first, core.shape[0]))
                first += core.shape[0]
            banks.append(CoreBank(rank, cores[0].offset, first, tuple(members)))
        return tuple(banks)

    def core_banks(self, vector: Tensor) -> list[Tensor]:
        """All cores of each rank as one stacked view [n, r, r] into ``vector`` [P].

        The banks come in the order of :attr:`banks`, which also says whose heads they hold.
        """
        self._check(vector)
        return [
            vector.narrow(0, b.offset, b.heads * b.rank * b.rank).view(b.heads, b.rank, b.rank)
            for b in self.banks
        ]

    def fingerprint(self) -> str:
        """A hash of all names and shapes: equal layouts, equal fingerprints."""
        text = json.dumps([[e.name, list(e.shape)] for e in self.entries])
        return hashlib.sha256(text.encode()).hexdigest()

    def _check(self, vector: Tensor) -> None:
        if vector.shape != (self.size,):
            raise InputError(
                f"layout: vector has shape {tuple(vector.shape)}, expected ({self.size},)"
            )
