"""Print results to standard output, and progress and errors to standard error."""

import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trishul_ray.errors import (
    BusyError,
    InputError,
    PermanentError,
    RunError,
    describe_os_error,
)
from trishul_ray.plugins.loading import load_plugin
from trishul_ray.storage.redaction import redact
from trishul_ray.tracking.terminal import PlainConsole

if TYPE_CHECKING:
    from trishul_ray.tracking.progress import RunProgress

out = PlainConsole()
err = PlainConsole(stderr=True)

#: Base class of Typer's usage errors. Typer bundles a private copy of Click's exceptions, and
#: BadParameter is its only public subclass.
UsageError: Any = typer.BadParameter.__mro__[1]


def _load_plugins(files: list[Path] | None) -> list[Path] | None:
    for file in files or ():
        load_plugin(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="File with custom methods, tasks or datasets; may be repeated.",
        callback=_load_plugins,
        show_default=False,
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Id or folder of the run.")]
Runs = Annotated[
    str, typer.Option(help="Folder or URI where runs are stored.", envvar="TRISHUL_RUNS")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_line(text: str, console: Console = out) -> None:
    """Print plain text without wrapping, so that users can copy paths and commands."""
    console.print(text, soft_wrap=True)


def print_field(label: str, text: object) -> None:
    """Print a label, in a column of 10 characters, and a text to standard output."""
    print_line(f"{label:<9} {text}")


def print_table(table: Table) -> None:
    """Print a table to standard output, folded on a terminal and at full width in a file."""
    for column in table.columns:
        column.overflow = "fold"  # the default truncates long words
    full = PlainConsole(width=10**4).measure(table).maximum
    console = out if out.is_terminal else PlainConsole(width=max(out.width, full))
    console.print(table)


def wrapped(text: str) -> str:
    """Wrap each line of a text at 100 characters."""
    # Keep paths and commands in one piece, since users copy them.
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def show_progress(rounds: int = 1) -> "RunProgress":
    """Return a progress display on standard error."""
    from trishul_ray.tracking.progress import RunProgress

    return RunProgress(rounds, err)


@contextmanager
def resumable(progress: "RunProgress", kept: str) -> Iterator[None]:
    """Show progress, and print how to resume if the command fails or is stopped."""
    how = f"{kept}; to continue: {typed()}"
    with progress:
        try:
            yield
        except (BusyError, InputError, typer.Exit):
            raise
        except PermanentError as error:
            again = "The same command would fail again; change a field to start another run"
            raise RunError(f"{error}. {again}. {kept}") from error
        except RunError as error:
            raise RunError(f"{error}. {how}") from error
        except OSError as error:
            raise RunError(f"{describe_os_error(error)}. {how}") from error
        except Exception:  # a plug-in failed, or this is a bug: the traceback follows
            print_line(f"failed. {how}", err)
            raise
        except KeyboardInterrupt:
            with suppress(OSError):  # the terminal may be closed
                print_line(f"stopped. {how}", err)
            raise typer.Exit(130) from None


def typed() -> str:
    """Return the command that resumes this one, without ``--fresh`` and credentials."""
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    return redact(shlex.join(["trishul", *words]))
