"""Keep names unique after replacing characters or truncating."""

from collections.abc import Container
from itertools import chain, count


def free_name(name: str, taken: Container[str]) -> str:
    """Return ``name``, or the first of ``name-2``, ``name-3``, ... that is not taken."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)
