"""FLoRG: train one low-rank matrix, average its Gram matrix, and align the next one.

Meng, Tang and Wong: "FLoRG: Federated Fine-tuning with Low-rank Gram Matrices and Procrustes
Alignment", ICLR 2026, arXiv 2602.17095.

The update of a layer is ``L A^T A R``, with k the smaller width of the layer. L [d_out, k] has
orthonormal columns and R [k, d_in] orthonormal rows; both are frozen and the same on all clients.
Clients train and send A [r, k]. The server averages the Gram matrices, ``Q = mean(A_c^T A_c)``,
which gives the exact mean of the updates, and decomposes ``Q = P^T D P`` into ``C = sqrt(D) P``.
For any orthonormal S, S C has the same Gram matrix. The server selects the S C nearest to the last
A (Procrustes): with ``A C^T = U E V^T``, the next A is ``U V^T C``. It has r rows, so a part of Q
is lost if the rank of Q exceeds r. The record has ``gram_error``, the mean of
``||A^T A - Q||_F / ||Q||_F`` over the matrices.

The gradient at A = 0 is zero, so A starts at a random A0, drawn like LoRA's A. The additional term
``- L A0^T A0 R`` makes the first model equal to the pretrained model. This start is our choice,
because we had no access to the paper's. The rank is the budget's LoRA rank, as in the paper: a
client trains r k numbers per matrix, half as many as LoRA if the matrix is square.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.base import Method, register
from trishul_ray.methods.base.adapters import FIELDS_READ, lora_scale
from trishul_ray.methods.base.messages import Round, State, TargetLayers
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@register("florg")
class FLoRG(Method):
    """Average Gram matrices of one trained factor."""

    summary = "one low-rank factor A; its Gram matrix A^T A averaged, A aligned with the last one"
    reference = "Meng et al., ICLR 2026, arXiv 2602.17095"
    communication = "r min(d_in, d_out) per matrix up and down"
    rates_like = "fedit"
    rates: ClassVar = {"cifar100 trishul/vit-s14-photos": 2.0e-3}
    fields_read = FIELDS_READ["lora"]

    def adapters(self, targets: TargetLayers) -> dict[str, LayerAdapter]:
        """Attach one factor to every target."""
        from trishul_ray.lab.methods.gram import GramFactor  # imports torch

        rank = targets.adapter.rank or targets.lora_rank
        scale = lora_scale(targets.adapter.alpha, rank)
        adapter = GramFactor(2 * rank, scale, dropout=targets.adapter.dropout)
        return {layer.name: adapter for layer in targets.layers}

    def contribution(self, upload: State, layout: Layout) -> State:
        """Add the Gram matrices [k, k] of the factors, in float64, to an upload."""
        factors = self.factors(layout, upload.shared)
        return replace(upload, base={n: a.double().mT @ a.double() for n, a in factors.items()})

    def aggregate(self, state: State, mean: State, round_: Round, layout: Layout) -> State:
        """Decompose the mean Gram matrices, and align each factor with the last A."""
        shared, errors = mean.shared.clone(), []
        last = self.factors(layout, state.shared)
        for name, factor in self.factors(layout, shared).items():
            aligned = align(mean.base[name], last[name].double())
            errors.append((aligned.mT @ aligned - mean.base[name]).norm() / mean.base[name].norm())
            factor.copy_(aligned)
        round_.metrics["gram_error"] = float(torch.stack(errors).mean())
        return State(shared)

    def factors(self, layout: Layout, shared: Tensor) -> dict[str, Tensor]:
        """Return the factors A [r, k], keyed by name, as views of a shared part [W]."""
        named = self.named_tensors(layout, shared)
        return {name: value for name, value in named.items() if name.endswith(".gram_A")}


def align(gram: Tensor, last: Tensor) -> Tensor:
    """Compute the factor of a Gram matrix that is nearest to the last factor.

    Args:
        gram: Q [k, k], positive semi-definite.
        last: The last A [r, k].

    Returns:
        ``U V^T C`` [r, k], whose Gram matrix is Q if Q has rank r or less.
    """
    values, vectors = torch.linalg.eigh(gram)
    root = values.clamp(min=0).sqrt()[:, None] * vectors.mT  # C [k, k]
    u, _, vt = torch.linalg.svd(last @ root.mT, full_matrices=False)
    aligned: Tensor = u @ vt @ root
    return aligned
