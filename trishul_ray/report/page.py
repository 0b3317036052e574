"""The report: one self-contained HTML page, its tables as Markdown, LaTeX and CSV, its figures."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trishul_ray.errors import why_unreadable
from trishul_ray.report.formats import escape_markdown, to_csv, to_latex, to_markdown
from trishul_ray.report.layouts import FigureLayout
from trishul_ray.report.outcomes import (
    SEED,
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
from trishul_ray.stages import STAGES, stage_names
from trishul_ray.storage.durable import Json, write_file
from trishul_ray.tracking.progress import format_duration
from trishul_ray.version import NUMERICS, __version__

#: Draws a figure from the finished cells; None if there is nothing to draw.
DrawFigure = Callable[[FigureLayout, SweepOutcome], DrawnFigure | None]

#: What numbers of a profile may be compared with.
COMPARABLE = {
    "paper": "The paper's protocol: these numbers may be compared with the paper's.",
    "small": "Small models and short runs: compare the rows of a table with each other, and no "
    "number with the paper's.",
    "smoke": "Stand-in data, tiny models and a few steps: these numbers show that every cell "
    "works. They say nothing about the methods, and must not be compared with the paper's.",
    "custom": "A sweep of your own: compare only what differs in the axes of a table.",
}
#: Settings that a page shows of each sweep at a glance, by field.
_SETTINGS = {
    "model.name": "model",
    "data.name": "dataset",
    "method.name": "method",
    "budget": "budget",
    "federation.clients": "clients",
    "federation.clients_per_round": "clients a round",
    "federation.rounds": "rounds",
    "federation.local_steps": "local steps",
    "federation.batch_size": "batch size",
    "optimizer.name": "optimizer",
    "optimizer.lr": "learning rate",
    "model.precision": "precision",
}
#: Sections and fields that change no number.
_UNSHOWN = ("name", "seed", "storage", "tracking", "resources", "plugins")
#: More values of a setting than these are counted instead of listed.
_MOST_VALUES = 4
#: Variables of ``report.css`` that replace the colors of text and background in a figure.
_OF_PAGE = {
    "#000000": "--ink", "#222222": "--ink", "#555555": "--muted", "#b0b0b0": "--line",
    "#ffffff": "--page", "#0072b2": "--blue",
}  # fmt: skip
_FIGURE_COLOR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")


@dataclass(frozen=True)
class Drawing:
    """A figure on the page, or why there is none."""

    layout: FigureLayout
    slug: str
    image: DrawnFigure | None
    problem: str = ""

    @property
    def markup(self) -> Markup:
        """The SVG text for HTML, in the colors of the page."""
        return Markup(_FIGURE_COLOR.sub(_as_of_page, self.image.svg) if self.image else "")

    @property
    def number(self) -> str:
        """Number and label of the figure of the paper that it reproduces; empty if none."""
        key = self.layout.paper
        return f"Figure {reference_of(key).figures()[key]} of the paper ({key})" if key else ""


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of the runs of one row: texts, with the range if they differ."""

    label: str
    uploaded: str
    downloaded: str
    round_seconds: str
    runs: int


