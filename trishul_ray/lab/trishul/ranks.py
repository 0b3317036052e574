"""Core heads of different ranks, and clients of limited compute that train a part of each core.

``method.ranks_by=block``: every block has the same number of heads, whose ranks are water-filled,
of equal parameters. ``method.ranks_by=head``: ranks are halved from head to head of a matrix (our
own).
``method.limits=ranks``: a limited client trains the leading rows and columns of every core, and
each entry is averaged over the clients that hold it (as raFLoRA does with factors of LoRA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.layout import Layout
from trishul_ray.config.fields import COMPUTE_LEVELS
from trishul_ray.lab.trishul.allocation import (
    geometric_ranks,
    rank_step,
    round_ranks,
    water_fill_ranks,
)
from trishul_ray.lab.trishul.limited import (
    average_leading,
    leading_entries,
    leading_rank,
    level_of,
)
from trishul_ray.methods.base import Settings, register
from trishul_ray.methods.messages import LocalRun, Round, Site, State, Tensors
from trishul_ray.methods.ravan import Ravan, RavanConfig
from trishul_ray.methods.trishul import Stack, Trishul, TrishulConfig
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class LimitedConfig(RavanConfig):
    """Hyper-parameters of RAVAN whose limited clients train a part of every core."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        self.reject_unused(("head_fraction", "selection"), f"with method={self.name!r}")
        return self


