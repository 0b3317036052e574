"""Summarize benchmarks, check goals, and write dated result files as JSON and Markdown."""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trishul_ray.runs.results import hardware, processor
from trishul_ray.version import NUMERICS, __version__

if TYPE_CHECKING:  # gpu.py must run without rich
    from rich.console import Console

#: Default folder of results, which is part of the repository.
RESULTS = Path(__file__).resolve().parent / "results"
#: Packages whose versions are recorded.
PACKAGES = ("torch", "ray", "transformers", "datasets", "numpy", "pyarrow", "mlflow", "peft")
#: Maximum number of runnable processes per CPU at the start for a timing to be reliable.
BUSY = 0.3
#: Options with paths, which do not affect results.
PATH_OPTIONS = ("hub", "cache", "runs", "out")


@dataclass(frozen=True)
class Times:
    """Repeated measurements of a duration, in seconds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Times":
        return cls(tuple(float(v) for v in values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        """Format as ``median (min-max)``, each multiplied by ``scale``."""
        low, high = min(self.values) * scale, max(self.values) * scale
        return f"{self.median * scale:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def paired(over: Times, under: Times) -> Times:
    """Compute the ratios of measurements that were taken in pairs."""
    return Times.of([a / b for a, b in zip(over.values, under.values, strict=True)])


@dataclass(frozen=True)
class Goal:
    """A measured number that must not exceed a bound."""

    what: str
    measured: float
    bound: float

    @property
    def met(self) -> bool:
        return self.measured <= self.bound

    def line(self) -> str:
        verdict = "met" if self.met else "NOT MET"
        return f"{self.what}: {self.measured:.4g}, goal at most {self.bound:g}: {verdict}"


@dataclass(frozen=True)
class Section:
    """A table of results, with notes and goals."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # raw numbers, for the JSON file

    def print(self, console: "Console") -> None:
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for text in [*self.notes, *(goal.line() for goal in self.goals)]:
            console.print(f"  {text}", highlight=False, soft_wrap=True, markup=False)

    def markdown(self) -> str:
        rows = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = [f"## {self.title}", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
        lines += [f"- {text}" for text in self.notes]
        lines += [f"- **{goal.line()}**" for goal in self.goals]
        return "\n".join(lines) + "\n"


def argument_parser(script: str | None, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Create an argument parser with a script's docstring as help, and an argument for parts."""
    parser = argparse.ArgumentParser(
        description=script, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if parts:
        known, names = [*parts, [*parts]], " ".join(parts)  # the last is the default
        add = parser.add_argument
        add("parts", nargs="*", metavar="PART", choices=known, default=[*parts], help=names)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def wide_console() -> "Console":
    """Create a console that is wide enough for tables if the output is not a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def versions() -> dict[str, str]:
    """Return the versions of packages that results depend on."""
    found = {"trishul_ray": __version__, "numerics": str(NUMERICS)}
    found["python"] = platform.python_version()
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def hardware_slug() -> str:
    """Return a short name of this machine for file names, such as ``amd-epyc-2cpu`` or ``h200``."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    else:
        name = f"{processor()} {os.cpu_count()}cpu"
    name = re.sub(r"\((r|tm)\)|processor|\bcpu @.*?hz", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Report:
    """Collect sections, and write them to ``<what>_<hardware>_<date>.json`` and ``.md``."""

    def __init__(self, what: str, options: argparse.Namespace, *private: str) -> None:
        """Record the time and the load of the machine.

        Options with paths and ``private`` options are not written to the page.
        """
        hidden = {*PATH_OPTIONS, *private}
        self.config = {key: value for key, value in vars(options).items() if key not in hidden}
        if "parts" in self.config:
            self.config["parts"] = " ".join(options.parts)
        self.what, self.folder, self.console = what, options.out, wide_console()
        self.began = datetime.datetime.now(datetime.UTC)
        self.load = os.getloadavg()[0] / (os.cpu_count() or 1)
        self.sections: list[Section] = []
        if self.busy:
            self.console.print(
                f"this machine is busy ({self.load:.1f} runnable processes per CPU): ratios of "
                "adjacent measurements are still meaningful, but seconds are not",
                style="yellow",
            )

    @property
    def busy(self) -> bool:
        """Whether other processes were running at the start."""
        return self.load > BUSY

    @property
    def stem(self) -> str:
        return f"{self.what}_{hardware_slug()}_{self.began.date().isoformat()}"

    def add(self, section: Section) -> None:
        """Print a section, and write all sections so far, in case the script is stopped.

        Files of an earlier measurement on the same day are replaced.
        """
        section.print(self.console)
        self.sections.append(section)
        self.folder.mkdir(parents=True, exist_ok=True)
        took = (datetime.datetime.now(datetime.UTC) - self.began).total_seconds()
        content = {
            "what": self.what,
            "date": self.began.isoformat(timespec="seconds"),
            "seconds": round(took, 1),
            "busy": self.busy,
            "load_per_cpu_before": round(self.load, 2),
            "hardware": asdict(hardware()),
            "versions": versions(),
            "config": self.config,
            "sections": [
                asdict(s) | {"goals": [asdict(g) | {"met": g.met} for g in s.goals]}
                for s in self.sections
            ],
        }
        file = self.folder / f"{self.stem}.json"
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        page = self.folder / f"{self.stem}.md"
        page.write_text(self._page(content), encoding="utf-8")
        self.console.print(f"written: {page} and .json", soft_wrap=True, highlight=False)

    def _page(self, content: dict[str, Any]) -> str:
        machine = content["hardware"]
        where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cpus']} CPUs"
        kept = ("trishul_ray", "python", "torch", "ray", "transformers")
        numbers = ", ".join(f"{name} {content['versions'][name]}" for name in kept)
        config = ", ".join(f"{key}={value}" for key, value in self.config.items())
        lines = [
            f"# {self.what}, {content['date'][:10]}",
            "",
            f"{where}, {machine['memory_gib']} GiB ({machine['cpu_capability']}); {numbers}; "
            f"took {content['seconds']:.0f} s.",
            "",
            f"Settings: {config}.",
            "",
        ]
        if self.busy:
            lines += [
                f"**The machine was busy** ({self.load:.1f} runnable processes per CPU before the "
                "start): do not quote seconds from this page.",
                "",
            ]
        return "\n".join(lines) + "\n" + "\n".join(section.markdown() for section in self.sections)
