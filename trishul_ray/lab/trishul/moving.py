"""TRISHUL whose core heads move between blocks during training.

A block on which the means of uploads have stopped moving, or clients disagree, gives heads to one
that moves; see :mod:`~trishul_ray.lab.trishul.slots`. The idea is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.adapters.layout import Layout
from trishul_ray.lab.trishul import slots, statistics
from trishul_ray.methods.base import Settings, register
from trishul_ray.methods.messages import LocalRun, Round, Site, State, Tensors
from trishul_ray.methods.trishul import Trishul, TrishulConfig
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trishul_ray.lab.trishul.heads import SpareHeads


class MovingConfig(TrishulConfig):
    """Hyper-parameters of TRISHUL with heads that move."""

    move_every: int = Field(
        10,
        ge=1,
        description="rounds between moves of heads from block to block, from a fifth to four "
        "fifths of the run, by how far means of uploads move and how far clients agree",
    )
    spare_heads: int = Field(2, ge=1, le=64, description="heads each matrix may receive in a run")


@register("trishul-moving")
class MovingTrishul(Trishul):
    """TRISHUL, where a block that has stopped moving gives heads to one that moves."""

    Config = MovingConfig
    summary = "TRISHUL whose core heads move between blocks during training"
    reference = "this project"
    rates_like = "trishul"
    mean_is_enough = True  # what `broadcast` leaves out is not for clients
    reads_rounds = True

    def check(self, settings: Settings) -> None:
        """Refuse what alters or hides the numbers that clients send beside the cores."""
        super().check(settings)
        name = self.config.name
        if settings.is_set("privacy"):
            raise ValueError(
                f"privacy: method={name!r} sends statistics that clipping does not cover; use "
                "method=trishul"
            )
        if settings.is_set("downloads"):
            raise ValueError(
                f"downloads: a codec sends all core heads in every round, but method={name!r} "
                "sends a retired head once; set only one"
            )

    def head_limits(self, site: Site, caps: dict[str, int]) -> list[int] | None:
        """Leave room for spare heads, which must be orthogonal, too."""
        spare = self.config.spare_heads if site.adapter.overflow == "cap" else 0
        return super().head_limits(site, {block: cap - spare for block, cap in caps.items()})

    def cores(self, site: Site, layer: LayerSpec, heads: int, rank: int) -> LayerAdapter:
        """Attach spare heads beside those of the allocation."""
        spare = self.config.spare_heads if heads else 0
        plain = super().cores(site, layer, heads, rank)
        fields = {**vars(plain), "heads": heads + spare}
        return self.heads_class(**fields, spare=spare)

    @property
    def heads_class(self) -> type[SpareHeads]:
        """The class of adapters with spare heads."""
        from trishul_ray.lab.trishul.heads import SpareHeads  # imports torch

        return SpareHeads

    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Start with the first allocation."""
        state = super().initial_state(layout, initial, survey)
        first = slots.first_extra(layout, self.config.spare_heads)
        return replace(state, extra=state.extra | first)

    def broadcast(self, state: State) -> State:
        """Leave out what only the server reads."""
        state = super().broadcast(state)
        extra = {k: v for k, v in state.extra.items() if k not in slots.MEANS}
        return replace(state, extra=extra)

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Train the active heads only."""
        if run.training:
            count = sum(1 for _ in run.layout.units(self.wire(run.layout)))
            run.active = slots.active_units(run.broadcast.extra["status"], count)
        super().start(run, initial)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send how far each trained core head has moved."""
        sent, memory = super().upload(run, steps)
        new, old = (self.named_tensors(run.layout, x.shared) for x in (sent, run.broadcast))
        moved = slots.squared_changes(new, old, run.layout)
        return statistics.with_statistic(sent, run, "moved", moved), memory

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Add the two numbers of each core head that are sent beside its core."""
        return super().upload_lengths(layout) | statistics.lengths(layout, "moved")

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean; after some rounds, let heads change place."""
        found = statistics.means(mean, round_, ["moved"])
        mean = super().aggregate(state, mean, round_, layout)
        trained = found["trained"].double()
        spread = found["moved"].double() / torch.where(trained > 0, trained, 1.0)
        # By what clients have moved: a server optimizer's step has a length of its own.
        pair = (mean.shared, state.shared)
        if round_.change is not None:
            pair = (round_.change, torch.zeros_like(round_.change))
        new, old = (self.named_tensors(layout, each) for each in pair)
        energy = slots.squared_changes(new, old, layout)
        every = self.config.move_every
        extra = slots.next_extra(state.extra, energy, spread, round_, every, layout)
        mean = statistics.without_statistics(mean, "moved")
        return replace(mean, extra=mean.extra | extra)

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, uploads: Sequence[int]
    ) -> int:
        """Leave out core heads that are zero or frozen; see :meth:`setup_parameters`."""
        count = super().download_parameters(broadcast, layout, unsent, uploads)
        return count - int(slots.sizes(layout)[broadcast.extra["status"] != slots.ACTIVE].sum())

    def setup_parameters(self, broadcast: State, layout: Layout, last: int | None) -> int:
        """Add the core heads that were retired since a client took part last, once."""
        count = super().setup_parameters(broadcast, layout, last)
        new = broadcast.extra["status"] >= (last or 1)
        return count + int(slots.sizes(layout)[new].sum())
