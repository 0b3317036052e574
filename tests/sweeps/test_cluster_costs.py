"""docs/what-a-cluster-costs.md has the numbers of the cost model."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster_costs.py"


@pytest.fixture(scope="module")
def costs():
    spec = importlib.util.spec_from_file_location("cluster_costs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_the_page_has_the_numbers_of_the_cost_model(costs):
    new = costs.numbers()
    page = costs.PAGE.read_text(encoding="utf-8")
    old = page.split(costs.BEGIN)[1].split(costs.END)[0].strip()
    assert old == new, "python benchmarks/cluster_costs.py"


def test_time_falls_until_the_longest_run_decides(costs):
    hours = [5.0, 3.0, 3.0, 2.0, 1.0]
    ends = [costs.finish_time(hours, gpus) for gpus in (1, 2, 3, 4, 5, 9)]
    assert ends == [14.0, 7.0, 5.0, 5.0, 5.0, 5.0]
