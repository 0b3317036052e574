"""The Typer application of the ``trishul`` command.

Exit codes: 0 for success; 2 for invalid input (a one-line message); 1 for a failed run (a paragraph
with the cause, the finished rounds and the command that resumes); 130 after Ctrl-C, 143 after
SIGTERM (Slurm, Docker, systemd), and 129 after SIGHUP (the terminal was closed).
"""

import gc
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # documented

from trishul_ray.cli.listing import list_
from trishul_ray.cli.machine import check, doctor, ui
from trishul_ray.cli.output import UsageError, wrapped
from trishul_ray.cli.run import run
from trishul_ray.cli.runs import rm, show
from trishul_ray.cli.submit import submit
from trishul_ray.cli.sweeps import report, sweep
from trishul_ray.cli.trained import evaluate, export, verify
from trishul_ray.errors import InputError, RunError, describe_os_error, stop_signals
from trishul_ray.storage.redaction import redact
from trishul_ray.tracking.terminal import escape_controls
from trishul_ray.version import NUMERICS, __version__

# Commands import torch and the rest of the package only when they are called.
app = typer.Typer(
    name="trishul",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Simulate federated parameter-efficient fine-tuning on Ray.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"trishul-ray {__version__} (numerics {NUMERICS})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            hidden=True,  # the help must fit on one screen, and ``doctor`` prints the version
        ),
    ] = False,
) -> None:
    """Define the options that precede a command."""


app.command()(run)
app.command(short_help="Run a grid, a search or tables of the paper; write a report.")(sweep)
app.command("table", hidden=True)(sweep)  # an alias of sweep
app.command(short_help="Write tables and figures of finished runs: HTML, LaTeX, CSV.")(report)
app.command("eval")(evaluate)
app.command()(export)
app.command()(verify)
app.command(short_help="Run a command on a Ray cluster, and show its output.")(submit)
app.command("list")(list_)
app.command()(show)
app.command()(rm)
app.command()(check)
app.command()(doctor)
app.command()(ui)


def run_command_line() -> NoReturn:
    """Run the command line and exit. Errors become a message and an exit code."""
    try:
        completion_init()
        # A command keeps nearly all its objects. With Python's default threshold, the search for
        # cyclic garbage takes a fifth of the time of a command that reads thousands of results.
        gc.set_threshold(100_000)
        for stream in (sys.stdout, sys.stderr):  # some terminals cannot print Greek letters
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        with _signals_as_interrupts():
            code = app(standalone_mode=False)
        if code == 130 and stop_signals:
            code = 128 + stop_signals[0]
    except InputError as error:
        _fail(str(error), 2)
    except typer.Abort:
        code = 130
    except UsageError as error:
        code = 2
        if message := _usage(error):  # empty if the help was printed instead
            _fail(message, 2)
    except RunError as error:
        _fail(wrapped(str(error)), 1)
    except OSError as error:
        _fail(describe_os_error(error), 1)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Any) -> str:
    """Format a usage error, with a hint if the option has the name of a field."""
    message: str = error.format_message()
    if option := getattr(error, "option_name", None):
        from trishul_ray.experiment.loading import is_field  # imports all methods

        name = option.lstrip("-").replace("-", "_")
        if is_field(name):
            return f"{message}; write a field as {name}=VALUE"
    return message


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {escape_controls(redact(message))}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first SIGTERM or SIGHUP, unless it is ignored (``nohup``).

    Further signals do not interrupt the shutdown: ``timeout`` and Slurm send two at once.
    """

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        if not stop_signals:
            stop_signals.append(signum)
            raise KeyboardInterrupt

    handled = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in handled:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in handled:
            signal.signal(signum, signal.SIG_IGN if stop_signals else signal.SIG_DFL)
