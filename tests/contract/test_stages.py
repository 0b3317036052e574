"""Contract checks of every registered stage, including new ones."""

import pytest

from trishul_ray.contract import stages
from trishul_ray.contract.methods import order_is_free, resumes
from trishul_ray.stages import STAGES, stage_names

#: Stages of the package, without stages that another test has loaded.
STAGES_OF_PACKAGE = stage_names()


@pytest.mark.parametrize("check", [stages.call_repeats, order_is_free, resumes])
@pytest.mark.parametrize("name", STAGES_OF_PACKAGE)
def test_it_keeps_a_promise_of_the_contract(name, check, executor, tmp_path):
    def on(*overrides):
        return executor(*overrides, *stages.words_of(name))

    check(tmp_path, stages.METHOD, on)


@pytest.mark.parametrize("name", STAGES_OF_PACKAGE)
def test_it_is_off_at_its_defaults(name):
    assert STAGES[name].example, "an example of it, with which it is checked"
    stages.off_at_defaults(name)
