"""The pages of results that are kept: what they show is what today's sweeps run."""

import csv
from pathlib import Path

import pytest

from trishul_ray.sweeps.loading import find_sweeps
from trishul_ray.version import EDGE_NUMERICS, NUMERICS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGES = sorted(path.parent for path in RESULTS.glob("*/report.md"))


@pytest.mark.parametrize("folder", PAGES, ids=lambda folder: folder.name)
def test_a_kept_page_has_the_ids_and_numerics_of_todays_sweeps(folder):
    """Otherwise take it down, or run it again: it would be read as if it were of this code."""
    said = (folder / "report.md").read_text(encoding="utf-8")
    assert f"numerics {NUMERICS} ({EDGE_NUMERICS} of the sections" in said
    shown: dict[tuple[str, str, str], set[str]] = {}
    for table in (folder / "tables").glob("*.csv"):
        for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
            if row.get("status") == "finished":
                key = row["sweep"], row["sweep_profile"], row["overrides"]
                shown.setdefault(key, set()).add(row["id"])
    assert shown
    for (name, profile, overrides), ids in shown.items():
        words = [*filter(None, overrides.split(", ")), "seed=0..4"]
        (sweep,) = find_sweeps([name], profile, words)
        assert ids <= {cell.experiment.id for cell in sweep.cells}, name
