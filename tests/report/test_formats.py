"""Tables as Markdown, LaTeX, CSV and on the terminal."""

import csv
import io
import itertools
import re

import pytest
from invented_outcomes import half_missing, initialization, invent_sweep, sensitivity, vision
from rich.console import Console

from trishul_ray.report.formats import to_csv, to_rich, without_formula
from trishul_ray.report.tables import build_tables

HOSTILE = r"a|b & 50% of $x_1$ #{<script>alert(1)</script>} \n ~^ [red]λ±≤"


def build(sweep):
    return build_tables([sweep])[0]


@pytest.fixture
def latex(written):
    """``latex(sweep)`` returns the LaTeX of the only table of a sweep."""

    def read(sweep):
        (file,) = (written(sweep) / "tables").glob("*.tex")
        return file.read_text(encoding="utf-8")

    return read


@pytest.fixture
def markdown(written):
    """``markdown(sweep)`` returns the lines of the table of a sweep in report.md."""

    def read(sweep):
        text = (written(sweep) / "report.md").read_text(encoding="utf-8")
        lines = itertools.takewhile(str.strip, text[text.index("\n| ") + 1 :].splitlines())
        return "".join(f"{line}\n" for line in lines)

    return read


def hostile():
    axes = {HOSTILE: (HOSTILE, "b"), "metric": ("x", "y"), "seed": ("0", "1", "2")}
    return invent_sweep(
        "hostile", axes, (HOSTILE,), ("metric",), title=HOSTILE, profile="custom",
        status=lambda x: ("failed", HOSTILE) if x["metric"] == "y" else ("finished", ""),
    )  # fmt: skip


def markdown_cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("sweep", [vision(), vision(status=half_missing), hostile()])
def test_markdown_rows_have_equal_numbers_of_cells(sweep, markdown):
    table = build(sweep)
    lines = markdown(sweep).splitlines()
    assert {len(markdown_cells(line)) for line in lines} == {len(table.columns) + 2}
    groups = sum(bool(group.label) for group in table.groups)
    assert len(lines) == 2 + groups + len(list(table.rows))


def test_a_mean_that_lacks_seeds_has_their_number(markdown, latex):
    for text in (markdown(vision(status=half_missing)), latex(vision(status=half_missing))):
        assert re.search(r"\d \([12] of 3 seeds\)", text)


def test_markdown_shows_means_the_best_and_the_paper(markdown):
    lines = markdown(sensitivity()).splitlines()
    ours = markdown_cells(next(line for line in lines if line.startswith("| 0.01")))
    assert re.fullmatch(r"\*\*79\.\d\d ± 0\.\d\d\*\* \[paper 79.41, [+−]0\.\d\d, within\]", ours[1])
    assert ours[-1] == "best mean"
    smoke = markdown(sensitivity(profile="smoke", seeds=1))
    # Numbers of the profile smoke do not compare methods: none is the best.
    assert re.search(r"\| \d\d\.\d\d \[paper 79\.41\] \|", smoke)
    assert "**" not in smoke and "best" not in smoke
    assert "failed" in markdown(hostile())
    assert "<script" not in markdown(hostile()).replace(r"\<script", "")


def test_csv_names_configuration_and_labels():
    sweep = initialization(profile="smoke")
    rows = csv.DictReader(io.StringIO(to_csv(build(sweep))))
    assert {(r["dataset"], r["ran_dataset"], r["ran_model"]) for r in rows} == {
        ("20newsgroups", "digits", "google/vit-base-patch16-224-in21k")
    }


def structure(text):
    """Check braces, environments and cells of a LaTeX table, and return its rows."""
    needs, _, bare = re.sub(r"\\[\\{}%$#&_]", "", text).partition("\n")
    assert needs.startswith("% Needs \\usepackage{booktabs,adjustbox}")
    assert bare.count("{") == bare.count("}")
    depth = 0
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert bare.count("$") % 2 == 0
    assert not re.search(r"[%#_]", re.sub(r"\\label\{[^}]*\}", "", bare))
    for name in ("table", "adjustbox", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 1
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text).group(1))
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    for row in rows:
        spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row))
        assert len(re.findall(r"(?<!\\)&", row)) + 1 + spans == width, row
    return rows


@pytest.mark.parametrize("sweep", [vision(), vision(status=half_missing), sensitivity(), hostile()])
def test_latex_is_balanced_with_complete_rows(sweep, latex):
    structure(latex(sweep))


def test_only_comparable_latex_has_numbers_of_the_paper(latex):
    paper = latex(initialization())
    assert "Profile paper." in paper
    assert "[66.92]" in paper
    smoke = latex(initialization(profile="smoke", seeds=1))
    assert "Profile smoke; not comparable" in smoke
    assert "66.92" not in smoke
    assert all(ord(letter) < 128 for letter in latex(sensitivity()))


def test_csv_has_every_run():
    table = build(vision(status=half_missing))
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert len(rows) == 360
    assert len({row["id"] for row in rows}) == 360
    by_id = {run.id: run for run in table.cells}
    for row in rows:
        run = by_id[row["id"]]
        assert {axis: row[axis] for axis in run.labels} == run.labels
        assert (row["status"], row["reason"]) == (run.status, run.reason)
        assert (float(row["value"]) if row["value"] else None) == run.value
        assert row["sweep_profile"] == "paper"
        assert row["paper_percent"]


def test_csv_keeps_hostile_text_and_renames_axes():
    rows = list(csv.DictReader(io.StringIO(to_csv(build(hostile())))))
    assert len(rows) == 12
    assert {row["axis_metric"] for row in rows} == {"x", "y"}
    assert {row["metric"] for row in rows} == {"accuracy"}
    assert {row[HOSTILE] for row in rows} == {HOSTILE, "b"}
    assert {row["reason"] for row in rows} == {"", HOSTILE}


def test_csv_has_no_formulas():
    texts = ["=1+1", "+cmd", "-x", "-2+3+cmd|' /C calc'!A0", "+1-A1", "@SUM(A1)", "\t=1"]
    assert [without_formula(text) for text in texts] == [f"'{text}" for text in texts]
    for value in ("a=1", "−1", "-0.5", "+1e-05", "-inf", -2.5, None):
        assert without_formula(value) == value


NARROW = invent_sweep("seeds", {"seed": ("0", "1")}, ("seed",), (), profile="custom")


@pytest.mark.parametrize(
    "sweep", [sensitivity(), sensitivity(seeds=1, profile="smoke"), hostile(), NARROW]
)
def test_the_terminal_shows_every_row_completely(sweep):
    table = build(sweep)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(to_rich(table, console.width))
    text = console.export_text()
    for row in table.rows:
        assert row.label in text
        assert row.verdict.text in text
    assert f"[{table.sweep.profile}]" in text
    assert table.caption in text
