"""Load fast tokenizers without executing code of a checkpoint, and build the byte tokenizer."""

import hashlib
import json
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.builtin import (
    BOS,
    BUILTINS,
    CLS,
    EOS,
    MASK,
    PAD,
    SENTINELS,
    SEP,
    SPECIAL_TOKENS,
    UNK,
)
from trishul_ray.models.find_model import ModelFiles

#: Special tokens around one text, and around a pair, keyed by model type.
_TEMPLATES = {
    "bert": ("<cls> $A <sep>", "<cls> $A <sep> $B <sep>"),
    "t5": ("$A </s>", "$A </s> $B </s>"),
    "llama": ("<s> $A", "<s> $A $B"),
}


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer; without a padding token it pads with its end token.

    Raises:
        InputError: The model cannot be found, does not take text, or has no tokenizer files.
        CorruptFileError: A tokenizer file of a local folder is not readable.
    """
    name, location = files.name, files.location
    if name in BUILTINS:
        model_type = BUILTINS[name].model_type
        if model_type == "vit":
            raise InputError(f"model.name={name!r} classifies images and does not take text")
        return byte_tokenizer(model_type)
    if isinstance(location, Path):
        files.check()
        _check_file(location / "tokenizer.json")
    try:
        with files.reading():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                location, trust_remote_code=False, use_fast=True
            )
    except CorruptFileError as error:
        if isinstance(location, Path) and not list(location.glob("*token*")):
            raise _missing_files(name, location) from error
        raise
    if not tokenizer.is_fast:
        raise InputError(
            f"model.name={name!r}: {location} has no fast tokenizer (tokenizer.json); other "
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
    """Return the hex SHA-256 of everything that determines a tokenizer's output.

    Truncation and padding of earlier calls, which the tokenizer remembers, are excluded.
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
        raise CorruptFileError(f"{file}: not a tokenizer file, because it has no field 'model'")


def _is_empty(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has only special tokens.

    For a folder without tokenizer files, transformers creates such a tokenizer instead of raising.
    """
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    return not {piece for piece in tokenizer.get_vocab() if piece not in special} - {"▁"}


def _missing_files(name: str, location: Path | str) -> InputError:
    return InputError(
        f"model.name={name!r}: no tokenizer in {location}: tokenizer.json (or the vocabulary files "
        "of its family) must be next to config.json"
    )


def byte_tokenizer(model_type: str) -> PreTrainedTokenizerBase:
    """Build the byte-level tokenizer of ``bert``, ``t5`` or ``llama``, with its special tokens."""
    sentinels = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    # The visible character that byte-level tokenizers write for each byte.
    letters = bytes_to_unicode()
    pieces = [*SPECIAL_TOKENS, *(letters[byte] for byte in range(256)), *sentinels]
    fast = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    single, pair = _TEMPLATES[model_type]
    special = [(token, i) for i, token in enumerate(SPECIAL_TOKENS)]
    fast.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token=SPECIAL_TOKENS[PAD],
        eos_token=SPECIAL_TOKENS[EOS],
        unk_token=SPECIAL_TOKENS[UNK],
        cls_token=SPECIAL_TOKENS[CLS],
        sep_token=SPECIAL_TOKENS[SEP],
        bos_token=SPECIAL_TOKENS[BOS],
        mask_token=SPECIAL_TOKENS[MASK],
        additional_special_tokens=sentinels,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
