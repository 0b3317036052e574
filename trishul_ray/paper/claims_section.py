"""The claims of the paper as a section of the page, and as CSV."""

from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from trishul_ray.paper.claims import VERDICTS, Finding, judge
from trishul_ray.report.formats import csv_text
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.sections import SECTIONS, PageSection, render

#: File of a report with every comparison.
_FILE = "tables/claims.csv"


@SECTIONS.register("claims")
class ClaimsSection(PageSection):
    """The claims that sweeps of the page decide, each with its verdict."""

    title = "What the paper claims"

    def __init__(self, sweeps: Sequence[SweepOutcome]) -> None:
        super().__init__(sweeps)
        self.findings = judge(sweeps)
        self.complete = not any(finding.problem for finding in self.findings)
        # Claims about seconds do not count, nor those of the profile smoke.
        told = Counter(f.verdict for f in self.findings if not f.timed and f.profile != "smoke")
        self.note = ", ".join(f"{told[name]} {name}" for name in VERDICTS if told[name])

    def html(self) -> Markup:
        """Return a table of the claims, with all comparisons of each."""
        if not self.findings:
            return Markup("")
        profiles = tuple(dict.fromkeys(sweep.profile for sweep in self.sweeps))
        return render("trishul_ray.paper", "claims.html", section=self, profiles=profiles)

    def markdown(self) -> str:
        """Return a table of the claims that a repetition does not change."""
        return render("trishul_ray.paper", "claims.md", section=self)

    def files(self) -> dict[str, str]:
        """Return every comparison as CSV."""
        return {_FILE: claims_csv(self.findings)} if self.findings else {}


def claims_csv(findings: Sequence[Finding]) -> str:
    """Return the claims as CSV: a row for each part."""
    head = ("claim", "says", "paper", "line", "profile", "sweep", "on", "verdict", "part")
    rows: list[list[object]] = []
    rows.append([*head, "part_verdict", "number", "low", "high", "seeds", "columns", "differs"])
    for finding in findings:
        claim = finding.claim
        first = [claim.name, claim.says, claim.paper or "", claim.line, finding.profile]
        first += [claim.sweep, finding.label, finding.told]
        for part, verdict in zip(finding.parts, finding.told_parts, strict=True):
            number = "" if part.number is None else repr(part.number)
            low, high = map(repr, part.interval) if part.interval else ("", "")
            last = (part.seeds, part.columns, finding.differs)
            rows.append([*first, part.text, verdict, number, low, high, *last])
    return csv_text(rows)
