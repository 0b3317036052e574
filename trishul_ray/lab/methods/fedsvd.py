"""FedSVD: clients train only B, and the server rotates A and B so that A's rows are orthonormal.

Lee et al.: "FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA", NeurIPS
2025, arXiv 2505.12805.

Within a round, A is frozen and the same on all clients, so averaging B is exact, as in FFA-LoRA.
After every round, the server decomposes ``B A = U S V^T`` and sets ``A <- V_r^T``,
``B <- U_r S_r``. B A has at most rank r, so the global model does not change, and the rows of A
become the main directions of the update. After a QR decomposition of B, the SVD is of an r x d_in
matrix. The server sends both factors, and clients send only B. The rank is the budget's LoRA rank.

Codecs, privacy and server optimizers act on the change of B within a round. Stages that store
numbers for the next round (moments, coding errors) are rejected, because these numbers would refer
to the earlier A.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import Settings, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import Round, State
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch


@register("fedsvd")
class FedSVD(FedIT):
    """Train and average B; decompose the product into the next A and B."""

    summary = "LoRA; B averaged under a common A, which the SVD of B A renews each round (exact)"
    reference = "Lee et al., NeurIPS 2025, arXiv 2505.12805"
    communication = "r d_out per matrix up, r (d_in + d_out) down"
    rates_like = "ffalora"
    #: Tuned like the other rates of the row, over 1e-3 to 5e-3 (2026-11-25).
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 2.0e-3}

    def check(self, settings: Settings) -> None:
        """Reject stages whose state depends on an earlier A."""
        super().check(settings)
        if settings.stateful_fields:
            raise ValueError(
                f"{settings.stateful_fields[0]} adds a state of earlier rounds to a change, and "
                f"method={self.config.name!r} changes its bases between rounds; use only one"
            )

    def round_wire(self, layout: Layout, round_number: int) -> tuple[str, ...]:
        """Return all names except the names of A."""
        return tuple(name for name in self.wire(layout) if not name.endswith(".lora_A"))

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Decompose the product of the mean B and the common A into the next A and B."""
        shared = mean.shared.clone()
        for _, a, b in lora_pairs(self.named_tensors(layout, shared)):
            left, small = torch.linalg.qr(b.double())  # [d_out, k], [k, r] with k = min(d_out, r)
            u, s, vt = torch.linalg.svd(small @ a.double(), full_matrices=False)  # s: [k]
            # Singular vectors have arbitrary signs: make the largest entry of A's rows positive.
            largest = vt.abs().argmax(dim=1, keepdim=True)
            sign = torch.sign(vt.gather(1, largest))  # [k, 1]
            a[: len(s)] = (sign * vt).float()
            b[:, : len(s)] = (left @ u * s * sign.mT).float()
            b[:, len(s) :] = 0  # the rank is at most d_out
        return replace(mean, shared=shared)
