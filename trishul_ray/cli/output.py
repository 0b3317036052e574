"""Output of commands: results on standard output, progress and errors on standard error."""

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from trishul_ray.errors import (
    BusyError,
    FailsAgainError,
    InputError,
    RunError,
    describe_os_error,
)
from trishul_ray.plugins.loading import load_plugin
from trishul_ray.storage.redaction import redact

if TYPE_CHECKING:
    from trishul_ray.tracking.progress import RunProgress

# Names of a user are shown as they are: "[red]" is no markup, and ":a:" no picture.
plain_console = partial(Console, markup=False, emoji=False, highlight=False)
out = plain_console()
err = plain_console(stderr=True)

#: Base class of Typer's usage errors. Typer bundles a private copy of Click's exceptions, whose
#: only public subclass is BadParameter.
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
        help="A file with a method, task or dataset of your own; may be repeated.",
        callback=_load_plugins,
        show_default=False,
    ),
]


Runs = Annotated[
    str, typer.Option(help="Folder or URI where runs are stored.", envvar="TRISHUL_RUNS")
]


def print_line(text: str, console: Console = out) -> None:
    """Print plain text without wrapping it, so that paths and commands can be copied."""
    console.print(text, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table on standard output and cut none of it.

    A pipe or a file gets it as wide as it is. On a terminal cells wrap between words; where even
    the longest words do not fit beside each other, each row becomes a list of its cells.
    """
    whole = plain_console(width=10**4).measure(table)
    if not out.is_terminal:
        plain_console(width=max(out.width, whole.maximum)).print(table)
    elif whole.minimum <= out.width:
        for column in table.columns:
            column.overflow = "fold"  # by default the end of a long word is cut
        out.print(table)
    else:
        out.print(_stacked(table))


def _stacked(table: Table) -> Table:
    """Return a table of two columns, the heads and the cells of each row below each other."""
    stacked = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
    stacked.title, stacked.caption = table.title, table.caption
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, cells, strict=True):
            if cell:
                stacked.add_row(column.header, cell)
        stacked.add_row()
    return stacked


def wrapped(text: str) -> str:
    """Return a paragraph in lines of 100 characters, with the line breaks it has."""
    # Do not break paths and commands, which people copy.
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def show_progress(rounds: int = 1) -> "RunProgress":
    """Return a display of progress on standard error."""
    from trishul_ray.tracking.progress import RunProgress

    return RunProgress(rounds, err)


@contextmanager
def resumable(progress: "RunProgress", how: Callable[[bool], str]) -> Iterator[None]:
    """Show progress; if the command fails or is stopped, print how to continue it.

    ``how`` is told whether the same command would fail again.
    """
    with progress:
        try:
            yield
        except BusyError:  # another process runs it: nothing is to be repeated
            raise
        except (RunError, OSError) as error:
            cause = str(error) if isinstance(error, RunError) else describe_os_error(error)
            raise RunError(f"{cause}. {how(isinstance(error, FailsAgainError))}") from error
        except (InputError, typer.Exit):
            raise
        except Exception:  # of a plug-in, or a bug: its traceback follows
            with suppress(OSError):  # as below
                print_line(f"failed. {how(False)}", err)
            raise
        except KeyboardInterrupt:
            with suppress(OSError):  # the terminal may be closed
                print_line(f"stopped. {how(False)}", err)
            raise typer.Exit(130) from None


def print_field(label: str, text: object) -> None:
    """Print ``text`` on standard output after a label in a column of 10 characters."""
    print_line(f"{label:<9} {text}")


def typed() -> str:
    """Return the command of this process to be copied, without the credentials in it."""
    return as_typed(redact(shlex.join(["trishul", *sys.argv[1:]])))


def as_typed(command: str) -> str:
    """Return a command ``trishul ...`` as it works when it is pasted where this one was typed.

    ``trishul`` becomes the path that was typed if the shell does not find this one by its name.
    Anything else, such as the address of a server, is returned unchanged.
    """
    if not command.startswith("trishul "):
        return command
    typed = Path(sys.argv[0])
    program = "trishul"
    if typed.name == program and typed.is_file():
        found = shutil.which("trishul")
        if found is None or not typed.samefile(found):
            program = shlex.quote(sys.argv[0])
    return program + command.removeprefix("trishul")
