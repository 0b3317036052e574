"""The report: the page is complete, valid and reproducible."""

import csv
import dataclasses
import re
from xml.etree import ElementTree

import pytest
from invented_outcomes import (
    FIGURE,
    half_missing,
    initialization,
    invent_sweep,
    sensitivity,
    square,
    vision,
)

from trishul_ray.data.coverage import Coverage, RowCounts
from trishul_ray.errors import CorruptFileError
from trishul_ray.report.layouts import Evaluated, FigureLayout
from trishul_ray.report.outcomes import DrawnFigure
from trishul_ray.report.page import write_report
from trishul_ray.report.summary import EVALUATION
from trishul_ray.storage.integrity import to_checked_json
from trishul_ray.storage.store import Store


class Element(ElementTree.Element):
    """An element of a page."""

    def find(self, tag, **attributes):
        """Return the descendants with this tag and these attributes, in order."""
        fit = (e for e in self.iter(tag) if attributes.items() <= e.attrib.items())
        return [element for element in fit if element is not self]

    @property
    def words(self):
        return " ".join(" ".join(self.itertext()).split())

    @property
    def classes(self):
        return self.attrib.get("class", "").split()


def parse(path):
    """Parse the page as a tree; an element that is not closed correctly is an error."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(<(?:meta|img)[^>]*)>", r"\1/>", text).replace(
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
def full(written):
    other = FIGURE.model_copy(update={"name": "other", "paper": "fig:lambda"})
    sweeps = [vision(figures=[FIGURE, other]), sensitivity(), initialization()]
    folder = written(*sweeps)
    return parse(folder / "report.html"), folder


def test_the_page_is_self_contained_and_valid(full):
    page, _ = full
    ids = [e.attrib["id"] for e in page.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))
    assert not page.find("script") and not page.find("link")
    for element in page.iter():
        source = element.attrib.get("src", "")
        assert not source or source.startswith("data:")
        target = element.attrib.get("href", "")
        if target.startswith("#"):
            assert target[1:] in ids
        elif target:
            assert re.fullmatch(r"(tables|figures)/[a-z0-9-]+\.(csv|tex|svg|pdf)", target)
    styles = page.find("style")[0].words
    assert "url(" not in styles and "@import" not in styles
    for marker in ("prefers-color-scheme: dark", "@media print", "position: sticky"):
        assert marker in styles


def test_tables_are_accessible(full):
    page, _ = full
    for table in page.find("table"):
        assert len(table.find("caption")) == 1
        scopes = {th.attrib["scope"] for th in table.find("th")}
        assert scopes <= {"col", "row", "colgroup", "rowgroup"}
        (box,) = (e for e in page.iter("div") if table in e)
        assert (box.attrib["role"], box.attrib["tabindex"]) == ("region", "0")
        width = max(_width(row) for row in table.find("tr"))
        assert all(_width(row) == width for row in table.find("tbody")[0].find("tr"))
    levels = [e.tag for e in page.iter() if re.fullmatch(r"h\d", e.tag)]
    assert levels[:2] == ["h1", "h2"] and levels.count("h1") == 1


def _width(row):
    return sum(int(cell.attrib.get("colspan", 1)) for cell in row)


def test_a_table_has_the_papers_numbers_and_verdicts(full):
    page, folder = full
    (block,) = page.find("figure", id="paper-vision")
    assert "Table 2 of the paper (tab:vision)" in block.find("figcaption")[0].words
    table = block.find("table")[0]
    groups = [e.words for e in table.find("th", scope="rowgroup")]
    assert groups == ["budget: lower", "budget: higher"]
    rows = {row[0].text: row for row in table.find("tr") if row.find("th", scope="row")}
    ours = rows["TRISHUL"].find("td")
    number = r"\d\d\.\d\d ± \d\.\d\d paper \d\d\.\d\d [+−]\d+\.\d\d (within|outside)"
    assert re.fullmatch(number, ours[0].words) and ours[-1].words == "★ best mean"
    verdicts = " ".join(row.find("td")[-1].words for row in rows.values())
    for text in ("○ reference", "▼ worse, decided −", "? undecided −", "against TRISHUL p = 0."):
        assert text in verdicts
    # On a phone, the verdict is below the name.
    assert "★ best mean" in rows["TRISHUL"].find("th")[0].words
    assert "SCAFFOLD+LoRA's 87.23 is higher" in block.words
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "Table 10 of the paper (tab:ablation\\_init)" in text
    assert "\n- SVHN, 50 clients" in text


def test_a_sweep_shows_its_configuration_command_and_traffic(full):
    page, _ = full
    (section,) = page.find("section", **{"aria-labelledby": "sweep-paper-lambda"})
    assert section.find("pre")[0].words == "trishul sweep lambda --profile paper"
    for field in ("lam: 0.01", "rounds: 50", "name: trishul"):
        assert field in section.find("pre")[1].words
    (curve,) = section.find("figure", id="figure-paper-lambda-curve")
    assert "Learning curve" in curve.words and curve.find("img")
    (row, *_) = section.find("table")[-1].find("tbody")[0].find("tr")
    assert [cell.words for cell in row] == ["0 (no penalty)", "40 MB", "40 MB", "18.0 s", "9"]


def test_a_smoke_sweep_is_not_judged(report, tmp_path):
    sweep = part_of(sensitivity(profile="smoke"), "cifar100")
    page = report(sweep)
    texts = [page.find("main")[0].words, (tmp_path / "out" / "report.md").read_text()]
    for text in texts:
        for word in ("decided", "best mean", "★"):
            assert word not in text
    (section,) = page.find("section", **{"aria-labelledby": "sweep-smoke-lambda"})
    assert "500 of 10,000 test rows scored" in section.words and not section.find("strong")


def test_custom_sweep_has_no_paper_comparison(report, tmp_path):
    page = report(vision(seeds=1, profile="custom", figures=[FIGURE]))
    assert "About this sweep" in page.words
    for text in (page.words, (tmp_path / "out" / "report.md").read_text(encoding="utf-8")):
        for word in ("What it reproduces", "paper leaves open", "paper 8", "comparable"):
            assert word not in text, word
    assert "[8" not in (tmp_path / "out" / "tables" / "custom-vision.tex").read_text()


@pytest.mark.parametrize("profile", ["small", "smoke", "custom"])
def test_the_profile_is_on_every_table_and_figure(report, profile):
    page = report(vision(seeds=1, profile=profile, figures=[FIGURE]), sensitivity(profile=profile))
    blocks = page.find("figure")
    assert len(blocks) == 4
    for block in blocks:
        assert block.attrib["data-profile"] == profile
        assert block.find("figcaption")[0].words.startswith(profile)
        for hidden in block.find("caption"):
            assert f"Profile {profile}." in hidden.words
    for heading in page.find("h2"):
        assert not heading.attrib["id"].startswith("sweep-") or heading.words.endswith(profile)
    assert f"Profile {profile}." in page.find("header")[0].words
    assert profile in page.find("title")[0].words
    printed = [e for e in page.iter() if "printed" in e.classes]
    assert (len(printed) > 100) == (profile != "custom")
    assert not any(element.find("b") for element in printed)
    if profile != "custom":
        captions = [block.find("figcaption")[0].words for block in blocks if block.find("table")]
        assert all("not comparable with the paper's numbers" in caption for caption in captions)


def part_of(sweep, dataset):
    """Return the sweep as if its runs on a dataset had scored 500 of 10,000 rows."""

    def partial(cell):
        train, test = RowCounts(50_000, 50_000, 50_000), RowCounts(500, 500, 10_000)
        data = Coverage(dataset, f"mirror:{dataset}", None, train, test)
        chosen = cell.labels["dataset"] == dataset
        summary = dataclasses.replace(cell.summary, data=data)
        return dataclasses.replace(cell, summary=summary) if chosen else cell

    return dataclasses.replace(sweep, cells=tuple(map(partial, sweep.cells)))


@pytest.mark.parametrize("why", ["federation.rounds=2", "500 of 10,000 test rows scored"])
def test_departures_are_never_compared_with_the_paper(report, tmp_path, why):
    """Check the page, tables in any format, and differences from the paper's numbers."""
    whole, departed = sensitivity(seeds=2), vision(seeds=2)
    if why.startswith("500"):
        departed = part_of(departed, "cifar100")
    else:
        departed = dataclasses.replace(departed, overrides=(why,))
    page = report(departed, whole)
    notice = page.find("header")[0].words
    assert "protocol with deviations" in notice and why in notice
    for block in (block for block in page.find("figure") if block.find("table")):
        said = block.attrib["id"] == "paper-vision"
        assert ("not comparable with the paper's" in block.find("figcaption")[0].words) == said
        assert any(p.find("b") for p in block.iter() if "printed" in p.classes) == (not said)
    tables = tmp_path / "out" / "tables"
    tex = (tables / "paper-vision.tex").read_text().replace("\\_", "_")
    assert why in tex and "not comparable with" in tex and not re.search(r"\[\d", tex)
    rows = list(csv.DictReader((tables / "paper-vision.csv").open()))
    named = {row["dataset"] for row in rows if why in row["part"] or why in row["overrides"]}
    assert named == ({"cifar100"} if why.startswith("500") else {"cifar100", "svhn"})
    assert re.search(r"\[\d", (tables / "paper-lambda.tex").read_text())


