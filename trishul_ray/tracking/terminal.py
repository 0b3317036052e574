"""Output on a terminal, which must not obey control characters in the names of users."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    """Return a text with control characters other than tabs and line breaks as hex digits."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class PlainConsole(Console):
    """Prints names unchanged, except for control characters: ``[red]`` is not markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts of a text or table; only parts of rich itself control the terminal."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=escape_controls(part.text))
