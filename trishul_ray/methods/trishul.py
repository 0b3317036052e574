"""TRISHUL: exact multi-head aggregation, singular-value thresholding, water-filled core heads.

The three prongs of the paper (Algorithm 1):

1. Cores between frozen orthonormal bases are uploaded as s·H and averaged per head (eqs. forward,
  server_aggregation). This part is inherited from RAVAN.
2. After a local step, the proximal map of the nuclear norm is applied to each trained core, ``H <-
  U (Σ - λη)_+ V^T`` (eqs. grad_step, prox_step, svt), every ``prox_every`` steps with
  ``prox_every`` times the threshold; scalars are clipped to [0, s_max].
3. Core heads are allocated to transformer blocks by concave water-filling of ``a_l = ||W_l||_F^2``
  (eqs. waterfill_opt, waterfill_sol, rounding_floor), the same number on each adapted matrix of a
  block.

The paper leaves three choices open. The weights that score a block are its adapted matrices by
default (``method.block_scores``). s_max is 10 by default. The prox, which is defined for plain
gradient steps, is combined with Adam as written: it follows the optimizer's step with threshold λη,
on the whole core; ``method.prox_on=change`` applies it to the core's local change instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from trishul_ray.adapters.targets import BlockScores
from trishul_ray.errors import warn_once
from trishul_ray.methods.base import register
from trishul_ray.methods.base.messages import LocalRun, State, SurveyPlan, TargetLayers, Tensors
from trishul_ray.methods.ravan import Ravan, RavanConfig
from trishul_ray.runtime.lazy import torch
from trishul_ray.spectral.allocation import round_to_total, uniform, water_fill
from trishul_ray.spectral.diagnostics import stack_spectra
from trishul_ray.spectral.svt import SvtStats, svt_of_stacks, svt_stats, svt_summary

if TYPE_CHECKING:
    from torch import Tensor

#: ε of eq. layer_capacity: keeps the score of an all-zero weight positive.
SCORE_FLOOR = 1e-12


class TrishulConfig(RavanConfig):
    """Hyper-parameters of TRISHUL; the defaults are the paper's main setting."""

    lam: float = Field(0.01, ge=0, description="λ: weight of the nuclear norm; 0 disables the prox")
    prox_every: int = Field(1, ge=1, description="local steps per proximal map")
    allocation: Literal["waterfill", "uniform", "gradient", "curvature"] = Field(
        "waterfill",
        description="core heads per block: water-filling of the squared weight norms, equal "
        "numbers, or water-filling of scores that clients measure before round 1: the squared norm "
        "of a mini-batch's gradient, averaged over mini-batches, or the empirical Fisher trace "
        "(both capped at the heads that fit orthogonally, unless adapter.overflow=independent)",
    )
    block_scores: BlockScores = Field(
        "adapted",
        description="weights whose squared norms score a block for water-filling: its adapted "
        "matrices, the linear weights of its attention, or all its linear weights",
    )
    prox_on: Literal["core", "change"] = Field(
        "core", description="argument of the prox: the core, or its change since the broadcast"
    )
    scalar_max: float = Field(
        10.0,
        ge=1,
        description="s_max: upper bound of the scalars, which are 1 at the start of a round",
    )

    @property
    def label(self) -> str:
        """λ, for a one-line run summary."""
        return f"λ={self.lam:g}"


@dataclass
class Stack:
    """The cores of one rank in a client's round, for the prox.

    Attributes:
        bank: [n, r, r], the cores, a view of the client's vector.
        trained: Indices of the trained cores; None means all.
        origin: [n, r, r], the broadcast cores, if the prox applies to the change since then.
        last: Cores before the last prox of a diagnosed round, and its threshold.
    """

    bank: Tensor
    trained: Tensor | None = None
    origin: Tensor | None = None
    last: tuple[Tensor, float] | None = None

    def take(self, bank: Tensor) -> Tensor:
        """Select the trained cores of a stack [n, ...]; a view if all are trained."""
        return bank if self.trained is None else bank.index_select(0, self.trained)

    def change(self) -> Tensor:
        """Return the input of the prox: the trained cores, or their change since the broadcast."""
        cores = self.take(self.bank).contiguous()
        return cores if self.origin is None else cores - self.take(self.origin)

    def store(self, shrunk: Tensor) -> None:
        """Write the result of the prox to the cores that :meth:`change` read."""
        if self.origin is not None:
            shrunk = shrunk + self.take(self.origin)
        if self.trained is None:
            self.bank.copy_(shrunk)
        else:
            self.bank.index_copy_(0, self.trained, shrunk)


class Stacks(list[Stack]):
    """The trained cores of a client's round, one stack per rank."""


