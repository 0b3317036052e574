"""Names that stay distinct after letters were replaced or cut."""

from collections.abc import Container
from itertools import chain, count


def free_name(name: str, taken: Container[str]) -> str:
    """Return the name, or with the first number from 2 that makes it a new one: ``name-2``."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)
