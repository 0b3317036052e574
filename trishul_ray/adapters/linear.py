"""The module that replaces an ``nn.Linear`` of an adapted model, and low-precision arithmetic.

Backbones in bfloat16 and float16 must keep updates far smaller than the frozen weight. Two
roundings lose an update D of a weight W if its entries are below half a step of W's dtype:

* The sum ``W + D`` rounds back to W. :func:`split` therefore stores it as two tensors of that
  dtype.
* ``x W^T`` is rounded to the dtype when it is written, and adding ``x D^T`` afterwards rounds back
  to it in the same way, for every token. :func:`split_linear` therefore starts from the small
  terms: the sum is accumulated in float32 and rounded once, after all terms are added. The rounding
  error is as large as before but unbiased.

Legend: n tokens; d_out, d_in widths of the layer; R total rank of the adapter.
"""

import torch
from torch import Tensor, nn

from trishul_ray.adapters.base import (
    ComputePath,
    FrozenLinear,
    LayerAdapter,
    LayerSpec,
    is_low_precision,
)
from trishul_ray.adapters.quantized import QuantizedLinear
from trishul_ray.adapters.stacked import Stack, as_shape


class AdaptedLinear(nn.Module):
    """Replacement of an ``nn.Linear``; without bound trainables it computes the original layer."""

    def __init__(
        self,
        linear: nn.Linear,
        adapter: LayerAdapter,
        constants: dict[str, Tensor],
        path: ComputePath,
    ) -> None:
        super().__init__()
        #: Stores the weight instead of ``weight`` if it is quantized.
        self.stored: QuantizedLinear | None = None
        if isinstance(linear, QuantizedLinear):
            self.stored, self.dtype = linear, linear.dtype
        else:
            self.weight, self.dtype = linear.weight, linear.weight.dtype
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.adapter, self.path = adapter, path
        self.low_precision = is_low_precision(self.dtype)
        self._two_products_pay = False
        if self.stored is None and not self.weight.is_cpu:
            spec = LayerSpec("", "", self.out_features, self.in_features)
            thin = adapter.multiplications(
                spec, 1, training=False, path="factored", low_precision=self.low_precision
            )
            self._two_products_pay = thin > self.weight.numel()
        self.constants = constants  # float32, for exact updates
        self._bound_constants = constants
        # In the weight's dtype, for the forward; cast only once.
        self._cast_constants = adapter.cast(constants, self.dtype)
        self.params: dict[str, Tensor] | None = None
        #: Clients whose trainables are bound, if there are several.
        self.stack: Stack | None = None
        #: Frozen weight plus the bound base, or None without a base.
        self.moved_weight: Tensor | None = None
        #: Merged weight of a bound state that is not trained; formed in its first forward.
        self.merged: Tensor | None = None
        #: In low precision, the second part of ``merged``, or otherwise of ``moved_weight``.
        self.remainder: Tensor | None = None

    def bind(
        self,
        params: dict[str, Tensor] | None,
        base: Tensor | None = None,
        constants: dict[str, Tensor] | None = None,
        stack: Stack | None = None,
    ) -> None:
        """Bind trainables to the layer, or compute the frozen layer if ``params`` is None.

        Args:
            params: The trainables, keyed by suffix; with a ``stack``, [k, ...] and trained.
            base: [d_out, d_in] float32, added to the frozen weight while bound. In low precision
                the sum is two tensors, so that a small base is not rounded away. A quantized weight
                and its base are one dense weight while bound.
            constants: Frozen tensors that replace the layer's own while bound.
            stack: The clients, if there are several.
        """
        self.params, self.merged, self.stack = params, None, stack
        self.moved_weight, self.remainder = None, None
        if base is not None:
            weight = self.weight if self.stored is None else self.stored.weight
            self.moved_weight, self.remainder = self._parts(weight.detach().float() + base)
        used = self.constants if constants is None else constants
        if constants is not None or self._bound_constants is not self.constants:
            self._cast_constants = self.adapter.cast(used, self.dtype)
        self._bound_constants = used

    def forward(self, x: Tensor) -> Tensor:
        """Compute the adapted layer, [..., d_in] -> [..., d_out]."""
        if self.moved_weight is not None:
            return self._compute(x, self.moved_weight)
        if self.stored is None:
            return self._compute(x, self.weight)
        with self.stored.dense() as weight:
            return self._compute(x, weight)

    def _compute(self, x: Tensor, frozen: Tensor) -> Tensor:
        if self.params is None:
            return nn.functional.linear(x, frozen, self.bias)
        if not self._uses_merged(self.params):
            layer = FrozenLinear(
                frozen, self.bias, self._cast_constants, self.remainder, self._is_quantized
            )
            if self.stack is not None:
                rows = self.stack.rows(x)
                y = self.adapter.forward_stacked(rows, layer, self.params, self.path)
                return y.view(*x.shape[:-1], self.out_features)
            return self.adapter.forward(x, layer, self.params, self.path)
        if self.merged is None:
            if self.low_precision:
                frozen = frozen.float()
            if self.remainder is not None:
                frozen = frozen + self.remainder.float()
            merged = self.adapter.merged_weight(frozen, self._bound_constants, self.params)
            self.merged, self.remainder = self._parts(merged)
        if self.remainder is None:
            return nn.functional.linear(x, self.merged, self.bias)
        x2 = x.reshape(-1, self.in_features)
        y = split_linear(x2, self.merged, self.remainder, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _parts(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``weight`` in the layer's dtype and, in low precision, its remainder."""
        if self.low_precision:
            return split(weight, self.dtype)
        return weight.to(self.dtype), None

    @property
    def _is_quantized(self) -> bool:
        """Whether the frozen weight in use is dense only during a product."""
        return self.stored is not None and self.moved_weight is None

    def _uses_merged(self, params: dict[str, Tensor]) -> bool:
        """Return whether the bound state is merged once for all its forwards.

        In low precision a merged weight takes two products. This pays off in two cases: with a
        base, when the frozen weight also takes two products; and on a GPU, where a product is one
        kernel, if the thin factors cost more than the second product. A quantized layer never
        stores a merged weight.
        """
        trains = any(p.requires_grad for p in params.values())
        exact = not self.low_precision or self.remainder is not None or self._two_products_pay
        return not (trains or self._is_quantized) and self.path != "factored" and exact


def split(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a weight into two tensors of a low-precision dtype with twice the digits.

    With 8 significant bits (bfloat16) the error of the sum is at most ``2^-9 |remainder| <= 2^-18
    |weight|`` in every entry.

    Args:
        weight: Float32 or float64.
        dtype: The low-precision dtype.

    Returns:
        ``(high, remainder)``, whose sum is the weight.
    """
    high = weight.to(dtype)
    return high, (weight - high.to(weight.dtype)).to(dtype)


def split_linear(
    x: Tensor,
    weight: Tensor,
    remainder: Tensor | None,
    bias: Tensor | None,
    factors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute ``x (weight + remainder)^T + thin up + bias`` [n, d_out], small terms first.

    No gradient flows to ``x`` through ``remainder``: the input gradient uses only the high part of
    the weight. Its error is one rounding, like those of the gradient itself, and does not
    accumulate over steps.

    Args:
        x: [n, d_in].
        weight: [d_out, d_in].
        remainder: [d_out, d_in] or None.
        bias: [d_out] or None.
        factors: ``thin``, the projected input [n, R], and ``up`` [R, d_out]; for k clients, [k,
            n/k, R] and [k, R, d_out].
    """
    y = None if remainder is None else x.detach() @ remainder.t()
    if factors is not None:
        if factors[0].dim() == 3:
            small = as_shape(torch.bmm(*factors), len(x), len(weight))
            y = small if y is None else y.add_(small)
        else:
            y = factors[0] @ factors[1] if y is None else y.addmm_(*factors)
    if y is None:
        return nn.functional.linear(x, weight, bias)
    y = y.addmm_(x, weight.t())
    return y if bias is None else y.add_(bias)
