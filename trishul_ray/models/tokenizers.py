"""Load tokenizers: fast ones only, without running any code of a checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.builtin import BUILTINS, byte_tokenizer
from trishul_ray.models.lookup import READ_ERRORS, reading_from

if TYPE_CHECKING:
    from trishul_ray.models.backbone import Backbone


def load_tokenizer(backbone: "Backbone") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a backbone; see :attr:`Backbone.tokenizer`, also for the errors."""
    name = backbone.name
    if name in BUILTINS:
        model_type = BUILTINS[name].model_type
        if model_type == "vit":
            raise InputError(f"model.name={name!r} classifies images: it takes no text")
        return byte_tokenizer(model_type)
    location = backbone.location
    if isinstance(location, Path):
        _check_file(location / "tokenizer.json")
    with reading_from(location):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                location, trust_remote_code=False, use_fast=True
            )
        except (*READ_ERRORS, ImportError) as error:
            if isinstance(location, Path) and not list(location.glob("*token*")):
                raise _missing_files(name, location) from error
            raise backbone.load_error(error) from error
    if not tokenizer.is_fast:
        raise InputError(
            f"model.name={name!r}: {location} has no fast tokenizer (tokenizer.json), and other "
            "tokenizers are not supported"
        )
    if _is_empty(tokenizer):
        raise _missing_files(name, location)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(
                f"model.name={name!r}: its tokenizer has neither a padding nor an end token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hex SHA-256 of everything that determines a tokenizer's output.

    Truncation and padding of an earlier call, which the tokenizer remembers, are left out.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    rest = {
        "library": tokenizers.__version__,
        "special": {name: str(t) for name, t in tokenizer.special_tokens_map.items()},
        "sides": [tokenizer.padding_side, tokenizer.truncation_side],
        "split_special": bool(getattr(tokenizer, "split_special_tokens", False)),
    }
    return hashlib.sha256(json.dumps([state, rest], sort_keys=True).encode()).hexdigest()


def _check_file(file: Path) -> None:
    """Reject a file for which the compiled library would raise a bare Exception."""
    if not file.is_file():
        return
    try:
        has_model = "model" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise CorruptFileError(f"{file}: not a readable tokenizer file ({error})") from error
    if not has_model:
        raise CorruptFileError(f"{file}: not a tokenizer file: it has no field 'model'")


def _is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer knows special tokens only.

    For a folder without tokenizer files transformers makes such a tokenizer instead of raising.
    """
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    return not {piece for piece in tokenizer.get_vocab() if piece not in special} - {"▁"}


def _missing_files(name: str, location: Path | str) -> InputError:
    return InputError(
        f"model.name={name!r}: no tokenizer in {location}: tokenizer.json (or the vocabulary files "
        "of its family) must be beside config.json"
    )
