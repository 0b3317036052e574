"""The two ways a command may end badly.

``InputError``: what the user gave is wrong. One line, exit code 2, nothing was changed.
``RunError``: the run failed on its way. One paragraph, exit code 1: what happened, what is
kept, and the command that continues it.
"""


class InputError(ValueError):
    """The input is wrong: the message names the field, the value and what is allowed."""


class RunError(RuntimeError):
    """A run failed: the message says what happened, what is kept and how to continue."""


class CorruptFileError(InputError):
    """A file that should be readable is not: the message names the file and the fault."""


class StorageError(RunError, OSError):
    """The storage of runs failed, and went on failing for as long as was waited."""


class StorageRefusedError(StorageError):
    """The storage of runs refuses for good: no permission, no such bucket, a file in the way."""
