"""Every method and stage has a small run, and repeated runs compute the same bytes."""

import pytest
from contract.digests import CONFIGURATIONS, experiment_of, known, outcome, run_inline

from trishul_ray.methods.base import method_classes
from trishul_ray.stages import stage_names

#: Five shapes of a run: plain, client state, a survey, LoRA factors, and a stage.
SHAPES = ["trishul", "scaffold", "fedsb", "flora", "privacy"]


def test_every_method_and_stage_is_configured():
    experiments = [experiment_of(name) for name in filter(known, CONFIGURATIONS)]
    shipped = {n for n, c in method_classes().items() if c.__module__.startswith("trishul_ray.")}
    assert {each.method.name for each in experiments} >= shipped
    assert {*stage_names()} <= {name for each in experiments for name in each.stages}


@pytest.mark.parametrize("name", [*filter(known, SHAPES)])
def test_a_run_computes_the_same_bytes_again(name, cache, tmp_path):
    found = [
        outcome(
            run_inline(
                experiment_of(
                    name,
                    "resources.backend=inline",
                    f"storage.cache={cache}",
                    f"storage.runs={tmp_path / again}",
                )
            )
        )
        for again in "ab"
    ]
    assert found[0] == found[1]
