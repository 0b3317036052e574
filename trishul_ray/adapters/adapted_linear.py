"""The module that stands in for one ``nn.Linear`` of an adapted model."""

from torch import Tensor, nn

from trishul_ray.adapters.base import LOW_PRECISION, LayerAdapter, Path


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
        #: A bound state that does not train is merged once for all its forwards.
        self.mergeable = path != "factored" and linear.weight.dtype not in LOW_PRECISION
        self.params: dict[str, Tensor] | None = None
        self.merged: Tensor | None = None
        #: The frozen weight for the bound state, where a method has moved it.
        self.moved: Tensor | None = None

    def bind(
        self,
        params: dict[str, Tensor] | None,
        base: Tensor | None = None,
        constants: dict[str, Tensor] | None = None,
    ) -> None:
        """Take trainables by suffix, or None to compute the frozen layer alone.

        Args:
            params: trainables.
            base: [d_out, d_in], added to the frozen weight while bound.
            constants: instead of the layer's own frozen bases, while bound.
        """
        self.params, self.merged = params, None
        self.moved = None
        if base is not None:
            self.moved = (self.weight.detach().float() + base).to(self.weight.dtype)
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
        if self.mergeable and not any(p.requires_grad for p in self.params.values()):
            if self.merged is None:
                self.merged = self.adapter.merged_weight(frozen, self.exact, self.params)
            return nn.functional.linear(x, self.merged, self.bias)
        return self.adapter.forward(x, frozen, self.bias, self.working, self.params, self.path)
