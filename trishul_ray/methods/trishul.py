"""TRISHUL: exact multi-head aggregation, singular-value thresholding, water-filled core heads.

The three prongs of the paper (Algorithm 1):

1. Cores between frozen orthonormal bases are uploaded as s·H and averaged head by head (eqs.
   forward, server_aggregation), as in RAVAN.
2. After a local step each trained core takes the proximal map of the nuclear norm,
   ``H <- U (Σ - λη)_+ V^T`` (eqs. grad_step, prox_step, svt), every ``prox_every`` steps with
   ``prox_every`` times the threshold; scalars are clipped to [0, s_max].
3. Core heads are allocated to transformer blocks by concave water-filling of ``a_l = ||W_l||_F^2``
   (eqs. waterfill_opt, waterfill_sol, rounding_floor), the same number on each adapted matrix of a
   block.

The paper leaves three choices open: which weights score a block (``method.block_scores``; by
default its adapted matrices), s_max (default 10), and how the prox, defined for plain gradient
steps, meets Adam (as written: it follows the optimizer's step with threshold λη, on the whole core;
``method.prox_on=change`` applies it to the core's local change instead).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from trishul_ray.adapters.targets import BlockScores
from trishul_ray.lazy import torch
from trishul_ray.methods.base import LocalRun, Site, State, SurveyPlan, Tensors, register
from trishul_ray.methods.ravan import Ravan, RavanConfig
from trishul_ray.spectral.allocation import round_to_total, uniform, water_fill
from trishul_ray.spectral.diagnostics import stack_spectra
from trishul_ray.spectral.svt import svt, svt_stats, svt_summary

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

#: ε of eq. layer_capacity: keeps a score positive where a weight is all zero.
SCORE_FLOOR = 1e-12


class TrishulConfig(RavanConfig):
    """Hyper-parameters of TRISHUL; the defaults are the paper's headline setting."""

    lam: float = Field(0.01, ge=0, description="λ: weight of the nuclear norm; 0 is no prox")
    prox_every: int = Field(1, ge=1, description="local steps between two proximal maps")
    allocation: Literal["waterfill", "uniform", "gradient", "curvature"] = Field(
        "waterfill",
        description="core heads per block: water-filling of the squared weight norms, the same "
        "everywhere, or water-filling of what clients measure before round 1: the squared norm of "
        "a mini-batch's gradient, averaged over mini-batches, or the empirical Fisher trace (both "
        "capped at the heads that fit orthogonally, unless adapter.overflow=independent)",
    )
    block_scores: BlockScores = Field(
        "adapted",
        description="water-filling: whose squared norms score a block: its adapted matrices, the "
        "linear weights of its attention, or all its linear weights",
    )
    prox_on: Literal["core", "change"] = Field(
        "core", description="what the prox shrinks: the core, or its change since the broadcast"
    )
    scalar_max: float = Field(10.0, gt=0, description="s_max: upper bound of the scalars")


@dataclass
class Prox:
    """What the prox of a client's round needs; lists have one entry for each rank of cores.

    Attributes:
        heads: Numbers of the trained cores in their stack; None means all.
        origins: The cores that were broadcast, if the change since then is shrunk; else empty.
        scalars: Which scalars are trained; None means all.
        before: What the last prox of a diagnosed round has shrunk, as it was before.
    """

    heads: list[Tensor | None]
    origins: list[Tensor]
    scalars: Tensor | None = None
    before: list[Tensor] = field(default_factory=list)


