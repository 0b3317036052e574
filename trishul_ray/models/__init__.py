"""Backbones: by name, from a folder, a mirror or the hub; and the built-in tiny ones."""

from trishul_ray.models.backbone import load_backbone, meta_backbone
from trishul_ray.models.builtin import builtin_names
from trishul_ray.models.lookup import (
    Preprocessing,
    load_model_config,
    load_preprocessing,
    resolve_model,
)
from trishul_ray.models.shared_weights import Resident, resident_backbone
from trishul_ray.models.tokenizers import load_tokenizer, tokenizer_key

__all__ = [
    "Preprocessing",
    "Resident",
    "builtin_names",
    "load_backbone",
    "load_model_config",
    "load_preprocessing",
    "load_tokenizer",
    "meta_backbone",
    "resident_backbone",
    "resolve_model",
    "tokenizer_key",
]
