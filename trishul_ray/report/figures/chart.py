"""Charts: the numbers of a figure in long form, and how they are drawn, apart from the drawing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trishul_ray.report.formats import csv_text

#: How the rows of a panel are drawn; see ``marks.py``.
Mark = Literal["line", "bar", "scatter", "heatmap"]
#: Whole numbers such as rounds, an amount, a strength on a log axis with 0 and infinity beyond its
#: ends, a skew on a reversed one, a logarithm, or names.
Scale = Literal["whole", "amount", "strength", "skew", "log", "names"]
#: Columns of the CSV file by their names there: attributes of a row.
Columns = Mapping[str, str]
#: Columns of a number.
NUMBER = {name: name for name in ("value", "low", "high", "n")}
#: Columns of a figure of lines.
LINES = {name: name for name in ("panel", "metric", "series", "x")} | NUMBER | {"paper": "paper"}


@dataclass(frozen=True)
class Band:
    """A number measured ``count`` times: its centre and the interval that is drawn."""

    centre: float
    low: float
    high: float
    count: int

    @classmethod
    def of_runs(cls, values: Sequence[float]) -> "Band":
        """Return the mean of several runs, and one standard deviation to each side of it."""
        mean = float(np.mean(values))
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return cls(mean, mean - deviation, mean + deviation, len(values))

    @classmethod
    def of_rounds(cls, values: Sequence[float]) -> "Band":
        """Return the median of many rounds, and their 10 % and 90 % quantiles."""
        low, centre, high = np.quantile(values, [0.1, 0.5, 0.9])
        return cls(float(centre), float(low), float(high), len(values))

    @classmethod
    def of_share(cls, share: float, rows: int) -> "Band":
        """Return a share in [0, 1] of ``rows`` rows, and its 95 % interval (Wilson 1927)."""
        z = 1.959964
        middle = (share + z**2 / (2 * rows)) / (1 + z**2 / rows)
        spread = math.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
        half = z / (1 + z**2 / rows) * spread
        return cls(share, middle - half, middle + half, rows)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of a figure and its place: a line of the CSV file.

    Attributes:
        metric: Name of the number.
        x: Its place: a number or a name.
        y: Its second place, in a heat map.
        low: Lower end of the interval that is drawn, up to ``high``; NaN without one.
        n: How many values it is made of; None if that says nothing.
        paper: What a publication prints there, or NaN.
        text: What is written beside it.
    """

    value: float
    panel: str = ""
    metric: str = ""
    series: str = ""
    x: Any = ""
    y: Any = ""
    low: float = math.nan
    high: float = math.nan
    n: int | None = None
    paper: float = math.nan
    text: str = ""

    @classmethod
    def of(cls, band: Band, **place: Any) -> "Row":
        """Return the row of a band."""
        return cls(value=band.centre, low=band.low, high=band.high, n=band.count, **place)

    @property
    def ends(self) -> tuple[float, float]:
        """The interval; the number itself without one."""
        return (self.low, self.high) if math.isfinite(self.low) else (self.value, self.value)


@dataclass(frozen=True)
class Axis:
    """An axis of a panel; ``infinite`` is how an infinite place is displayed."""

    label: str = ""
    scale: Scale = "amount"
    percent: bool = False
    infinite: str = "∞"


