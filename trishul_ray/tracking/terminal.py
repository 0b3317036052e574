"""Print to a terminal, escaping control characters in user-supplied names."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    """Replace control characters, except tabs and line breaks, by hex escapes."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class PlainConsole(Console):
    """Console that prints text literally: no markup such as ``[red]``, no control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a text or table, escaping all but rich's own control segments."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=escape_controls(part.text))
