"""Base class of layer adapters, which adapt one frozen linear layer.

An adapter defines its trainable tensors, the frozen tensors drawn with them, and the forward pass
of the layer. It stores no tensors: constants and trainables are passed to every call, so that one
attached model can serve any client.

Legend: d_out, d_in widths of the layer; n tokens; k clients; R total rank of the adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


#: Computation of an adapted layer: through one merged weight, through the thin factors, or by
#: whichever needs fewer multiplications for the given shapes. The results agree up to rounding. For
#: this reason, the forward in low precision is always factored.
ComputePath = Literal["auto", "merged", "factored"]


#: Inputs of a forward: the trainables (float32), their casts to the layer's dtype, or the products
#: of scalars and cores in that dtype. Casts and products are computed for all layers at once.
Reads = Literal["trainables", "casts", "products"]


def is_low_precision(dtype: torch.dtype) -> bool:
    """Return whether adding an update to weights of this dtype would round the update away.

    Args:
        dtype: Dtype of the weights.
    """
    return dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerSpec:
    """A targeted ``nn.Linear``.

    Attributes:
        name: Dotted module path in the model.
        block: Dotted path of its transformer block.
        d_out: Number of rows of the weight.
        d_in: Number of columns of the weight.
    """

    name: str
    block: str
    d_out: int
    d_in: int


@dataclass(frozen=True)
class FrozenLinear:
    """Frozen part of an adapted layer, which receives no gradients.

    Attributes:
        weight: [d_out, d_in].
        bias: [d_out] or None.
        constants: Frozen tensors of the adapter, keyed by name, from :meth:`LayerAdapter.cast`.
        remainder: [d_out, d_in], only in low precision: the second part of a weight that was split
            by :func:`trishul_ray.adapters.linear.split`.
        quantized: Whether the weight is stored in fewer bits, and dense only in this call.
    """

    weight: Tensor
    bias: Tensor | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    remainder: Tensor | None = None
    quantized: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether adding an update to the weight would round the update away."""
        return is_low_precision(self.weight.dtype)

    @property
    def factored(self) -> bool:
        """Whether forming the adapted weight would lose digits or take memory, so it is avoided."""
        return self.quantized or self.low_precision