@dataclass(frozen=True)
class SweepPart:
    """A sweep on the page."""

    sweep: SweepOutcome
    slug: str
    tables: tuple[tuple[str, SweepTable], ...]  # by slug
    drawings: tuple[Drawing, ...]

    @property
    def command(self) -> str:
        """The command that makes its runs."""
        return " ".join([self.sweep.command, *self.sweep.overrides])

    @property
    def states(self) -> Counter[str]:
        """Number of its runs by state."""
        return Counter({cell.id: cell.status for cell in self.sweep.cells}.values())

    @property
    def departures(self) -> tuple[str, ...]:
        """Departures of its runs from the profile."""
        return self.sweep.departures(self.sweep.cells)

    @cached_property
    def _configs(self) -> list[Json]:
        finished = {c.id: c.result.config for c in self.sweep.cells if c.status == "finished"}
        return [flatten(config) for config in finished.values()]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The main settings of its finished runs: name, and value or values."""
        found = []
        for field, name in _SETTINGS.items():
            values = sorted({str(c[field]) for c in self._configs if c.get(field) is not None})
            few = ", ".join(values) if len(values) <= _MOST_VALUES else f"{len(values)} values"
            found += [(name, few)] * bool(values)
        return found

    @property
    def configuration(self) -> str:
        """The fields that all finished runs have in common, as YAML."""
        common: Json = {}
        first, *others = self._configs or [{}]
        for field, value in first.items():
            section, _, name = field.rpartition(".")
            same = all(field in other and other[field] == value for other in others)
            if same and field.partition(".")[0] not in _UNSHOWN:
                place = common
                for part in section.split(".") if section else ():
                    place = place.setdefault(part, {})
                place[name] = value
        text: str = yaml.safe_dump(common, sort_keys=False, allow_unicode=True, width=90)
        return text

    @property
    def traffic(self) -> list[Traffic]:
        """Bytes that all clients of a run send and receive, by the axes of the first table."""
        axes = self.sweep.tables[0].rows if self.sweep.tables else _varying(self.sweep)[:1]
        groups: dict[tuple[str, ...], dict[str, RunSummary]] = {}
        for cell in self.sweep.cells:
            if cell.status == "finished":
                groups.setdefault(cell.labels_of(axes), {})[cell.id] = cell.result
        found = []
        for labels in self.sweep.in_order(axes, groups):
            runs = list(groups[labels].values())
            name = ", ".join(map(self.sweep.shown_label, axes, labels)) or self.sweep.title
            seconds = [s for run in runs for s in run.round_seconds]
            found.append(
                Traffic(
                    name,
                    _range(bytes_text, [run.uploaded_bytes for run in runs]),
                    _range(bytes_text, [run.downloaded_bytes for run in runs]),
                    f"{statistics.median(seconds):.3g} s" if seconds else "",
                    len(runs),
                )
            )
        return found

    @property
    def problems(self) -> list[tuple[CellStatus, str, list[CellOutcome]]]:
        """Runs that failed or cannot be used, by state and reason."""
        found: dict[tuple[CellStatus, str], dict[str, CellOutcome]] = {}
        for cell in self.sweep.cells:
            if cell.status not in ("finished", "missing"):
                found.setdefault((cell.status, cell.reason), {}).setdefault(cell.id, cell)
        groups = [(status, reason, [*runs.values()]) for (status, reason), runs in found.items()]
        return sorted(groups, key=lambda group: STATUSES.index(group[0]))


@dataclass(frozen=True)
class Page:
    """Content of the page."""

    parts: tuple[SweepPart, ...]

    @property
    def title(self) -> str:
        """The title of the only sweep, or one for all."""
        return self.parts[0].sweep.title if len(self.parts) == 1 else "Tables and figures"

    @property
    def profiles(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Profiles, what their numbers may be compared with, and how runs depart from them."""
        sweeps: dict[str, list[SweepOutcome]] = {}
        for part in self.parts:
            sweeps.setdefault(part.sweep.profile, []).append(part.sweep)
        return [(name, comparable(each), departures(each)) for name, each in sweeps.items()]

    @property
    def judged(self) -> bool:
        """Whether rows of any table are compared."""
        return any(table.judged for part in self.parts for _, table in part.tables)

    @cached_property
    def runs(self) -> list[tuple[SweepOutcome, CellOutcome]]:
        """Every run once, with the first sweep that has it."""
        found: dict[str, tuple[SweepOutcome, CellOutcome]] = {}
        for part in self.parts:
            for cell in part.sweep.cells:
                found.setdefault(cell.id, (part.sweep, cell))
        return list(found.values())

    @cached_property
    def states(self) -> Counter[str]:
        """Number of runs by state."""
        return Counter(run.status for _, run in self.runs)

    @cached_property
    def summaries(self) -> list[RunSummary]:
        """The results of all finished runs."""
        return [run.result for _, run in self.runs if run.status == "finished"]

    @cached_property
    def choices(self) -> list[Choice]:
        """What a publication leaves open that sweeps of the page reproduce."""
        if all(part.sweep.profile == "custom" for part in self.parts):
            return []
        return [each for ref in references() for each in ref.open_choices(self.summaries)]

    @property
    def machines(self) -> list[tuple[str, int]]:
        """Machines and the number of runs on each."""
        return sorted(Counter(_machine(s.hardware) for s in self.summaries).items())

    @property
    def versions(self) -> list[tuple[str, str]]:
        """Versions of software by name; several if runs differ."""
        found: dict[str, set[str]] = {}
        for name, version in (pair for s in self.summaries for pair in s.versions.items()):
            found.setdefault(name, set()).add(version)
        return [(name, ", ".join(sorted(versions))) for name, versions in found.items()]

    @property
    def seconds(self) -> float:
        """Seconds of all rounds of all finished runs, each counted once."""
        return sum(summary.seconds for summary in self.summaries)


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
    LaTeX) and ``figures/`` (SVG, PDF, and what they show as CSV). Any number of cells may be
    missing. ``tables`` are made if they are not given.
    """
    if figures is None:
        from trishul_ray.report.figures.draw import draw  # imports matplotlib

        figures = draw
    tables = build_tables(outcomes) if tables is None else tables
    page = Page(tuple(_parts(outcomes, tables, figures)))
    files: dict[str, str | bytes] = {"report.html": _html(page), "report.md": _markdown(page)}
    for part in page.parts:
        for slug, table in part.tables:
            files[f"tables/{slug}.csv"] = to_csv(table)
            files[f"tables/{slug}.tex"] = to_latex(table)
        for drawing in part.drawings:
            if image := drawing.image:
                for kind, content in (("svg", image.svg), ("csv", image.csv), ("pdf", image.pdf)):
                    files[f"figures/{drawing.slug}.{kind}"] = content
    for name, text in files.items():
        write_file(folder / name, text.encode() if isinstance(text, str) else text)
    return folder / "report.html"


def _html(page: Page) -> str:
    templates = Environment(
        loader=PackageLoader("trishul_ray.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["duration"] = format_duration
    shown = {"labels_text": labels_text, "statuses": STATUSES, "alpha": f"{100 * ALPHA:g}%"}
    return templates.get_template("report.html").render(page=page, comparable=comparable, **shown)


def _markdown(page: Page) -> str:
    """Return title, profiles, tables and figures of the page as Markdown."""
    lines = [f"# {escape_markdown(page.title)}", ""]
    for name, text, reasons in page.profiles:
        departs = f" Departures: {'; '.join(reasons)}." if reasons else ""
        lines += [f"**Profile {escape_markdown(name)}.** {escape_markdown(text + departs)}", ""]
    others = [f", {page.states[state]} {state}" for state in STATUSES[1:] if page.states[state]]
    lines += [f"{page.states['finished']} of {page.states.total()} runs finished{''.join(others)}."]
    lines += [f"Ids are those of trishul-ray {__version__}, numerics {NUMERICS}."]
    for part in page.parts:
        profile = escape_markdown(part.sweep.profile)
        lines += ["", f"## {escape_markdown(part.sweep.title)} (profile {profile})", ""]
        lines += [f"Command: {escape_markdown(part.command)}"] if part.command else []
        for _, table in part.tables:
            title = filter(None, [table.paper_table, table.caption, *table.caveats])
            lines += ["", f"### {escape_markdown(table.layout.title)}", ""]
            lines += [escape_markdown(" ".join(title)), "", to_markdown(table)]
            lines += [f"- {escape_markdown(slip)}" for slip in table.slips]
        for drawing in part.drawings:
            lines += ["", f"### {escape_markdown(drawing.layout.title)} (profile {profile})", ""]
            name = escape_markdown(drawing.layout.title)
            image = f"![{name}](figures/{drawing.slug}.svg)"
            lines += [image if drawing.image else escape_markdown(drawing.problem)]
    if page.choices:
        lines += ["", "## Choices that the paper leaves open", ""]
        lines += ["| question | field | values |", "| --- | --- | --- |"]
        for choice in page.choices:
            values = ", ".join(f"{value} ({count})" for value, count in choice.answers)
            texts = (choice.question, choice.field, values)
            lines += [f"| {' | '.join(map(escape_markdown, texts))} |"]
    return "\n".join(lines) + "\n"


def labels_text(sweep: SweepOutcome, labels: Mapping[str, str]) -> str:
    """Return the displayed labels of a cell in one line."""
    return ", ".join(
        f"{SEED} {label}" if axis == SEED else sweep.shown_label(axis, label)
        for axis, label in labels.items()
    )


def bytes_text(count: float) -> str:
    """Return an amount of bytes with its unit, such as ``26.6 MB``."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    found = next(((unit, size) for unit, size in units if count >= size), ("B", 1.0))
    return f"{count / found[1]:.3g} {found[0]}"


