"""Cases of independent parameters, without their full product."""


def pairwise(first, second, third):
    """Return rows of three parameters, longest first, in which each pair of values occurs."""
    assert len(third) <= min(len(first), len(second))
    return [
        (a, b, third[(i + j) % len(third)])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