@register("trishul")
class Trishul(Ravan):
    """RAVAN with a nuclear-norm prox on the client and water-filled core heads."""

    Config = TrishulConfig
    summary = "multi-head cores, nuclear-norm prox on the client, water-filled heads"
    reference = "TRISHUL, Algorithm 1"
    communication = "sum over matrices of h_l r^2 up and down"
    default_init = "gram_schmidt"

    # Prong 3: head allocation.
    def heads_by_block(self, targets: TargetLayers, caps: dict[str, int]) -> dict[str, int]:
        """Distribute ``heads`` x blocks core heads over the blocks, by their scores."""
        blocks = targets.blocks()
        total = targets.adapter.heads * len(blocks)
        limits = self.head_limits(targets, caps)
        if self.config.allocation == "uniform":
            heads = uniform(len(blocks), total, limits)
        else:
            scores = self.scores(targets)
            heads = round_to_total(water_fill(scores, total, limits), total, limits)
            if targets.adapter.overflow == "auto" and limits is not None:
                largest = max(round_to_total(water_fill(scores, total), total))
                if largest > max(limits):
                    warn_once(
                        f"method.allocation={self.config.allocation} would give one block "
                        f"{largest} of {total} heads; at most {max(limits)} fit "
                        "(adapter.overflow=independent removes the limit)"
                    )
        return dict(zip(blocks, heads, strict=True))

    def scores(self, targets: TargetLayers) -> list[float]:
        measured = self.survey_plan is not None
        layers = targets.layers if measured else targets.scored
        known = (
            {n: float(x) for n, x in targets.survey.items()} if measured else targets.squared_norms
        )
        return [
            sum(known.get(layer.name, 0.0) for layer in layers if layer.block == block)
            + SCORE_FLOOR
            for block in targets.blocks()
        ]

    def head_limits(self, targets: TargetLayers, caps: dict[str, int]) -> list[int] | None:
        """Return the maximum number of core heads of each block, or None if unlimited.

        Measured scores of two blocks can differ by any factor, so one block could get every core
        head of the model. Weight norms do not differ as much, and the paper's water-filling has no
        limit.
        """
        overflow = targets.adapter.overflow
        if overflow == "cap" or (self.survey_plan is not None and overflow == "auto"):
            # Bases that need not be orthogonal may exceed the width even at the mean number of
            # heads.
            minimum = targets.adapter.heads if overflow == "auto" else 0
            return [max(caps[block], minimum) for block in targets.blocks()]
        return None

    @property
    def block_scores(self) -> BlockScores:
        """``method.block_scores`` if weights are scored, otherwise the default."""
        chosen: BlockScores = self.config.block_scores
        return chosen if self.config.allocation == "waterfill" else "adapted"

    @property
    def survey_plan(self) -> SurveyPlan | None:
        """Request gradients of 5 clients (4 batches or 32 examples) if allocation needs them."""
        if self.config.allocation == "gradient":
            return SurveyPlan(clients=5, batches=4, decides_adapters=True)
        if self.config.allocation == "curvature":
            return SurveyPlan(clients=5, batches=32, batch_size=1, decides_adapters=True)
        return None

    def survey(self, gradients: Iterator[Tensors]) -> Tensors:
        """Compute the mean squared gradient norm of each layer.

        Over single examples, this is the trace of the empirical Fisher matrix.
        """
        norms = [{name: g.square().sum() for name, g in batch.items()} for batch in gradients]
        return {name: torch.stack([n[name] for n in norms]).mean().view(1) for name in norms[0]}

    # Prong 2: proximal local steps.
    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Start like RAVAN, and collect the cores that the prox will shrink."""
        super().start(run, initial)
        if run.training:
            run.set_state(Stacks(self.stacks(run)))

    def stacks(self, run: LocalRun) -> list[Stack]:
        """Collect the trained cores, one stack per rank."""
        banks = run.layout.core_banks(run.vector)
        stacks = [Stack(bank) for bank in banks]
        if run.active is not None:
            # Core heads are the first units of an upload, in the order of the banks. Their indices
            # are stored on the device, because the steps must not wait for the host.
            counts = [len(bank) for bank in banks]
            flags = run.active[: sum(counts)].split(counts)
            for stack, trained in zip(stacks, flags, strict=True):
                stack.trained = trained.nonzero().squeeze(1).to(run.vector.device)
        if self.config.prox_on == "change":
            for stack in stacks:
                stack.origin = stack.bank.clone()
        return stacks

    def after_steps(self, runs: Sequence[LocalRun], step: int, steps: int) -> None:
        """Clip the scalars, then apply the prox of ``λη||.||_*`` to the trained cores."""
        for run in runs:
            # Scalars of untrained heads are 1, so clipping does not change them.
            run.vector[run.layout.scalars].clamp_(0.0, self.config.scalar_max)
        if step % self.config.prox_every and step != steps:
            return
        proxes: list[tuple[Stack, Tensor, float]] = []
        for run in runs if self.config.lam else ():
            threshold = self.config.lam * run.summed_rate(step, self.since(step))
            for stack in run.state_of(Stacks):
                cores = stack.change()
                proxes.append((stack, cores, threshold))
                if run.diagnosed and step == steps:
                    stack.last = cores.clone(), threshold
        shrunk = svt_of_stacks([(cores, threshold) for _, cores, threshold in proxes])
        for (stack, _, _), new in zip(proxes, shrunk, strict=True):
            stack.store(new)

    @property
    def steps_per_prox(self) -> int:
        """``method.prox_every``, or 0 without a threshold."""
        return self.config.prox_every if self.config.lam else 0

    def since(self, step: int) -> int:
        """Return the number of steps that a prox covers, counted from the previous one."""
        every: int = self.config.prox_every
        return step % every or every

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the upload of RAVAN; in diagnosed rounds, also report the last prox's spectra."""
        sent, kept = super().upload(run, steps)
        if run.diagnosed and (stacks := run.state_of(Stacks)):
            last = [stack.last for stack in stacks if stack.last is not None]
            # ``last`` is None if λ is 0, because nothing was shrunk.
            stats = [svt_stats(before, threshold) for before, threshold in last]
            run.metrics |= {f"svt_{name}": value for name, value in svt_summary(stats).items()}
            if stats:
                run.spectra = spectra(stats)
        return sent, kept


def spectra(stats: Sequence[SvtStats]) -> dict[str, np.ndarray]:
    """Return singular values ``before`` and ``after`` [n, r], and the ``threshold`` [1]."""
    return {
        "before": stack_spectra([s.before for s in stats]).numpy(),
        "after": stack_spectra([s.after for s in stats]).numpy(),
        "threshold": np.array([stats[0].threshold]),
    }
