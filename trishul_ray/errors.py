"""Errors that end a command, and helpers for their messages.

An ``InputError`` reports invalid input in one line, with exit code 2, before anything has changed.
A ``RunError`` reports a failed run in one paragraph, with exit code 1: the cause, the kept files,
and how to resume.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class InputError(ValueError):
    """Invalid input. The message names the field, the value and the allowed values.

    Example:
        >>> import trishul_ray
        >>> trishul_ray.run("digits", rounds="many")  # doctest: +SKIP
        Traceback (most recent call last):
        ...
        trishul_ray.errors.InputError: federation.rounds='many': input should be a valid integer
    """


class RunError(RuntimeError):
    """A failed run. The message contains the cause, the kept files, and how to resume.

    Example:
        >>> import trishul_ray
        >>> try:  # doctest: +SKIP
        ...     result = trishul_ray.run("digits")
        ... except trishul_ray.RunError as error:
        ...     print(error)
    """


class PermanentError(RunError):
    """A failure that the same command would repeat. The message says how to avoid it."""


class ArtifactsError(RunError):
    """A finished run whose model could not be exported. Its scores are stored."""


class CorruptFileError(InputError):
    """An unreadable file. The message names the file and the fault."""


class BusyError(RunError):
    """A run that another process is driving."""


class StorageError(RunError, OSError):
    """The storage of runs failed until the retry time (``storage.retry_seconds``) had elapsed."""


class StorageRefusedError(StorageError):
    """The storage of runs failed permanently: no permission, no bucket, or a file in the way."""


#: Signals that asked this process to stop, as received by the command line.
stop_signals: list[int] = []


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, ignoring case.

    Args:
        name: The unknown name.
        known: The known names.

    Returns:
        ``"; did you mean 'x'?"``, or an empty string if no name is similar.

    Example:
        >>> did_you_mean("Trishull", ["fedit", "trishul"])
        "; did you mean 'trishul'?"
    """
    import difflib  # takes, with logging, half of the import time of this package

    by_folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has already logged the same message.

    Args:
        message: The warning.
    """
    import logging

    logging.getLogger("trishul_ray").warning(message)


def how_to_install(extra: str, requirement: str) -> str:
    """Describe how to install a package of an optional extra, from a clone or from elsewhere.

    Args:
        extra: Name of the extra, such as ``"eval"``.
        requirement: Requirement of the package, such as ``"lm-eval>=0.4.13"``.

    Returns:
        The commands, for the end of a message.
    """
    return f"pip install '.[{extra}]' in a clone of the repository, or pip install '{requirement}'"


def join_limited(names: Sequence[str], limit: int) -> str:
    """Join the first names with commas, followed by the number of further ones.

    Args:
        names: The names.
        limit: Maximum number of names to list.

    Returns:
        The list as text.

    Example:
        >>> join_limited(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message.

    Args:
        error: The error.

    Returns:
        The line, or the name of the error's type if the message is empty.
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def typed_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message.

    Args:
        error: The error.

    Returns:
        ``"Type: line"``, or only the type if the message is empty.

    Example:
        >>> typed_line(ValueError("too large"))
        'ValueError: too large'
    """
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def one_line(error: BaseException) -> str:
    """Return an error's message in one line.

    Args:
        error: The error.

    Returns:
        The message with single spaces, or the name of the error's type if the message is empty.
    """
    return " ".join(str(error).split()) or type(error).__name__


def why_unreadable(error: Exception) -> str:
    """Describe in one line why files of runs cannot be used.

    Args:
        error: The error that reading the files raised.

    Returns:
        The first line of the message. It starts with the type of the error unless that is an
        ``OSError`` or ``ValueError``, since a ``KeyError`` contains only the missing name.
    """
    return first_line(error) if isinstance(error, OSError | ValueError) else typed_line(error)


def describe_os_error(error: OSError) -> str:
    """Describe a failed system call in one line.

    Args:
        error: The error.

    Returns:
        The reason and the file.

    Example:
        >>> describe_os_error(FileNotFoundError(2, "No such file or directory", "a.yaml"))
        'No such file or directory: a.yaml'
    """
    return f"{error.strerror or error}: {error.filename or 'storage'}"


@contextmanager
def own_errors() -> Iterator[None]:
    """Convert errors of other packages to a RunError, as a context manager or a decorator.

    It wraps the Python interface, which raises only ``InputError`` and ``RunError``. The original
    error, with its traceback, is the ``__cause__``.

    Raises:
        RunError: The block raised another error than an ``InputError`` or ``RunError``.

    Example:
        >>> with own_errors():
        ...     open("/missing/file")
        Traceback (most recent call last):
        ...
        trishul_ray.errors.RunError: No such file or directory: /missing/file
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except OSError as error:
        raise RunError(describe_os_error(error)) from error
    except Exception as error:
        raise RunError(typed_line(error)) from error
