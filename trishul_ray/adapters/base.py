"""The contract of a layer adapter: how one frozen linear layer is adapted.

An adapter says what is trained beside a frozen weight, what is drawn once and frozen with it, and
how the layer then computes. It owns no tensors: constants and trainables are handed over in every
call, so that one attached model serves any client.

Legend: d_out, d_in the layer's width; n tokens; R the adapter's total rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: Which route an adapted layer takes: through one merged weight, through the thin factors, or
#: whichever needs fewer multiplications for the shapes at hand. The results are equal; to keep them
#: so, a forward in low precision takes the thin factors always.
Path = Literal["auto", "merged", "factored"]

#: Weights of these types are not merged while they train: adding the update would round it away.
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerSpec:
    """A targeted ``nn.Linear``.

    Attributes:
        name: dotted module path in the model.
        block: dotted path of the transformer block it belongs to.
        d_out: rows of the weight.
        d_in: columns of the weight.
    """

    name: str
    block: str
    d_out: int
    d_in: int


@dataclass(frozen=True)
class LayerAdapter(ABC):
    """How one linear layer is adapted. Subclasses are frozen dataclasses of hyper-parameters."""

    @abstractmethod
    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Shapes of the trainables by suffix (``core``, ``scale``, ...); empty: not adapted."""

    @abstractmethod
    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The frozen tensors of this layer, float32 on ``device``.

        They are drawn on the CPU from the layer's own stream, so that every process and every
        kind of device gets the same bytes.
        """

    @abstractmethod
    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """The trainables before the first step, float32 on the CPU; the update they give is 0."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constants: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        path: Path = "auto",
        rest: Tensor | None = None,
    ) -> Tensor:
        """The adapted layer: x [..., d_in] -> [..., d_out].

        Gradients flow to ``x`` and ``params``, never to ``weight``, ``bias`` or ``rest``.

        Args:
            x: [..., d_in] in the weight's dtype.
            weight: [d_out, d_in], frozen.
            bias: [d_out] or None.
            constants: frozen tensors by name.
            params: trainables by suffix.
            path: which route to take.
            rest: [d_out, d_in], in low precision alone: what the frozen weight has beyond
                ``weight`` (see :func:`trishul_ray.adapters.low_precision.split`).
        """

    @abstractmethod
    def merged_weight(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """The weight with the update added, [d_out, d_in] in the weight's dtype."""

    @abstractmethod
    def lora_factors(
        self, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The update as a LoRA pair of scale 1, float64: B-side [d_out, R] and A-side [R, d_in]."""

    def delta(self, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
        """The update of the weight, float64 [d_out, d_in]."""
        side_B, side_A = self.lora_factors(constants, params)
        return side_B @ side_A

    @abstractmethod
    def num_parameters(self, spec: LayerSpec) -> int:
        """Trainable matrix entries, scalars left out (as the published budgets count)."""

    def num_scalars(self, spec: LayerSpec) -> int:
        """Trainable scalars beside :meth:`num_parameters`."""
        return 0
