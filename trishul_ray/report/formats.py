"""Format the numbers of tables, and write tables as CSV or to a terminal."""

import re

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from trishul_ray.report.tables import Number, Row, SweepTable

#: Header of the column of verdicts.
VERDICT = "against the best"
_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "lambda", "mu", "rho")
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "–": "--"}
    | {"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "≤": r"$\leq$"}
    | dict(zip("αβγδεηθλμρ", (f"$\\{name}$" for name in _GREEK), strict=True))
)


def number_text(number: Number | None) -> str:
    """Format the mean, deviation and missing seeds, or the reason for a missing mean."""
    if number is None:
        return ""
    if not number.count:
        return number.gap
    text = number.format(number.mean)
    text += f" ± {number.format(number.deviation)}" if number.deviation is not None else ""
    return f"{text} ({number.missing})" if number.missing else text


def paper_text(number: Number | None) -> str:
    """Format the paper's number, our difference from it, and whether our interval contains it."""
    if number is None or number.paper is None:
        return ""
    parts = [f"paper {number.format(number.paper)}"]
    if number.difference is not None:
        parts += [number.format(number.difference, "+"), number.within]
    return ", ".join(filter(None, parts))


def escape_markdown(text: str) -> str:
    """Escape Markdown and HTML markup, and join lines, because a table row is one line."""
    return re.sub(r"([\\`*_\[\]<>&|#~])", r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    """Escape LaTeX markup, and join lines."""
    return " ".join(text.split()).translate(_LATEX)


def to_csv(table: SweepTable) -> str:
    """Write the runs of a table as CSV, one line per run, with all digits.

    Values are fractions, except losses and costs; the paper's numbers are percentages. ``part``
    describes the rows used if a run did not use the complete dataset. ``overrides`` lists the
    fields set on the command line. ``ran_dataset`` and ``ran_model`` name the dataset and model of
    finished runs.
    """
    runs, sweep = table.runs, table.sweep
    found = runs[["metric", "value", "status", "reason", "id", "paper_percent"]].copy()
    found["part"] = [cell.part for cell in table.cells]
    found["overrides"] = " ".join(sweep.overrides)
    ran = [cell.summary.config if cell.summary else {} for cell in table.cells]
    for name, section in (("ran_dataset", "data"), ("ran_model", "model")):
        found[name] = [config.get(section, {}).get("name", "") for config in ran]
    found.insert(0, "table", table.layout.name)
    found.insert(0, "sweep_profile", sweep.profile)
    found.insert(0, "sweep", sweep.name)
    names = [f"axis_{name}" if name in found.columns else name for name in runs.index.names]
    found.index = found.index.set_names(names)
    return str(found.reset_index().map(without_formula).to_csv(index=False))


def without_formula(value: object) -> object:
    """Prefix text with an apostrophe if a spreadsheet would evaluate it as a formula."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def to_rich(table: SweepTable, width: int) -> Group:
    """Render a table for a terminal of ``width`` characters, splitting wider tables into parts."""
    heads = ["\n".join(filter(None, column)) for column in table.columns]
    numbers = [[_rich_number(row, c) for c in range(len(heads))] for row in table.rows]
    texts = [*heads, *(number.plain for row in numbers for number in row)]
    widest = max((len(line) for text in texts for line in text.split("\n")), default=0)
    left = max(map(len, [table.row_axis, *(row.label for row in table.rows)]))
    fits = max(1, (width - left - 4) // (widest + 3))
    views = []
    for start in range(0, len(heads), fits):
        columns = (Column(Text(head), justify="right") for head in heads[start : start + fits])
        view = Table(Column(Text(table.row_axis), min_width=left), *columns)
        rows = iter(numbers)
        for group in table.groups:
            if group.label:
                view.add_section()
                view.add_row(Text(group.label, "italic"))
            for row in group.rows:
                view.add_row(Text(row.label), *next(rows)[start : start + fits])
        views.append(view)
    if table.judged:
        verdicts = Table.grid(padding=(0, 2))
        for group in table.groups:
            for row in group.rows:
                label = Text(group.label, "italic")
                verdicts.add_row(label, Text(row.label), Text(row.verdict.text))
        views.append(verdicts)
    title = Text(f"{table.layout.title}: {table.unit} [{table.sweep.profile}]", "bold")
    draws = [Text(" ".join(table.draws))] if table.draws else []
    return Group(title, *views, *draws, Text(table.caption, "italic"))


def _rich_number(row: Row, column: int) -> Text:
    number = row.numbers[column]
    text = Text(number_text(number))
    if column in row.best and number is not None:
        text.stylize("bold", 0, len(number.format(number.mean)))
    if paper := paper_text(number):
        text.append("\n").append(paper.replace(", ", "\n", 1), "dim")
    return text
