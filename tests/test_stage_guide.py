"""The example in docs/plugins.md is a complete stage and computes what it documents."""

import re
from pathlib import Path

import numpy as np
import pytest
from example_plugins import unloaded_after
from method_runs import resumed, run

from trishul_ray.contract.plugin_checks import check_plugin
from trishul_ray.plugins.loading import load_plugin
from trishul_ray.stages import STAGES

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


def test_example_equals_the_built_in_optimizer(example, executor, tmp_path):
    assert len(example.splitlines()) < 55
    mine, _ = resumed(executor("method=trishul", "fedadam.lr=0.01"), tmp_path)
    ours = run(executor("method=trishul", "server.optimizer=adam", "server.lr=0.01"), tmp_path)
    np.testing.assert_array_equal(mine.state.shared, ours.checkpoint.state.shared)


def test_it_keeps_the_contract(example):
    """Load it from a separate file, as ``trishul check --plugin fedadam.py`` runs it."""
    plugin = next(iter(STAGES.plugins_of("fedadam")))
    outcomes = list(check_plugin(plugin))
    assert {each.subject for each in outcomes} == {"stage=fedadam"} and len(outcomes) == 4
    assert {(each.result, each.reason) for each in outcomes} == {("ok", "")}


@pytest.mark.parametrize("fault", ["memory", "purity"])
def test_a_broken_promise_is_named(fault, tmp_path):
    """Test a stage that keeps state outside its memory, or draws from another stream."""
    body = {
        "memory": "    def mean(self, number, mean):\n"
        "        self.last = getattr(self, 'last', 0) + mean.state.shared\n"
        "        return mean.with_shared(self.last)\n",
        "purity": "    def send(self, change, sender):\n"
        "        noise = np.random.default_rng().standard_normal(len(change.shared))\n"
        "        return replace(change, shared=change.shared + noise.astype(np.float32))\n",
    }[fault]
    file = tmp_path / "broken.py"
    file.write_text(
        "from dataclasses import replace\n"
        "import numpy as np\n"
        "from pydantic import Field\n"
        "from trishul_ray.config.fields import Section\n"
        "from trishul_ray.stages import Stage, register_stage\n"
        "class BrokenConfig(Section):\n"
        "    on: bool = Field(False, description='on')\n"
        "@register_stage('broken')\n"
        "class Broken(Stage):\n"
        "    Config, example = BrokenConfig, {'on': True}\n" + body
    )
    with unloaded_after():
        outcomes = {each.name: each.result for each in check_plugin(load_plugin(file))}
    failed = {name for name, result in outcomes.items() if result == "failed"}
    assert (
        failed
        == {
            "memory": {"resumes with the same bytes"},
            "purity": {
                "repeats a client's call",
                "does not depend on the order of clients",
                "resumes with the same bytes",
            },
        }[fault]
    )
