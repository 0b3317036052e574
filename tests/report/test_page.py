"""The report: what is on the page, that it is valid, and that it is reproducible."""

import csv
import dataclasses
import re
from xml.etree import ElementTree

import pytest
from invented_outcomes import (
    FIGURE,
    half_missing,
    initialization,
    invent_run,
    invent_sweep,
    sensitivity,
    square,
    vision,
)

from trishul_ray.data.prepare import Coverage, RowCounts
from trishul_ray.errors import InputError
from trishul_ray.federation.records import RoundRecord
from trishul_ray.report.outcomes import (
    EVALUATION,
    DrawnFigure,
    Evaluated,
    FigureLayout,
    TableLayout,
)
from trishul_ray.report.page import write_report
from trishul_ray.runs.results import metrics_parquet
from trishul_ray.storage.integrity import to_checked_json
from trishul_ray.storage.store import Store


class Element(ElementTree.Element):
    """An element of a page."""

    def find(self, tag, **attributes):
        """Elements inside with this tag and these attributes, in order."""
        fit = (e for e in self.iter(tag) if attributes.items() <= e.attrib.items())
        return [element for element in fit if element is not self]

    @property
    def words(self):
        return " ".join(" ".join(self.itertext()).split())

    @property
    def classes(self):
        return self.attrib.get("class", "").split()


def parse(path):
    """The page as a tree; an element that is not closed where it should be is an error."""
    text = path.read_text(encoding="utf-8").replace(" data-time>", ' data-time="">')
    text = re.sub(r"(<meta[^>]*)>", r"\1/>", text).replace(
        ' xmlns="http://www.w3.org/2000/svg"', ""
    )
    tree = ElementTree.TreeBuilder(Element)
    return ElementTree.fromstring(text, ElementTree.XMLParser(target=tree))


@pytest.fixture
def report(tmp_path):
    """``report(sweep, ...)`` writes a report and returns the parsed page."""

    def write(*sweeps, figures=square):
        return parse(write_report(sweeps, tmp_path / "out", figures=figures))

    return write


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    other = FIGURE.model_copy(update={"name": "other", "paper": "fig:lambda"})
    sweeps = [vision(figures=[FIGURE, other]), sensitivity(), initialization()]
    return parse(write_report(sweeps, folder, figures=square)), folder


def test_the_page_is_self_contained_and_valid(full):
    page, _ = full
    ids = [e.attrib["id"] for e in page.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))
    assert not page.find("script")
    assert not page.find("link")
    for element in page.iter():
        source = element.attrib.get("src", "")
        assert not source or source.startswith("data:")
        target = element.attrib.get("href", "")
        if target.startswith("#"):
            assert target[1:] in ids
        elif target:
            assert re.fullmatch(r"(tables|figures)/[a-z0-9-]+\.(csv|tex|svg|pdf)", target)
    styles = page.find("style")[0].words
    assert "url(" not in styles
    assert "@import" not in styles
    for marker in ("prefers-color-scheme: dark", "@media print", "position: sticky"):
        assert marker in styles


def test_tables_are_accessible(full):
    page, _ = full
    tables = page.find("table")
    assert len(tables) == 3 * 2 + 2
    for table in tables:
        assert len(table.find("caption")) == 1
        assert all(
            th.attrib["scope"] in ("col", "row", "colgroup", "rowgroup") for th in table.find("th")
        )
        (box,) = (e for e in page.iter("div") if table in e)
        assert box.attrib["role"] == "region"
        assert box.attrib["tabindex"] == "0"
        width = max(_width(row) for row in table.find("tr"))
        assert all(_width(row) == width for row in table.find("tbody")[0].find("tr"))
    order = [e.attrib["id"] for e in page.iter() if e.attrib.get("id")]
    assert order.index("paper-vision") < order.index("reading") < order.index("switches")
    levels = [e.tag for e in page.iter() if re.fullmatch(r"h\d", e.tag)]
    assert levels[:2] == ["h1", "h2"]
    assert levels.count("h1") == 1


def _width(row):
    return sum(int(cell.attrib.get("colspan", 1)) for cell in row)


