"""The module that stands in for one ``nn.Linear`` of an adapted model."""

from torch import Tensor, nn

from trishul_ray.adapters.base import LOW_PRECISION, LayerAdapter, Path
from trishul_ray.adapters.low_precision import add_linear, rest_product, split


class AdaptedLinear(nn.Module):
    """Stands in for one ``nn.Linear``. Without bound trainables it computes just that layer."""

    def __init__(
        self, linear: nn.Linear, adapter: LayerAdapter, constants: dict[str, Tensor], path: Path
    ) -> None:
        """Keep the linear layer's own weight and bias."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.adapter, self.path = adapter, path
        self.constants = constants  # float32, for exact updates
        #: In the weight's dtype, for the forward: cast once (the same tensors in float32).
        self.working = {k: v.to(linear.weight.dtype) for k, v in constants.items()}
        self.exact, self.swapped = constants, False
        self.low = linear.weight.dtype in LOW_PRECISION
        self.params: dict[str, Tensor] | None = None
        #: The whole weight of a bound state that does not train, formed at its first forward.
        self.merged: Tensor | None = None
        #: The frozen weight for the bound state, where a method has moved it.
        self.moved: Tensor | None = None
        #: In low precision, what ``merged``, or else ``moved``, lacks of the weight it stands for.
        self.rest: Tensor | None = None

    def bind(
        self,
        params: dict[str, Tensor] | None,
        base: Tensor | None = None,
        constants: dict[str, Tensor] | None = None,
    ) -> None:
        """Take trainables by suffix, or None to compute the frozen layer alone.

        Args:
            params: trainables.
            base: [d_out, d_in] float32, added to the frozen weight while bound. In low precision
                the sum is kept as two tensors, so that a small base is not rounded away.
            constants: instead of the layer's own frozen bases, while bound.
        """
        self.params, self.merged = params, None
        self.moved, self.rest = None, None
        if base is not None:
            self.moved, self.rest = self._kept(self.weight.detach().float() + base)
        used = self.constants if constants is None else constants
        self.exact = used
        if constants is not None or self.swapped:
            self.working = {k: v.to(self.weight.dtype) for k, v in used.items()}
        self.swapped = constants is not None

    def forward(self, x: Tensor) -> Tensor:
        """The adapted layer: x [..., d_in] -> [..., d_out]."""
        if self.params is None:
            return nn.functional.linear(x, self.weight, self.bias)
        frozen = self.weight if self.moved is None else self.moved
        if self._merges(self.params):
            if self.merged is None:
                if self.rest is not None:
                    frozen = frozen.float() + self.rest.float()
                whole = self.adapter.merged_weight(frozen, self.exact, self.params)
                self.merged, self.rest = self._kept(whole)
            if self.rest is None:
                return nn.functional.linear(x, self.merged, self.bias)
            x2 = x.reshape(-1, self.in_features)
            y = add_linear(rest_product(x2, self.rest), x2, self.merged, self.bias)  # [n, d_out]
            return y.view(*x.shape[:-1], self.out_features)
        return self.adapter.forward(
            x, frozen, self.bias, self.working, self.params, self.path, self.rest
        )

    def _kept(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """``weight`` in the layer's dtype, and in low precision what that lacks of it."""
        dtype = self.weight.dtype
        return split(weight, dtype) if self.low else (weight.to(dtype), None)

    def _merges(self, params: dict[str, Tensor]) -> bool:
        """Whether the bound state is merged once for all its forwards.

        In low precision a merged weight takes two products, which pays where the method has moved
        the frozen weight, since that takes two by itself.
        """
        trains = any(p.requires_grad for p in params.values())
        return not trains and self.path != "factored" and (not self.low or self.rest is not None)