class Limited(Ravan):
    """Let a limited client train the leading part of every core."""

    reference = "this project; raFLoRA, arXiv 2602.13486"
    mean_is_enough = False
    #: Whether a limited client trains the leading part of every core, or some of the cores.
    limits_ranks: bool = True

    def choose(self, run: LocalRun) -> Tensor:
        """Choose the leading entries of all cores, if ranks are limited."""
        if not self.limits_ranks:
            return super().choose(run)
        units = list(run.layout.units(self.wire(run.layout)))
        active = torch.ones(len(units), dtype=torch.bool) if run.active is None else run.active
        run.entries = leading_entries(run.layout, run.vector, run.capacity)
        run.unsent = sum(
            unit.rank**2 - leading_rank(unit.rank, run.capacity) ** 2
            for unit, trained in zip(units, active.tolist(), strict=True)
            if trained and unit.rank is not None
        )
        return active

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send which share of each core was trained."""
        sent, memory = super().upload(run, steps)
        if self.limits_ranks:
            sent = replace(sent, extra=sent.extra | {"level": level_of(run.capacity)})
        return sent, memory

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Add the client's level."""
        level = {"level": len(COMPUTE_LEVELS)} if self.limits_ranks else {}
        return super().upload_lengths(layout) | level

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean, of each entry of a core over the clients that hold it."""
        mean = super().aggregate(state, mean, round_, layout)
        if not self.limits_ranks:
            return mean
        shared, extra = mean.shared.clone(), dict(mean.extra)
        new, old = (self.named_tensors(layout, each) for each in (shared, state.shared))
        average_leading(new, old, extra.pop("level"), layout)
        return replace(mean, shared=shared, extra=extra)

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, uploads: Sequence[int]
    ) -> int:
        """Count all cores: what a client of limited ranks does not hold is in its model."""
        unsent = 0 if self.limits_ranks else unsent
        return super().download_parameters(broadcast, layout, unsent, uploads)


@register("ravan-ranks")
class LimitedRavan(Limited):
    """RAVAN, where a limited client trains the leading part of every core."""

    Config = LimitedConfig
    summary = "RAVAN whose limited clients train the leading part of every core"


class RankedConfig(TrishulConfig):
    """Hyper-parameters of TRISHUL with heads of different ranks."""

    ranks_by: Literal["none", "block", "head"] | None = Field(
        None,
        description="differences of heads' ranks. none: no. block: as many heads everywhere, "
        "whose ranks are water-filled, of equal parameters. head: halved from head to head of one "
        "matrix, of no more parameters; these need orthonormal bases (adapter.init=gram_schmidt). "
        "Default: head, and none with limits=ranks",
    )
    limits: Literal["heads", "ranks"] = Field(
        "heads",
        description="limit of a limited client: fewer heads, or lower ranks (the leading rows and "
        "columns of every core, where each entry is averaged over the clients that hold it)",
    )

    @property
    def differ_by(self) -> Literal["none", "block", "head"]:
        """Ranks of heads that differ by block or by head."""
        return self.ranks_by or ("none" if self.limits == "ranks" else "head")

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.limits == "ranks":
            self.reject_unused(("head_fraction", "selection"), "with limits='ranks'")
        if self.differ_by == "block":
            self.reject_unused(("allocation",), "with ranks_by='block'")
        if self.differ_by == "none" and self.limits == "heads":
            raise ValueError("ranks_by='none' with limits='heads' is method=trishul")
        if self.differ_by == "head" and self.head_fraction != 1.0:
            raise ValueError(
                f"head_fraction={self.head_fraction:g} cannot be set with ranks_by='head', whose "
                "heads differ in size"
            )
        return self


@register("trishul-ranks")
class RankedTrishul(Limited, Trishul):
    """TRISHUL with heads of different ranks, or clients that train a part of each."""

    Config = RankedConfig
    summary = "TRISHUL with heads of different ranks, for blocks, heads or clients"
    rates_like = "trishul"
    mean_is_enough = True

    def __init__(self, config: RankedConfig, lora_alpha: float | None = None) -> None:
        super().__init__(config, lora_alpha)
        self.limits_ranks = config.limits == "ranks"
        self.mean_is_enough &= not self.limits_ranks
        self.takes_limits &= config.differ_by != "head" or self.limits_ranks

    def check(self, settings: Settings) -> None:
        """Refuse bases that are not orthonormal where ranks differ within a matrix."""
        super().check(settings)
        init = settings.adapter.init
        if self.config.differ_by == "head" and init not in (None, "gram_schmidt"):
            raise ValueError(
                f"adapter.init={init!r} cannot be set with method.ranks_by='head', whose bases are "
                "orthonormal; a dataset's preset may have set it: write adapter.init=gram_schmidt "
                "or method.ranks_by=block"
            )

    def heads_by_block(self, site: Site, caps: dict[str, int]) -> dict[str, int]:
        """Return as many heads for each block where ranks differ by block."""
        if self.config.differ_by != "block":
            return super().heads_by_block(site, caps)
        return dict.fromkeys(site.blocks(), site.adapter.heads)

    def ranks(self, site: Site) -> dict[str, int]:
        """Return the rank of each core head: with ``ranks_by=block``, by the score of its block.

        All matrices of a block have the same one, a multiple of 8 (of 4 or 1 where ranks are
        small), and together the parameters of equal ranks at most.
        """
        equal = super().ranks(site)
        if self.config.differ_by != "block":
            return equal
        heads, fits = site.adapter.heads, site.adapter.overflow != "independent"
        blocks = site.blocks()
        widths = [min(min(m.d_out, m.d_in) for m in members) for members in blocks.values()]
        sizes = [heads * len(members) for members in blocks.values()]
        budget = sum(heads * rank**2 for rank in equal.values())
        step = rank_step(min(equal.values()))
        caps = [max(width // heads if fits else width, step) for width in widths]
        scores, prices = self.scores(site), [size / heads**2 for size in sizes]
        totals = water_fill_ranks(scores, prices, budget, [heads * cap for cap in caps])
        ranks = round_ranks(totals, heads, scores, sizes, budget, caps, step)
        by_block = dict(zip(blocks, ranks, strict=True))
        return {layer.name: by_block[layer.block] for layer in site.layers}

    def cores(self, site: Site, layer: LayerSpec, heads: int, rank: int) -> LayerAdapter:
        """Halve the ranks of a matrix from head to head, with ``ranks_by=head``."""
        if self.config.differ_by != "head" or heads < 2:
            return super().cores(site, layer, heads, rank)
        from trishul_ray.lab.trishul.mixed import MixedHeads  # imports torch

        ranks = geometric_ranks(heads, rank, min(layer.d_out, layer.d_in), rank_step(rank))
        return MixedHeads.of(ranks, train_scale=self.config.scalars == "trainable")

    def stacks(self, run: LocalRun) -> list[Stack]:
        """Return the part of the trained cores that the client trains."""
        found = super().stacks(run)
        if run.entries is None:
            return found
        for stack in found:
            lead = leading_rank(stack.bank.shape[-1], run.capacity)
            stack.bank = stack.bank[:, :lead, :lead]
            if stack.origin is not None:
                stack.origin = stack.origin[:, :lead, :lead]
        return found
