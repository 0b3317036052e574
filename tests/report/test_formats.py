"""Tables as Markdown, LaTeX, CSV and on the terminal."""

import csv
import io
import re

import pytest
from invented_outcomes import half_missing, initialization, invent_sweep, sensitivity, vision
from rich.console import Console

from trishul_ray.report.formats import csv_text, to_csv, to_latex, to_markdown, to_rich
from trishul_ray.report.tables import build_tables

HOSTILE = r"a|b & 50% of $x_1$ #{<script>alert(1)</script>} \n ~^ [red]λ±≤"


def build(sweep):
    return build_tables([sweep])[0]


def hostile():
    axes = {HOSTILE: (HOSTILE, "b"), "metric": ("x", "y"), "seed": ("0", "1", "2")}
    return invent_sweep(
        "hostile", axes, (HOSTILE,), ("metric",), title=HOSTILE, profile="custom",
        status=lambda x: ("failed", HOSTILE) if x["metric"] == "y" else ("finished", ""),
    )  # fmt: skip


def markdown_cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("sweep", [vision(), vision(status=half_missing), hostile()])
def test_markdown_has_the_same_number_of_cells_in_each_row(sweep):
    table = build(sweep)
    lines = to_markdown(table).splitlines()
    assert {len(markdown_cells(line)) for line in lines} == {len(table.columns) + 2}
    groups = sum(bool(group.label) for group in table.groups)
    assert len(lines) == 2 + groups + len(list(table.rows))


@pytest.mark.parametrize("write", [to_markdown, to_latex])
def test_a_mean_that_lacks_seeds_says_how_many_it_has(write):
    assert re.search(r"\d \([12] of 3 seeds\)", write(build(vision(status=half_missing))))


def test_markdown_shows_means_the_best_and_the_paper():
    lines = to_markdown(build(sensitivity())).splitlines()
    ours = markdown_cells(next(line for line in lines if line.startswith("| 0.01")))
    assert re.fullmatch(r"\*\*79\.\d\d\*\* ± 0\.\d\d \[paper 79.41, [+−]0\.\d\d, within\]", ours[1])
    assert ours[-1] == "best mean"
    smoke = to_markdown(build(sensitivity(profile="smoke", seeds=1)))
    # Numbers of the profile smoke say nothing about methods: none is the best.
    assert re.search(r"\| \d\d\.\d\d \[paper 79\.41\] \|", smoke)
    assert "**" not in smoke and "best" not in smoke
    assert "failed" in to_markdown(build(hostile()))
    assert "<script" not in to_markdown(build(hostile())).replace(r"\<script", "")


def test_csv_says_what_ran_for_what_its_labels_name():
    sweep = initialization(profile="smoke")
    rows = csv.DictReader(io.StringIO(to_csv(build(sweep))))
    assert {(r["dataset"], r["ran_dataset"], r["ran_model"]) for r in rows} == {
        ("20newsgroups", "digits", "google/vit-base-patch16-224-in21k")
    }


def structure(latex):
    """Check braces, environments and cells of a LaTeX table, and return its rows."""
    needs, _, bare = re.sub(r"\\[\\{}%$#&_]", "", latex).partition("\n")
    assert needs.startswith("% Needs \\usepackage{booktabs,multirow,adjustbox}")
    assert bare.count("{") == bare.count("}")
    depth = 0
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert bare.count("$") % 2 == 0
    assert not re.search(r"[%#_]", re.sub(r"\\label\{[^}]*\}", "", bare))
    for name in ("table", "adjustbox", "tabular"):
        assert latex.count(rf"\begin{{{name}}}") == latex.count(rf"\end{{{name}}}") == 1
    body = latex[latex.index(r"\toprule") : latex.index(r"\bottomrule")]
    width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", latex).group(1))
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    for row in rows:
        spans = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", row))
        assert len(re.findall(r"(?<!\\)&", row)) + 1 + spans == width, row
    return rows


@pytest.mark.parametrize("sweep", [vision(), vision(status=half_missing), sensitivity(), hostile()])
def test_latex_is_balanced_and_every_row_fills_the_table(sweep):
    structure(to_latex(build(sweep)))


def test_latex_names_the_profile_and_shows_the_papers_numbers_in_its_profile_alone():
    paper = to_latex(build(initialization()))
    assert "Profile paper." in paper
    assert "[66.92]" in paper
    smoke = to_latex(build(initialization(profile="smoke", seeds=1)))
    assert "Profile smoke; not comparable" in smoke
    assert "66.92" not in smoke
    assert all(ord(letter) < 128 for letter in to_latex(build(sensitivity())))


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


def test_csv_keeps_hostile_text_and_axes_that_are_named_like_its_columns():
    rows = list(csv.DictReader(io.StringIO(to_csv(build(hostile())))))
    assert len(rows) == 12
    assert {row["axis_metric"] for row in rows} == {"x", "y"}
    assert {row["metric"] for row in rows} == {"accuracy"}
    assert {row[HOSTILE] for row in rows} == {HOSTILE, "b"}
    assert {row["reason"] for row in rows} == {"", HOSTILE}


def test_no_text_in_a_csv_is_a_formula_and_every_number_stays_one():
    texts = ["=1+1", "+cmd", "-x", "@SUM(A1)", "\t=1"]
    row = [*texts, "a=1", "−1", "-0.5", "+1e-05", "-inf", -2.5, None]
    read = next(csv.reader(io.StringIO(csv_text([row]), newline="")))
    assert read == [*(f"'{text}" for text in texts), *row[5:10], "-2.5", ""]


NARROW = invent_sweep("seeds", {"seed": ("0", "1")}, ("seed",), (), profile="custom")


@pytest.mark.parametrize(
    "sweep", [sensitivity(), sensitivity(seeds=1, profile="smoke"), hostile(), NARROW]
)
def test_the_terminal_shows_every_row_as_it_is(sweep):
    table = build(sweep)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(to_rich(table, console.width))
    text = console.export_text()
    for row in table.rows:
        assert row.label in text
        assert row.verdict.text in text
    assert f"[{table.sweep.profile}]" in text
    assert table.caption in text