def test_the_table_shows_what_the_paper_prints(full):
    page, _ = full
    (block,) = page.find("figure", id="paper-vision")
    table = block.find("table")[0]
    groups = [e.words for e in table.find("th", scope="rowgroup")]
    assert groups == ["budget: lower", "budget: higher"]
    body = [row for row in table.find("tr") if row.find("th", scope="row")]
    assert len(body) == 15
    ours = next(row for row in body if row.find("th", scope="row")[0].text == "TRISHUL")
    first = ours.find("td")[0]
    number = r"\d\d\.\d\d ± \d\.\d\d paper 85\.13 [+−]\d+\.\d\d (within|outside)"
    assert re.fullmatch(number, first.words)
    assert sum(bool(cell.find("strong")) for cell in ours.find("td")) >= 4
    assert ours.find("td")[-1].words == "★ best mean"
    verdicts = " ".join(row.find("td")[-1].words for row in body)
    said = ["○ reference", "seeds needed", "▼ worse, decided p = 0.0", "? undecided p = 0."]
    assert all(text in verdicts for text in [*said, "against TRISHUL"]), verdicts


def test_a_verdict_stands_under_the_name_where_there_is_no_room_beside_it(full):
    page, _ = full
    for row in page.find("figure", id="paper-vision")[0].find("table")[0].find("tr"):
        for name in row.find("th", scope="row"):
            verdict = row.find("td")[-1]
            (under,) = (e for e in name.iter() if "under" in e.classes)
            assert under.words.split(", p")[0] in verdict.words and under.words[:1] in "★=▼?○"
    styles = page.find("style")[0].words
    narrow = styles[styles.index("@media (max-width: 40rem)") :]
    assert (
        ".results .verdict { display: none; }" in narrow and ".under { display: block; }" in narrow
    )


def test_what_says_nothing_about_methods_is_not_judged(report, tmp_path):
    """No verdict, no best number and no tick; departures once for a sweep."""
    sweep = part_of(sensitivity(seeds=3, profile="smoke"), "cifar100")
    page = report(sweep)
    texts = [page.find("main")[0].words]
    texts.append((tmp_path / "out" / "report.md").read_text())
    for text in texts:
        for word in ("decided", "best mean", "★", "✓", "reversed,", " seen,"):
            assert word not in text
    found = page.find("section")
    (section,) = (s for s in found if s.attrib["aria-labelledby"].startswith("sweep"))
    assert section.words.count("500 of 10,000 test rows scored") == 1
    assert not section.find("strong") and not section.find("figcaption")[0].find("b")


def test_figures_have_the_colours_of_the_page(report):
    svg = '<svg id="x"><path style="fill: #ffffff; stroke: #222222"></path>'
    svg += '<path style="fill: #d55e00"></path></svg>'
    page = report(sensitivity(figures=[FIGURE]), figures=lambda *_: DrawnFigure(svg, b"", ""))
    styles = [path.attrib["style"] for path in page.find("path")]
    assert styles == ["fill: var(--page, #ffffff); stroke: var(--ink, #222222)", "fill: #d55e00"]


def test_a_table_names_that_of_the_paper_and_its_slips(full):
    page, folder = full
    (block,) = page.find("figure", id="paper-vision")
    caption = block.find("figcaption")[0].words
    assert "Table 2 of the paper (tab:vision)" in caption
    assert "Accuracy on CIFAR-100 and SVHN" not in caption  # the section's title says it
    assert "SCAFFOLD+LoRA's 87.23 is higher" in block.words
    assert "The level of 5 % is for the 42 pairs of rows of this table together" in block.words
    assert "Slips" not in page.find("figure", id="paper-lambda")[0].words
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "Slips of the paper in this table:\n\n- SVHN, 50 clients" in text
    assert "Table 10 of the paper (tab:ablation\\_init)" in text


def test_a_page_of_ones_own_sweep_reproduces_nothing(report, tmp_path):
    page = report(vision(seeds=1, profile="custom", paper=None))
    assert not page.find("h2", id="switches")
    assert "About this sweep" in page.words
    for text in (page.words, (tmp_path / "out" / "report.md").read_text(encoding="utf-8")):
        assert "What it reproduces" not in text
        assert "Choices that the paper leaves open" not in text


def test_a_table_says_what_its_intervals_leave_out(report):
    sweep = initialization()
    losses = [dataclasses.replace(cell, metric="loss") for cell in sweep.cells]
    block = report(dataclasses.replace(sweep, cells=tuple(losses))).find("figure")[0].words
    assert "which all score the same test rows: the error of these is not in them." in block
    # 500 rows, of which between 57 and 79 % are right: at most 1.96 sqrt(0.25 / 500).
    block = report(sweep).find("figure")[0].words
    assert "with other rows, a mean could differ by up to 4.3 points more (95 %)." in block


