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

Beyond the paper, ``method.lam_rule`` chooses other thresholds than λη, which under Adam is far
below what a step adds, and ``method.reallocate_every`` moves heads between blocks during training;
see :class:`TrishulConfig` and docs/what-the-paper-leaves-open.md.

The paper leaves three choices open: which weights score a block (``method.block_scores``; by
default its adapted matrices), s_max (default 10), and how the prox, defined for plain gradient
steps, meets Adam (as written: it follows the optimizer's step with threshold λη, on the whole core;
``method.prox_on=change`` applies it to the core's local change instead).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.layout import Layout
from trishul_ray.adapters.targets import BlockScores
from trishul_ray.config import in_id_if_set
from trishul_ray.lab.trishul import slots
from trishul_ray.lab.trishul.limited import leading_rank
from trishul_ray.lab.trishul.server_rules import (
    DECAY,
    LEVELS,
    LamRule,
    denoised,
    next_shares,
    rank_shares,
)
from trishul_ray.lazy import torch
from trishul_ray.methods.base import LocalRun, Round, Site, State, SurveyPlan, Tensors, register
from trishul_ray.methods.ravan import Ravan, RavanConfig
from trishul_ray.spectral.allocation import (
    geometric_ranks,
    rank_step,
    round_ranks,
    round_to_total,
    uniform,
    water_fill,
    water_fill_ranks,
)
from trishul_ray.spectral.diagnostics import stack_spectra
from trishul_ray.spectral.svt import SvtStats, singular_values, svt, svt_stats, svt_summary
from trishul_ray.spectral.thresholds import hard_threshold

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

#: ε of eq. layer_capacity: keeps a score positive where a weight is all zero.
SCORE_FLOOR = 1e-12

#: Allocations by the norms of the weights.
BY_WEIGHTS = ("waterfill", "ranks")


class TrishulConfig(RavanConfig):
    """Hyper-parameters of TRISHUL; the defaults are the paper's headline setting."""

    lam: float = Field(0.01, ge=0, description="λ: weight of the nuclear norm; 0 is no prox")
    lam_rule: LamRule = in_id_if_set(
        "fixed",
        "rule for the threshold τ of singular values. fixed: λη. relative: ρ times the largest one "
        "of the core. entropy: the same, where the server moves log ρ of each core head toward a "
        "target for effective rank over rank. continuation: λη, where λ falls by a tenth a round "
        "to method.lam. Applied once a round: unknown: keep values above 2.858 medians (Gavish and "
        "Donoho). Applied to the mean, with the noise told by how two or more clients differ: "
        "edge: optimal shrinkage; sure: the threshold of least estimated error",
    )
    lam_level: float | None = in_id_if_set(
        None,
        "relative: ρ, by default 0.03; entropy: the target, 0.35; continuation: λ in round 1, 1",
        gt=0,
    )
    prox_every: int = Field(1, ge=1, description="local steps between two proximal maps")
    allocation: Literal["waterfill", "uniform", "gradient", "curvature", "ranks"] = Field(
        "waterfill",
        description="core heads per block: water-filling of the squared weight norms, the same "
        "everywhere, or water-filling of what clients measure before round 1: the squared norm of "
        "a mini-batch's gradient, averaged over mini-batches, or the empirical Fisher trace (both "
        "capped at the heads that fit orthogonally, unless adapter.overflow=independent). "
        "ranks: as many heads everywhere, whose ranks are water-filled, of equal parameters",
    )
    head_ranks: Literal["equal", "geometric"] = in_id_if_set(
        "equal",
        "ranks of the heads of one matrix: equal, or halved from head to head, of no more "
        "parameters; these need orthonormal bases (adapter.init=gram_schmidt)",
    )
    block_scores: BlockScores = Field(
        "adapted",
        description="water-filling: whose squared norms score a block: its adapted matrices, the "
        "linear weights of its attention, or all its linear weights",
    )
    prox_on: Literal["core", "change"] = Field(
        "core", description="what the prox shrinks: the core, or its change since the broadcast"
    )
    scalar_max: float = Field(
        10.0,
        ge=1,
        description="s_max: upper bound of the scalars, which are 1 at the start of a round",
    )
    reallocate_every: int = in_id_if_set(
        0,
        "rounds between moves of heads from block to block, from a fifth to four fifths of the "
        "run, by how far means of uploads move and how far clients agree; 0: never",
        ge=0,
    )
    spare_heads: int = in_id_if_set(
        2, "reallocate_every: how many heads each matrix may receive in a run", ge=1, le=64
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        rule = self.lam_rule
        if self.limits == "ranks" and rule in ("edge", "sure"):
            raise ValueError(
                f"limits='ranks' cannot be set with lam_rule={rule!r}, which reads whole cores of "
                "each client"
            )
        reads = {
            "lam": ("fixed", "continuation"),
            "lam_level": tuple(LEVELS),
            "prox_every": ("fixed", *LEVELS),
        }
        unread = [name for name, rules in reads.items() if rule not in rules]
        self.refuse_unread(unread, f"with lam_rule={rule!r}")
        if self.head_ranks == "geometric":
            for name in ("private_heads", "reallocate_every", "head_fraction"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}={value!r} cannot be set with head_ranks='geometric', whose heads "
                        "differ in size"
                    )
        if not self.reallocate_every:
            self.refuse_unread(["spare_heads"], "with reallocate_every=0")
        if self.lam_level is not None and self.lam_level >= 1 and rule in ("relative", "entropy"):
            raise ValueError(f"lam_level={self.lam_level:g} must be below 1 with lam_rule={rule!r}")
        return self

    @property
    def level(self) -> float:
        """The number of the rule."""
        return LEVELS[self.lam_rule] if self.lam_level is None else self.lam_level


@dataclass
class Prox:
    """What the prox of a client's round needs; lists have one entry for each rank of cores.

    Attributes:
        heads: Numbers of the trained cores in their stack; None means all.
        origins: The cores that were broadcast, if the change since then is shrunk; else empty.
        shares: ρ of the trained cores, with the rule ``entropy``.
        before: What the last prox of a diagnosed round has shrunk, as it was before, and τ or its
            share of sigma_1.
    """

    heads: list[Tensor | None]
    origins: list[Tensor]
    shares: list[Tensor] = field(default_factory=list)
    before: list[tuple[Tensor, float | Tensor]] = field(default_factory=list)


@register("trishul")
class Trishul(Ravan):
    """RAVAN with a nuclear-norm prox on the client and water-filled core heads."""

    Config = TrishulConfig
    summary = "multi-head cores, nuclear-norm prox on the client, water-filled heads"
    reference = "TRISHUL, Algorithm 1"
    communication = "sum over matrices of h_l r^2 up and down"
    default_init = "gram_schmidt"
    mean_is_enough = True  # what `broadcast` leaves out is not for clients

    def __init__(self, config: TrishulConfig) -> None:
        super().__init__(config)
        self.spare_heads = config.spare_heads if config.reallocate_every else 0
        self.needs_uploads = config.lam_rule in ("edge", "sure")
        self.mean_is_enough &= not self.needs_uploads
        self.least_clients = 2 if self.needs_uploads else 1
        self.takes_limits &= config.head_ranks == "equal" or config.limits == "ranks"

    def heads_by_block(self, site: Site, caps: dict[str, int]) -> dict[str, int]:
        """Divide ``heads`` x blocks core heads among the blocks, by their scores (prong 3)."""
        blocks = site.blocks()
        total = site.adapter.heads * len(blocks)
        limits = self._limits(site, caps)
        if self.config.allocation == "ranks":
            return super().heads_by_block(site, caps)
        if self.config.allocation == "uniform":
            heads = uniform(len(blocks), total, limits)
        else:
            scores = self._scores(site)
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

    def ranks(self, site: Site) -> dict[str, int]:
        """Return the rank of each core head of a layer: with ``ranks``, by the block's score.

        All matrices of a block have the same one, a multiple of 8 (of 4 or 1 where ranks are
        small), and together the parameters of equal ranks at most.
        """
        equal = super().ranks(site)
        if self.config.allocation != "ranks":
            return equal
        heads, fits = site.adapter.heads, site.adapter.overflow != "independent"
        blocks = site.blocks()
        widths = [min(min(m.d_out, m.d_in) for m in members) for members in blocks.values()]
        sizes = [heads * len(members) for members in blocks.values()]
        budget = sum(heads * rank**2 for rank in equal.values())
        least = min(equal.values())
        step = rank_step(least)
        caps = [max(width // heads if fits else width, step) for width in widths]
        scores = self._scores(site)
        prices = [size / heads**2 for size in sizes]
        totals = water_fill_ranks(scores, prices, budget, [heads * cap for cap in caps])
        ranks = round_ranks(totals, heads, scores, sizes, budget, caps, step)
        by_block = dict(zip(blocks, ranks, strict=True))
        return {layer.name: by_block[layer.block] for layer in site.layers}

    def adapters(self, site: Site) -> dict[str, LayerAdapter]:
        """Attach the cores that RAVAN attaches; halve their ranks, with ``geometric``."""
        found = super().adapters(site)
        if self.config.head_ranks == "equal":
            return found
        from trishul_ray.adapters.multihead import MultiHead
        from trishul_ray.lab.trishul.mixed import MixedHeads  # imports torch

        for layer in site.layers:
            equal = found[layer.name]
            if isinstance(equal, MultiHead) and equal.heads > 1:
                width, step = min(layer.d_out, layer.d_in), rank_step(equal.rank)
                ranks = geometric_ranks(equal.heads, equal.rank, width, step)
                found[layer.name] = MixedHeads.of(ranks, train_scale=equal.train_scale)
        return found

    def _scores(self, site: Site) -> list[float]:
        """Return the score of each block."""
        by_weights = self.config.allocation in BY_WEIGHTS
        layers = site.scored if by_weights else site.layers
        known = site.squared_norms if by_weights else {n: float(x) for n, x in site.survey.items()}
        return [
            sum(known.get(layer.name, 0.0) for layer in layers if layer.block == block)
            + SCORE_FLOOR
            for block in site.blocks()
        ]

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
            spare = self.spare_heads if overflow == "cap" else 0  # they must be orthogonal, too
            return [max(caps[block] - spare, minimum) for block in site.blocks()]
        return None

    @property
    def block_scores(self) -> BlockScores:
        """Return ``method.block_scores`` where weights are scored, and the default otherwise."""
        chosen: BlockScores = self.config.block_scores
        return chosen if self.config.allocation in BY_WEIGHTS else "adapted"

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
        """Start as RAVAN does, and prepare the prox."""
        if self.spare_heads and run.training:
            count = sum(1 for _ in run.layout.units(self.wire(run.layout)))
            run.active = slots.active_units(run.broadcast.extra["status"], count)
        super().start(run, initial)
        if not run.training:
            return
        banks = run.layout.core_banks(run.vector)
        on_change = self.config.prox_on == "change"
        origins = [bank.clone() for bank in banks] if on_change else []
        prox = Prox([None] * len(banks), origins)
        run.set_state(prox)
        if run.active is not None:
            # Core heads are the first units of the wire, in the order of the banks. Their numbers
            # are kept on the device: the steps must not ask the host.
            counts = [len(bank) for bank in banks]
            trained = run.active[: sum(counts)].split(counts)
            prox.heads = [flags.nonzero().squeeze(1).to(run.vector.device) for flags in trained]
        if self.config.lam_rule == "entropy":
            shares = run.broadcast.extra["log_share"].double().exp().clamp(max=1.0)
            each = zip(shares.split([len(bank) for bank in banks]), prox.heads, strict=True)
            prox.shares = [_take(share, heads) for share, heads in each]

    def after_step(self, run: LocalRun, step: int, steps: int) -> None:
        """Clip the scalars, then apply the prox of ``λη||.||_*`` to trained cores (prong 2)."""
        # Those that are not trained are 1.
        run.vector[run.layout.scalars].clamp_(0.0, self.config.scalar_max)
        strengths = self._strengths(run, step, steps)
        if strengths is not None:
            self._shrink_cores(run, strengths, keep=run.diagnosed and step == steps)

    def _strengths(self, run: LocalRun, step: int, steps: int) -> list[float | Tensor] | None:
        """Return τ of the prox that ends a step, or its share of sigma_1, for each rank of cores.

        None for a step without a prox; empty with the rule ``unknown``, which reads the cores.
        """
        rule, every = self.config.lam_rule, self.config.prox_every
        if rule == "unknown":
            return [] if step == steps else None
        if rule in ("edge", "sure") or (step % every and step != steps):
            return None
        # The last prox covers the steps since the one before, so that the total is λη per step.
        since = step % every or every
        if rule == "entropy":
            return [1.0 - (1.0 - share) ** since for share in run.state_of(Prox).shares]
        ranks = len(run.state_of(Prox).heads)
        if rule == "relative":
            return [1.0 - (1.0 - self.config.level) ** since] * ranks
        lam = self.config.lam
        if rule == "continuation":
            lam = max(lam, self.config.level * DECAY ** (run.round - 1))
        return [float(lam * run.summed_rate(step, since))] * ranks if lam else None

    def _shrink_cores(self, run: LocalRun, strengths: list[float | Tensor], keep: bool) -> None:
        """Apply the prox to all trained cores of each rank at once.

        What is thresholded is a core minus its origin: zero, or the core that was broadcast; of a
        client of limited ranks, the part that it trains. With ``keep``, what it was before is kept
        for the statistics of :meth:`upload`.
        """
        prox = run.state_of(Prox)
        for number, bank in enumerate(run.layout.core_banks(run.vector)):
            if not len(bank):  # all are private
                continue
            trained = prox.heads[number]
            if run.entries is not None:
                lead = leading_rank(bank.shape[-1], run.capacity)
                bank = bank[:, :lead, :lead]
            cores = origin = _take(bank, trained).contiguous()
            if prox.origins:
                side = bank.shape[-1]
                origin = _take(prox.origins[number][:, :side, :side], trained)
                cores = cores - origin
            strength = strengths[number] if strengths else hard_threshold(singular_values(cores))
            if keep:
                prox.before.append((cores.clone(), strength))
            shrunk = svt(cores, strength, relative=self._relative, hard=not strengths)
            if prox.origins:
                shrunk = shrunk + origin
            if trained is None:
                bank.copy_(shrunk)
            else:
                bank.index_copy_(0, trained, shrunk)

    @property
    def _relative(self) -> bool:
        return self.config.lam_rule in ("relative", "entropy")

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send what RAVAN sends; report the last prox's spectra to rounds that are diagnosed."""
        sent, kept = super().upload(run, steps)
        sent = replace(sent, extra=sent.extra | self._told(run, sent.shared))
        if not run.diagnosed or self.needs_uploads or not _core_heads(run.layout):
            return sent, kept
        # Without a threshold, λ is 0 and nothing was shrunk.
        relative, hard = self._relative, self.config.lam_rule == "unknown"
        before = run.state_of(Prox).before
        stats = [svt_stats(b, t, relative=relative, hard=hard) for b, t in before]
        run.metrics |= {f"svt_{name}": value for name, value in svt_summary(stats).items()}
        if stats:
            run.spectra = _spectra(stats)
            if self.config.lam_rule != "fixed":
                run.metrics["svt_threshold"] = float(run.spectra["threshold"].mean())
            if not (relative or hard):  # all have one
                run.spectra["threshold"] = run.spectra["threshold"][:1]
        return sent, kept

    def _told(self, run: LocalRun, shared: Tensor) -> Tensors:
        """Return, by core head, whether it was trained and, if so, what the server reads of it."""
        layout, told = run.layout, {}
        if self.config.lam_rule == "entropy":
            told["rank"] = rank_shares(layout, run.vector)
        if self.spare_heads:
            new, old = (self.named_tensors(layout, x) for x in (shared, run.broadcast.shared))
            told["moved"] = slots.squared_changes(new, old, layout)
        if not told:
            return {}
        count = _core_heads(layout)
        trained = torch.ones(count, dtype=torch.bool) if run.active is None else run.active[:count]
        told = {name: (value * trained.to(value)).float() for name, value in told.items()}
        return {"trained": trained.to(run.vector), **told}

    def upload_lengths(self, layout: Layout) -> dict[str, int]:
        """Return the numbers for each core head that are sent beside its core, if any are."""
        lengths, count = super().upload_lengths(layout), _core_heads(layout)
        if self.config.lam_rule == "entropy":
            lengths |= dict.fromkeys(("trained", "rank"), count)
        if self.spare_heads:
            lengths |= dict.fromkeys(("trained", "moved"), count)
        return lengths

    def initial_state(self, layout: Layout, initial: Tensor, survey: Tensors) -> State:
        """Start with the default ρ, with the rule ``entropy``, and with the first allocation."""
        state, extra = super().initial_state(layout, initial, survey), {}
        if self.config.lam_rule == "entropy":
            level = math.log(LEVELS["relative"])
            extra["log_share"] = torch.full((_core_heads(layout),), level)
        if self.spare_heads:
            extra |= slots.first_extra(layout, self.spare_heads)
        return replace(state, extra=extra)

    def broadcast(self, state: State) -> State:
        """Leave out what only the server reads."""
        extra = {k: v for k, v in state.extra.items() if k not in slots.MEANS}
        return replace(state, extra=extra)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Return the mean; move ρ toward the target, or take noise off, by ``method.lam_rule``.

        After some rounds, let heads change place (``method.reallocate_every``).
        """
        shared, extra = super().aggregate(state, mean, round_, layout).shared, {}
        rule = self.config.lam_rule
        if rule in ("edge", "sure") and _core_heads(layout):
            on_change = self.config.prox_on == "change"
            shared, stats = denoised(shared, state.shared, round_.uploads, layout, rule, on_change)
            round_.metrics.update({f"svt_{n}": value for n, value in svt_summary(stats).items()})
            round_.spectra.update(_spectra(stats))
            round_.metrics["svt_threshold"] = float(round_.spectra["threshold"].mean())
        told = mean.extra
        if "trained" in told:
            # Nothing that clients say of a head counts if the sum of its changes does not.
            used = round_.trained[: len(told["trained"])].to(told["trained"])
            told = {**told, **{k: told[k] * used for k in ("trained", "moved") if k in told}}
        if rule == "entropy":
            extra["log_share"] = next_shares(state.extra["log_share"], told, self.config.level)
        if self.spare_heads:
            trained = told["trained"].double()
            spread = told["moved"].double() / torch.where(trained > 0, trained, 1.0)
            # By what clients have moved: a server optimizer's step has a length of its own.
            moved = (shared, state.shared)
            if round_.change is not None:
                moved = (round_.change, torch.zeros_like(round_.change))
            new, old = (self.named_tensors(layout, each) for each in moved)
            energy = slots.squared_changes(new, old, layout)
            every = self.config.reallocate_every
            extra |= slots.next_extra(state.extra, energy, spread, round_, every, layout)
        return replace(mean, shared=shared, extra=extra)

    def download_parameters(
        self, broadcast: State, layout: Layout, unsent: int, uploads: Sequence[int]
    ) -> int:
        """Leave out core heads that are zero or frozen; see :meth:`setup_parameters`."""
        count = super().download_parameters(broadcast, layout, unsent, uploads)
        if self.spare_heads:
            count -= int(slots.sizes(layout)[broadcast.extra["status"] != slots.ACTIVE].sum())
        return count

    def setup_parameters(self, broadcast: State, layout: Layout, last: int | None) -> int:
        """Add the core heads that were retired since a client took part last, once."""
        count = super().setup_parameters(broadcast, layout, last)
        if self.spare_heads:
            new = broadcast.extra["status"] >= (last or 1)
            count += int(slots.sizes(layout)[new].sum())
        return count


def _spectra(stats: Sequence[SvtStats]) -> dict[str, np.ndarray]:
    """Return singular values ``before`` and ``after`` [n, r], and each ``threshold`` [n]."""
    return {
        "before": stack_spectra([s.before for s in stats]).numpy(),
        "after": stack_spectra([s.after for s in stats]).numpy(),
        "threshold": torch.cat([s.threshold for s in stats]).numpy(),
    }


def _core_heads(layout: Layout) -> int:
    return sum(entry.shape[0] for entry in layout.entries if entry.kind == "core")


def _take(bank: Tensor, heads: Tensor | None) -> Tensor:
    """Return the given cores of a stack [n, r, r]; all of them, as a view, for None."""
    return bank if heads is None else bank.index_select(0, heads)


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)
