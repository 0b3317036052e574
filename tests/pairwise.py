"""Cases of independent parameters, without their full product."""


def pairwise(first, second, third):
    """Rows of three parameters in which each two values occur together; the longest come first."""
    assert len(third) <= min(len(first), len(second))
    return [
        (a, b, third[(i + j) % len(third)])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
