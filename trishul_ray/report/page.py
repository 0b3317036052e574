"""Write the report: an HTML page, a Markdown page, and files of its tables and figures."""

import base64
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from trishul_ray.experiment.loading import set_field
from trishul_ray.report.formats import (
    VERDICT,
    escape_latex,
    escape_markdown,
    number_text,
    paper_text,
    to_csv,
)
from trishul_ray.report.layouts import FigureLayout
from trishul_ray.report.outcomes import (
    REPETITIONS,
    STATUSES,
    CellOutcome,
    CellStatus,
    DrawnFigure,
    SweepOutcome,
)
from trishul_ray.report.references import Choice, reference_of, references
from trishul_ray.report.statistics import ALPHA
from trishul_ray.report.summary import Hardware, RunSummary, flatten
from trishul_ray.report.tables import SweepTable, build_tables, make_slug
from trishul_ray.runtime.names import free_name
from trishul_ray.stages import STAGES, stage_names
from trishul_ray.storage.durable import Json, write_file
from trishul_ray.tracking.progress import format_bytes, format_duration
from trishul_ray.version import NUMERICS, __version__

#: Function that draws a figure from the finished cells, or returns None without data to draw.
DrawFigure = Callable[[FigureLayout, SweepOutcome], DrawnFigure | None]

#: Explains, for each profile, which comparisons of numbers are valid.
COMPARABLE = {
    "paper": "The paper's protocol: these numbers may be compared with the paper's.",
    "small": "Small models and short runs: compare the rows of a table with each other, but no "
    "number with the paper's.",
    "smoke": "Generated data, tiny models and a few steps: these numbers show that every cell "
    "works. They contain no information about the methods. Do not compare them with the paper's.",
    "custom": "A custom sweep: compare only results that differ in the axes of a table.",
}
_DEPARTED = (
    "The paper's protocol with deviations: a table or figure with a deviation cannot be compared "
    "with the paper's."
)
#: Sections and fields that do not affect any number.
_UNSHOWN = ("name", *REPETITIONS, "storage", "tracking", "resources", "plugins")


@dataclass(frozen=True)
class Drawing:
    """A figure on the page. ``image`` is None if no finished run has its numbers."""

    layout: FigureLayout
    slug: str
    image: DrawnFigure | None

    @property
    def source(self) -> str:
        """The image as a data URI."""
        svg = self.image.svg if self.image else b""
        return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"

    @property
    def number(self) -> str:
        """Number and label of the reproduced figure of the paper, or an empty string."""
        key = self.layout.paper
        return f"Figure {reference_of(key).figures()[key]} of the paper ({key})" if key else ""


@dataclass(frozen=True)
class SweepPart:
    """A section of the page, with a sweep and its tables and figures."""

    sweep: SweepOutcome
    slug: str
    tables: tuple[tuple[str, SweepTable], ...]  # (slug, table)
    drawings: tuple[Drawing, ...]

    @property
    def command(self) -> str:
        """The command that starts the runs, with overrides."""
        return " ".join([self.sweep.command, *self.sweep.overrides])

    @property
    def states(self) -> Counter[str]:
        """Number of runs per status; cells that share a run count once."""
        return Counter({cell.id: cell.status for cell in self.sweep.cells}.values())

    @property
    def deviations(self) -> tuple[str, ...]:
        return self.sweep.deviations(self.sweep.cells)

    @property
    def configuration(self) -> str:
        """YAML of the fields that are equal in all finished runs."""
        finished = {c.id: c.result.config for c in self.sweep.cells if c.status == "finished"}
        first, *others = map(flatten, finished.values()) if finished else [{}]
        common: Json = {}
        for field, value in first.items():
            same = all(field in other and other[field] == value for other in others)
            if same and field.partition(".")[0] not in _UNSHOWN:
                set_field(common, field, value)
        text: str = yaml.safe_dump(common, sort_keys=False, allow_unicode=True, width=90)
        return text

    @cached_property
    def traffic(self) -> list[tuple[str, ...]]:
        """Rows of (label, bytes sent by all clients, bytes received, median round, runs).

        Rows are the combinations of labels on the row axes of the first table.
        """
        axes = self.sweep.tables[0].rows if self.sweep.tables else _varying(self.sweep)[:1]
        groups: dict[tuple[str, ...], dict[str, RunSummary]] = {}
        for cell in self.sweep.cells:
            if cell.status == "finished":
                groups.setdefault(cell.labels_of(axes), {})[cell.id] = cell.result
        found: list[tuple[str, ...]] = []
        for labels in self.sweep.in_order(axes, groups):
            runs = list(groups[labels].values())
            name = ", ".join(map(self.sweep.title_of, axes, labels)) or self.sweep.title
            sent = _range([run.uploaded_bytes for run in runs])
            received = _range([run.downloaded_bytes for run in runs])
            seconds = statistics.median(s for run in runs for s in run.round_seconds)
            found.append((name, sent, received, format_duration(seconds), str(len(runs))))
        return found

    @property
    def problems(self) -> list[tuple[CellStatus, str, list[CellOutcome]]]:
        """Failed and unusable runs, grouped by status and reason."""
        found: dict[tuple[CellStatus, str], dict[str, CellOutcome]] = {}
        for cell in self.sweep.cells:
            if cell.status not in ("finished", "missing"):
                found.setdefault((cell.status, cell.reason), {}).setdefault(cell.id, cell)
        groups = [(status, reason, [*runs.values()]) for (status, reason), runs in found.items()]
        return sorted(groups, key=lambda group: STATUSES.index(group[0]))


