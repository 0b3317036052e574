"""Keep updates far smaller than the frozen weight in bfloat16 and float16.

Two roundings lose an update D of a weight W whose entries are below half a step of W's dtype:

* the sum ``W + D`` rounds back to W. :func:`split` therefore keeps it as two tensors of that dtype;
* ``x W^T`` is rounded to the dtype when it is written, and adding ``x D^T`` afterwards rounds back
  to it likewise, on every token. :func:`add_linear` therefore takes the small term first: the sum
  is accumulated in float32 and rounded when both are in it, which is off by as much but unbiased.

Legend: n tokens, d_out and d_in the layer's width.
"""

import torch
from torch import Tensor
from torch.nn import functional


def split(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``(high, rest)`` in ``dtype`` whose sum is ``weight`` to twice the digits of one.

    Args:
        weight: any shape, float32 or float64.
        dtype: of the parts. With 8 significant bits (bfloat16) the sum is off by at most
            ``2^-9 |rest| <= 2^-18 |weight|``, entry by entry.
    """
    high = weight.to(dtype)
    return high, (weight - high.to(weight.dtype)).to(dtype)


def rest_product(x: Tensor, rest: Tensor | None) -> Tensor | None:
    """Return ``x rest^T`` [n, d_out], or None if there is no rest.

    No gradient flows back to ``x``: the input gradient takes ``high`` for the whole weight, an
    error of one rounding, as those of the gradient itself, and not carried from step to step.

    Args:
        x: [n, d_in].
        rest: second part of a :func:`split` weight [d_out, d_in], or None.
    """
    return None if rest is None else x.detach() @ rest.t()


def add_linear(update: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``update + x W^T + bias`` [n, d_out]; overwrites ``update``.

    Args:
        update: [n, d_out], the small term, or None.
        x: [n, d_in].
        weight: [d_out, d_in].
        bias: [d_out] or None.
    """
    if update is None:
        return functional.linear(x, weight, bias)
    y = update.addmm_(x, weight.t())
    return y if bias is None else y.add_(bias)
