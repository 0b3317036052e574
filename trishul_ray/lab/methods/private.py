"""Private core heads: clients train the last heads of each matrix, and never send them.

Private heads are not part of the global model. If the bases are orthogonal, the shared and the
private part of an update are orthogonal matrices. The idea is our own.
"""

from __future__ import annotations

from pydantic import Field

from trishul_ray.adapters.base import LayerAdapter, LayerSpec
from trishul_ray.methods.base import Settings, register
from trishul_ray.methods.base.messages import LocalRun, State, TargetLayers, Tensors
from trishul_ray.methods.ravan import Ravan, RavanConfig
from trishul_ray.methods.trishul import Stack, Trishul, TrishulConfig


class PrivateConfig(RavanConfig):
    """Hyper-parameters of a method with private heads."""

    private_heads: int = Field(
        1,
        ge=1,
        description="core heads of each matrix that the client trains and never sends; a matrix "
        "without more heads still shares one. If equal to adapter.heads, all heads are private",
    )


class Private(Ravan):
    """Base class of methods whose clients keep some core heads of each matrix."""

    Config = PrivateConfig
    reference = "this project"
    personal = True
    takes_limits = False

    def check(self, settings: Settings) -> None:
        """Reject more private heads than ``adapter.heads``."""
        super().check(settings)
        if (wanted := self.config.private_heads) > (heads := settings.adapter.heads):
            raise ValueError(f"method.private_heads={wanted} must be at most adapter.heads={heads}")

    def cores(self, targets: TargetLayers, layer: LayerSpec, heads: int, rank: int) -> LayerAdapter:
        """Create an adapter whose last ``private_heads`` heads are private.

        At least one head remains shared, unless the field equals ``adapter.heads``.
        """
        from trishul_ray.lab.methods.private_heads import PrivateHeads  # imports torch

        shared, wanted = super().cores(targets, layer, heads, rank), self.config.private_heads
        everything = wanted == targets.adapter.heads
        private = heads if everything else max(0, min(wanted, heads - 1))
        return PrivateHeads(**vars(shared), private=private)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the shared heads, and keep the private heads."""
        sent, memory = super().upload(run, steps)
        views = run.layout.views(run.vector)
        private = [entry.name for entry in run.layout.entries if entry.kind == "adapter"]
        return sent, memory | {name: views[name].clone() for name in private}


@register("ravan-private")
class PrivateRavan(Private):
    """RAVAN with private core heads."""

    summary = "RAVAN with core heads that stay with the client (personal models)"


class PrivateTrishulConfig(PrivateConfig, TrishulConfig):
    """Hyper-parameters of TRISHUL with private heads."""


@register("trishul-private")
class PrivateTrishul(Private, Trishul):
    """TRISHUL with private core heads."""

    Config = PrivateTrishulConfig
    summary = "TRISHUL with core heads that stay with the client (personal models)"
    rates_like = "trishul"

    def stacks(self, run: LocalRun) -> list[Stack]:
        """Return the trained cores; skip matrices whose heads are all private."""
        return [stack for stack in super().stacks(run) if len(stack.bank)]
