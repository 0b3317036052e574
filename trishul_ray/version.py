"""The version of the package, and of the numbers it computes."""

__version__ = "0.1.0"

#: Increase this with every code change that can change a bit of a result. It is part of every
#: experiment's id, so results of different numerics never share an id.
NUMERICS = 5
