"""A kind of adapter that does not agree with itself is refused before a run."""

import sys
from pathlib import Path

import pytest
import torch
from newcomers import unloaded_after
from torch.nn.functional import linear

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.check import TOLERANCE, Trial, check_kinds
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.errors import InputError
from trishul_ray.methods.base import method_class
from trishul_ray.plugins.loading import load_plugin

SPEC = LayerSpec("layer", "block", 12, 8)
HIRA = Path(__file__).parents[1] / "methods" / "newcomers" / "hira.py"
#: A line of HiRA, what it becomes, and what is said of it.
FAULTS = {
    "update": (
        "return weight * (1 + ",
        "return weight + (",
        r"forward\(\) is not that of merged_weight\(\): outputs of up to .* differ by",
    ),
    "shape": (
        "return weight * (1 + ",
        "return weight[:, :1] * (1 + ",
        "forward",
    ),
    "error": ('params["hira_B"] @', 'params["hira_X"] @', "wrong, line .*: KeyError: 'hira_X'"),
}


@pytest.mark.parametrize(
    "adapter", [LoRA(3), LoRA(3, 0.5, train_A=False), MultiHead(2, 3, "gram_schmidt")]
)
def test_the_kinds_of_the_package_agree(adapter):
    trial = Trial.of(adapter, SPEC)
    untrained = adapter.forward(trial.rows, trial.frozen, adapter.initial(SPEC, 0))
    torch.testing.assert_close(
        untrained, linear(trial.rows, trial.frozen.weight), rtol=0, atol=TOLERANCE
    )
    trial.forward_is_the_merged_weight()
    trial.factors_are_the_update()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kind_that_cannot_be_exported_is_refused(fault, tmp_path):
    old, new, said = FAULTS[fault]
    source = HIRA.read_text().replace('@register("hira")', '@register("wrong")')
    own = 'merged = frozen.weight * (1 + params["hira_B"] @ params["hira_A"])'
    source = source.replace(
        "merged = self.merged_weight(frozen.weight, frozen.constants, params)", own
    )
    before, found, after = source.rpartition(old)
    assert found and own in before
    file = tmp_path / "wrong.py"
    file.write_text(before + new + after)
    with unloaded_after():
        load_plugin(file)
        adapter = vars(sys.modules[method_class("wrong").__module__])["Hadamard"](2)
        with pytest.raises(
            InputError, match=f"Hadamard of plug-in wrong cannot be exported.*{said}"
        ):
            check_kinds({"layer": adapter}, [SPEC])