def test_gaps_are_visible_with_their_reason(report):
    page = report(vision(status=half_missing))
    cells = [e for e in page.find("td") if "gap" in e.classes]
    assert {e.find("span")[0].words for e in cells} == {"missing", "failed", "stale", "corrupt"}
    (problems,) = [e for e in page.find("div") if "problems" in e.classes]
    assert "failed 24 runs: out of memory on round 12" in problems.words
    assert "the content of the training data has changed" in problems.words
    assert len(problems.find("code")) == 24 + 14 + 12
    assert "164 of 360 runs finished, 146 missing, 24 failed, 14 stale, 12 corrupt" in page.words
    assert any("of 3 seeds" in e.words for e in page.find("span"))


def test_nothing_is_finished(report):
    nothing = vision(status=lambda labels: ("missing", ""), figures=[FIGURE])
    page = report(nothing, figures=lambda *_: None)
    assert "0 of 360 runs finished, 360 missing" in page.words
    assert "No finished run has the numbers of this figure." in page.words
    assert "No run has finished." in page.words


HOSTILE = "</td><script>alert('1')</script>\"' & {{ 7 * 7 }} {% raw %} ]]> <!--"


def test_hostile_texts_are_escaped(report, tmp_path):
    axes = {"row": (HOSTILE, "b"), "column": (HOSTILE,), "seed": ("0", "1")}
    sweep = invent_sweep(
        HOSTILE, axes, ("row",), ("column",), title=HOSTILE, profile=HOSTILE,
        figures=[FigureLayout.model_construct(name=HOSTILE, title=HOSTILE, kind="convergence")],
        status=lambda x: ("failed", HOSTILE) if x["row"] == "b" else ("finished", ""),
    )  # fmt: skip
    sweep = dataclasses.replace(sweep, description=HOSTILE)
    page = report(sweep, figures=lambda *_: DrawnFigure(b"<svg></svg>", b"", "", HOSTILE))
    assert not page.find("script")
    assert page.words.count(" ".join(HOSTILE.split())) >= 8
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert all(re.fullmatch(r"out/[a-z0-9/.-]+", name) for name in files), files
    assert "<script" not in (tmp_path / "out/report.md").read_text().replace(r"\<script", "")