@pytest.mark.parametrize("profile", ["small", "smoke", "custom", "mine"])
def test_the_profile_is_on_every_table_and_figure(report, profile):
    page = report(
        vision(seeds=1, profile=profile, figures=[FIGURE]), sensitivity(seeds=1, profile=profile)
    )
    blocks = page.find("figure")
    assert len(blocks) == 3
    for block in blocks:
        assert block.attrib["data-profile"] == profile
        caption = block.find("figcaption")[0].words
        assert caption.startswith(profile)
        assert "not comparable with the paper's" in caption
        for hidden in block.find("caption"):
            assert f"Profile {profile}." in hidden.words
    for heading in page.find("h2"):
        if heading.attrib["id"].startswith("sweep-"):
            assert heading.words.endswith(profile)
    assert f"Profile {profile}." in page.find("header")[0].words
    assert profile in page.find("title")[0].words
    printed = [e for e in page.iter() if "printed" in e.classes]
    assert len(printed) > 100
    assert not any(element.find("b") for element in printed)


def part_of(sweep, dataset):
    """The sweep as if its runs on a dataset had scored 500 of 10,000 rows."""

    def partial(cell):
        train, test = RowCounts(50_000, 50_000, 50_000), RowCounts(500, 500, 10_000)
        data = Coverage(dataset, f"mirror:{dataset}", None, train, test)
        chosen = cell.labels["dataset"] == dataset
        summary = dataclasses.replace(cell.summary, data=data)
        return dataclasses.replace(cell, summary=summary) if chosen else cell

    return dataclasses.replace(sweep, cells=tuple(map(partial, sweep.cells)))


@pytest.mark.parametrize("why", ["federation.rounds=2", "500 of 10,000 test rows scored"])
def test_what_departs_from_the_paper_is_never_compared_with_it(report, tmp_path, why):
    """Not by the page, a table in any format, or a difference from the paper's number."""
    whole, departed = (make(seeds=2, figures=[FIGURE]) for make in (sensitivity, vision))
    if why.startswith("500"):
        departed = part_of(departed, "cifar100")
    else:
        departed = dataclasses.replace(departed, overrides=(why,))
    page = report(departed, whole)
    notice = page.find("header")[0].words
    assert "but not all of it" in notice and why in notice
    for block, said in zip(page.find("figure"), [True, True, False, False], strict=True):
        assert ("not comparable with the paper's" in block.find("figcaption")[0].words) == said
        differences = [p.find("b") for p in block.iter() if "printed" in p.classes]
        assert any(differences) == (not said and bool(block.find("table")))
    assert why in page.find("figure")[0].find("figcaption")[0].words
    tables = tmp_path / "out" / "tables"
    tex = (tables / "paper-vision.tex").read_text().replace("\\_", "_")
    assert why in tex and "Not comparable with" in tex and r"\emph{paper}" not in tex
    text = (tmp_path / "out" / "report.md").read_text().partition("## Sensitivity")[0]
    assert text.count("not comparable with the paper's numbers") == 1 and why in text
    rows = list(csv.DictReader((tables / "paper-vision.csv").open()))
    named = {row["dataset"] for row in rows if why in row["part"] or why in row["overrides"]}
    assert named == ({"cifar100"} if why.startswith("500") else {"cifar100", "svhn"})
    assert r"\emph{paper}" in (tables / "paper-lambda.tex").read_text()
    rows = csv.DictReader((tables / "paper-lambda.csv").open())
    assert {(row["part"], row["overrides"]) for row in rows} == {("", "")}


def test_gaps_are_visible_with_their_reason(report):
    page = report(vision(status=half_missing))
    cells = [e for e in page.find("td") if "gap" in e.classes]
    assert {e.find("span")[0].words for e in cells} == {"missing", "failed", "stale", "corrupt"}
    failed = [e for e in cells if "failed" in e.classes]
    assert all("out of memory" in e.attrib["title"] for e in failed)
    (problems,) = [e for e in page.find("div") if "problems" in e.classes]
    assert "failed 24 runs: out of memory on round 12" in problems.words
    assert "the content of the training data has changed" in problems.words
    assert len(problems.find("code")) == 24 + 14 + 12
    assert "164 of 360 runs finished, 146 missing, 24 failed, 14 stale, 12 corrupt" in page.words
    assert any("of 3 seeds" in e.words for e in page.find("span"))


