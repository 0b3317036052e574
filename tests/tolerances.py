"""Largest difference of two float32 computations of the same numbers, on any processor.

Kernels differ in the order of their sums and in fused multiply-adds. A sum of n products computed
in any order is within ``gamma_n`` of the exact sum, relative to the sum of their absolute values,
with ``gamma_n = n u / (1 - n u)`` and u = 2^-24 (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, eq. 3.5).
"""

from torch import Tensor

UNIT = 2.0**-24


def rounding(terms: int, size: float = 1.0) -> float:
    """Bound the error of a float32 sum.

    Args:
        terms: Number of rounded operations that lead to one entry: products of a sum, or the total
            of consecutive sums.
        size: Sum of the products' absolute values, or a bound on it.
    """
    return terms * UNIT / (1 - terms * UNIT) * float(size)


def between(terms: int, size: float = 1.0) -> float:
    """Bound the difference of two float32 sums of the same terms: each may err by its rounding."""
    return 2 * rounding(terms, size)


def forward(layers: int, width: int, outputs: Tensor) -> float:
    """Bound the difference of two forward passes: in each layer, sums of up to ``width`` terms.

    The largest output represents the intermediate sizes (layers of order one, after a norm).
    """
    return between(layers * width, float(outputs.detach().abs().max()))