def test_the_same_outcomes_give_the_same_bytes(written):
    homes = [written(vision(figures=[FIGURE], status=half_missing)) for _ in range(2)]
    first, second = (
        {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*.*")} for home in homes
    )
    assert first == second
    figures = [f"figures/figure-paper-vision-curve.{suffix}" for suffix in ("csv", "pdf", "svg")]
    tables = [f"tables/paper-vision.{suffix}" for suffix in ("csv", "tex")]
    assert set(first) == {"report.html", "report.md", *tables, *figures}
    assert first["figures/figure-paper-vision-curve.csv"] == b"x,value\n1,2\n"


def test_choices_machines_and_runs(full):
    page, folder = full
    text = page.words
    assert "method.allocation waterfill" in text
    assert "16 CPUs (AVX512), 125.9 GiB, 1 x NVIDIA H100 80GB HBM3: 417 runs" in text
    assert "torch 2.13.0" in text and "Figure 10 of the paper (fig:lambda)" in text
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.count("\n| ---") == 3 + 1 and "method.lam | 0.01 (" in text
    assert "](figures/figure-paper-vision-curve.svg)" in text


def test_runs_that_sweeps_share_are_counted_once(report):
    page = report(initialization(), initialization())
    assert "12 of 12 runs finished" in page.find("ul")[0].words
    names = [e.attrib["id"] for e in page.find("figure") if e.find("table")]
    assert names == ["paper-initialization", "paper-initialization-2"]


def test_a_page_shows_later_evaluations(report, tmp_path):
    def kept(cell):
        return dataclasses.replace(cell, home=Store.open(str(tmp_path)).child(cell.id))

    axes = {"method": ("FedIT",), "seed": ("0", "1")}
    score = Evaluated(score="rouge_l")
    invented = invent_sweep("eval", axes, ("method",), (), profile="custom", eval=score)
    sweep = dataclasses.replace(invented, cells=tuple(map(kept, invented.cells)))
    assert "not measured" in report(sweep).words
    for cell in sweep.cells:
        scores = {"state_sha256": cell.result.state_sha256, "tuned": {"rouge_l": 0.5}}
        cell.home.write(EVALUATION, to_checked_json(scores))
    (number,) = report(sweep).find("span", **{"class": "value"})
    assert number.words == "50.00 ± 0.00"
    sweep.cells[0].home.write(EVALUATION, to_checked_json({"tuned": {"rouge_l": ["0.5"]}}))
    with pytest.raises(CorruptFileError, match=r"eval\.json has invalid fields"):
        report(sweep)
