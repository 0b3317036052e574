"""Tables of sweeps as Markdown, LaTeX (booktabs), CSV (long form), and on the terminal."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from trishul_ray.report.table_cells import TableCell
from trishul_ray.report.tables import SweepTable, sentence
from trishul_ray.report.verdicts import RowGroup, TableRow

#: Columns of :func:`to_csv` besides the axes.
_CSV_HEAD = ("sweep", "sweep_profile", "table")
_CSV_TAIL = (
    *("metric", "value", "status", "reason", "id", "paper_percent", "part", "overrides"),
    *("ran_dataset", "ran_model"),
)

#: The head of the column of verdicts.
_VERDICT = "against the best"

_GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η",
    "theta": "θ", "lambda": "λ", "mu": "μ", "rho": "ρ", "sigma": "σ", "tau": "τ",
}  # fmt: skip
_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "≤": r"$\leq$",
    "–": "--",
    **{letter: f"$\\{name}$" for name, letter in _GREEK.items()},
}


def to_markdown(table: SweepTable) -> str:
    """Return a table as Markdown: mean ± standard deviation, and the paper's number in brackets."""
    heads = [" / ".join(filter(None, column)) for column in table.columns]
    rows = [[escape_markdown(text) for text in (table.row_axis, *heads, _VERDICT)]]
    rows.append(["---", *["---:"] * len(heads), "---"])
    for group in table.groups:
        if group.label:
            rows.append([f"*{escape_markdown(group.label)}*", *[""] * (len(heads) + 1)])
        for row in group.rows:
            verdict = escape_markdown(row.verdict.text)
            rows.append([escape_markdown(row.label), *map(_md_cell, row.cells), verdict])
    rows = rows if table.judged else [row[:-1] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _md_cell(cell: TableCell) -> str:
    text = _plain_cell(cell, lambda value: f"**{value}**", escape_markdown)
    if cell.paper is None:
        return text
    return f"{text} [paper {', '.join(_paper_parts(cell))}]"


def _paper_parts(cell: TableCell) -> list[str]:
    """Return the paper's number, the difference from it, and whether our interval contains it."""
    parts = [] if cell.paper is None else [cell.format(cell.paper)]
    if cell.difference is not None:
        parts += [cell.format_difference(cell.difference), *filter(None, [cell.within])]
    return parts


def escape_markdown(text: str) -> str:
    """Escape what Markdown, or HTML within it, would read as markup; a table row is one line."""
    return re.sub(r"([\\`*_\[\]<>&|#~])", r"\\\1", " ".join(text.split()))


def _plain_cell(
    cell: TableCell, bold: Callable[[str], str], quote: Callable[[str], str], sign: str = "±"
) -> str:
    """Return mean and spread, with how many seeds if some are missing, or why there are none."""
    if not cell.planned:
        return ""
    if cell.estimate is None:
        return quote(cell.gap)
    mean = cell.format(cell.estimate.mean)
    text = bold(mean) if cell.best else mean
    if cell.estimate.deviation is not None:
        text += f" {sign} {cell.format(cell.estimate.deviation)}"
    return text + (f" {quote(f'({cell.lacks})')}" if cell.lacks else "")


def to_latex(table: SweepTable) -> str:
    """Return a table for LaTeX, no wider than a line of text; the caption names the profile.

    The paper's numbers have rows of their own, where the two may be compared.
    """
    width = len(table.columns)
    span = 1 + width + table.judged
    lines = [
        r"% Needs \usepackage{booktabs,adjustbox}; the latter fits the table to the line.",
        r"\begin{table}",
        rf"\caption{{{_tex(caption(table))}}}",
        rf"\label{{tab:{table.slug}}}",
        r"\centering",
        r"\begin{adjustbox}{max width=\linewidth}",
        rf"\begin{{tabular}}{{l{'r' * width}{'l' * table.judged}}}",
        r"\toprule",
        *_tex_header(table),
    ]
    for group in table.groups or [RowGroup("", ())]:
        lines.append(r"\midrule")
        if group.label:
            lines.append(rf"\multicolumn{{{span}}}{{l}}{{\emph{{{_tex(group.label)}}}}} \\")
        for row in group.rows:
            lines += _tex_rows(row, with_paper=table.comparable, judged=table.judged)
    ends = [r"\bottomrule", r"\end{tabular}", r"\end{adjustbox}", r"\end{table}"]
    return "\n".join([*lines, *ends]) + "\n"


def _tex_header(table: SweepTable) -> list[str]:
    """Return the levels of the header; labels of columns span rules below them."""
    lines = []
    *above, last = table.header()
    for level in above:
        cells, rules, start = [""], [], 2
        for label, span in level:
            cells.append(_tex_span(label, span))
            rules += [rf"\cmidrule(lr){{{start}-{start + span - 1}}}"] * bool(label)
            start += span
        lines += [_tex_row(*cells, *[""] * table.judged), " ".join(rules)]
    heads = [_tex(table.row_axis), *(_tex_span(*each) for each in last)]
    return [*lines, _tex_row(*heads, *[_VERDICT] * table.judged)]


def _tex_span(label: str, span: int) -> str:
    return _tex(label) if span == 1 else rf"\multicolumn{{{span}}}{{c}}{{{_tex(label)}}}"


def _tex_row(*cells: str) -> str:
    return rf"{' & '.join(cells)} \\"


def _tex_rows(row: TableRow, *, with_paper: bool, judged: bool) -> list[str]:
    cells = [_plain_cell(c, lambda text: rf"\textbf{{{text}}}", _tex, r"$\pm$") for c in row.cells]
    verdict = ": ".join(filter(None, (row.verdict.label, row.verdict.p_value)))
    lines = [_tex_row(_tex(row.label), *cells, *[_tex(verdict)] * judged)]
    numbers = ["" if cell.paper is None else cell.format(cell.paper) for cell in row.cells]
    if with_paper and any(numbers):
        lines.append(_tex_row(r"\quad\emph{paper}", *numbers, *[""] * judged))
    return lines


def _tex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def caption(table: SweepTable) -> str:
    """Return title, unit, profile and what departs from it in one line."""
    spread = "mean ± standard deviation over seeds" if table.seeds > 1 else "one seed"
    text = f"{table.layout.title}: {table.unit}, {spread}. Profile {table.profile}."
    text += f" {table.assumed}" if table.assumed else ""
    return f"{text} {sentence(table.reservation)}" if table.departures else text


def to_csv(table: SweepTable) -> str:
    """Return all runs of a table, one a line, with their labels, value, state and id.

    Values are fractions of 1 unless losses, with all digits; the paper's numbers are percentages.
    ``part`` names the rows that were used if they are not all of the dataset, ``overrides`` the
    fields that the command line set, ``ran_dataset`` and ``ran_model`` what a finished run used,
    also where that stands in for what its labels name.
    """
    sweep, axes = table.sweep, list(table.sweep.axes)
    taken = {*_CSV_HEAD, *_CSV_TAIL}
    names = [f"axis_{axis}" if axis in taken else axis for axis in axes]
    rows: list[Sequence[object]] = [[*_CSV_HEAD, *names, *_CSV_TAIL]]
    cells = [cell for row in table.rows for cell in row.cells]
    for number, run in ((cell, run) for cell in cells for run in cell.runs):
        head = (sweep.name, table.profile, table.layout.name, *run.labels_of(axes))
        value, paper = ("" if each is None else repr(each) for each in (run.value, number.paper))
        tail = (run.status, run.reason, run.id, paper, run.part, " ".join(sweep.overrides))
        config = run.summary.config if run.summary is not None else None
        used = (config["data"]["name"], config["model"]["name"]) if config else ("", "")
        rows.append([*head, run.metric, value, *tail, *used])
    return csv_text(rows)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV.

    A text that a spreadsheet would run as a formula, because it begins with ``=``, ``+``, ``-``,
    ``@``, a tab or a carriage return and is no number, gets an apostrophe in front.
    """
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows(map(_no_formula, row) for row in rows)
    return sink.getvalue()


def _no_formula(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def to_rich(table: SweepTable, width: int) -> Group:
    """Return a table for a terminal of ``width`` letters.

    Columns that do not fit beside each other are shown below, again with the names of the rows.
    """
    heads = [Text("\n".join(filter(None, column))) for column in table.columns]
    contents = [[_rich_cell(row.cells[i]) for row in table.rows] for i in range(len(heads))]
    # Headings wrap between words; numbers do not.
    widths = [
        max(
            map(
                cell_len,
                [*head.plain.split(), *(line for c in cells for line in c.plain.split("\n"))],
            )
        )
        for head, cells in zip(heads, contents, strict=True)
    ]
    left = max(map(cell_len, (table.row_axis, *(row.label for row in table.rows))))
    parts: list[list[int]] = [[]]
    for i in range(len(heads)):
        used = left + 4 + sum(widths[k] + 3 for k in (*parts[-1], i))
        if parts[-1] and used > width:
            parts.append([])
        parts[-1].append(i)
    columns = [
        Column(head, justify="right", width=width)
        for head, width in zip(heads, widths, strict=True)
    ]
    views = [_rich_part(table, columns, part, left) for part in parts]
    if table.judged:
        views.append(_rich_verdicts(table))
    views[0].title = Text(f"{table.layout.title}: {table.unit} [{table.profile}]")
    # Not the caption of a view, which wraps it to its own width: that may be a few letters.
    return Group(*views, Text(caption(table), "italic"))


def _rich_part(
    table: SweepTable, columns: Sequence[Column], part: Sequence[int], left: int
) -> Table:
    """Return the columns ``part`` of a table; the names of its rows have ``left`` letters."""
    view = Table(Column(Text(table.row_axis), width=left), *(columns[i].copy() for i in part))
    for group in table.groups:
        if group.label:
            view.add_section()
            view.add_row(Text(group.label, "italic"))
        for row in group.rows:
            view.add_row(Text(row.label), *(_rich_cell(row.cells[i]) for i in part))
    return view


def _rich_verdicts(table: SweepTable) -> Table:
    """Return what is decided of each row."""
    view = Table.grid(padding=(0, 2))
    for group in table.groups:
        if group.label:
            view.add_row(Text(group.label, "italic"))
        for row in group.rows:
            view.add_row(Text(row.label), Text(row.verdict.text))
    return view


def _rich_cell(cell: TableCell) -> Text:
    text = Text(_plain_cell(cell, str, str))
    if cell.best and cell.estimate is not None:
        text.stylize("bold", 0, len(cell.format(cell.estimate.mean)))
    if cell.paper is not None:
        paper, *rest = _paper_parts(cell)
        text.append("\n").append(f"paper {paper}", "dim")
        text.append(
            "".join([*(f" {part}" for part in rest[:1]), *(f"\n{part}" for part in rest[1:])])
        )
    return text
