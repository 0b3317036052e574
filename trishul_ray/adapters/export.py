"""Export of a trained state, as a PEFT LoRA adapter or as the merged model.

An update ``sum_i s_i B_i H_i A_i`` is a LoRA pair of rank h r, ``[B_i s_i H_i]`` and ``[A_i]``; a
PEFT alpha equal to the rank makes its scale 1. Layers may differ in rank, and layers without heads
are left out. A folder is written under a temporary name and renamed when it is complete.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from trishul_ray.adapters.base import LOW_PRECISION
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import classifier_module, classifier_parameters
from trishul_ray.errors import InputError

#: PEFT's prefix of a base model's module paths.
_PEFT_PREFIX = "base_model.model."

#: PEFT's task type by suffix of the model's class name; other models load as a plain PeftModel.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def export_peft(
    adapted: AdaptedModel, trained: Trained, directory: Path | str, base_model_name: str
) -> Path:
    """Write a folder that ``peft.PeftModel.from_pretrained(base, folder)`` loads.

    Args:
        adapted: the model with its adapters.
        trained: the trained state.
        directory: a new or empty folder; it is returned.
        base_model_name: name or path of the backbone, recorded in the adapter's config.

    Raises:
        InputError: the folder is not empty, no layer is adapted, or the method changed the frozen
            weights themselves, which an adapter cannot represent.
    """
    if trained.base:
        raise InputError(
            "export: this method changes the frozen weights, which a LoRA adapter cannot "
            "represent; export the merged model instead (--merged)"
        )
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for name, adapter, params in adapted.iter_layers(trained.vector):
        constants = trained.constants.get(name, adapted.constants(name))
        factor_B, factor_A = adapter.lora_factors(constants, params)
        ranks[name] = factor_A.shape[0]
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = _portable(factor_A)
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = _portable(factor_B)
    if not ranks:
        raise InputError("export: no layer is adapted, so there is no adapter to write")
    # Write an untrained classification head too: a backbone loaded elsewhere may draw another one.
    model = adapted.model
    classifier = {name: model.get_parameter(name) for name in classifier_parameters(model)}
    for name, value in (classifier | adapted.direct_parameters(trained.vector)).items():
        tensors[_PEFT_PREFIX + name] = _portable(value)
    modules_to_save = sorted({m for name in classifier if (m := classifier_module(name))})
    common = Counter(ranks.values()).most_common(1)[0][0]
    others = {name: rank for name, rank in ranks.items() if rank != common}
    kind = type(model).__name__
    config = LoraConfig(
        r=common,
        lora_alpha=common,
        rank_pattern=dict(others),
        alpha_pattern=dict(others),
        target_modules=sorted(ranks),
        modules_to_save=modules_to_save or None,
        lora_dropout=0.0,
        bias="none",
        task_type=next((task for end, task in _TASKS.items() if kind.endswith(end)), None),
        base_model_name_or_path=base_model_name,
        inference_mode=True,
    )
    with _temporary_folder(Path(directory)) as folder:
        config.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return Path(directory)


def export_merged(adapted: AdaptedModel, trained: Trained, directory: Path | str) -> Path:
    """Write the model with the updates in its weights, using ``save_pretrained``.

    A bfloat16 or float16 model is written in float32, which represents its weights exactly and
    keeps updates that its dtype would round away.

    Args:
        adapted: a Hugging Face model with its adapters.
        trained: the trained state.
        directory: a new or empty folder; it is returned.

    Raises:
        InputError: the folder is not empty, or the model has no ``save_pretrained``.
    """
    low = any(p.dtype in LOW_PRECISION for p in adapted.model.parameters())
    merged = adapted.merge(
        trained.vector, trained.base, trained.constants, torch.float32 if low else None
    )
    save = getattr(merged, "save_pretrained", None)
    if save is None:
        raise InputError(f"export: {type(adapted.model).__name__} has no save_pretrained")
    with _temporary_folder(Path(directory)) as folder:
        save(str(folder))
    return Path(directory)


def _portable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous().clone()


@contextmanager
def _temporary_folder(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``directory`` on success, remove it on an error."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"export: {directory} exists and is not an empty folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
