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
from typing import Any, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from trishul_ray.checksums import digest
from trishul_ray.config import COMPUTE_LEVELS, COMPUTE_PROFILES
from trishul_ray.files import write_file
from trishul_ray.methods.base import method_class, method_names
from trishul_ray.paper.claims import VERDICTS, Finding, claims_csv, judge, why_unreadable
from trishul_ray.paper.numbers import figure_numbers, slips
from trishul_ray.report.formats import escape_markdown, to_csv, to_latex, to_markdown
from trishul_ray.report.outcomes import (
    CellOutcome,
    CellStatus,
    DrawnFigure,
    FigureLayout,
    SweepOutcome,
)
from trishul_ray.report.statistics import ALPHA, POWER
from trishul_ray.report.summary import Hardware, RunSummary
from trishul_ray.report.tables import SweepTable, build_tables, labels_text, make_slug
from trishul_ray.stages import stage_names
from trishul_ray.tracking.progress import format_duration
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
#: Open questions by the field that decides them.
SWITCHES = {
    "optimizer.name": "Equations step along the plain gradient, the protocol says Adam: which?",
    "optimizer.lr_source": "Where do the learning rates come from? The paper says both: tuned by "
    "method and budget, and fixed across methods; `trishul rates` tunes them.",
    "optimizer.schedule": "Does the learning rate decay?",
    "model.name": "Which checkpoint is the backbone?",
    "model.dropout": "Does the backbone's dropout act in training?",
    "model.train_head": "Is the classification head trained and averaged?",
    "model.precision": "In which precision does the frozen backbone compute?",
    "federation.weighting": "Do clients weigh the same, or by their rows? The equations disagree.",
    "partition.variant": "How does a Dirichlet partition draw its proportions?",
    "partition.min_size": "What is the smallest number of rows of a client?",
    "federation.compute": "Which shares of the budget can clients train?",
    "adapter.matching": "Do methods match the budget on each matrix, or use the published ranks?",
    "adapter.init": "How are the frozen bases drawn?",
    "adapter.sigma": "Which scale have bases that are not normalized?",
    "adapter.alpha": "What is LoRA's α? (the update is α/r B A)",
    "adapter.overflow": "What if more heads are allocated than can be orthogonal? (auto: "
    "water-filling may exceed that number; gradient and curvature allocations are capped at it, "
    "since their scores may give one block all heads)",
    "method.scalars": "Are the scalars of heads trained?",
    "method.scalar_max": "What bounds the scalars (s_max)?",
    "method.selection": "Which heads does a limited client train?",
    "method.head_fraction": "Which share of its heads does a client train?",
    "method.lam": "How strong is the nuclear norm (λ)?",
    "method.prox_on": "Does the prox shrink the whole core, or its change of the round?",
    "method.prox_every": "After how many local steps does the prox follow?",
    "method.allocation": "What are heads allocated by?",
    "method.block_scores": "Whose weights score a block?",
    "method.option": "What is SCAFFOLD's control variate? (auto: the mean raw gradient)",
    "method.server_lr": "Which step does SCAFFOLD's server take?",
    "method.unsent": "What becomes of HetLoRA's components that no client of a round sends?",
    "method.init_clients": "How many clients send Fed-SB's first gradient?",
    "method.init_batches": "On how many mini-batches is Fed-SB's first gradient?",
    "method.init_lr": "Which signed step do Fed-SB's bases come from?",
    "task.kind": "Is text classified by a head, an answer or words? (auto: by the backbone's kind)",
    "task.template": "Which prompt is a text read in?",
    "task.verbalizers": "Which words stand for the classes?",
    "task.target_length": "How many tokens may a generated answer have?",
    "evaluation.limit": "How many test rows are scored?",
    "evaluation.top_k": "How many directions has the principal-angle similarity?",
}
#: Open questions that no field decides: question, answer, and the dataset that they concern.
FIXED = (
    ("Which round is reported?", "the last", None),
    ("What is the mean F1 of MRQA over?", "questions, not its six sub-datasets", "mrqa"),
)
#: Conditions under which a field decides something: another field of its section, and its values.
_APPLIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "adapter.sigma": ("init", lambda init: init == "rv_random_normal"),
    "partition.variant": ("kind", lambda kind: kind == "dirichlet"),
    "partition.min_size": ("kind", lambda kind: kind == "dirichlet"),
}
#: Displayed text of absent values, if it is not just "default".
_ABSENT = {"evaluation.limit": "all", "adapter.sigma": "1/√width", "adapter.alpha": "r"}
#: More values than these are counted instead of listed.
MOST_VALUES = 6
_STATUSES: tuple[CellStatus, ...] = get_args(CellStatus)
#: Variables of ``report.css`` for the colours of a figure that are those of type and paper.
_OF_PAGE = {
    "#000000": "--ink", "#222222": "--ink", "#555555": "--muted", "#b0b0b0": "--line",
    "#ffffff": "--page", "#0072b2": "--blue",
}  # fmt: skip
_FIGURE_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")
#: File of a report that says what it was made from.
_MADE_FROM = "made-from.json"


