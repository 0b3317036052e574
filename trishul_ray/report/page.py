"""The report: one self-contained HTML page, the same as Markdown, and its tables and figures.

The same outcomes give the same bytes. Numbers of the clock are on the HTML page alone, inside
elements with the attribute ``data-time``: without them, the pages of two repetitions are equal.
"""

import hashlib
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from trishul_ray.errors import why_unreadable
from trishul_ray.report.formats import to_csv, to_latex, to_markdown
from trishul_ray.report.outcomes import (
    COLUMNS,
    STATUSES,
    CellOutcome,
    CellStatus,
    DrawnFigure,
    FigureLayout,
    SweepOutcome,
)
from trishul_ray.report.references import REFERENCES, of_figure
from trishul_ray.report.sections import SECTIONS, PageSection, render
from trishul_ray.report.statistics import ALPHA, POWER
from trishul_ray.report.summary import Hardware, RunSummary
from trishul_ray.report.tables import SweepTable, build_tables, labels_text, make_slug
from trishul_ray.stages import STAGES, stage_names
from trishul_ray.storage.durable import Json, write_file
from trishul_ray.storage.integrity import digest
from trishul_ray.version import EDGE_NUMERICS, NUMERICS, __version__

#: Draws a figure from the finished cells; None if there is nothing to draw.
DrawFigure = Callable[[FigureLayout, SweepOutcome], DrawnFigure | None]

#: Numbers to compare those of a profile with; other profiles are a user's own.
COMPARABLE = {
    "paper": "The paper's protocol: these numbers may be compared with the paper's.",
    "small": "Small models and short runs: compare the rows of a table with each other, and no "
    "number with the paper's.",
    "smoke": "Stand-in data, tiny models and a few steps: these numbers show that every cell "
    "works. They say nothing about the methods, and must not be compared with the paper's.",
    "custom": "A sweep of your own: compare what differs in the axes of a table alone, and no "
    "number with the paper's.",
}
#: Variables of ``report.css`` for the colours of a figure that are those of type and paper.
_OF_PAGE = {
    "#000000": "--ink", "#222222": "--ink", "#555555": "--muted", "#b0b0b0": "--line",
    "#ffffff": "--page", "#0072b2": "--blue",
}  # fmt: skip
_FIGURE_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")
_REGISTRIES = (COLUMNS, REFERENCES, SECTIONS)
#: File of a report that says what it was made from.
_MADE_FROM = "made-from.json"


@dataclass(frozen=True)
class Drawing:
    """A figure on the page, or why there is none; a ``broken`` one had files of runs unread."""

    layout: FigureLayout
    slug: str
    image: DrawnFigure | None
    problem: str = ""
    broken: bool = False

    @property
    def markup(self) -> Markup:
        """The SVG text, to be put into HTML as it is, in the colours of the page."""
        return Markup(_FIGURE_COLOUR.sub(_as_of_page, self.image.svg) if self.image else "")

    @property
    def number(self) -> str:
        """Number and label of the figure of the paper that it reproduces; empty if none."""
        key = self.layout.paper
        return f"Figure {of_figure(key).figures()[key]} of the paper ({key})" if key else ""


@dataclass(frozen=True)
class SweepPart:
    """A sweep on the page."""

    sweep: SweepOutcome
    slug: str
    tables: tuple[tuple[str, SweepTable], ...]  # by slug
    drawings: tuple[Drawing, ...]

    @property
    def states(self) -> Counter[str]:
        """Number of its runs by state."""
        return Counter(run.status for _, run in _distinct([self.sweep]))

    @property
    def departures(self) -> tuple[str, ...]:
        """Departures of its runs from the profile."""
        return self.sweep.departures(self.sweep.cells)

    @property
    def problems(self) -> list[tuple[CellStatus, str, list[CellOutcome]]]:
        """Runs that failed or cannot be used, by state and reason."""
        found: dict[tuple[CellStatus, str], list[CellOutcome]] = {}
        for _, run in _distinct([self.sweep]):
            if run.status not in ("finished", "missing", "stopped"):
                found.setdefault((run.status, run.reason), []).append(run)
        groups = [(status, reason, runs) for (status, reason), runs in found.items()]
        return sorted(groups, key=lambda group: STATUSES.index(group[0]))


