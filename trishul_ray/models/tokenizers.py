"""Tokenizers by the backbone's name: fast ones only, no code from a checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.builtin import BUILTINS, byte_tokenizer
from trishul_ray.models.lookup import not_found, quiet_transformers, resolve_model

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig


def load_tokenizer(
    config: "ModelConfig", *, hub: Path | None, cache: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer of ``config.name``; one without a padding token pads with its end token.

    Args:
        config: names the model: a built-in (bytes), a folder, or a name of the mirror or hub.
        hub: a local mirror.
        cache: folder of built-in backbones.

    Raises:
        InputError: the model is not found, takes no text, or has no tokenizer files.
        CorruptFileError: a tokenizer file of a local folder is not readable.
    """
    name = config.name
    if name in BUILTINS:
        family = BUILTINS[name].family
        if family == "vit":
            raise InputError(f"model.name={name!r} classifies images: it takes no text")
        return byte_tokenizer(family)
    where = resolve_model(config, hub=hub, cache=cache)
    if isinstance(where, Path):
        _check_file(where / "tokenizer.json")
    with quiet_transformers():
        try:
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                where, trust_remote_code=False, use_fast=True
            )
        except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
            if isinstance(where, Path) and not list(where.glob("*token*")):
                raise _without_files(name, where) from error
            raise not_found(config, where, hub, error) from error
    if not found.is_fast:
        raise InputError(
            f"model.name={name!r}: {where} has no fast tokenizer (tokenizer.json), and no other "
            "kind is taken"
        )
    if _is_empty(found):
        raise _without_files(name, where)
    if found.pad_token is None:
        if found.eos_token is None:
            raise InputError(
                f"model.name={name!r}: its tokenizer has neither a padding nor an end token"
            )
        found.pad_token = found.eos_token
    return found


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 of everything that decides a tokenizer's output.

    Not of the truncation and padding of an earlier call, which the tokenizer remembers.
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
    """Refuse a file that the compiled library would refuse with a bare Exception."""
    if not file.is_file():
        return
    try:
        whole = "model" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise CorruptFileError(f"{file}: not a readable tokenizer file ({error})") from error
    if not whole:
        raise CorruptFileError(f"{file}: not a tokenizer file: it has no field 'model'")


def _is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it knows nothing but special tokens.

    What transformers makes of a folder without tokenizer files: no error, and every word unknown.
    """
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    return not {piece for piece in tokenizer.get_vocab() if piece not in special} - {"▁"}


def _without_files(name: str, where: Path | str) -> InputError:
    return InputError(
        f"model.name={name!r}: no tokenizer in {where}: tokenizer.json (or the vocabulary files "
        "of its family) must lie beside config.json"
    )
