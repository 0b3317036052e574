"""Shares of a count, computed without rounding."""

import math
from fractions import Fraction


def exact_fraction(count: int, *shares: float) -> Fraction:
    """Return ``count`` times the shares, each read as the decimal number that it is written as.

    In binary 0.8 x 0.75 x 5 is a little more than 3, and its ceiling 4; here it is 3.
    """
    return math.prod((Fraction(repr(float(share))) for share in shares), start=Fraction(count))
