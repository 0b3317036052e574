"""Operations of a backbone's forward pass, counted by torch on the meta device."""

from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from trishul_ray.config.fields import ModelConfig, TaskConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.find_model import image_config


@lru_cache(maxsize=32)
def row_flops(
    model: ModelConfig, paths: StoragePaths, task: TaskConfig
) -> tuple[float, float, int]:
    """Count the operations of a row's forward pass and generation, and the linear layers.

    Texts are counted with ``task.max_length`` tokens and all their logits, so the counts are upper
    bounds.

    Raises:
        InputError: The model is not on this machine.
    """
    module = backbone_of(model, paths).shapes
    config: Any = module.config
    generates = config.is_encoder_decoder or task.kind == "instruction"
    with torch.device("meta"):
        images = image_config(config)
        if (size := model.image_size or getattr(images, "image_size", None)) is not None:
            given = {"pixel_values": torch.empty(1, images.num_channels, size, size)}
        else:
            given = {"input_ids": torch.zeros(1, task.max_length, dtype=torch.long)}
            if config.is_encoder_decoder:
                target = torch.zeros(1, task.target_length, dtype=torch.long)
                given["decoder_input_ids"] = target
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(**given)
    forward = float(counter.get_total_flops())
    layers = sum(isinstance(each, torch.nn.Linear) for each in module.modules())
    return forward, forward if generates else 0.0, layers