@dataclass(frozen=True)
class Page:
    """Content of the templates.

    Attributes:
        sections: Sections of plug-ins that have something to show: name, section, its HTML.
    """

    parts: tuple[SweepPart, ...]
    sections: tuple[tuple[str, PageSection, Markup], ...] = ()

    @property
    def title(self) -> str:
        """The title of the only sweep, or one for all."""
        return self.parts[0].sweep.title if len(self.parts) == 1 else "Tables and figures"

    @property
    def profiles(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """Profiles, what their numbers may be compared with, and how runs depart from them."""
        sweeps: dict[str, list[SweepOutcome]] = {}
        for part in self.parts:
            sweeps.setdefault(part.sweep.profile, []).append(part.sweep)
        return tuple((name, comparable(each), departures(each)) for name, each in sweeps.items())

    @property
    def decides(self) -> bool:
        """Whether some numbers say anything about methods."""
        return any(part.sweep.decides for part in self.parts)

    @cached_property
    def runs(self) -> list[tuple[SweepOutcome, CellOutcome]]:
        """Every run once, with the first sweep that has it."""
        return _distinct([part.sweep for part in self.parts])

    @cached_property
    def states(self) -> Counter[str]:
        """Number of runs by state."""
        return Counter(run.status for _, run in self.runs)

    @cached_property
    def summaries(self) -> list[RunSummary]:
        """The results of all finished runs."""
        return [run.result for _, run in self.runs if run.status == "finished"]

    @property
    def hardware(self) -> list[tuple[str, int]]:
        """Machines and the number of runs on each."""
        return sorted(Counter(_machine(s.hardware) for s in self.summaries).items())

    @property
    def made_by(self) -> str:
        """The version of the sweeps, and its numerics, in which a finished run may be shown."""
        return (
            f"trishul-ray {__version__}, numerics {NUMERICS} ({EDGE_NUMERICS} of the sections "
            f"{', '.join(stage_names())})"
        )

    @property
    def versions(self) -> list[tuple[str, str]]:
        """Versions of software by name; several if runs differ."""
        found: dict[str, dict[str, None]] = {}
        for summary in self.summaries:
            for name, version in summary.versions.items():
                found.setdefault(name, {})[version] = None
        return [(name, ", ".join(sorted(versions))) for name, versions in found.items()]

    @property
    def seconds(self) -> float:
        """Seconds of all rounds of all finished runs, each counted once."""
        return sum(summary.seconds for summary in self.summaries)

    @property
    def wall_seconds(self) -> float:
        """Wall time of the processes that finished the runs, from their start."""
        return sum(summary.wall_seconds for summary in self.summaries)

    @property
    def median_round(self) -> float:
        """Median seconds of a round."""
        rounds = [seconds for summary in self.summaries for seconds in summary.round_seconds]
        return statistics.median(rounds) if rounds else 0.0


def comparable(sweeps: Sequence[SweepOutcome]) -> str:
    """Return what the numbers of sweeps of one profile may be compared with."""
    profile = sweeps[0].profile
    text = COMPARABLE.get(profile, COMPARABLE["custom"])
    if profile == "paper" and departures(sweeps):
        text = "The paper's protocol, but not all of it: no table or figure that says so may be "
        text += "compared with the paper's."
    return " ".join([text, *_remarks(sweeps)])


def departures(sweeps: Sequence[SweepOutcome]) -> tuple[str, ...]:
    """Return how runs of sweeps depart from their profile: overrides, and parts of datasets."""
    return tuple(dict.fromkeys(reason for s in sweeps for reason in s.departures(s.cells)))


def _remarks(sweeps: Sequence[SweepOutcome]) -> list[str]:
    """Return what a reader must know of stages of the runs, by their reports."""
    runs = [run.result for s in sweeps for run in s.cells if run.status == "finished"]
    reports: dict[str, list[Json]] = {}
    for name, report in (pair for run in runs for pair in run.reports.items()):
        reports.setdefault(name, []).append(report)
    known = sorted(reports.keys() & set(stage_names()))
    return [text for name in known if (text := STAGES[name].remark(reports[name]))]


def write_report(
    outcomes: Sequence[SweepOutcome],
    folder: Path,
    tables: Sequence[SweepTable] | None = None,
    figures: DrawFigure | None = None,
) -> Path:
    """Write the report on sweeps into a folder, and return the path of its HTML page.

    The folder gets ``report.html``, which needs no other file, ``report.md``, ``tables/`` (CSV and
    LaTeX; files of sections) and ``figures/`` (SVG, PDF, and what they show as CSV). A
    report that was made from the same results by the same code, which ``made-from.json`` says,
    stays as it is. Any number of cells may be missing. ``tables`` are made if they are not given
    and the report is not there already.
    """
    made_from = _made_from(outcomes) if figures is None else None
    if made_from is not None and _is_current(folder, made_from):
        return folder / "report.html"
    if figures is None:
        from trishul_ray.report.figures.draw import draw  # imports matplotlib

        figures = draw
    tables = build_tables(outcomes) if tables is None else tables
    sections = [(name, section(outcomes)) for name, section in SECTIONS.all().items()]
    shown = tuple((name, each, html) for name, each in sections if (html := each.html()))
    page = Page(tuple(_parts(outcomes, tables, figures)), shown)
    files: dict[str, str | bytes] = {}
    for part in page.parts:
        for slug, table in part.tables:
            files[f"tables/{slug}.csv"] = to_csv(table)
            files[f"tables/{slug}.tex"] = to_latex(table)
        for drawing in part.drawings:
            if image := drawing.image:
                for kind, content in (("svg", image.svg), ("csv", image.csv), ("pdf", image.pdf)):
                    files[f"figures/{drawing.slug}.{kind}"] = content
    for _, section, _ in page.sections:
        files |= section.files()
    shown_by = {
        "ALPHA": ALPHA,
        "POWER": POWER,
        "comparable": comparable,
        "labels_text": labels_text,
        "to_markdown": to_markdown,
    }
    for name in ("report.md", "report.html"):
        files[name] = render("trishul_ray.report", name, page=page, **shown_by)
    for name, content in files.items():
        _write(folder / name, content)
    # Try again to read a broken drawing, since its files may be back.
    broken = any(drawing.broken for part in page.parts for drawing in part.drawings)
    broken |= not all(section.complete for _, section in sections)
    if made_from is not None and not broken:
        hashes = {name: digest(folder / name) for name in files}
        _write(folder / _MADE_FROM, json.dumps({"made_from": made_from, "files": hashes}, indent=1))
    return folder / "report.html"


def _made_from(outcomes: Sequence[SweepOutcome]) -> str:
    """Return a hash of what a report shows and of the code that shows it.

    The checksum of a result stands for its files; what columns of tables read may be added later.
    """
    # Without what Python compiles, which comes and goes beside the code.
    files = [f for f in Path(__file__).parents[1].rglob("*.*") if "__pycache__" not in f.parts]
    code = [digest(file) for file in sorted(files) if file.is_file()]
    added = [
        plugin.content
        for each in _REGISTRIES
        for name in each.names()
        for plugin in each.plugins_of(name)
    ]
    shown: list[object] = [__version__, code, added]
    for sweep in outcomes:
        shown.append(replace(sweep, cells=()))
        for layout in sweep.tables:
            if layout.column is not None:
                read = layout.column.outcomes(sweep.within(layout.where))
                shown.append([(cell.value, cell.gap) for cell in read])
        for cell in sweep.cells:
            checksum = cell.result.checksum if cell.status == "finished" else None
            state = cell.status, cell.reason, checksum
            shown.append((cell.labels, cell.id, *state, cell.metric, cell.scored))
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def _is_current(folder: Path, made_from: str) -> bool:
    """Return whether a folder has the whole report that :func:`_made_from` identifies."""
    try:
        noted = json.loads((folder / _MADE_FROM).read_bytes())
        return noted["made_from"] == made_from and all(
            digest(folder / name) == expected for name, expected in noted["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _parts(
    outcomes: Sequence[SweepOutcome], tables: Sequence[SweepTable], draw: DrawFigure
) -> Iterator[SweepPart]:
    taken: set[str] = set()

    def unique(slug: str) -> str:
        numbered = (f"{slug}-{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([slug], numbered) if name not in taken)
        taken.add(name)
        return name

    for sweep in outcomes:
        slug = unique(make_slug("sweep", sweep.profile, sweep.name))
        named = tuple((unique(table.slug), table) for table in tables if table.sweep is sweep)
        drawings = []
        for layout in sweep.figures:
            name = unique(make_slug("figure", sweep.profile, sweep.name, layout.name))
            drawings.append(_draw(layout, sweep, draw, name))
        yield SweepPart(sweep, slug, named, tuple(drawings))


def _draw(layout: FigureLayout, sweep: SweepOutcome, draw: DrawFigure, slug: str) -> Drawing:
    try:
        image = draw(layout, sweep)
    # One file of a run that is unreadable, or has other columns, must not cost the whole page.
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"It could not be drawn: {why_unreadable(error)}"
        return Drawing(layout, slug, None, why, broken=True)
    return Drawing(layout, slug, image, "" if image else "No finished run has what it shows.")


def _as_of_page(found: re.Match[str]) -> str:
    """Return a colour in SVG as the page's own, which follows the dark mode, if it has that."""
    name, colour = found.groups()
    return f"{name}: var({_OF_PAGE[colour]}, {colour})" if colour in _OF_PAGE else found.group()


def _distinct(sweeps: Sequence[SweepOutcome]) -> list[tuple[SweepOutcome, CellOutcome]]:
    """Return every run once, with the first sweep that has it."""
    found: dict[str, tuple[SweepOutcome, CellOutcome]] = {}
    for sweep in sweeps:
        for cell in sweep.cells:
            found.setdefault(cell.id, (sweep, cell))
    return list(found.values())


def _machine(hardware: Hardware) -> str:
    gpus = Counter(hardware.gpus)
    devices = [f"{count} x {name}" for name, count in sorted(gpus.items())] or ["no GPU"]
    return ", ".join(
        [
            hardware.processor,
            f"{hardware.cpus} CPUs ({hardware.cpu_capability})",
            f"{hardware.memory_gib} GiB",
            *devices,
        ]
    )


def _write(path: Path, content: str | bytes) -> None:
    write_file(path, content.encode() if isinstance(content, str) else content)