@dataclass(frozen=True)
class LayerAdapter(ABC):
    """Base class of adapters of one linear layer.

    Subclasses are frozen dataclasses of hyper-parameters. They implement :meth:`shapes`,
    :meth:`constants`, :meth:`initial`, :meth:`forward`, :meth:`merged_weight` and
    :meth:`num_parameters`. The other methods have defaults.

    Example:
        An adapter that trains one scale per output, ``y = (1 + s) * (W x)``::

            @dataclass(frozen=True)
            class Scaled(LayerAdapter):
                def shapes(self, spec):
                    return {"s": (spec.d_out,)}

                def constants(self, spec, seed, device="cpu"):
                    return {}

                def initial(self, spec, seed):
                    return {"s": torch.zeros(spec.d_out)}

                def forward(self, x, frozen, params, path="auto"):
                    scale = (1 + params["s"]).to(frozen.weight.dtype)
                    y = scale * (x @ frozen.weight.mT)
                    return y if frozen.bias is None else y + frozen.bias

                def merged_weight(self, weight, constants, params):
                    scale = (1 + params["s"]).to(weight.dtype)
                    return scale[:, None] * weight

                def num_parameters(self, spec):
                    return spec.d_out
    """

    @property
    def reads(self) -> Reads:
        """Kind of ``params`` that :meth:`forward` receives while the layer is trained."""
        return "trainables"

    def _computes_as(self, parent: type[LayerAdapter], *more: str) -> bool:
        """Return whether the forward, and further methods, are inherited from a parent class."""
        names = ("forward", "forward_stacked", *more)
        return all(getattr(type(self), name) is getattr(parent, name) for name in names)

    @abstractmethod
    def shapes(self, spec: LayerSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trainables.

        Args:
            spec: The layer.

        Returns:
            The shapes, keyed by suffix (``core``, ``scale``, ...). An empty dictionary leaves the
            layer unadapted.
        """

    @abstractmethod
    def constants(
        self, spec: LayerSpec, seed: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Create the frozen tensors of a layer.

        They are drawn on the CPU from a separate random stream per layer, so that every process and
        device type gets the same bytes.

        Args:
            spec: The layer.
            seed: Seed of the run.
            device: Device of the result.

        Returns:
            Float32 tensors on ``device``, keyed by name.
        """

    def cast(self, constants: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Convert the frozen tensors to the form that :meth:`forward` reads.

        Args:
            constants: Frozen tensors, keyed by name.
            dtype: Dtype of the weight.

        Returns:
            The frozen tensors in ``dtype``, keyed by name.
        """
        return {name: value.to(dtype) for name, value in constants.items()}

    @abstractmethod
    def initial(self, spec: LayerSpec, seed: int) -> dict[str, Tensor]:
        """Create the trainables before the first step; their update must be 0.

        Args:
            spec: The layer.
            seed: Seed of the run.

        Returns:
            Float32 tensors on the CPU, keyed by suffix.
        """

    def start(self, spec: LayerSpec, seed: int, weight: Tensor) -> dict[str, Tensor]:
        """Create the trainables of the first global state; by default :meth:`initial`.

        They may depend on the weight. Their update need not be 0, because the method's first state
        compensates for it.

        Args:
            spec: The layer.
            seed: Seed of the run.
            weight: [d_out, d_in], the frozen weight.

        Returns:
            Float32 tensors on the CPU, keyed by suffix.
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
        """Compute the adapted layer.

        Args:
            x: [..., d_in]; receives gradients.
            frozen: The frozen part of the layer.
            params: The trainables, or their form given by :attr:`reads`, keyed by suffix; they
                receive gradients.
            path: Requested computation; see :data:`ComputePath`.

        Returns:
            [..., d_out] in the dtype of the weight.
        """

    def forward_stacked(
        self,
        rows: Tensor,
        frozen: FrozenLinear,
        params: Mapping[str, Tensor],
        path: ComputePath = "auto",
    ) -> Tensor:
        """Compute the adapted layer for k clients.

        By default, the clients are computed one by one. Override it to compute the frozen part only
        once.

        Args:
            rows: [k, n, d_in]; receives gradients.
            frozen: The frozen part of the layer.
            params: The clients' trainables stacked to [k, ...], keyed by suffix; they receive
                gradients.
            path: Requested computation; see :data:`ComputePath`.

        Returns:
            [k, n, d_out] in the dtype of the weight.
        """
        own = [{name: param[i] for name, param in params.items()} for i in range(len(rows))]
        each = zip(rows, own, strict=True)
        return torch.stack([self.forward(x, frozen, one, path) for x, one in each])

    @abstractmethod
    def merged_weight(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the weight plus the update.

        Args:
            weight: [d_out, d_in], the frozen weight, including changes by the method.
            constants: The frozen tensors, keyed by name.
            params: The trainables, keyed by suffix.

        Returns:
            [d_out, d_in] in the dtype of the weight.
        """

    def lora_factors(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Express the update as a LoRA pair with scale 1.

        Args:
            weight: As for :meth:`merged_weight`.
            constants: As for :meth:`merged_weight`.
            params: As for :meth:`merged_weight`.

        Returns:
            Float64 [d_out, R] and [R, d_in]; None (the default) if the update is not a product of
            thin factors. Exports then decompose :meth:`delta`.
        """
        return None

    def delta(
        self, weight: Tensor, constants: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the update of the weight.

        By default, it is the product of the LoRA pair or, without a pair, the difference between
        :meth:`merged_weight` and the weight in float64.

        Args:
            weight: As for :meth:`merged_weight`.
            constants: As for :meth:`merged_weight`.
            params: As for :meth:`merged_weight`.

        Returns:
            Float64 [d_out, d_in].
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
        """Estimate the multiplications of a call in addition to those of the plain layer.

        By default, each trainable entry is used once per token and direction; override it for other
        computations.

        Args:
            spec: The layer.
            n: Number of tokens.
            training: Whether to include the backward pass.
            path: Requested computation; see :data:`ComputePath`.
            low_precision: Whether the weight has a low-precision dtype.

        Returns:
            The number of multiplications.
        """
        return n * self.num_parameters(spec) * (3 if training else 1)

    @abstractmethod
    def num_parameters(self, spec: LayerSpec) -> int:
        """Return the number of trainable matrix entries; published budgets exclude scalars.

        Args:
            spec: The layer.
        """

    def num_scalars(self, spec: LayerSpec) -> int:
        """Return the number of trainable scalars.

        Args:
            spec: The layer.
        """
        return 0
