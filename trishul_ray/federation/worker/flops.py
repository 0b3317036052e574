"""FLOPs of a local step, counted on a worker."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trishul_ray.adapters.model import Trained
from trishul_ray.federation.worker.context import WorkerContext, bound
from trishul_ray.stages import StepFlops


def count_flops(context: WorkerContext) -> StepFlops:
    """Count the FLOPs of a local step, for the shapes of the first training rows.

    The count includes the matrix products, convolutions and attention (as plain matrix products on
    every device) of the loss and its gradient. It excludes the elementwise operations, the
    optimizer, and additions by the method. The backbone's part is twice the forward pass, because
    without trainables no weights have gradients. The rest belongs to the adapters and the
    classification head.
    """
    size = context.settings.federation.batch_size
    batch = context.train_batch(np.resize(np.arange(min(size, len(context.train))), size))
    grad = torch.zeros_like(context.initial)

    def loss() -> Tensor:
        return context.task.losses(context.model, batch, 1)[0]

    with sdpa_kernel(SDPBackend.MATH):
        trained = Trained(context.initial.clone())
        with bound(context, trained, grad), _flop_counter() as whole:
            loss().backward()
        with _flop_counter() as forward, torch.no_grad():
            loss()
    total = float(whole.get_total_flops())
    backbone = min(2.0 * forward.get_total_flops(), total)
    return StepFlops(backbone, total - backbone)


def _flop_counter() -> FlopCounterMode:
    """Return torch's counter, extended by in-place products, which it does not count by default."""

    def product(added: torch.Size, first: torch.Size, second: torch.Size, **_: object) -> int:
        return 2 * first.numel() * second[-1]

    in_place = {torch.ops.aten.addmm_: product, torch.ops.aten.baddbmm_: product}
    return FlopCounterMode(display=False, custom_mapping=in_place)
