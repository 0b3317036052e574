"""HiRA: the elementwise product of the frozen weight and a low-rank product.

Huang et al.: "HiRA: Parameter-Efficient Hadamard High-Rank Adaptation for Large Language Models",
ICLR 2025. ``W <- W + W o (B A)``, whose update depends on the frozen weight and has any rank.
"""

from dataclasses import dataclass

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.methods.base import ADAPTED, Method, register
from trishul_ray.runtime.lazy import torch
from trishul_ray.runtime.random_streams import torch_rng


@dataclass(frozen=True)
class Hadamard(LayerAdapter):
    """``W o (1 + B A)``."""

    rank: int

    def shapes(self, spec):
        return {"hira_A": (self.rank, spec.d_in), "hira_B": (spec.d_out, self.rank)}

    def constants(self, spec, seed, device="cpu"):
        return {}

    def initial(self, spec, seed):
        drawn = torch.randn(self.rank, spec.d_in, generator=torch_rng(seed, "hira", spec.name))
        return {"hira_A": drawn / self.rank**0.5, "hira_B": torch.zeros(spec.d_out, self.rank)}

    def forward(self, x, frozen, params, path="auto"):
        merged = self.merged_weight(frozen.weight, frozen.constants, params)
        return torch.nn.functional.linear(x, merged, frozen.bias)

    def merged_weight(self, weight, constants, params):
        return weight * (1 + params["hira_B"] @ params["hira_A"])

    def num_parameters(self, spec):
        return self.rank * (spec.d_out + spec.d_in)


@register("hira")
class HiRA(Method):
    """Average the factors of a Hadamard product."""

    summary = "W o (B A): factors averaged"
    reference = "Huang et al., ICLR 2025"
    communication = "r (d_in + d_out) per matrix up and down"
    rates_like = "fedit"
    fields_read = ADAPTED
    aggregates_mean_only = True

    def adapters(self, targets):
        rank = targets.adapter.rank or targets.lora_rank
        return {layer.name: Hadamard(rank) for layer in targets.layers}
