"""The example in docs/plugins.md is a complete stage and computes what it says."""

import re
from pathlib import Path

import numpy as np
import pytest
from method_runs import resumed, run
from newcomers import unloaded_after

from trishul_ray.plugins import load_plugin

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"


@pytest.fixture
def example(tmp_path):
    """Load the example of the page as a plug-in, for one test."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "fedadam.py"
    file.write_text(code, encoding="utf-8")
    with unloaded_after():
        load_plugin(file)
        yield code


def test_it_is_short_and_moves_as_the_built_in_optimizer(example, executor, tmp_path):
    assert len(example.splitlines()) < 55
    mine, _ = resumed(executor("method=trishul", "fedadam.lr=0.01"), tmp_path)
    ours = run(executor("method=trishul", "server.optimizer=adam", "server.lr=0.01"), tmp_path)
    np.testing.assert_array_equal(mine.state.shared, ours.checkpoint.state.shared)


def test_it_is_in_an_id_only_while_it_is_set(example, executor):
    ids = [executor("method=trishul", *w).experiment.id for w in ([], ["fedadam.lr=0.01"])]
    assert ids[0] != ids[1]
    assert executor("method=trishul", "fedadam.lr=0").experiment.id == ids[0]