@dataclass(frozen=True)
class Switch:
    """A choice, and how many runs made it in which way, the most frequent first.

    ``field`` is empty if no field decides; ``others`` is the number of further values.
    """

    field: str
    question: str
    values: tuple[tuple[str, int], ...]
    others: int


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
        return f"Figure {figure_numbers()[key]} of the paper ({key})" if key else ""


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
        return sorted(groups, key=lambda group: _STATUSES.index(group[0]))


@dataclass(frozen=True)
class Page:
    """Content of the templates."""

    parts: tuple[SweepPart, ...]
    claims: tuple[Finding, ...] = ()

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
    def summaries(self) -> "list[RunSummary]":
        """The results of all finished runs."""
        return [run.result for _, run in self.runs if run.status == "finished"]

    @property
    def reproduces(self) -> bool:
        """Whether some sweep is one of the paper's, and not all a user's own."""
        return any(part.sweep.profile != "custom" for part in self.parts)

    @property
    def verdicts(self) -> Counter[str]:
        """Number of claims by verdict; each dataset counts.

        Claims about seconds are left out, as are those of the profile smoke, which is not judged.
        """
        counted = (each for each in self.claims if not each.timed and each.profile != "smoke")
        return Counter(finding.verdict for finding in counted)

    @property
    def slips(self) -> tuple[str, ...]:
        """Contradictions of the paper on the times of a round, which no table shows."""
        overhead = any(part.sweep.name == "overhead" for part in self.parts)
        return slips("fig:overhead") if overhead else ()

    @property
    def switches(self) -> tuple[Switch, ...]:
        """Choices of the runs that the paper leaves open."""
        return read_switches(self.summaries)

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
    return text + _private(sweeps)


def departures(sweeps: Sequence[SweepOutcome]) -> tuple[str, ...]:
    """Return how runs of sweeps depart from their profile: overrides, and parts of datasets."""
    return tuple(dict.fromkeys(reason for s in sweeps for reason in s.departures(s.cells)))


def _private(sweeps: Sequence[SweepOutcome]) -> str:
    """Return what a reader must know of the private runs of sweeps; empty if there are none."""
    runs = [run.result for s in sweeps for run in s.cells if run.status == "finished"]
    # Without noise nothing is promised.
    private = [each for run in runs if (each := run.privacy) is not None and each["epsilon"]]
    if not private:
        return ""
    accounted = {(each["population"], each["cohort"]) for each in private}
    shown = ", ".join(f"{cohort:,} of {population:,}" for population, cohort in sorted(accounted))
    return (
        f" Privacy of clients ({len(private)} runs) is accounted for cohorts of {shown}. It is a "
        "simulation: noise is reproducible from the seed. Simulation only, outside the guarantee: "
        f"{', '.join(private[0]['outside'])}."
    )


