"""Taking the result away: as a PEFT LoRA adapter, or merged into the whole model.

An update ``sum_i s_i B_i H_i A_i`` is a LoRA pair of rank h r: B-side ``[B_i s_i H_i]``, A-side
``[A_i]``, and PEFT's alpha equal to the rank makes its scale 1. Layers may differ in rank; one
without heads is left out. Folders are written beside their place and renamed into it.
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
from torch import Tensor, nn

from trishul_ray.adapters.base import LOW_PRECISION
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import head_module, head_parameters
from trishul_ray.errors import InputError

#: What PEFT prefixes to a base model's module paths.
_PEFT_PREFIX = "base_model.model."

#: PEFT's task by the end of the model's class name; others are loaded as a plain PeftModel.
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
        directory: must not exist, or be empty.
        base_model_name: name or path of the backbone, noted in the adapter's config.

    Returns:
        The folder.

    Raises:
        InputError: the folder is not empty, no layer is adapted, or the method moved the frozen
            weights themselves, which an adapter cannot hold.
    """
    if trained.base:
        raise InputError(
            "export: this method moved the frozen weights, which a LoRA adapter cannot hold; "
            "write the merged model instead (--merged)"
        )
    vector = trained.vector
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for name, adapter, params in adapted.states(vector):
        side_B, side_A = adapter.lora_factors(
            trained.constants.get(name, adapted.constants(name)), params
        )
        ranks[name] = side_A.shape[0]
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = _portable(side_A)
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = _portable(side_B)
    if not ranks:
        raise InputError("export: no layer is adapted, so there is no adapter to write")
    # An untrained head is written too: a backbone loaded elsewhere may have drawn another one.
    head = {name: adapted.model.get_parameter(name) for name in head_parameters(adapted.model)}
    for name, value in (head | adapted.head(vector)).items():
        tensors[_PEFT_PREFIX + name] = _portable(value)
    head_modules = sorted({module for name in head if (module := head_module(name))})
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    config = LoraConfig(
        r=usual,
        lora_alpha=usual,
        rank_pattern=dict(others),
        alpha_pattern=dict(others),
        target_modules=sorted(ranks),
        modules_to_save=head_modules or None,
        lora_dropout=0.0,
        bias="none",
        task_type=_task_of(adapted.model),
        base_model_name_or_path=base_model_name,
        inference_mode=True,
    )
    with _placed(Path(directory)) as folder:
        config.save_pretrained(str(folder))
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return Path(directory)


def export_merged(adapted: AdaptedModel, trained: Trained, directory: Path | str) -> Path:
    """Write the whole model with the updates in its weights, by ``save_pretrained``.

    A model in bfloat16 or float16 is written in float32, which holds its weights exactly and
    updates that its own dtype would round away.

    Args:
        adapted: the model with its adapters; a Hugging Face model.
        trained: the trained state.
        directory: must not exist, or be empty.

    Returns:
        The folder.

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
    with _placed(Path(directory)) as folder:
        save(str(folder))
    return Path(directory)


def _portable(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous().clone()


def _task_of(model: nn.Module) -> str | None:
    name = type(model).__name__
    return next((task for end, task in _TASKS.items() if name.endswith(end)), None)


@contextmanager
def _placed(directory: Path) -> Iterator[Path]:
    """A folder to write into, renamed to ``directory`` if all goes well and removed if not."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"export: {directory} exists and is not an empty folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    beside.mkdir()
    try:
        yield beside
        os.replace(beside, directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