@register("trishul")
class Trishul(Ravan):
    """RAVAN with a nuclear-norm prox on the client and water-filled core heads."""

    Config = TrishulConfig
    summary = "multi-head cores, nuclear-norm prox on the client, water-filled heads"
    reference = "TRISHUL, Algorithm 1"
    communication = "sum over matrices of h_l r^2 up and down"
    default_init = "gram_schmidt"

    def heads_by_block(self, site: Site, caps: dict[str, int]) -> dict[str, int]:
        """Divide ``heads`` x blocks core heads among the blocks, by their scores (prong 3)."""
        blocks = site.blocks()
        total = site.adapter.heads * len(blocks)
        limits = self._limits(site, caps)
        if self.config.allocation == "uniform":
            heads = uniform(len(blocks), total, limits)
        else:
            weights = site.scored if self.config.allocation == "waterfill" else site.layers
            scores = [
                sum(self._score(layer.name, site) for layer in weights if layer.block == block)
                + SCORE_FLOOR
                for block in blocks
            ]
            heads = round_to_total(water_fill(scores, total, limits), total, limits)
            if site.adapter.overflow == "auto" and limits is not None:
                largest = max(round_to_total(water_fill(scores, total), total))
                if largest > max(limits):
                    _warn_once(
                        f"method.allocation={self.config.allocation} would give one block "
                        f"{largest} of {total} heads; at most {max(limits)} fit "
                        "(adapter.overflow=independent removes the limit)"
                    )
        return dict(zip(blocks, heads, strict=True))

    def _limits(self, site: Site, caps: dict[str, int]) -> list[int] | None:
        """Return the largest number of core heads of each block; None if unlimited.

        Measured scores of two blocks can differ by any factor, so one block could get every core
        head of the model. Weight norms do not differ so much, and the paper's water-filling has
        no limit.
        """
        overflow = site.adapter.overflow
        measured = self.config.allocation in ("gradient", "curvature")
        if overflow == "cap" or (measured and overflow == "auto"):
            # Bases that need not be orthogonal may exceed the width even at the mean number.
            minimum = site.adapter.heads if overflow == "auto" else 0
            return [max(caps[block], minimum) for block in site.blocks()]
        return None

    def _score(self, layer: str, site: Site) -> float:
        if self.config.allocation == "waterfill":
            return site.squared_norms[layer]
        measured = site.survey.get(layer)
        return 0.0 if measured is None else float(measured)

    @property
    def block_scores(self) -> BlockScores:
        """Return ``method.block_scores`` where weights are scored, and the default otherwise."""
        chosen: BlockScores = self.config.block_scores
        return chosen if self.config.allocation == "waterfill" else "adapted"

    @property
    def survey_plan(self) -> SurveyPlan | None:
        """Ask 5 clients for gradients if the allocation needs them (4 batches, or 32 examples)."""
        if self.config.allocation == "gradient":
            return SurveyPlan(clients=5, batches=4, decides_adapters=True)
        if self.config.allocation == "curvature":
            return SurveyPlan(clients=5, batches=32, batch_size=1, decides_adapters=True)
        return None

    def survey(self, gradients: Iterator[Tensors]) -> Tensors:
        """Return the mean squared gradient norm of each layer.

        Over single examples this is the trace of the empirical Fisher matrix.
        """
        norms = [{name: g.square().sum() for name, g in batch.items()} for batch in gradients]
        return {name: torch.stack([n[name] for n in norms]).mean().view(1) for name in norms[0]}

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Keep a copy of the broadcast if the prox acts on the change since."""
        super().start(run, initial)
        if not run.training:
            return
        banks = run.layout.core_banks(run.vector)
        on_change = self.config.prox_on == "change"
        origins = [bank.clone() for bank in banks] if on_change else []
        prox = run.scratch = Prox([None] * len(banks), origins)
        if run.active is not None:
            # Which core heads and scalars are trained, on the device: the steps must not ask the
            # host. Core heads are the first units of the wire, in the order of the banks.
            device = run.vector.device
            units = list(run.layout.units(self.wire(run.layout)))[: sum(map(len, banks))]
            trained = run.active[: len(units)].split([len(bank) for bank in banks])
            prox.heads = [flags.nonzero().squeeze(1).to(device) for flags in trained]
            scalars = torch.zeros(run.layout.size, dtype=torch.bool)
            for unit, active in zip(units, run.active.tolist(), strict=False):
                if active and unit.scalar is not None:
                    scalars[unit.scalar] = True
            prox.scalars = scalars[run.layout.scalars].to(device)

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """Clip the scalars, then apply the prox of ``λη||.||_*`` to trained cores (prong 2)."""
        self._clip_scalars(run)
        threshold = self._threshold(run, step, steps)
        if threshold is not None:
            self._shrink_cores(run, threshold, keep=run.diagnosed and step == steps)

    def _threshold(self, run: LocalRun, step: int, steps: int) -> float | None:
        """Return the threshold of the prox that ends a step; None for a step without a prox."""
        if self.config.lam == 0.0 or (step % self.config.prox_every and step != steps):
            return None
        # The last prox covers the steps since the one before, so that the total is λη per step.
        since = step % self.config.prox_every or self.config.prox_every
        return float(self.config.lam * run.summed_rate(step, since))

    def _clip_scalars(self, run: LocalRun) -> None:
        """Clip the scalars of trained core heads to [0, s_max]."""
        scalars = run.vector[run.layout.scalars]
        clipped = scalars.clamp(0.0, self.config.scalar_max)
        if run.scratch.scalars is not None:
            clipped = torch.where(run.scratch.scalars, clipped, scalars)
        scalars.copy_(clipped)

    def _shrink_cores(self, run: LocalRun, threshold: float, keep: bool) -> None:
        """Apply the prox to all trained cores of each rank at once.

        What is thresholded is a core minus its origin: zero, or the core that was broadcast. With
        ``keep``, what it was before is kept for the statistics of :meth:`upload`.
        """
        prox: Prox = run.scratch
        for number, bank in enumerate(run.layout.core_banks(run.vector)):
            trained = prox.heads[number]
            origin = _take(prox.origins[number], trained) if prox.origins else None
            cores = _take(bank, trained)
            if origin is not None:
                cores = cores - origin
            if keep:
                prox.before.append(cores.clone())
            shrunk = svt(cores, threshold)
            if origin is not None:
                shrunk = shrunk + origin
            if trained is None:
                bank.copy_(shrunk)
            else:
                bank.index_copy_(0, trained, shrunk)

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send what RAVAN sends; report the last prox's spectra to rounds that are diagnosed."""
        sent = super().upload(run, steps)
        if not run.diagnosed:
            return sent
        threshold = self._threshold(run, steps, steps)
        if not run.layout.core_banks(run.vector):
            return sent
        # Without a threshold, λ is 0 and nothing was shrunk.
        stats = [] if threshold is None else [svt_stats(b, threshold) for b in run.scratch.before]
        run.metrics |= {f"svt_{name}": value for name, value in svt_summary(stats).items()}
        if threshold is not None:
            run.spectra = {
                "before": stack_spectra([s.before for s in stats]).numpy(),
                "after": stack_spectra([s.after for s in stats]).numpy(),
                "threshold": np.array([threshold]),
            }
        return sent


def _take(bank: Tensor, heads: Tensor | None) -> Tensor:
    """Return the given cores of a stack [n, r, r]; all of them, as a view, for None."""
    return bank if heads is None else bank.index_select(0, heads)


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
