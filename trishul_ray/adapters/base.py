"""The interface of a layer adapter: how one frozen linear layer is adapted.

An adapter defines the trainable tensors beside a frozen weight, the frozen tensors drawn with them,
and the layer's forward. It holds no tensors itself: constants and trainables are passed to every
call, so that one attached model serves any client.

Legend: d_out, d_in the layer's widths; n tokens; R the adapter's total rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


#: Computation of an adapted layer: through one merged weight, the thin factors, or whichever
#: needs fewer multiplications for the shapes at hand. The results agree up to rounding. To keep it
#: so, an adapter's forward in low precision is always factored.
ComputePath = Literal["auto", "merged", "factored"]


#: What a forward reads: the trainables (float32), their casts to the layer's dtype, or the products
#: of scalars and cores in that dtype. Casts and products are computed for all layers at once.
Reads = Literal["trainables", "casts", "products"]


def is_low_precision(dtype: torch.dtype) -> bool:
    """Return whether adding an update to weights of this dtype would round it away."""
    return dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerSpec:
    """A targeted ``nn.Linear``.

    Attributes:
        name: dotted module path in the model.
        block: dotted path of its transformer block.
        d_out, d_in: rows and columns of the weight.
    """

    name: str
    block: str
    d_out: int
    d_in: int


@dataclass(frozen=True)
class FrozenLinear:
    """Frozen part of an adapted layer: no gradient flows to it.

    Attributes:
        weight: [d_out, d_in].
        bias: [d_out] or None.
        constants: the adapter's frozen tensors by name, as :meth:`LayerAdapter.cast` gives them.
        remainder: [d_out, d_in], only in low precision: the second part of a weight that was split
            by :func:`trishul_ray.adapters.linear.split`.
        quantized: the weight is stored in fewer bits, and dense only in this call.
    """

    weight: Tensor
    bias: Tensor | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    remainder: Tensor | None = None
    quantized: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether adding an update to the weight would round it away."""
        return is_low_precision(self.weight.dtype)

    @property
    def factored(self) -> bool:
        """Whether the forward must not form the adapted weight: it is rounded, or takes memory."""
        return self.quantized or self.low_precision


@dataclass(frozen=True)
class LayerAdapter(ABC):
    """Adapter of one linear layer. Subclasses are frozen dataclasses of hyper-parameters."""

    @property
    def reads(self) -> Reads:
        """Kind of ``params`` that :meth:`forward` is given while the layer is trained."""
        return "trainables"

    def _computes_as(self, parent: type[LayerAdapter], *more: str) -> bool:
        """Return whether the forward, and more methods, are those of a parent class."""
        names = ("forward", "forward_stacked", *more)
        return all(getattr(type(self), name) is getattr(parent, name) for name in names)

    @abstractmethod
    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trainables by suffix (``core``, ``scale``, ...).

        An empty dictionary leaves the layer unadapted.
        """

    @abstractmethod
    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return the frozen tensors of this layer, float32 on ``device``.

        They are drawn on the CPU from the layer's own random stream, so that every process and
        device type gets the same bytes.
        """

    def cast(self, constants: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the frozen tensors as :meth:`forward` reads them, in the weight's dtype."""
        return {name: value.to(dtype) for name, value in constants.items()}

    @abstractmethod
    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """Return the trainables before the first step, float32 on the CPU; their update is 0."""

    def start(self, spec: LayerSpec, seed: int, weight: Tensor) -> dict[str, Tensor]:
        """Return the trainables of the first global state: :meth:`initial`, or others of a weight.

        Their update need not be 0: the method's first state makes up for it. ``weight`` is the
        frozen one, [d_out, d_in].
        """
        return self.initial(spec, seed)

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer, [..., d_in] -> [..., d_out] in the weight's dtype.

        ``params`` are the trainables by suffix, or what :attr:`reads` says, to which gradients
        flow, as to ``x``.
        """

    def forward_stacked(
        self,
        rows: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer for k clients, [k, n, d_in] -> [k, n, d_out].

        ``params`` are theirs, stacked: [k, ...] by suffix. By default the clients follow each
        other; override it to compute what is frozen once.
        """
        own = [{name: param[i] for name, param in params.items()} for i in range(len(rows))]
        each = zip(rows, own, strict=True)
        return torch.stack([self.forward(x, frozen, one, path) for x, one in each])

    @abstractmethod
    def merged_weight(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the weight plus the update, [d_out, d_in] in the weight's dtype.

        Args:
            weight: The frozen weight, [d_out, d_in], with the change that a method has made to it.
            constants: The adapter's frozen tensors by name.
            params: The trainables by suffix.
        """

    def lora_factors(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the update as a LoRA pair of scale 1: float64 [d_out, R] and [R, d_in].

        None (the default) if the update is no product of thin factors: an export then decomposes
        :meth:`delta`. The arguments are those of :meth:`merged_weight`.
        """
        return None

    def delta(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the update of the weight, float64 [d_out, d_in].

        By default the product of the LoRA pair or, without one, what :meth:`merged_weight` adds to
        the weight in float64.
        """
        factors = self.lora_factors(weight, constants, params)
        if factors is not None:
            return factors[0] @ factors[1]
        weight = weight.detach().double()
        wide = [{k: v.detach().double() for k, v in each.items()} for each in (constants, params)]
        return self.merged_weight(weight, *wide) - weight

    def multiplications(
        self,
        spec: LayerSpec,
        n: int,
        *,
        training: bool,
        path: ComputePath = "auto",
        low_precision: bool = False,
    ) -> int:
        """Estimate the multiplications of a call beyond those of the plain layer.

        With ``training`` those of the backward pass are included. By default each trainable entry
        is used once for each of the n tokens and direction; override it for another path.
        """
        return n * self.num_parameters(spec) * (3 if training else 1)

    @abstractmethod
    def num_parameters(self, spec: LayerSpec) -> int:
        """Return the number of trainable matrix entries (published budgets leave scalars out)."""

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return the number of trainable scalars."""
        return 0
