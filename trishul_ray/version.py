"""Versions: of the package, and of the numbers it computes."""

__version__ = "0.1.0"

#: Raised whenever a change to the code can change a result's bits. It is hashed into every
#: experiment's id, so that a finished run is never taken for one of another numerics.
NUMERICS = 3
