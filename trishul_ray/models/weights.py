"""Build a backbone's modules, and load their weights or draw them from the run's seed.

A head that the checkpoint lacks is also drawn. The result depends only on the checkpoint, the
configuration and the seed. Torch's global random state is not read, and is restored.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from trishul_ray.adapters.targets import classifier_parameters
from trishul_ray.config.fields import ModelConfig
from trishul_ray.errors import CorruptFileError, InputError, first_line
from trishul_ray.models.find_model import ModelFiles, ModelKind, image_config, quiet_transformers
from trishul_ray.runtime.random_streams import torch_rng

#: Standard deviation of the weights of a new head.
INIT_STD = 0.02

#: The classes of transformers that load each kind of model; they are untyped.
AUTO_CLASSES: dict[ModelKind, Any] = {
    "image-classification": AutoModelForImageClassification,
    "sequence-classification": AutoModelForSequenceClassification,
    "seq2seq-lm": AutoModelForSeq2SeqLM,
    "causal-lm": AutoModelForCausalLM,
}

#: Abilities of each kind of model, for messages.
_ABILITIES: dict[ModelKind, str] = {
    "image-classification": "classify images",
    "sequence-classification": "classify texts",
    "seq2seq-lm": "map text to text",
    "causal-lm": "continue a text",
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global random state for weights, and restore it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_rng(seed, "init").initial_seed())
        yield


def check_kind(name: str, architecture: PretrainedConfig, kind: ModelKind) -> None:
    """Raise an InputError unless transformers has a model of this kind for the architecture."""
    if type(architecture) not in AUTO_CLASSES[kind]._model_mapping:
        raise InputError(
            f"model.name={name!r} is a {architecture.model_type} model, which does not "
            f"{_ABILITIES[kind]}"
        )


def build_module(
    config: ModelConfig, architecture: PretrainedConfig, kind: ModelKind, seed: int = 0
) -> nn.Module:
    """Build the modules on the current default device, in float32, with random weights.

    They are the modules of transformers for the architecture; the weights depend only on the seed.

    Raises:
        InputError: The architecture cannot be used as this kind, or its values are inconsistent.
    """
    check_kind(config.name, architecture, kind)
    try:
        with quiet_transformers(), seeded(seed):
            model: nn.Module = AUTO_CLASSES[kind].from_config(architecture, dtype=torch.float32)
    except ValueError as error:
        reason = first_line(error)
        raise InputError(f"model.name={config.name!r} cannot be built: {reason}") from error
    if config.image_size is not None:
        resize_positions(model, config.image_size)
    return model


class Plan(NamedTuple):
    """Inputs to build a model with weights.

    Attributes:
        config: The section ``model``.
        files: Location of the checkpoint.
        architecture: The configuration of the modules.
        kind: Kind of the model.
        seed: Seed of the weights that are drawn.
    """

    config: ModelConfig
    files: ModelFiles
    architecture: PretrainedConfig
    kind: ModelKind
    seed: int

    def module(self) -> nn.Module:
        """Build the modules; see :func:`build_module`."""
        return build_module(self.config, self.architecture, self.kind, self.seed)


def build_weights(plan: Plan) -> tuple[nn.Module, list[str]]:
    """Build the model with drawn weights, or with the weights of its checkpoint.

    Only safetensors files of a checkpoint are read, and none of its code is executed.

    Returns:
        The model in float32, and the names of the head's parameters to draw if the checkpoint has
        no head of this size.

    Raises:
        InputError: The checkpoint cannot be found.
        CorruptFileError: The checkpoint lacks a tensor, or one contains NaN or infinity.
    """
    config, kind, checkpoint = plan.config, plan.kind, plan.files.location
    if config.init == "random":
        return plan.module(), []
    if isinstance(checkpoint, Path) and not any(checkpoint.glob("*.safetensors")):
        raise _no_safetensors(config, checkpoint, AUTO_CLASSES[kind].__name__)
    with plan.files.reading(weights=True), torch.random.fork_rng(devices=[]):
        model, info = AUTO_CLASSES[kind].from_pretrained(
            checkpoint,
            config=plan.architecture,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    missing = set(info["missing_keys"]) | {entry[0] for entry in info["mismatched_keys"]}
    # A classification head may be new; a language model's head is part of the pretrained model.
    optional = set(classifier_parameters(model)) if kind.endswith("classification") else set()
    lost = sorted(missing - optional)
    if lost:
        raise CorruptFileError(
            f"model.name={config.name!r}: checkpoint {checkpoint} lacks {len(lost)} tensors of "
            f"its architecture, or has them in another shape; the first is {lost[0]}"
        )
    for name, tensor in model.state_dict().items():
        floating = name not in missing and tensor.is_floating_point()
        if floating and not torch.isfinite(tensor).all():
            raise CorruptFileError(
                f"model.name={config.name!r}: tensor {name} of checkpoint {checkpoint} has NaN "
                "or infinity"
            )
    if config.image_size is not None:
        resize_positions(model, config.image_size)
    return model, head_to_draw(model, missing)


def _no_safetensors(config: ModelConfig, folder: Path, auto: str) -> CorruptFileError:
    """Build the error for a checkpoint without safetensors files."""
    begin = f"model.name={config.name!r}: cannot load {folder}: it has no weights (*.safetensors)"
    if not (pickles := sorted(file.name for file in folder.glob("*.bin"))):
        return CorruptFileError(begin)
    return CorruptFileError(
        f"{begin}, and {pickles[0]} is not read, because it may run code; if you trust it, convert "
        f'it: python -c "from transformers import {auto} as M; M.from_pretrained('
        f'{str(folder)!r}, use_safetensors=False).save_pretrained({str(folder)!r})"'
    )


def head_to_draw(model: nn.Module, missing: Collection[str]) -> list[str]:
    """Return the parameters to draw for a checkpoint that lacks ``missing``: the whole head.

    If ``missing`` is empty, return nothing. Otherwise return all parameters outside the base model,
    and the missing ones inside it (a pooler), in the model's order.
    """
    untyped: Any = model
    base = f"{untyped.base_model_prefix}."
    if not missing:
        return []
    return [
        name for name, _ in model.named_parameters() if not name.startswith(base) or name in missing
    ]


def draw_head(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Draw the parameters ``names`` in place: weights from N(0, 0.02^2), vectors zero."""
    generator = torch_rng(seed, "head")
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            if parameter.ndim >= 2:
                parameter.normal_(0.0, INIT_STD, generator=generator)
            else:
                parameter.zero_()


