"""Export a trained state as a PEFT LoRA adapter or as a merged model.

An update ``sum_i s_i B_i H_i A_i`` is a LoRA pair of rank h r, ``[B_i s_i H_i]`` and ``[A_i]``; a
PEFT alpha equal to the rank makes its scale 1. Layers may differ in rank, and layers without heads
are omitted. If a method has changed a frozen weight, the sum of change and update is decomposed
(SVD) and written at the lowest rank that is exact up to :data:`FOLDED_ERROR`. The same applies to
updates that are not a product of thin factors. Folders are written under a temporary name and
renamed when complete.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from trishul_ray.adapters.base import is_low_precision
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import classifier_module, classifier_parameters
from trishul_ray.errors import InputError
from trishul_ray.storage.durable import complete_folder

#: Maximum relative error, in the Frobenius norm, of a decomposed update. A method rounds changes of
#: the frozen weight to float32 in every round, which is an error of this size.
FOLDED_ERROR = 1e-6

#: Function that writes additional files into an exported folder.
Beside = Callable[[Path], None]

#: Prefix of a base model's module paths in PEFT.
_PEFT_PREFIX = "base_model.model."

#: Task types of PEFT, keyed by suffix of the model's class name; other models load as a plain
#: PeftModel.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


@dataclass(frozen=True)
class AdapterExport:
    """Summary of an exported adapter.

    Attributes:
        ranks: LoRA ranks, keyed by layer.
        folded: Whether the updates include changes of the frozen weights.
        error: Maximum relative error of an update, in the Frobenius norm.
    """

    ranks: dict[str, int]
    folded: bool
    error: float


def export_peft(
    adapted: AdaptedModel,
    trained: Trained,
    directory: Path | str,
    base_model_name: str,
    *,
    revision: str | None = None,
    rank: int | None = None,
    beside: Beside = lambda _: None,
) -> AdapterExport:
    """Write an adapter that ``peft.PeftModel.from_pretrained(base, directory)`` loads.

    ``directory`` is a new or empty folder. The adapter's config records ``base_model_name``, the
    name or path of the backbone, and ``revision``, its commit on the hub. Updates of a higher rank
    than ``rank`` are truncated. ``beside`` writes additional files before the folder is complete.

    Raises:
        InputError: The folder is not empty, or no layer is adapted.
    """
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    error = 0.0
    for name, adapter, params in adapted.iter_layers(trained.vector):
        constants = trained.constants.get(name, adapted.constants(name))
        weight = adapted.frozen_weight(name, trained)
        pair = adapter.lora_factors(weight, constants, params)
        fits = pair is not None and (rank is None or pair[1].shape[0] <= rank)
        if pair is not None and fits and name not in trained.base:
            factor_B, factor_A = pair
        else:
            update = adapter.delta(weight, constants, params)
            if name in trained.base:
                update = update + trained.base[name].double()
            factor_B, factor_A, lost = decompose(update, rank)
            error = max(error, lost)
        ranks[name] = factor_A.shape[0]
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = _portable(factor_A)
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = _portable(factor_B)
    if not ranks:
        raise InputError("export: no layer is adapted; an adapter needs at least one")
    # Also write an untrained classification head: loading the backbone elsewhere may draw another.
    model = adapted.model
    classifier = {name: model.get_parameter(name) for name in classifier_parameters(model)}
    for name, value in (classifier | adapted.direct_parameters(trained.vector)).items():
        tensors[_PEFT_PREFIX + name] = _portable(value)
    config = _peft_config(model, ranks, [*classifier], base_model_name, revision)
    with _exported(Path(directory)) as folder:
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        beside(folder)
    return AdapterExport(ranks, bool(trained.base), error)


def _peft_config(
    model: nn.Module,
    ranks: Mapping[str, int],
    classifier: Sequence[str],
    base_model_name: str,
    revision: str | None,
) -> dict[str, Any]:
    """Build the config of an adapter as PEFT writes it, without defaults.

    Importing PEFT instead would take three CPU seconds.
    """
    common = Counter(ranks.values()).most_common(1)[0][0]
    others = {name: rank for name, rank in ranks.items() if rank != common}
    kind = type(model).__name__
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in _TASKS.items() if kind.endswith(end)), None),
        "base_model_name_or_path": base_model_name,
        "revision": revision,
        "inference_mode": True,
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({m for n in classifier if (m := classifier_module(n))}) or None,
        "lora_dropout": 0.0,
        "bias": "none",
    }


def decompose(update: Tensor, most: int | None = None) -> tuple[Tensor, Tensor, float]:
    """Decompose an update into factors of the lowest rank exact up to :data:`FOLDED_ERROR`.

    Args:
        update: Float64 [d_out, d_in].
        most: Maximum rank.

    Returns:
        Float64 [d_out, R] and [R, d_in], and their relative error.
    """
    u, s, vt = torch.linalg.svd(update, full_matrices=False)
    # tails[R] is the norm of the part that a product of rank R omits.
    tails = s.square().flip(0).cumsum(0).flip(0).sqrt()
    rank = max(1, int((tails > FOLDED_ERROR * tails[0]).sum()))  # PEFT does not support rank 0
    rank = min(rank, most or rank)
    lost = float(tails[rank] / tails[0]) if rank < len(s) and tails[0] > 0 else 0.0
    return u[:, :rank] * s[:rank], vt[:rank], lost


def merge_trained(adapted: AdaptedModel, trained: Trained) -> nn.Module:
    """Return a copy of the model with the updates merged into its weights.

    A bfloat16 or float16 model becomes float32, which represents its weights exactly and keeps
    updates that its dtype would round away.
    """
    low = any(is_low_precision(p.dtype) for p in adapted.model.parameters())
    dtype = torch.float32 if low else None
    return adapted.merge(trained, dtype)


def export_merged(
    adapted: AdaptedModel,
    trained: Trained,
    directory: Path | str,
    *,
    beside: Beside = lambda _: None,
) -> Path:
    """Write the merged model into a new or empty folder, and return the folder.

    Raises:
        InputError: The folder is not empty.
    """
    merged = merge_trained(adapted, trained)
    with _exported(Path(directory)) as folder:
        save_module(merged, folder)
        beside(folder)
    return Path(directory)


def save_module(model: nn.Module, folder: Path) -> None:
    """Write a model with ``save_pretrained``, or as ``model.safetensors`` without this method."""
    save = getattr(model, "save_pretrained", None)
    if save is None:
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    else:
        save(str(folder))


def _portable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous().clone()


@contextmanager
def _exported(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``directory``, which must be new or empty."""
    directory = directory.resolve()  # Write to the target of a link.
    # Otherwise the user's shell would remain in the replaced folder.
    if directory.exists() and directory.samefile("."):
        raise InputError(f"export: {directory} is the current folder; choose another one")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"export: {directory} exists and is not an empty folder")
    with complete_folder(directory) as folder:
        yield folder
