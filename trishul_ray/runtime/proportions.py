"""Compute fractions of a count without rounding errors."""

import math
from fractions import Fraction


def exact_fraction(count: int, *shares: float) -> Fraction:
    """Multiply ``count`` by fractions, interpreting each as the decimal number that it displays.

    Example:
        >>> 0.8 * 0.75 * 5, exact_fraction(5, 0.8, 0.75)
        (3.0000000000000004, Fraction(3, 1))
    """
    return math.prod((Fraction(repr(float(share))) for share in shares), start=Fraction(count))
