"""Sections of the report's page that plug-ins add after its tables and figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from trishul_ray.plugins.registry import Registry
from trishul_ray.report.formats import escape_markdown
from trishul_ray.report.outcomes import STATUSES, SweepOutcome
from trishul_ray.tracking.progress import format_duration


class PageSection:
    """A section of the page on what its sweeps show. Without HTML it is not on the page.

    Subclass it, and register the class by the name that is the section's anchor. The same outcomes
    must give the same text; what a repetition changes stands in elements with ``data-time``.

    Args:
        sweeps: The sweeps on the page.

    Attributes:
        title: Its heading, also in the list of contents.
        note: A few words in the list of contents.
        complete: Whether all files of runs could be read. If not, the page is made again.
    """

    title: str
    note: str = ""
    complete: bool = True

    def __init__(self, sweeps: Sequence[SweepOutcome]) -> None:
        self.sweeps = sweeps

    def html(self) -> Markup:
        """Return what is below the heading, as HTML; empty without a section."""
        return Markup("")

    def markdown(self) -> str:
        """Return the same as Markdown, without a heading."""
        return ""

    def files(self) -> Mapping[str, str]:
        """Return further files of the report by path, such as ``tables/mine.csv``."""
        return {}


#: The sections that plug-ins have registered.
SECTIONS = Registry[type[PageSection]]("section", "section of the page")


def render(package: str, template: str, **values: Any) -> Markup:
    """Render a template of a package's folder ``templates``; HTML is escaped.

    It may import the macros of ``macros.html``, and has the filters ``duration`` and ``markdown``.
    """
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("trishul_ray.report")]),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"duration": format_duration, "markdown": escape_markdown}
    templates.globals["statuses"] = STATUSES
    return Markup(templates.get_template(template).render(**values))
