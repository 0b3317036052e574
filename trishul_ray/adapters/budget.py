"""Parameter budgets: a LoRA rank per matrix, and the rank of equal cost for each method.

A budget of LoRA rank L allows ``N = L (d_in + d_out)`` trainable entries on a matrix. Matching sets
r = L for LoRA, r = N / d_out with A frozen (FFA-LoRA), r = sqrt(N) for a single core (Fed-SB) and r
= sqrt(N / h) for h cores (RAVAN, section 4.3), rounded down. RAVAN and TRISHUL use the ranks that
match a 768 x 768 matrix on every backbone; on other widths these published ranks do not match.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.errors import InputError

#: matched: equal parameters on each matrix. published: the ranks that match a 768 x 768 matrix.
Matching = Literal["matched", "published"]

#: Matrix for which the published ranks are computed.
REFERENCE = LayerSpec("reference", "reference", 768, 768)


@dataclass(frozen=True)
class Counts:
    """Numbers of trainable adapter parameters: matrix entries, and scalars."""

    adapter: int
    scalars: int


def lora_rank_budget(spec: LayerSpec, lora_rank: int) -> int:
    """Return N, the number of trainable entries of LoRA with this rank on the matrix."""
    return lora_rank * (spec.d_in + spec.d_out)


def multihead_rank(
    spec: LayerSpec, lora_rank: int, heads: int, matching: Matching = "matched"
) -> int:
    """Return the rank of each of ``heads`` cores within the budget, ``floor(sqrt(N / heads))``.

    Raises:
        InputError: The budget is too small for one entry per head.
    """
    rank = math.isqrt(lora_rank_budget(_counted(spec, matching), lora_rank) // heads)
    if rank < 1:
        raise InputError(
            f"budget={lora_rank} gives {spec.name} ({spec.d_out}x{spec.d_in}) fewer entries than "
            f"adapter.heads={heads}: use fewer heads or a larger budget"
        )
    return rank


def ffa_rank(spec: LayerSpec, lora_rank: int, matching: Matching = "matched") -> int:
    """Return the rank of LoRA with A frozen within the budget, ``floor(N / d_out)``."""
    counted = _counted(spec, matching)
    return lora_rank_budget(counted, lora_rank) // counted.d_out


def fed_sb_rank(spec: LayerSpec, lora_rank: int, matching: Matching = "matched") -> int:
    """Return the rank of a single square core within the budget, ``floor(sqrt(N))``."""
    return multihead_rank(spec, lora_rank, 1, matching)


def check_heads_fit(spec: LayerSpec, heads: int, rank: int) -> None:
    """Check that the heads of a layer can be mutually orthogonal.

    Raises:
        InputError: heads x rank exceeds the smaller width.
    """
    width = min(spec.d_out, spec.d_in)
    if heads * rank > width:
        raise InputError(
            f"adapter.heads x rank = {heads} x {rank} = {heads * rank} exceeds the width {width} "
            f"of {spec.name} ({spec.d_out}x{spec.d_in}), so the heads cannot be orthogonal; use "
            f"adapter.rank<={width // heads}, fewer heads, a smaller budget, or "
            "adapter.overflow=independent"
        )


def count_parameters(adapters: Mapping[str, LayerAdapter], specs: Sequence[LayerSpec]) -> Counts:
    """Count the trainable parameters of the adapters, keyed by layer name.

    Raises:
        KeyError: The layer of an adapter is not in ``specs``.
    """
    by_name = {spec.name: spec for spec in specs}
    pairs = [(adapter, by_name[name]) for name, adapter in adapters.items()]
    return Counts(
        adapter=sum(adapter.num_parameters(spec) for adapter, spec in pairs),
        scalars=sum(adapter.num_scalars(spec) for adapter, spec in pairs),
    )


def _counted(spec: LayerSpec, matching: Matching) -> LayerSpec:
    return REFERENCE if matching == "published" else spec
