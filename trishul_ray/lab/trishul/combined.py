"""Two extensions of TRISHUL at once: a class of two parents, of which the first acts last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from trishul_ray.lab.trishul.moving import MovingConfig, MovingTrishul
from trishul_ray.lab.trishul.private import PrivateTrishul, PrivateTrishulConfig
from trishul_ray.lab.trishul.ranks import RankedConfig, RankedTrishul
from trishul_ray.lab.trishul.rules import ON_SERVER, RuledConfig, RuledTrishul
from trishul_ray.methods.base import Settings, register

if TYPE_CHECKING:
    from trishul_ray.lab.trishul.heads import SpareHeads


class MovingRuledConfig(MovingConfig, RuledConfig):
    """Hyper-parameters of TRISHUL with heads that move, and another rule."""


@register("trishul-moving-rules")
class MovingRuled(MovingTrishul, RuledTrishul):
    """TRISHUL with heads that move, and another rule for the threshold."""

    Config = MovingRuledConfig
    summary = "trishul-moving with a rule of trishul-rules"


class PrivateRuledConfig(PrivateTrishulConfig, RuledConfig):
    """Hyper-parameters of TRISHUL with private heads, and another rule."""


@register("trishul-private-rules")
class PrivateRuled(PrivateTrishul, RuledTrishul):
    """TRISHUL with private heads, and another rule for the threshold."""

    Config = PrivateRuledConfig
    summary = "trishul-private with a rule of trishul-rules"


class RankedRuledConfig(RankedConfig, RuledConfig):
    """Hyper-parameters of TRISHUL with heads of different ranks, and another rule."""

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        if self.limits == "ranks" and self.rule in ON_SERVER:
            raise ValueError(
                f"limits='ranks' cannot be set with rule={self.rule!r}, which reads whole cores of "
                "each client"
            )
        return self


@register("trishul-ranks-rules")
class RankedRuled(RankedTrishul, RuledTrishul):
    """TRISHUL with heads of different ranks, and another rule for the threshold."""

    Config = RankedRuledConfig
    summary = "trishul-ranks with a rule of trishul-rules"


class RankedMovingConfig(MovingConfig, RankedConfig):
    """Hyper-parameters of TRISHUL with heads that move, and clients of limited ranks."""

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        _refuse_unequal(self, "heads that move are of equal size")
        return self


@register("trishul-ranks-moving")
class RankedMoving(MovingTrishul, RankedTrishul):
    """TRISHUL with heads that move, and clients of limited ranks."""

    Config = RankedMovingConfig
    summary = "trishul-moving with the limited clients of trishul-ranks"


class PrivateRankedConfig(PrivateTrishulConfig, RankedConfig):
    """Hyper-parameters of TRISHUL with private heads, whose ranks differ by block."""

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        _refuse_unequal(self, "private heads are of equal size")
        return self


@register("trishul-private-ranks")
class PrivateRanked(PrivateTrishul, RankedTrishul):
    """TRISHUL with private heads, whose ranks differ by block."""

    Config = PrivateRankedConfig
    summary = "trishul-private with the ranks by block of trishul-ranks"


class PrivateMovingConfig(PrivateTrishulConfig, MovingConfig):
    """Hyper-parameters of TRISHUL with private heads, and others that move."""


@register("trishul-private-moving")
class PrivateMoving(MovingTrishul, PrivateTrishul):
    """TRISHUL with private heads, and others that move."""

    Config = PrivateMovingConfig
    summary = "trishul-moving with the private heads of trishul-private"

    def check(self, settings: Settings) -> None:
        """Refuse that all heads are private."""
        super().check(settings)
        if (private := self.config.private_heads) == settings.adapter.heads:
            raise ValueError(f"method.private_heads={private} leaves no head that moves")

    @property
    def heads_class(self) -> type[SpareHeads]:
        """The class of adapters with spare and private heads."""
        from trishul_ray.lab.trishul.heads import SparePrivateHeads  # imports torch

        return SparePrivateHeads


def _refuse_unequal(config: RankedConfig, why: str) -> None:
    if config.differ_by == "head":
        raise ValueError(
            f"ranks_by='head', the default, cannot be set with method={config.name!r}: {why}; set "
            "method.ranks_by=block or method.limits=ranks"
        )
