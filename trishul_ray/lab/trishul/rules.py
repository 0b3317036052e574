"""TRISHUL with another threshold than λη, which under Adam is far below what a step adds.

``relative``: ρ times the largest singular value of the core. ``entropy``: the same, where the
server moves log ρ of each core head toward a target of effective rank over rank.
``continuation``: λη, where λ falls by a tenth a round to ``method.lam``. ``unknown``, once a round:
keep values above 2.858 medians (Gavish and Donoho). ``edge`` and ``sure``, on the server: take off
the mean the noise that shows in how two or more clients differ. The choice of rules is our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trishul_ray.adapters.layout import Layout
from trishul_ray.lab.trishul import statistics
from trishul_ray.lab.trishul.server_rules import DECAY, LEVELS, denoised, next_shares, rank_shares
from trishul_ray.methods.base import Settings, register
from trishul_ray.methods.messages import LocalRun, Round, State, Tensors
from trishul_ray.methods.trishul import Stack, Trishul, TrishulConfig, spectra
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.proportions import exact_share
from trishul_ray.spectral.svt import Threshold, singular_values, svt_summary
from trishul_ray.spectral.thresholds import hard_threshold

if TYPE_CHECKING:
    from torch import Tensor

#: Rules that need every upload: the server applies them to the mean.
ON_SERVER = ("edge", "sure")


class RuledConfig(TrishulConfig):
    """Hyper-parameters of TRISHUL with another rule for the threshold."""

    rule: Literal["relative", "entropy", "continuation", "unknown", "edge", "sure"] = Field(
        "relative",
        description="rule for the threshold τ of singular values. relative: ρ times the largest "
        "one of the core. entropy: the same, where the server moves log ρ of each core head toward "
        "a target for effective rank over rank. continuation: λη, where λ falls by a tenth a round "
        "to method.lam. Applied once a round: unknown: keep values above 2.858 medians (Gavish and "
        "Donoho). Applied to the mean, with the noise estimated from two or more clients: "
        "edge: optimal shrinkage; sure: the threshold of least estimated error",
    )
    level: float | None = Field(
        None,
        gt=0,
        description="relative: ρ, by default 0.03; entropy: the target, 0.35; continuation: λ in "
        "round 1, 1",
    )

    @model_validator(mode="after")
    def _check_rule(self) -> Self:
        reads = {
            "lam": ("continuation",),
            "level": tuple(LEVELS),
            "prox_every": tuple(LEVELS),
        }
        unread = [name for name, rules in reads.items() if self.rule not in rules]
        self.reject_unused(unread, f"with rule={self.rule!r}")
        if self.level is not None and self.level >= 1 and self.rule in ("relative", "entropy"):
            raise ValueError(f"level={self.level:g} must be below 1 with rule={self.rule!r}")
        return self

    @property
    def number(self) -> float:
        """The number of the rule: ρ, the target, or λ in round 1."""
        return LEVELS[self.rule] if self.level is None else self.level

    @property
    def in_short(self) -> str:
        """The rule in the place of λ, for one line on a run."""
        return f"λ {self.rule}" + ("" if self.level is None else f"={self.level:g}")


@dataclass
class SharedStack(Stack):
    """Cores whose thresholds the server moves.

    Attributes:
        share: ρ of each trained core, float64.
    """

    share: Tensor | None = None


@register("trishul-rules")
class RuledTrishul(Trishul):
    """TRISHUL with another rule for the threshold."""

    Config = RuledConfig
    summary = "TRISHUL with relative, adaptive or server-side thresholds"
    reference = "this project"
    rates_like = "trishul"

    def __init__(self, config: RuledConfig, lora_alpha: float | None = None) -> None:
        super().__init__(config, lora_alpha)
        self.needs_uploads = config.rule in ON_SERVER
        self.mean_is_enough &= not self.needs_uploads

    def check(self, settings: Settings) -> None:
        """Refuse privacy where clients send more than changes, and rounds of one client."""
        super().check(settings)
        if self.config.rule in ON_SERVER:
            fed, size = settings.federation, settings.federation.clients_per_round
            ruled = f"method={self.config.name!r} method.rule={self.config.rule!r}"
            if size < 2:
                raise ValueError(
                    f"federation.clients_per_round={size} must be at least 2 with {ruled}"
                )
            timed = settings.is_set("devices") or settings.is_set("cohort")
            if timed and exact_share(size, fed.quorum) <= 1:
                raise ValueError(
                    f"federation.quorum={fed.quorum:g} lets the clock end a round with one of "
                    f"{size} clients: at least 2 are needed with {ruled}"
                )
        if self.config.rule == "entropy" and settings.is_set("privacy"):
            raise ValueError(
                "privacy: method.rule='entropy' sends statistics that clipping does not cover; "
                "use relative"
            )

    def stacks(self, run: LocalRun) -> list[Stack]:
        """Return the trained cores, with ρ of the broadcast for the rule ``entropy``."""
        found = super().stacks(run)
        if self.config.rule != "entropy":
            return found
        shares = run.broadcast.extra["log_share"].double().exp().clamp(max=1.0)
        parts = shares.split([len(stack.bank) for stack in found])
        return [
            SharedStack(s.bank, s.trained, s.origin, share=s.take(part))
            for s, part in zip(found, parts, strict=True)
        ]

    @property
    def steps_per_prox(self) -> int:
        """``method.prox_every``, and 0 where the server shrinks the mean instead."""
        return 0 if self.config.rule in ON_SERVER else self.config.prox_every

    def threshold(self, run: LocalRun, stack: Stack, cores: Tensor, step: int) -> Threshold | None:
        """Return the threshold of the rule."""
        rule, since = self.config.rule, self.since(step)
        if rule in ON_SERVER or (rule == "unknown" and step != run.steps):
            return None
        if rule == "unknown":
            # On the host, as in svt_stats; this is a client's last step.
            found = hard_threshold(singular_values(cores.cpu()))
            return Threshold(found.to(cores.device), hard=True)
        if rule == "continuation":
            lam = max(self.config.lam, self.config.number * DECAY ** (run.round - 1))
            return Threshold(lam * run.summed_rate(step, since)) if lam else None
        share = stack.share if isinstance(stack, SharedStack) else None
        remaining = 1.0 - (self.config.number if share is None else share)
        return Threshold(1.0 - remaining**since, relative=True)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send what TRISHUL sends and, with ``entropy``, the rank share of each trained core."""
        sent, memory = super().upload(run, steps)
        if self.config.rule == "entropy":
            shares = rank_shares(run.layout, run.vector)
            sent = statistics.with_statistic(sent, run, "rank", shares)
        if self.needs_uploads:  # the server reports what it shrinks
            run.metrics = {k: v for k, v in run.metrics.items() if not k.startswith("svt_")}
        elif run.spectra:
            run.metrics["svt_threshold"] = float(run.spectra["threshold"].mean())
        return sent, memory

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Add the two numbers of each core head that ``entropy`` sends beside its core."""
        found = super().upload_lengths(layout)
        entropy = self.config.rule == "entropy"
        return found | (statistics.lengths(layout, "rank") if entropy else {})

    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Start with the default ρ, with the rule ``entropy``."""
        state = super().initial_state(layout, initial, survey)
        if self.config.rule != "entropy":
            return state
        level = math.log(LEVELS["relative"])
        share = {"log_share": torch.full((statistics.core_heads(layout),), level)}
        return replace(state, extra=state.extra | share)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean; move ρ toward the target, or take the noise off."""
        entropy = self.config.rule == "entropy"
        found = statistics.means(mean, round_, ["rank"]) if entropy else {}
        mean = super().aggregate(state, mean, round_, layout)
        if self.needs_uploads and statistics.core_heads(layout):
            on_change = self.config.prox_on == "change"
            shared, stats = denoised(
                mean.shared, state.shared, round_.uploads, layout, self.config.rule, on_change
            )
            round_.metrics.update({f"svt_{n}": value for n, value in svt_summary(stats).items()})
            round_.spectra.update(spectra(stats))
            round_.metrics["svt_threshold"] = float(round_.spectra["threshold"].mean())
            mean = replace(mean, shared=shared)
        if entropy:
            share = next_shares(state.extra["log_share"], found, self.config.number)
            mean = statistics.without_statistics(mean, "rank")
            mean = replace(mean, extra=mean.extra | {"log_share": share})
        return mean
