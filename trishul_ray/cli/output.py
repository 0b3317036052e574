"""What commands print: results on standard output, progress and errors on standard error."""

from rich.console import Console

out = Console()
err = Console(stderr=True)


def print_line(text: str, console: Console = out) -> None:
    """Print plain text without wrapping it, so that paths and commands can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_field(label: str, text: object) -> None:
    """Print ``text`` on standard output after a label in a column of 10 characters."""
    print_line(f"{label:<9} {text}")


def describe_os_error(error: OSError) -> str:
    """Return the reason of a failed system call and its file, in one line."""
    return f"{error.strerror or error}: {error.filename or 'storage'}"
