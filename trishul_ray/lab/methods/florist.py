"""FLoRIST: stack the clients' factors, and broadcast the leading components of their product.

Ramesh and Dass: "FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated
Fine-Tuning of Large Language Models", MLSys 2026, arXiv 2506.09199.

As in FLoRA, stacking ``A_s = [p_1 A_1; ...; p_m A_m]`` and ``B_s = [B_1, ..., B_m]`` makes
``B_s A_s`` the sum of ``p_c B_c A_c``. Its SVD ``U S V^T`` follows from the SVD of a small core
between orthonormal bases of both stacks, without the full product. The paper computes the bases by
SVD; this file uses QR decompositions, which give the same product with less work. For each matrix,
the server keeps the smallest rank p whose squared singular values sum to at least the fraction
``method.threshold`` of the total (the paper's τ, 0.8 to 0.99). All clients receive ``A = V_p^T``
and ``B = U_p S_p``.

We could check this only against the abstract and the authors' code. In that code, a client starts
from the leading components that fit its rank, and zeros fill missing components. These cannot be
trained in that round, so no client sends them, but p may grow again, because clients differ. The
code evaluates the global model at rank p even if no client can train that rank. Here, p is at most
the adapter's rank, and ``kept_energy`` in the record is the smallest fraction kept of any matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import LocalRun, Round, State
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FLoRISTConfig(MethodConfig):
    """Hyper-parameters of FLoRIST."""

    threshold: float = Field(
        0.9, gt=0, le=1, description="τ: minimum fraction of the squared singular values to keep"
    )


@register("florist")
class FLoRIST(FedIT):
    """Average the products without forming them, and keep their leading components."""

    Config = FLoRISTConfig
    summary = "LoRA of any ranks, stacked; SVD of the stack, truncated at a fraction of its energy"
    reference = "Ramesh and Dass, MLSys 2026, arXiv 2506.09199"
    communication = "p (d_in + d_out) per matrix up and down, p <= r; initially r"
    aggregates_mean_only = False
    needs_uploads = True
    takes_limits = True

    def start(self, run: LocalRun, initial: Tensor) -> None:
        """Load the leading components of the broadcast; neither side sends missing components."""
        super().start(run, initial)
        self.limit_rank(run)
        pairs = [(a, len(b)) for _, a, b in lora_pairs(run.layout.views(run.vector))]
        run.unsent = sum(int((a == 0).all(dim=1).sum()) * (a.shape[1] + d) for a, d in pairs)

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Replace the factors of each matrix by the leading components of the stack."""
        total = math.fsum(upload.weight for upload in round_.uploads)
        sent = [
            (upload.weight / total, self.named_tensors(layout, upload.arrays.shared))
            for upload in round_.uploads
        ]
        shared, ranks, kept = mean.shared.clone(), [], []
        for layer, a, b in lora_pairs(self.named_tensors(layout, shared)):
            stack_A = torch.cat([p * one[f"{layer}.lora_A"].double() for p, one in sent])
            stack_B = torch.cat([one[f"{layer}.lora_B"].double() for _, one in sent], dim=1)
            u, s, vt = product_svd(stack_B, stack_A)
            b.zero_()
            if s[0] == 0:  # the product is zero: keep A, so that B has a gradient
                continue
            rank = min(kept_rank(s, self.config.threshold), len(a))
            # Singular vectors have arbitrary signs: make the largest entry of A's rows positive.
            sign = torch.sign(vt.gather(1, vt.abs().argmax(dim=1, keepdim=True)))[:rank]  # [p, 1]
            a.zero_()
            a[:rank] = (sign * vt[:rank]).float()
            b[:, :rank] = (u[:, :rank] * s[:rank] * sign.mT).float()
            ranks.append(rank)
            kept.append(float(s[:rank].square().sum() / s.square().sum()))
        if ranks:
            round_.metrics.update(kept_rank=math.fsum(ranks) / len(ranks), kept_energy=min(kept))
        return State(shared)

    def warning(self, metrics: Mapping[str, float]) -> str:
        """Warn if the adapter's rank keeps less than ``method.threshold``."""
        kept, threshold = metrics.get("kept_energy", 1.0), self.config.threshold
        if kept >= threshold * (1 - 1e-9):
            return ""
        return (
            f"kept_energy is {kept:.3g} in round 1, below method.threshold={threshold:g}: the "
            "adapter's rank is too small; increase adapter.rank or budget"
        )


def product_svd(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the SVD of ``b a`` in float64, without forming the product.

    Args:
        b: [d_out, n].
        a: [n, d_in].

    Returns:
        U [d_out, k], s [k] and V^T [k, d_in], with k the smallest of d_out, n and d_in.
    """
    left, core_B = torch.linalg.qr(b)
    right, core_A = torch.linalg.qr(a.mT)
    u, s, vt = torch.linalg.svd(core_B @ core_A.mT, full_matrices=False)
    return left @ u, s, vt @ right.mT


def kept_rank(values: Tensor, threshold: float) -> int:
    """Return how many leading values have squares that sum to ``threshold`` of the total."""
    energy = values.square().cumsum(0)
    return 1 + int((energy < threshold * energy[-1]).sum())
