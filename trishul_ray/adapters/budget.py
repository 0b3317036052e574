"""Parameter budgets: a LoRA rank per matrix, and the rank of each method that costs the same.

A budget of LoRA rank L allows ``N = L (d_in + d_out)`` trainable entries on a matrix. Matching
sets r = L for LoRA, r = N / d_out with A frozen (FFA-LoRA), r = sqrt(N) for a single core (Fed-SB)
and r = sqrt(N / h) for h cores (RAVAN, section 4.3), rounded down. The published ranks come from
768 x 768 and are used by RAVAN and TRISHUL on every backbone; only there are they matched.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.errors import InputError

#: matched: equal parameters on each matrix. published: the ranks that are matched for 768 x 768.
Matching = Literal["matched", "published"]

#: The matrix for which the published ranks are computed.
REFERENCE = LayerSpec("reference", "reference", 768, 768)


@dataclass(frozen=True)
class Counts:
    """Trainable parameters of a client: matrix entries, scalars, classification head."""

    adapter: int
    scalars: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.adapter + self.scalars + self.head


def lora_rank_budget(spec: LayerSpec, lora_rank: int) -> int:
    """N, the trainable entries that LoRA of this rank has on the matrix."""
    return lora_rank * (spec.d_in + spec.d_out)


def multihead_rank(
    spec: LayerSpec, lora_rank: int, heads: int, matching: Matching = "matched"
) -> int:
    """Rank of each of ``heads`` cores within the budget, ``floor(sqrt(N / heads))``.

    Raises:
        InputError: the budget is too small for one entry per head.
    """
    rank = math.isqrt(lora_rank_budget(_counted(spec, matching), lora_rank) // heads)
    if rank < 1:
        raise InputError(
            f"budget={lora_rank} gives {spec.name} ({spec.d_out}x{spec.d_in}) fewer entries than "
            f"adapter.heads={heads}: take fewer heads or a larger budget"
        )
    return rank


def ffa_rank(spec: LayerSpec, lora_rank: int, matching: Matching = "matched") -> int:
    """Rank of LoRA with A frozen within the budget, ``floor(N / d_out)``."""
    counted = _counted(spec, matching)
    return lora_rank_budget(counted, lora_rank) // counted.d_out


def fed_sb_rank(spec: LayerSpec, lora_rank: int, matching: Matching = "matched") -> int:
    """Rank of a single square core within the budget, ``floor(sqrt(N))``."""
    return multihead_rank(spec, lora_rank, 1, matching)


def check_heads_fit(
    spec: LayerSpec, heads: int, rank: int, lora_rank: int, matching: Matching = "matched"
) -> None:
    """Refuse heads that cannot be mutually orthogonal on a layer.

    Raises:
        InputError: heads x rank exceeds the smaller width; the message says what would fit.
    """
    width = min(spec.d_out, spec.d_in)
    if heads * rank <= width:
        return
    raise InputError(
        f"adapter.heads x rank = {heads} x {rank} = {heads * rank} exceeds the width {width} of "
        f"{spec.name} ({spec.d_out}x{spec.d_in}), so the heads cannot be orthogonal; "
        f"{_what_fits(spec, heads, rank, lora_rank, matching, width)}"
    )


def _what_fits(
    spec: LayerSpec, heads: int, rank: int, lora_rank: int, matching: Matching, width: int
) -> str:
    options = []
    if width // rank >= 1:
        options.append(f"adapter.heads<={width // rank} at rank {rank}")
    if width // heads >= 1:
        options.append(f"adapter.rank<={width // heads}")
    budget = largest_budget(spec, heads, matching)
    if 1 <= budget < lora_rank:
        options.append(f"budget<={budget}")
    options.append("adapter.overflow=independent")
    return "use " + " or ".join(options)


def largest_budget(spec: LayerSpec, heads: int, matching: Matching = "matched") -> int:
    """The largest LoRA-rank budget whose heads fit on the layer orthogonally; 0 if none does."""
    widest = min(spec.d_out, spec.d_in) // heads  # the largest rank that fits
    # floor(sqrt(N / heads)) <= widest  <=>  N < heads (widest + 1)^2
    counted = _counted(spec, matching)
    return (heads * (widest + 1) ** 2 - 1) // lora_rank_budget(counted, 1) if widest else 0


def count_parameters(
    adapters: Mapping[str, LayerAdapter], specs: Sequence[LayerSpec], head: int = 0
) -> Counts:
    """Trainable parameters of the adapters on their layers, and of a head of ``head`` numbers.

    Raises:
        KeyError: an adapter stands on a layer that is not among ``specs``.
    """
    by_name = {spec.name: spec for spec in specs}
    pairs = [(adapter, by_name[name]) for name, adapter in adapters.items()]
    return Counts(
        adapter=sum(adapter.num_parameters(spec) for adapter, spec in pairs),
        scalars=sum(adapter.num_scalars(spec) for adapter, spec in pairs),
        head=head,
    )


def _counted(spec: LayerSpec, matching: Matching) -> LayerSpec:
    if matching not in ("matched", "published"):
        raise InputError(f"adapter.matching={matching!r}: must be 'matched' or 'published'")
    return REFERENCE if matching == "published" else spec
