"""FedRot-LoRA: clients rotate their factors toward the broadcast before the server averages them.

Zhang et al.: "FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA", ICML 2026, arXiv
2602.23638.

For any orthogonal R, ``(B R)(R^T A) = B A``, so clients with the same update may send factors that
cancel in the mean. A client therefore sends ``R^T A_c`` and ``B_c R``. With A and B the broadcast,
R solves the orthogonal Procrustes problem ``min ||R^T A_c - A||`` in odd rounds and
``min ||B_c R - B||`` in even rounds: ``R = U V^T``, with the SVD ``M = U S V^T`` of ``M = A_c A^T``
or ``M = B_c^T B``. Round 1 is skipped, because B is still zero. The server averages as in FedIT.

With ``method.strength`` l below 1, clients rotate partially: ``R <- polar((1 - l) I + l R)``, after
the sign of the last row of V^T has turned a reflection (det R < 0) into a rotation. 0 is FedIT. The
default 1, the full R, is from the authors' configuration; it may be a reflection. The order of the
factors is our choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from trishul_ray.methods.base import MethodConfig, register
from trishul_ray.methods.base.adapters import lora_pairs
from trishul_ray.methods.base.messages import LocalRun, State, Tensors
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FedRotConfig(MethodConfig):
    """Hyper-parameters of FedRot-LoRA."""

    strength: float = Field(
        1.0,
        ge=0,
        le=1,
        description="l: strength of the rotation; 0 is FedIT, 1 is the full rotation",
    )


@register("fedrot")
class FedRot(FedIT):
    """FedIT with factors that clients align before averaging."""

    Config = FedRotConfig
    summary = "LoRA; A and B rotated toward the broadcast, then averaged separately (inexact)"
    reference = "Zhang et al., ICML 2026, arXiv 2602.23638"
    #: Tuned like the other rates of the row, over 1e-3 to 5e-3 (2026-11-25).
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 2.0e-3}

    def upload(self, run: LocalRun, steps: int) -> tuple[State, Tensors]:
        """Send the rotated factors."""
        shared = self.pack(run.layout, run.vector)
        if run.round > 1 and self.config.strength > 0:
            old = self.named_tensors(run.layout, run.broadcast.shared)
            for layer, a, b in lora_pairs(self.named_tensors(run.layout, shared)):
                own_a, own_b = a.double(), b.double()
                if run.round % 2:
                    likeness = own_a @ old[f"{layer}.lora_A"].double().mT
                else:
                    likeness = own_b.mT @ old[f"{layer}.lora_B"].double()
                rotation = rotation_towards(likeness, self.config.strength)
                a.copy_(rotation.mT @ own_a)
                b.copy_(own_b @ rotation)
        return State(shared), {}


def rotation_towards(likeness: Tensor, strength: float) -> Tensor:
    """Compute the orthogonal R [r, r] that maximizes ``tr(R^T M)``.

    Args:
        likeness: M [r, r], float64.
        strength: l; below 1, R is a partial rotation.
    """
    u, _, vt = torch.linalg.svd(likeness)
    rotation: Tensor = u @ vt
    if strength == 1:
        return rotation
    sign = torch.ones_like(vt[:, :1])
    sign[-1] = torch.linalg.det(rotation).sign()
    identity = torch.eye(len(vt), dtype=vt.dtype, device=vt.device)
    u, _, vt = torch.linalg.svd((1 - strength) * identity + strength * (u @ (sign * vt)))
    rotation = u @ vt
    return rotation