def write_report(
    outcomes: Sequence[SweepOutcome],
    folder: Path,
    tables: Sequence[SweepTable] | None = None,
    figures: DrawFigure | None = None,
) -> Path:
    """Write the report on sweeps into a folder, and return the path of its HTML page.

    The folder gets ``report.html``, which needs no other file, ``report.md``, ``tables/`` (CSV and
    LaTeX; the paper's claims as CSV) and ``figures/`` (SVG, PDF, and what they show as CSV). A
    report that was made from the same results by the same code, which ``made-from.json`` says,
    stays as it is. Any number of cells may be missing. ``tables`` are made if they are not given
    and the report is not there already.
    """
    made_from = _made_from(outcomes) if figures is None else None
    if made_from is not None and _is_current(folder, made_from):
        return folder / "report.html"
    if figures is None:
        from trishul_ray.report.figures.drawing import draw  # imports matplotlib

        figures = draw
    tables = build_tables(outcomes) if tables is None else tables
    page = Page(tuple(_parts(outcomes, tables, figures)), judge(outcomes))
    templates = Environment(
        loader=PackageLoader("trishul_ray.report"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"duration": format_duration, "markdown": escape_markdown}
    templates.globals |= {
        "ALPHA": ALPHA,
        "POWER": POWER,
        "comparable": comparable,
        "labels_text": labels_text,
        "statuses": _STATUSES,
        "verdicts": VERDICTS,
        "to_markdown": to_markdown,
    }
    files: dict[str, str | bytes] = {}
    for part in page.parts:
        for slug, table in part.tables:
            files[f"tables/{slug}.csv"] = to_csv(table)
            files[f"tables/{slug}.tex"] = to_latex(table)
        for drawing in part.drawings:
            if image := drawing.image:
                for kind, content in (("svg", image.svg), ("csv", image.csv), ("pdf", image.pdf)):
                    files[f"figures/{drawing.slug}.{kind}"] = content
    if page.claims:
        files["tables/claims.csv"] = claims_csv(page.claims)
    for name in ("report.md", "report.html"):
        files[name] = templates.get_template(name).render(page=page)
    for name, content in files.items():
        _write(folder / name, content)
    # Try again to read a broken drawing, since its files may be back.
    broken = any(drawing.broken for part in page.parts for drawing in part.drawings)
    broken |= any(finding.problem for finding in page.claims)
    if made_from is not None and not broken:
        hashes = {name: digest(folder / name) for name in files}
        _write(folder / _MADE_FROM, json.dumps({"made_from": made_from, "files": hashes}, indent=1))
    return folder / "report.html"


def _made_from(outcomes: Sequence[SweepOutcome]) -> str:
    """Return a hash of what a report shows and of the code that shows it.

    The checksum of a result stands for its files.
    """
    # Without what Python compiles, which comes and goes beside the code.
    files = [f for f in Path(__file__).parent.rglob("*.*") if "__pycache__" not in f.parts]
    code = [digest(file) for file in sorted(files) if file.is_file()]
    shown: list[object] = [__version__, code]
    for sweep in outcomes:
        shown.append(replace(sweep, cells=()))
        for cell in sweep.cells:
            checksum = cell.result.checksum if cell.status == "finished" else None
            shown.append((cell.labels, cell.id, cell.status, cell.reason, cell.metric, checksum))
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


def read_switches(summaries: "Sequence[RunSummary]") -> tuple[Switch, ...]:
    """Return how runs set each of :data:`SWITCHES`.

    Fields that a run's method or task does not read do not count.
    """
    found = []
    for field, question in SWITCHES.items():
        counts = Counter(v for s in summaries if (v := _value(s, field)) is not None)
        values = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if values:
            others = max(0, len(values) - MOST_VALUES)
            found.append(Switch(field, question, tuple(values[:MOST_VALUES]), others))
    for question, answer, dataset in FIXED:
        runs = sum(dataset in (None, s.identity["data"]["name"]) for s in summaries)
        if runs:
            found.append(Switch("", question, ((answer, runs),), 0))
    return tuple(found)


def _value(summary: RunSummary, field: str) -> str | None:
    """Return how a run set a field, as text; None if it does not apply."""
    section, _, name = field.partition(".")
    # The source of a rate cannot change a number: it is not part of the identity.
    fields = (summary.config if name == "lr_source" else summary.identity).get(section, {})
    other, applies = _APPLIES.get(field, (name, lambda _: True))
    unread = name not in fields or field in summary.unread_fields
    if unread or not applies(fields.get(other)):
        return None
    value = fields[name]
    if field == "federation.compute":
        return _shares(value, fields.get("compute_shares"))
    if value is None and field == "adapter.init":
        return _default_init(summary.identity["method"]["name"])
    if value is None:
        return _ABSENT.get(field, "default")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", "\\n")


def _shares(profile: str, custom: Sequence[float] | None) -> str:
    """Return a profile of capacities with the proportions that it stands for."""
    if profile == "full":
        return profile
    proportions = COMPUTE_PROFILES[profile] if custom is None else custom
    levels = zip(COMPUTE_LEVELS, proportions, strict=False)
    return f"{profile} ({', '.join(f'{share:.0%} train {level:g}' for level, share in levels)})"


def _default_init(method: str) -> str:
    default = (
        getattr(method_class(method), "default_init", None) if method in method_names() else ""
    )
    return f"{default} (the default of {method})" if default else f"the default of {method}"
