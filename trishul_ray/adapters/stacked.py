"""Several clients in one forward: their rows concatenated, their trainables stacked.

The frozen part computes on all rows at once. Trainables act on the rows of their client, using
products with an additional axis.

Legend: k clients; n rows of one client, counting tokens; d_out, d_in widths of a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trishul_ray.errors import InputError


@dataclass
class Stack:
    """The clients of a forward, in the order of their rows.

    Attributes:
        clients: k.
        examples: Number of examples in the batch, of all clients; set before every forward.
    """

    clients: int
    examples: int = 0

    def rows(self, x: Tensor) -> Tensor:
        """Reshape the inputs of a layer [k b, ..., d_in] to [k, n, d_in].

        Raises:
            InputError: The first axis does not enumerate the examples.
        """
        if not x.shape[0] or x.shape[0] % self.examples:
            raise InputError(
                f"an adapted layer gets inputs of shape {tuple(x.shape)} for {self.examples} "
                "examples, whose first axis does not distinguish them: federation.stacked and "
                "gradients per example do not support this model"
            )
        return x.reshape(self.clients, -1, x.shape[-1])

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a linear layer with separate parameters per client, [k b, ..., d_out].

        ``weight`` is [k, d_out, d_in] and ``bias`` [k, d_out]; both are cast to the inputs' dtype.
        """
        if bias is not None:
            bias = bias.to(x.dtype)[:, None]
        y = own_linear(self.rows(x), weight.to(x.dtype), bias)
        return y.view(*x.shape[:-1], weight.shape[1])


def own_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply each client's rows [k, n, d_in] by its weight [k, d_out, d_in], to [k, n, d_out].

    ``bias`` is [d_out] for all clients, or [k, 1, d_out].
    """
    if bias is None:
        return torch.bmm(rows, weight.mT)
    return torch.baddbmm(bias, rows, weight.mT)


def as_shape(fresh: Tensor, *shape: int) -> Tensor:
    """Reshape a tensor that is not used elsewhere, for in-place additions.

    In-place additions to a view would make the backward copy all gradients.
    """
    found: Tensor = torch.ops.aten._unsafe_view(fresh, shape)
    return found
