"""Extensions beyond the paper, each a plug-in of the platform in a file of its own.

Nothing outside this folder imports it, or names what is in it. Entry points in ``pyproject.toml``
make what it registers known by name; a run imports only what it names.
"""

#: Increase this with every change that can change a bit of a result of what is in this folder. It
#: is a part of the ids of runs that use it, once it is more than 0.
NUMERICS = 0