def resize_positions(model: nn.Module, image_size: int) -> None:
    """Interpolate a ViT's position embeddings [1, 1 + n, d] for images of side ``image_size``.

    Interpolation is bicubic on the grid of patches, as in Dosovitskiy et al. 2021 for other
    resolutions. The model is modified in place.

    Raises:
        InputError: The model has no such embeddings, or the size is not a multiple of its patch.
    """
    config = image_config(model.config)
    if getattr(config, "image_size", None) in (image_size, None):
        return
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    patches = getattr(embeddings, "patch_embeddings", None)
    positions: Tensor | None = getattr(embeddings, "position_embeddings", None)
    if patches is None or positions is None:
        raise InputError(
            f"model.image_size={image_size}: this {config.model_type} model takes only images of "
            f"{config.image_size}"
        )
    patch = config.patch_size
    if image_size % patch:
        raise InputError(
            f"model.image_size={image_size} is not a multiple of the model's patch, {patch}"
        )
    grid, old = image_size // patch, config.image_size // patch
    extra = positions.shape[1] - old * old  # class token, and distillation token of DeiT
    with torch.no_grad():
        table = positions[:, extra:].reshape(1, old, old, -1).permute(0, 3, 1, 2)  # [1, d, g, g]
        table = F.interpolate(table, size=(grid, grid), mode="bicubic", align_corners=False)
        table = table.permute(0, 2, 3, 1).reshape(1, grid * grid, -1)
        embeddings.position_embeddings = nn.Parameter(torch.cat([positions[:, :extra], table], 1))
    patches.image_size = embeddings.image_size = (image_size, image_size)
    patches.num_patches = grid * grid
    config.image_size = image_size
