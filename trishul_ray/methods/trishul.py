"""TRISHUL: exact multi-head aggregation, singular-value thresholding, water-filled heads.

The three prongs of the paper (Algorithm 1):

1. Cores between frozen orthonormal bases, uploaded as s·H and averaged head by head (eqs.
   forward, server_aggregation): inherited from every multi-head method.
2. After a local step each active core takes the proximal map of the nuclear norm,
   ``H <- U (Σ - λη)_+ V^T`` (eqs. grad_step, prox_step, svt), every ``prox_every`` steps with
   ``prox_every`` times the threshold; scalars are clipped to [0, s_max].
3. Heads per transformer block by concave water-filling of ``a_l = ||W_l||_F^2`` (eqs.
   waterfill_opt, waterfill_sol, rounding_floor), the same number on each adapted matrix of it.

The paper leaves open which weights score a block (``method.block_scores``; here its adapted
matrices), s_max (default 10) and how a plain-gradient prox meets Adam (as written: the prox follows
the optimizer's step with threshold λη, on the whole core and not on the local change, which is
``method.prox_on=change``).
"""

import functools
import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trishul_ray.adapters.targets import BlockScores
from trishul_ray.methods.base import LocalRun, Site, State, SurveyPlan, register
from trishul_ray.methods.ravan import HeadsConfig, MultiHeadMethod
from trishul_ray.spectral.allocation import round_to_total, uniform, water_fill
from trishul_ray.spectral.diagnostics import stack_spectra
from trishul_ray.spectral.svt import SvtStats, svt, svt_summary, svt_with_stats

_log = logging.getLogger(__name__)

#: ε of eq. layer_capacity: keeps a score positive where a weight is all zero.
SCORE_FLOOR = 1e-12


class TrishulConfig(HeadsConfig):
    """TRISHUL's switches; the defaults are the paper's headline setting."""

    name: Literal["trishul"] = "trishul"
    lam: float = Field(0.01, ge=0, description="λ: weight of the nuclear norm; 0 is no prox")
    prox_every: int = Field(1, ge=1, description="local steps between two proximal maps")
    allocation: Literal["waterfill", "uniform", "gradient", "curvature"] = Field(
        "waterfill",
        description="heads per block: water-filling of the squared weight norms, the same "
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


@register("trishul")
class Trishul(MultiHeadMethod):
    """Spectral control of multi-head adapters in three prongs."""

    Config = TrishulConfig
    summary = "multi-head cores, nuclear-norm prox on the client, water-filled heads"
    reference = "TRISHUL, Algorithm 1"
    communication = "sum over matrices of h_l r^2 up and down"
    rates_like = "ravan"
    default_init = "gram_schmidt"

    def heads_by_block(self, site: Site, caps: dict[str, int]) -> dict[str, int]:
        """Prong 3: a total of ``heads`` x blocks, shared out by the blocks' squared norms."""
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
                free = max(round_to_total(water_fill(scores, total), total))
                if free > max(limits):
                    _warn_once(
                        f"method.allocation={self.config.allocation} would give one block {free} "
                        f"of {total} heads; a block takes at most the {max(limits)} that fit "
                        "(adapter.overflow=independent lifts the cap)"
                    )
        return dict(zip(blocks, heads, strict=True))

    def _limits(self, site: Site, caps: dict[str, int]) -> list[int] | None:
        """Most heads of each block; None for no limit.

        Measured scores of two blocks may differ by any factor, so that one block could get every
        head of the model. Weight norms do not, and the paper's water-filling has no cap.
        """
        overflow = site.adapter.overflow
        measured = self.config.allocation in ("gradient", "curvature")
        if overflow == "cap" or (measured and overflow == "auto"):
            # Bases that need not be orthogonal may exceed the width at the mean number already.
            least = site.adapter.heads if overflow == "auto" else 0
            return [max(caps[block], least) for block in site.blocks()]
        return None

    def _score(self, layer: str, site: Site) -> float:
        if self.config.allocation == "waterfill":
            return site.squared_norms[layer]
        measured = site.survey.get(layer)
        return 0.0 if measured is None else float(measured)

    @property
    def block_scores(self) -> BlockScores:
        """Those of the configuration, where weights are scored at all."""
        chosen: BlockScores = self.config.block_scores
        return chosen if self.config.allocation == "waterfill" else "adapted"

    @property
    def survey_plan(self) -> SurveyPlan | None:
        """Gradients of 5 clients for the allocations that need them (4 batches, or 32 rows)."""
        if self.config.allocation == "gradient":
            return SurveyPlan(clients=5, batches=4, decides_adapters=True)
        if self.config.allocation == "curvature":
            return SurveyPlan(clients=5, batches=32, batch_size=1, decides_adapters=True)
        return None

    def survey(self, gradients: Iterator[dict[str, Tensor]]) -> State:
        """By layer, the mean squared gradient norm of mini-batches, or of single examples.

        The latter mean is the trace of the empirical Fisher matrix.
        """
        found = [{name: g.square().sum() for name, g in batch.items()} for batch in gradients]
        return {name: torch.stack([f[name] for f in found]).mean().view(1) for name in found[0]}

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Remember the broadcast's cores where the prox acts on their change."""
        super().start(run, initial)
        if run.training and self.config.prox_on == "change":
            run.memory["broadcast"] = run.vector.clone()

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """Prong 2: the prox of ``λη||.||_*`` on every active core, then the clip of s."""
        views = run.layout.views(run.vector)
        active_heads = self.active_heads(run)
        for name, value in views.items():
            if not name.endswith(".scale"):
                continue
            trained = active_heads.get(name.removesuffix(".scale"))
            if trained is None:
                value.clamp_(0.0, self.config.scalar_max)
            else:
                value[trained] = value[trained].clamp(0.0, self.config.scalar_max)
        if self.config.lam == 0.0:
            return
        # The last prox covers the steps since the one before, so that the total is λη per step.
        since = step % self.config.prox_every or self.config.prox_every
        if step % self.config.prox_every and step != steps:
            return
        threshold = self.config.lam * run.summed_rate(step, since)
        stats: list[SvtStats] = []
        # What is thresholded is a core minus its origin: zero, or the core that was broadcast.
        origins = (
            run.layout.core_banks(run.memory["broadcast"]) if "broadcast" in run.memory else []
        )
        for index, (bank, active) in enumerate(self._banks(run)):
            cores = bank if active is None else bank[active]
            if origins:
                origin = origins[index] if active is None else origins[index][active]
                cores = cores - origin
            if step == steps:
                shrunk, found = svt_with_stats(cores, threshold)
                stats.append(found)
            else:
                shrunk = svt(cores, threshold)
            if origins:
                shrunk = shrunk + origin
            if active is None:
                bank.copy_(shrunk)
            else:
                bank[active] = shrunk
        if step == steps and stats:
            run.notes["metrics"] = {f"svt_{k}": v for k, v in svt_summary(stats).items()}
            run.notes["spectra"] = {
                "before": stack_spectra([s.before for s in stats]).cpu().numpy(),
                "after": stack_spectra([s.after for s in stats]).cpu().numpy(),
                "threshold": np.array([threshold]),
            }

    def _banks(self, run: LocalRun) -> Iterator[tuple[Tensor, Tensor | None]]:
        """All cores of one rank as [n, r, r], with [n] bool of those this client trains."""
        start = 0
        for bank in run.layout.core_banks(run.vector):
            stop = start + bank.shape[0]
            # On the wire the cores stand first, in the same order as in the banks.
            yield bank, None if run.active is None else run.active[start:stop]
            start = stop


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
