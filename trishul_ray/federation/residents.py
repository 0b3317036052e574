"""The backbones that a process keeps loaded from one run to the next."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import run_dtype
from trishul_ray.models.lookup import ModelKind
from trishul_ray.models.shared_weights import set_head

#: Backbones to keep on a CPU, where their pages are shared with other processes and reclaimable.
KEPT_ON_CPU = 3
#: Backbones to keep on a GPU, whose memory the batches need.
KEPT_ON_GPU = 1


@dataclass
class LoadedBackbone:
    """A backbone without adapters, on its device.

    Attributes:
        module: The model; whoever adapts it detaches the adapters before the next run.
        source: Identity of its weights; see ``Resident``.
        drawn: Parameters that are drawn from the seed, because the checkpoint lacks them.
        seed: The seed they are drawn from.
        norms: Squared Frobenius norms of its weights by layer, as far as they have been computed.
    """

    module: nn.Module
    source: str
    drawn: tuple[str, ...]
    seed: int
    norms: dict[str, float] = field(default_factory=dict)


class Residents:
    """Loads backbones and keeps the most recently used ones.

    A backbone is kept as long as its configuration, its files and its device are the same; for
    another seed, only its drawn head changes. One workbench at a time may use it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, LoadedBackbone] = OrderedDict()

    def load(
        self,
        backbone: Backbone,
        kind: ModelKind,
        num_classes: int | None,
        *,
        seed: int,
        device: torch.device,
    ) -> LoadedBackbone:
        """Return a backbone in the run's precision and in eval mode; see ``Backbone.load``.

        Raises:
            InputError: The model cannot be found, or cannot be used as this kind.
            CorruptFileError: The checkpoint is malformed.
        """
        weights = backbone.resident_key(kind, num_classes, seed=seed)
        key = (weights, backbone.config.model_dump_json(), kind, device)
        kept = self._kept.pop(key, None)
        if kept is None:
            # Before loading, so that a GPU need not hold both.
            limit = KEPT_ON_GPU if device.type == "cuda" else KEPT_ON_CPU
            while len(self._kept) >= limit:
                self._kept.popitem(last=False)
            resident = backbone.load_resident(kind, num_classes, seed=seed)
            model = resident.model.to(device)
            kept = LoadedBackbone(model, resident.source, resident.drawn, seed)
        elif kept.drawn and kept.seed != seed:
            set_head(kept.module, kept.drawn, seed, run_dtype(backbone.config))
            kept.seed = seed
            kept.norms = {n: v for n, v in kept.norms.items() if f"{n}.weight" not in kept.drawn}
        self._kept[key] = kept
        return kept
