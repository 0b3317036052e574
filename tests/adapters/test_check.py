"""Check of the consistency of forward, merged weight and update per kind of adapter."""

import pytest
import torch
from torch.nn.functional import linear

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.check import TOLERANCE, Trial
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.multihead import MultiHead

SPEC = LayerSpec("layer", "block", 12, 8)


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
