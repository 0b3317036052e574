"""What commands print: results on standard output, progress and errors on standard error."""

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import trishul_ray.cli.lazy as lazy
from trishul_ray.errors import FailsAgainError, InputError, RunError, at_loss, describe_os_error
from trishul_ray.plugins import load_plugin

out = Console()
err = Console(stderr=True)


def _load_plugins(files: list[Path] | None) -> None:
    for file in files or ():
        load_plugin(file)


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


def print_line(text: str, console: Console = out) -> None:
    """Print plain text without wrapping it, so that paths and commands can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_whole(table: Table) -> None:
    """Print a table on standard output, however wide: to 80 columns, as of a pipe, Rich cuts."""
    whole = Console(width=10**4).measure(table).maximum
    Console(width=max(out.width, whole)).print(table)


def wrapped(text: str) -> str:
    """Return a paragraph in lines of 100 characters, with the line breaks it has."""
    # Do not break paths and commands, which people copy.
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def show_progress(rounds: int = 1) -> "lazy.progress.RunProgress":
    """Return a display of progress on standard error."""
    return lazy.progress.RunProgress(rounds, err)


@contextmanager
def resumable(progress: "lazy.progress.RunProgress", how: Callable[[bool], str]) -> Iterator[None]:
    """Show progress; if what runs fails, is stopped or loses Ray, say how to continue it.

    ``how`` is told whether the same command would fail again.
    """

    def print_last(why: str) -> None:  # this process is about to be ended
        progress.__exit__()
        print(f"error: {wrapped(f'{why}. {how(False)}')}", file=sys.stderr, flush=True)

    with progress, at_loss(print_last):
        try:
            yield
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
    """Return the command of this process, so that it can be copied."""
    return as_typed(shlex.join(["trishul", *sys.argv[1:]]))


def as_typed(command: str) -> str:
    """Return a command ``trishul ...`` as it works when it is pasted where this one was typed.

    ``trishul`` becomes the path that was typed if the shell does not find this one by its name.
    """
    typed = Path(sys.argv[0])
    program = "trishul"
    if typed.name == program and typed.is_file():
        found = shutil.which("trishul")
        if found is None or not typed.samefile(found):
            program = shlex.quote(sys.argv[0])
    return program + command.removeprefix("trishul")
