"""Errors that end a command.

``InputError``: the input is wrong; one line, exit code 2, nothing was changed. ``RunError``: the
run failed; one paragraph, exit code 1: the cause, the kept files, and how to continue.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class InputError(ValueError):
    """Invalid input; the message names the field, the value and the allowed values."""


class RunError(RuntimeError):
    """A failed run; the message has the cause, the kept files, and how to continue."""


class FailsAgainError(RunError):
    """A run that the same command would fail in the same way; the message says what helps."""


class ArtifactsError(RunError):
    """A finished run whose model could not be exported; its scores are kept."""


class CorruptFileError(InputError):
    """An unreadable file; the message names the file and the fault."""


class BusyError(RunError):
    """A run that another process drives."""


class StorageError(RunError, OSError):
    """The storage of runs kept failing until the retry time was over."""


class StorageRefusedError(StorageError):
    """The storage of runs failed permanently: no permission, no bucket, or a file in the way."""


#: Signals that asked this process to stop, as the command line received them.
stop_signals: list[int] = []


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` with the nearest of the known names; empty if none is near."""
    import difflib  # with logging, half of the time of importing this package

    by_folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same before."""
    import logging

    logging.getLogger("trishul_ray").warning(message)


def how_to_install(extra: str, requirement: str) -> str:
    """Return how to install a package that an extra asks for, in a clone or anywhere else."""
    return f"pip install '.[{extra}]' in a clone of the repository, or pip install '{requirement}'"


def join_limited(names: Sequence[str], limit: int) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def typed_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, if it has one."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def one_line(error: BaseException) -> str:
    """Return an error's message with its line breaks as blanks; else the name of its type."""
    return " ".join(str(error).split()) or type(error).__name__


def why_unreadable(error: Exception) -> str:
    """Return in a line why files of runs cannot be used; a missing column has no sentence."""
    return first_line(error) if isinstance(error, OSError | ValueError) else typed_line(error)


def describe_os_error(error: OSError) -> str:
    """Return the reason of a failed system call and its file, in one line."""
    return f"{error.strerror or error}: {error.filename or 'storage'}"


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise an error of another package as a RunError, in this context or as a decorator.

    For the Python interface; the cause has the traceback.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except OSError as error:
        raise RunError(describe_os_error(error)) from error
    except Exception as error:
        raise RunError(typed_line(error)) from error