@dataclass(frozen=True)
class Page:
    """Content of the page, which the templates render."""

    parts: tuple[SweepPart, ...]

    @property
    def title(self) -> str:
        return self.parts[0].sweep.title if len(self.parts) == 1 else "Tables and figures"

    @cached_property
    def profiles(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Profiles, the comparisons that they allow, and the deviations of their runs."""
        parts: dict[str, list[SweepPart]] = {}
        for part in self.parts:
            parts.setdefault(part.sweep.profile, []).append(part)
        found = []
        for name, each in parts.items():
            deviations = tuple(dict.fromkeys(text for part in each for text in part.deviations))
            text = COMPARABLE.get(name, COMPARABLE["custom"])
            if name == "paper" and deviations:
                text = _DEPARTED
            found.append((name, " ".join([text, *_remarks(each)]), deviations))
        return found

    @property
    def judged(self) -> bool:
        return any(table.judged for part in self.parts for _, table in part.tables)

    @cached_property
    def runs(self) -> list[CellOutcome]:
        """All runs; runs that several cells or sweeps share are listed once."""
        cells = (cell for part in reversed(self.parts) for cell in reversed(part.sweep.cells))
        return [*{cell.id: cell for cell in cells}.values()][::-1]

    @cached_property
    def states(self) -> Counter[str]:
        return Counter(run.status for run in self.runs)

    @cached_property
    def summaries(self) -> list[RunSummary]:
        return [run.result for run in self.runs if run.status == "finished"]

    @cached_property
    def choices(self) -> list[Choice]:
        """Choices that the reproduced publications leave open."""
        if all(part.sweep.profile == "custom" for part in self.parts):
            return []
        return [each for ref in references() for each in ref.open_choices(self.summaries)]

    @property
    def machines(self) -> list[tuple[str, int]]:
        return sorted(Counter(_machine(run.hardware) for run in self.summaries).items())

    @property
    def versions(self) -> list[tuple[str, str]]:
        """Software with its version, or comma-separated versions if runs differ."""
        found: dict[str, set[str]] = {}
        for name, version in (pair for run in self.summaries for pair in run.versions.items()):
            found.setdefault(name, set()).add(version)
        return [(name, ", ".join(sorted(versions))) for name, versions in found.items()]

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.summaries)


def write_report(
    outcomes: Sequence[SweepOutcome],
    folder: Path,
    tables: Sequence[SweepTable] | None = None,
    figures: DrawFigure | None = None,
) -> Path:
    """Write the report of sweeps into a folder.

    Writes ``report.html`` (self-contained), ``report.md``, ``tables/`` (CSV and LaTeX) and
    ``figures/`` (SVG, PDF, and their numbers as CSV).

    Args:
        outcomes: The sweeps; any number of cells may be missing.
        folder: Folder to write into.
        tables: Tables of the sweeps, built from ``outcomes`` by default.
        figures: Function that draws a figure, by default with matplotlib.

    Returns:
        The path of ``report.html``.
    """
    if figures is None:
        from trishul_ray.report.figures.draw import draw  # imports matplotlib

        figures = draw
    tables = build_tables(outcomes) if tables is None else tables
    page = Page(tuple(_parts(outcomes, tables, figures)))
    files: dict[str, str | bytes] = {
        "report.html": _render("report.html", page=page),
        "report.md": _render("report.md", page=page),
    }
    for part in page.parts:
        for slug, table in part.tables:
            files[f"tables/{slug}.csv"] = to_csv(table)
            files[f"tables/{slug}.tex"] = _render("table.tex", table=table)
        for drawing in part.drawings:
            if image := drawing.image:
                for kind, content in (("svg", image.svg), ("csv", image.csv), ("pdf", image.pdf)):
                    files[f"figures/{drawing.slug}.{kind}"] = content
    for name, text in files.items():
        write_file(folder / name, text.encode() if isinstance(text, str) else text)
    return folder / "report.html"


def _render(name: str, **content: object) -> str:
    """Render a template. Jinja escapes only HTML; other templates must call an escape filter."""
    return _templates().get_template(name).render(**content)


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("trishul_ray.report"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = number_text, paper_text, escape_markdown, escape_latex, format_duration
    templates.filters |= {each.__name__: each for each in filters}
    templates.globals |= {"alpha": f"{100 * ALPHA:g}%", "verdict": VERDICT, "statuses": STATUSES}
    templates.globals |= {"version": __version__, "numerics": NUMERICS}
    return templates


def _parts(
    outcomes: Sequence[SweepOutcome], tables: Sequence[SweepTable], draw: DrawFigure
) -> Iterable[SweepPart]:
    taken = set[str]()

    def unique(*names: str) -> str:
        taken.add(slug := free_name(make_slug(*names), taken))
        return slug

    for sweep in outcomes:
        drawings = []
        for layout in [*sweep.figures, *_learning_curve(sweep)]:
            slug = unique("figure", sweep.profile, sweep.name, layout.name)
            drawings.append(Drawing(layout, slug, draw(layout, sweep)))
        named = tuple((unique(table.slug), table) for table in tables if table.sweep is sweep)
        slug = unique("sweep", sweep.profile, sweep.name)
        yield SweepPart(sweep, slug, named, tuple(drawings))


def _learning_curve(sweep: SweepOutcome) -> list[FigureLayout]:
    """Return a figure of the score per round, unless the sweep defines one."""
    if any(figure.kind == "convergence" for figure in sweep.figures):
        return []
    axes = [axis for axis in _varying(sweep) if axis != "dataset"][:1]
    panels = [axis for axis in sweep.axes if axis == "dataset"]
    title = "Learning curve"
    return [FigureLayout(name="curve", title=title, kind="convergence", series=axes, panels=panels)]


def _varying(sweep: SweepOutcome) -> list[str]:
    """Return the axes with several labels, except repetitions; axes of table rows first."""
    first = [axis for table in sweep.tables[:1] for axis in reversed(table.rows)]
    axes = dict.fromkeys([*first, *sweep.axes])
    return [axis for axis in axes if axis not in REPETITIONS and len(sweep.axes[axis]) > 1]


def _remarks(parts: Sequence[SweepPart]) -> list[str]:
    """Collect the remarks of stages, given their reports on finished runs."""
    runs = [run.result for p in parts for run in p.sweep.cells if run.status == "finished"]
    reports: dict[str, list[Json]] = {}
    for name, report in (pair for run in runs for pair in run.reports.items()):
        reports.setdefault(name, []).append(report)
    known = sorted(reports.keys() & set(stage_names()))
    return [text for name in known if (text := STAGES[name].remark(reports[name]))]


def _range(amounts: Sequence[int]) -> str:
    least, most = format_bytes(min(amounts)), format_bytes(max(amounts))
    return least if least == most else f"{least} to {most}"


def _machine(hardware: Hardware) -> str:
    gpus = Counter(hardware.gpus)
    devices = [f"{count} x {name}" for name, count in sorted(gpus.items())] or ["no GPU"]
    cpus = f"{hardware.cpus} CPUs ({hardware.cpu_capability})"
    return ", ".join([hardware.processor, cpus, f"{hardware.memory_gib} GiB", *devices])