@dataclass(frozen=True)
class Panel:
    """Rows that are drawn in one pair of axes, and how.

    Attributes:
        second: Rows of another axis: that on the right of bars, or the x axis of a scatter.
        colours: Axis of the colours of a heat map; neighbours with one label share a scale.
        palette: Name of the colour map.
        levels: Numbers to compare with, by name, as dotted lines; "" is no name.
        printed: Numbers that a publication prints for a whole series, as dashed lines.
        by: Whether each series or each metric is drawn as one.
        dots: Draw the rows of bars as points.
        base: Where the lines of dots begin; None: there are none.
        sideways: Draw bars from left to right, each with the name of its series.
        square: A matrix whose rows and columns are the same; its diagonal is hidden if ``unit``.
        from_zero: Begin the y axis at 0 where a number has no interval.
    """

    rows: tuple[Row, ...]
    mark: Mark = "line"
    title: str = ""
    x: Axis = Axis()
    y: Axis = Axis()
    second: tuple[Row, ...] = ()
    second_label: str = ""
    colours: Axis = Axis()
    palette: str = "cividis"
    levels: Mapping[str, float] = field(default_factory=dict)
    printed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    by: Literal["series", "metric"] = "series"
    dots: bool = False
    base: float | None = None
    sideways: bool = False
    square: bool = False
    unit: bool = False
    from_zero: bool = True

    @property
    def series(self) -> dict[str, list[Row]]:
        """The rows by series or metric, in order."""
        return grouped(self.rows, lambda row: str(getattr(row, self.by)))

    def describe(self) -> str:
        """Return the numbers in words: of lines over rounds the last ones."""
        title = self.title + f" ({self.y.label})" * bool(self.y.label)
        if self.mark == "heatmap":
            return f"{self.title}: {self._describe_field()}"
        lines = [f"{name} {self._points(rows)}".strip() for name, rows in self.series.items()]
        lines += [f"{name} {level:.3g}" for name, level in self.levels.items() if name]
        return f"{title}: {'; '.join(lines)}".removeprefix(": ")

    def _points(self, rows: Sequence[Row]) -> str:
        form = ".1%" if self.y.percent else ".4g"
        if self.mark == "line" and self.x.scale in ("whole", "amount"):
            rows = rows[-1:]
        elif self.x.scale == "log":
            rows = [rows[0], rows[len(rows) // 2], rows[-1]]
        others = {(row.series, row.x): row for row in self.second if row.series}
        texts = []
        for row in rows:
            # In a scatter, the text beside a point is its place.
            written = row.text.replace("\n", ", ") if self.mark == "bar" else ""
            text = written or f"{row.value:{form}}"
            place = f"{row.x:g}" if isinstance(row.x, int | float) else str(row.x)
            text += f" at {place}" * bool(place and not self.sideways)
            if math.isfinite(row.paper) and not written:
                text += f" (paper {row.paper:{form}})"
            if (other := others.get((row.series, row.x))) is not None:
                text += f" and {other.metric} {other.value:.3f}"
            texts.append(text)
        return ", ".join(texts)

    def _describe_field(self) -> str:
        if self.x.scale != "whole":
            values = [row.value for row in self.rows if math.isfinite(row.value)]
            ends = f"{min(values):.3g} to {max(values):.3g}" if values else "unknown"
            return f"{self.colours.label}, {ends}"
        by_name = grouped(self.rows, lambda row: str(row.y))
        return ", ".join(f"{rows[0].value:g} to {rows[-1].value:g}" for rows in by_name.values())


@dataclass(frozen=True)
class Chart:
    """The content of a figure.

    Attributes:
        names: All series, also those that are missing: colours do not depend on what is finished.
        columns: Columns of the CSV file.
        remarks: Lines for the note below.
        listed: The rows of the CSV file, where that is not the rows of all panels in order.
        legend: Name the series above the panels, not at the ends of lines.
        across: Panels beside each other, each ``height`` inches high.
    """

    panels: tuple[Panel, ...]
    names: tuple[str, ...]
    columns: Columns = field(default_factory=lambda: LINES)
    remarks: tuple[str, ...] = ()
    listed: tuple[Row, ...] = ()
    legend: bool = False
    across: int = 2
    height: float = 3.2

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every number that is drawn, in long form."""
        return self.listed or tuple(row for panel in self.panels for row in panel.rows)

    def describe(self) -> str:
        """Return the main numbers in words."""
        return f"{'; '.join(panel.describe() for panel in self.panels)}."

    def csv(self, profile: str) -> str:
        """Return the rows as CSV, each with the profile; an unknown number is empty."""
        lines = [[getattr(row, name) for name in self.columns.values()] for row in self.rows]
        empty = [["" if v is None or v != v else v for v in line] for line in lines]
        return csv_text([["profile", *self.columns], *([profile, *line] for line in empty)])


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Return rows by a key, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
