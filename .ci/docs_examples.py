"""An extension of griffe: the section ``Example:`` of a docstring is code, like ``Examples:``."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section, which griffe otherwise reads as text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it in the docstring of an object."""
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", value, flags=re.MULTILINE)
