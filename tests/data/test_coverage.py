"""Coverage: a part of a dataset is reported with its numbers of rows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trishul_ray.data.coverage import RowCounts, measure_coverage
from trishul_ray.data.datasets.glue import SST2
from trishul_ray.data.prepare import prepare
from trishul_ray.data.public import DATASETS

PUBLIC = [*DATASETS.all().values()]


@pytest.fixture
def mirror(tmp_path):
    """Create a mirror with 4 of QQP's training rows and 2 of its test rows."""
    folder = tmp_path / "hub/nyu-mll/glue"
    (folder / "qqp").mkdir(parents=True)
    for split, rows in (("train", 4), ("validation", 2)):
        text = [f"q{n}" for n in range(rows)]
        columns = {"question1": text, "question2": text, "label": [n % 2 for n in range(rows)]}
        pq.write_table(pa.table(columns), folder / f"qqp/{split}-00000-of-00001.parquet")
    return folder


def test_a_partial_mirror_is_reported_for_each_split(mirror, tmp_path):
    data = prepare("glue/qqp", cache=tmp_path / "cache", hub=tmp_path / "hub")
    coverage = measure_coverage(data)
    assert coverage.part and coverage.revision is None
    assert coverage.train == RowCounts(4, 4, 363_846) and coverage.test == RowCounts(2, 2, 40_430)
    assert coverage.sentence == (
        "part of glue/qqp: 4 of 363,846 training rows, 2 of 40,430 test rows scored; "
        "mirror:nyu-mll/glue, revision unknown"
    )


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ((None, None), "all of digits: 1,000 training rows, 497 test rows scored;"),
        ((5000, 5000), "all of digits: 1,000 training rows, 497 test rows scored;"),
        ((300, None), "part of digits: 300 of 1,000 training rows, 497 test rows scored;"),
        ((None, 64), "part of digits: 1,000 training rows, 64 of 497 test rows scored;"),
    ],
)
def test_limits_make_a_part(cache, limits, sentence):
    coverage = measure_coverage(prepare("digits", cache=cache, hub=None), *limits)
    assert coverage.sentence.startswith(sentence) and coverage.part == sentence.startswith("part")


def test_user_data_are_always_complete(tmp_path):
    from trishul_ray.config.fields import DataConfig

    (tmp_path / "notes.csv").write_text("text,label\n" + "\n".join(f"a,{n % 2}" for n in range(10)))
    own = DataConfig(name="table", path=str(tmp_path / "notes.csv"))
    data = prepare(own, cache=tmp_path / "cache", hub=None)
    coverage = measure_coverage(data)
    assert not coverage.part and coverage.test == RowCounts(2, 2, 2)
    assert "revision" not in coverage.sentence
    limited = measure_coverage(data, test_limit=1)
    assert limited.part and "1 of 2 test rows" in limited.sentence


def test_official_test_rows_count_every_scored_split():
    mnli = next(source for source in PUBLIC if source.name == "glue/mnli")
    assert mnli.official == {"train": 392_702, "test": 9_815 + 9_832}
    assert SST2.official == {"train": 67_349, "test": 872}
