"""Tables of sweeps as Markdown, LaTeX (booktabs), CSV (long form), and on the terminal."""

import csv
import io
import re
from collections.abc import Iterable

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from trishul_ray.report.tables import Number, SweepTable
from trishul_ray.runtime.lazy import pd

#: The head of the column of verdicts.
_VERDICT = "against the best"
_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "lambda", "mu", "rho")
_LATEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "–": "--"},
    **{"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "≤": r"$\leq$"},
    **dict(zip("αβγδεηθλμρ", (f"$\\{name}$" for name in _GREEK), strict=True)),
}


def number_text(number: Number | None) -> str:
    """Return mean and spread, with what the mean lacks, or why there is none."""
    if number is None:
        return ""
    if not number.count:
        return number.gap
    text = number.format(number.mean)
    text += f" ± {number.format(number.deviation)}" if number.deviation is not None else ""
    return f"{text} ({number.lacks})" if number.lacks else text


def paper_text(number: Number | None) -> str:
    """Return the paper's number, the difference from it, and whether our interval contains it."""
    if number is None or number.paper is None:
        return ""
    parts = [f"paper {number.format(number.paper)}"]
    if number.difference is not None:
        parts += [number.format_difference(number.difference), number.within]
    return ", ".join(filter(None, parts))


def escape_markdown(text: str) -> str:
    """Escape what Markdown, or HTML within it, would read as markup; a table row is one line."""
    return re.sub(r"([\\`*_\[\]<>&|#~])", r"\\\1", " ".join(text.split()))


def to_markdown(table: SweepTable) -> str:
    """Return a table as Markdown: mean ± standard deviation, and the paper's number in brackets."""
    heads = [" / ".join(filter(None, column)) for column in table.columns]
    lines = [[table.row_axis, *heads, *[_VERDICT] * table.judged]]
    lines = [[escape_markdown(text) for text in line] for line in lines]
    lines.append(["---", *["---:"] * len(heads), *["---"] * table.judged])
    for group in table.groups:
        if group.label:
            empty = [""] * (len(heads) + table.judged)
            lines.append([f"*{escape_markdown(group.label)}*", *empty])
        for row in group.rows:
            verdict = [escape_markdown(row.verdict.text)] * table.judged
            numbers = map(_markdown_number, row.numbers)
            lines.append([escape_markdown(row.label), *numbers, *verdict])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown_number(number: Number | None) -> str:
    text = escape_markdown(number_text(number))
    if number is not None and number.best:
        mean, _, rest = text.partition(" ")
        text = f"**{mean}** {rest}".rstrip()
    paper = paper_text(number)
    return f"{text} [{paper}]" if paper else text


def to_latex(table: SweepTable) -> str:
    """Return a table for LaTeX, no wider than a line of text; the caption names the profile.

    The paper's numbers are in brackets if the two may be compared.
    """

    def text(number: Number | None) -> str:
        if number is None or number.paper is None or not number.compared:
            return number_text(number)
        return f"{number_text(number)} [{number.format(number.paper)}]"

    levels = len(table.columns[0]) if table.columns else 1
    verdict = (_VERDICT, *[""] * (levels - 1))
    heads = [*table.columns, *[verdict] * table.judged]
    rows = [(group.label, row.label) for group in table.groups for row in group.rows]
    index = pd.MultiIndex.from_tuples(rows or [("", "")], names=["", table.row_axis])
    content = [[*map(text, r.numbers), *[r.verdict.text] * table.judged] for r in table.rows]
    made = pd.DataFrame(content or None, index, pd.MultiIndex.from_tuples(heads or [("",)]))
    if not any(group.label for group in table.groups):
        made = made.droplevel(0)
    bold = [[_is_bold(n) for n in row.numbers] + [""] * table.judged for row in table.rows]
    style = made.style.format(_latex).format_index(_latex).format_index(_latex, axis=1)
    style = style.format_index_names(_latex)
    style = style.apply(lambda _: pd.DataFrame(bold, made.index, made.columns), axis=None)
    tex = style.to_latex(
        hrules=True,
        position_float="centering",
        caption=_latex(table.caption),
        label=f"tab:{table.slug}",
        column_format=f"{'l' * made.index.nlevels}{'r' * len(table.columns)}{'l' * table.judged}",
        multicol_align="c",
        multirow_align="t",
    )
    tex = tex.replace(
        r"\begin{tabular}", "\\begin{adjustbox}{max width=\\linewidth}\n\\begin{tabular}"
    )
    tex = tex.replace(r"\end{tabular}", "\\end{tabular}\n\\end{adjustbox}")
    needs = r"% Needs \usepackage{booktabs,multirow,adjustbox}; the last fits it to the line."
    return f"{needs}\n{tex}"


def _is_bold(number: Number | None) -> str:
    return "textbf:--rwrap" if number is not None and number.best else ""


def _latex(text: object) -> str:
    return "".join(_LATEX.get(mark, mark) for mark in " ".join(str(text).split()))


def to_csv(table: SweepTable) -> str:
    """Return all runs of a table, one a line, with their labels, value, state and id.

    Values are fractions of 1 unless amounts, with all digits; the paper's numbers are percentages.
    ``part`` names the rows that were used if they are not all of the dataset, ``overrides`` the
    fields that the command line set, ``ran_dataset`` and ``ran_model`` what a finished run used.
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
    taken = {name: f"axis_{name}" for name in runs.index.names if name in found.columns}
    found.index = found.index.set_names([taken.get(name, name) for name in runs.index.names])
    found = found.reset_index().astype(object)
    return csv_text([found.columns, *found.where(found.notna(), "").itertuples(index=False)])


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV.

    A text that a spreadsheet would run as a formula, because it begins with ``=``, ``+``, ``-``,
    ``@``, a tab or a carriage return and does not parse as a number, gets an apostrophe in front.
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
    """Return a table for a terminal of ``width`` letters; columns that do not fit stand below."""
    heads = ["\n".join(filter(None, column)) for column in table.columns]
    numbers = [[_rich_number(number) for number in row.numbers] for row in table.rows]
    lines = [line for text in heads for line in text.split("\n")]
    lines += [line for row in numbers for text in row for line in text.plain.split("\n")]
    left = max(map(len, [table.row_axis, *(row.label for row in table.rows)]))
    fits = max(1, (width - left - 4) // (max(map(len, lines), default=0) + 3))
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
                texts = Text(group.label, "italic"), Text(row.label), Text(row.verdict.text)
                verdicts.add_row(*texts)
        views.append(verdicts)
    title = Text(f"{table.layout.title}: {table.unit} [{table.sweep.profile}]", "bold")
    return Group(title, *views, Text(table.caption, "italic"))


def _rich_number(number: Number | None) -> Text:
    text = Text(number_text(number))
    if number is not None and number.best:
        text.stylize("bold", 0, len(number.format(number.mean)))
    if paper := paper_text(number):
        text.append("\n").append(paper.replace(", ", "\n", 1), "dim")
    return text