def _parts(
    outcomes: Sequence[SweepOutcome], tables: Sequence[SweepTable], draw: DrawFigure
) -> Iterable[SweepPart]:
    taken: Counter[str] = Counter()

    def unique(*names: str) -> str:
        slug = make_slug(*names)
        taken[slug] += 1
        return f"{slug}-{taken[slug]}" if taken[slug] > 1 else slug

    for sweep in outcomes:
        drawings = []
        for layout in [*sweep.figures, *_learning_curve(sweep)]:
            slug = unique("figure", sweep.profile, sweep.name, layout.name)
            drawings.append(_draw(layout, sweep, draw, slug))
        named = tuple((unique(table.slug), table) for table in tables if table.sweep is sweep)
        slug = unique("sweep", sweep.profile, sweep.name)
        yield SweepPart(sweep, slug, named, tuple(drawings))


def _learning_curve(sweep: SweepOutcome) -> list[FigureLayout]:
    """Return a figure of the score by round, if the sweep has none."""
    if any(figure.kind == "convergence" for figure in sweep.figures):
        return []
    axes = [axis for axis in _varying(sweep) if axis != "dataset"][:1]
    panels = [axis for axis in sweep.axes if axis == "dataset"]
    title = "Learning curve"
    return [FigureLayout(name="curve", title=title, kind="convergence", series=axes, panels=panels)]