def test_nothing_is_finished(report):
    nothing = vision(status=lambda labels: ("missing", ""), figures=[FIGURE])
    page = report(nothing, sensitivity())
    assert "0 of 360 runs finished, 360 missing" in page.words
    page = report(nothing, figures=lambda *_: None)
    assert "No finished run has what it shows." in page.words
    assert page.words.count("No run has finished.") == 2


HOSTILE = "</td><script>alert('1')</script>\"' & {{ 7 * 7 }} {% raw %} ]]> <!--"


def test_hostile_texts_are_shown_as_they_are(report, tmp_path):
    axes = {"row": (HOSTILE, "b"), "column": (HOSTILE,), "seed": ("0", "1")}
    sweep = invent_sweep(
        HOSTILE, axes, ("row",), ("column",), title=HOSTILE, profile=HOSTILE,
        figures=[FigureLayout.model_construct(name=HOSTILE, title=HOSTILE, kind="convergence")],
        status=lambda x: ("failed", HOSTILE) if x["row"] == "b" else ("finished", ""),
    )  # fmt: skip
    sweep = dataclasses.replace(sweep, description=HOSTILE)
    page = report(sweep, figures=lambda *_: DrawnFigure("<svg></svg>", b"", ""))
    assert not page.find("script")
    shown = " ".join(HOSTILE.split())
    assert page.words.count(shown) >= 8
    assert page.find("td", title=f"failed: {HOSTILE}; failed: {HOSTILE}")
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert all(re.fullmatch(r"out/[a-z0-9/.-]+", name) for name in files), files
    assert "<script" not in (tmp_path / "out/report.md").read_text().replace(r"\<script", "")