def _varying(sweep: SweepOutcome) -> list[str]:
    """Return the axes other than the seed that vary, axes of rows first."""
    first = [axis for table in sweep.tables[:1] for axis in reversed(table.rows)]
    axes = dict.fromkeys([*first, *sweep.axes])
    return [axis for axis in axes if axis != SEED and len(sweep.axes[axis]) > 1]


def _draw(layout: FigureLayout, sweep: SweepOutcome, draw: DrawFigure, slug: str) -> Drawing:
    try:
        image = draw(layout, sweep)
    # One file of a run that is unreadable, or has other columns, must not cost the whole page.
    except (OSError, ValueError, LookupError, TypeError) as error:
        return Drawing(layout, slug, None, f"It could not be drawn: {why_unreadable(error)}")
    return Drawing(layout, slug, image, "" if image else "No finished run has what it shows.")


def _as_of_page(found: re.Match[str]) -> str:
    """Return a color in SVG as the page's own, which follows the dark mode, if it has that."""
    name, color = found.groups()
    return f"{name}: var({_OF_PAGE[color]}, {color})" if color in _OF_PAGE else found.group()


def _range(text: Callable[[Any], str], values: Sequence[Any]) -> str:
    least, most = text(min(values)), text(max(values))
    return least if least == most else f"{least} to {most}"


def _machine(hardware: Hardware) -> str:
    gpus = Counter(hardware.gpus)
    devices = [f"{count} x {name}" for name, count in sorted(gpus.items())] or ["no GPU"]
    cpus = f"{hardware.cpus} CPUs ({hardware.cpu_capability})"
    return ", ".join([hardware.processor, cpus, f"{hardware.memory_gib} GiB", *devices])