def test_the_same_outcomes_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        sweeps = [vision(figures=[FIGURE], status=half_missing), initialization()]
        write_report(sweeps, tmp_path / name, figures=square)
    first, second = (
        {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*.*")}
        for home in (tmp_path / "a", tmp_path / "b")
    )
    assert first == second
    tables = ["paper-vision.csv", "paper-vision.tex", "paper-initialization.csv"]
    tables += ["paper-initialization.tex"]
    figures = [f"figure-paper-vision-curve.{suffix}" for suffix in ("csv", "pdf", "svg")]
    written = [f"tables/{name}" for name in tables] + [f"figures/{name}" for name in figures]
    assert set(first) == {"report.html", "report.md", *written}


def without_time(element):
    if "data-time" in element.attrib:
        return None
    inside = [without_time(child) for child in element]
    inside = [child for child in inside if child is not None]
    return element.tag, sorted(element.attrib.items()), element.text, inside, element.tail


def test_what_depends_on_the_clock_is_marked(tmp_path):
    def sweep(seconds):
        slow = [
            invent_run(cell.labels, 100 * cell.value, seconds=seconds)
            for cell in initialization().cells
        ]
        return dataclasses.replace(initialization(figures=[FIGURE]), cells=tuple(slow))

    def timed(figure, outcome):
        seconds = outcome.cells[0].summary.round_seconds[0]
        return DrawnFigure(f"<svg><text>{seconds} s</text></svg>", b"", "", timed=True)

    pages = [
        write_report([sweep(seconds)], tmp_path / str(seconds), figures=timed)
        for seconds in (1.5, 70.25)
    ]
    first, second = (parse(page) for page in pages)
    assert first.words != second.words
    assert without_time(first) == without_time(second)
    for name in ("report.md", "tables/paper-initialization.csv", "tables/paper-initialization.tex"):
        assert len({(page.parent / name).read_bytes() for page in pages}) == 1


def test_figures_are_inline_and_beside_the_page(full):
    page, folder = full
    blocks = [e for e in page.find("figure") if e.find("svg")]
    names = ["figure-paper-vision-curve", "figure-paper-vision-other"]
    assert [e.attrib["id"] for e in blocks] == names
    file = folder / "figures" / "figure-paper-vision-curve.svg"
    assert file.read_text().startswith("<svg")
    assert "an invented curve" in blocks[0].words
    caption = blocks[1].find("figcaption")[0].words
    assert "Figure 10 of the paper (fig:lambda)" in caption
    assert file.with_suffix(".csv").read_text() == "x,value\n1,2\n"
    assert file.with_suffix(".pdf").read_bytes() == b"%PDF-"
    links = {e.attrib["href"] for e in blocks[0].find("a")}
    assert {f"figures/{file.stem}{suffix}" for suffix in (".csv", ".svg", ".pdf")} <= links


def test_a_figure_that_cannot_be_drawn_costs_no_page(report):
    def broken(figure, sweep):
        raise InputError("metrics.parquet of run 123 is unreadable")

    page = report(sensitivity(figures=[FIGURE]), figures=broken)
    assert "could not be drawn: metrics.parquet of run 123 is unreadable" in page.words


def test_switches_machines_and_runs(full):
    page, _ = full
    text = page.words
    assert "method.allocation waterfill" in text
    assert "16 CPUs (AVX512), 125.9 GiB, 1 x NVIDIA H100 80GB HBM3: 417 runs" in text
    assert "torch 2.13.0" in text
    section = page.find("section", **{"aria-labelledby": "runs"})[0]
    assert len(section.find("tbody")[0].find("tr")) == 360 + 45 + 12
    seconds = page.find("dl")[-1].words
    assert f"{417 * 5 * 18} s" in seconds


def test_runs_that_sweeps_share_are_counted_once(report):
    page = report(initialization(), initialization())
    assert "12 of 12 runs finished" in page.find("ul")[0].words
    names = [e.attrib["id"] for e in page.find("figure")]
    assert names == ["paper-initialization", "paper-initialization-2"]


def test_a_sweep_may_have_no_table_and_a_table_no_column(report):
    sweep = initialization()
    page = report(dataclasses.replace(sweep, tables=()))
    assert "12 of 12" in page.words
    bare = TableLayout(name="bare", title="Bare")
    page = report(dataclasses.replace(sweep, tables=(bare,)))
    (row,) = page.find("table")[0].find("tbody")[0].find("tr")
    assert row.find("th")[0].words == "Bare"
    heads = [head.words for head in page.find("table")[0].find("thead")[0].find("th")]
    assert heads == ["", "accuracy, %", "against the best"]


def test_markdown_has_every_table(full):
    _, folder = full
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.count("\n| ---") == 3 + 1
    assert "**Profile paper.**" in text
    assert "](figures/figure-paper-vision-curve.svg)" in text
    assert "| optimizer" not in text
    assert "`method.lam` | 0.01 (" in text
    blocks = re.split(r"\n\n+", text)
    assert all("|" not in block or block.count("\n| ---") <= 1 for block in blocks)


def test_files_are_replaced_and_others_kept(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "paper-initialization.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    path = write_report([initialization()], tmp_path, figures=square)
    assert path == tmp_path / "report.html"
    with (tmp_path / "tables" / "paper-initialization.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 13
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not [p for p in tmp_path.rglob("*.tmp")]


def test_a_figure_whose_files_are_back_is_drawn_by_the_next_call(tmp_path):
    def with_files(cell):
        home = Store.open(str(tmp_path)).child(cell.id)
        home.write("metrics.parquet", b"half of it")
        return dataclasses.replace(cell, home=home)

    figure = FigureLayout(name="curve", title="A curve", kind="convergence")
    invented = sensitivity(figures=[figure])
    sweep = dataclasses.replace(invented, cells=tuple(map(with_files, invented.cells)))
    page = write_report([sweep], tmp_path / "out")
    assert "could not be drawn" in parse(page).words
    for cell in sweep.cells:
        rows = [RoundRecord(number, scores={"accuracy": 0.1 * number}) for number in range(3)]
        cell.home.write("metrics.parquet", metrics_parquet(rows))
    write_report([sweep], tmp_path / "out")
    assert "could not be drawn" not in parse(page).words
    drawn = page.stat().st_mtime_ns
    write_report([sweep], tmp_path / "out")
    assert page.stat().st_mtime_ns == drawn


def test_a_page_is_written_again_when_its_runs_have_been_evaluated(tmp_path):
    def kept(cell):
        return dataclasses.replace(cell, home=Store.open(str(tmp_path)).child(cell.id))

    column = Evaluated(score="rouge_l")
    invented = invent_sweep("eval", {"seed": ("0", "1")}, (), (), profile="custom", column=column)
    sweep = dataclasses.replace(invented, cells=tuple(map(kept, invented.cells)))
    assert "not measured" in parse(write_report([sweep], tmp_path / "out")).words
    for cell in sweep.cells:
        scores = {"state_sha256": cell.result.state_sha256, "tuned": {"rouge_l": 0.5}}
        cell.home.write(EVALUATION, to_checked_json(scores))
    (number,) = parse(write_report([sweep], tmp_path / "out")).find("span", **{"class": "value"})
    assert number.words == "50.00 ± 0.00"
