"""The tokenizer of the built-in text models: one token a byte of UTF-8, made here, without files.

Legend: ids 0..6 are the marks below, 7..262 the bytes, from 263 on the sentinels of T5.
"""

from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS, UNK, CLS, SEP, BOS, MASK = range(7)
_MARKS = ("<pad>", "</s>", "<unk>", "<cls>", "<sep>", "<s>", "<mask>")
#: Id of byte 0.
FIRST_BYTE = len(_MARKS)
#: Marks of cut out spans, as T5's, in ascending ids.
SENTINELS = 16
FIRST_SENTINEL = FIRST_BYTE + 256
VOCABULARY = FIRST_SENTINEL + SENTINELS

#: What stands around one text, and around a pair, by family.
_TEMPLATES = {
    "bert": ("<cls> $A <sep>", "<cls> $A <sep> $B <sep>"),
    "t5": ("$A </s>", "$A </s> $B </s>"),
    "llama": ("<s> $A", "<s> $A $B"),
}


def _letters() -> list[str]:
    """The visible character by which byte-level tokenizers write each byte, in byte order.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 and on (Radford
    et al. 2019).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def byte_tokenizer(family: str) -> "PreTrainedTokenizerBase":
    """The byte-level tokenizer with the marks a family puts around its texts.

    Args:
        family: ``bert``, ``t5`` or ``llama``.
    """
    sentinels = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    pieces = [*_MARKS, *_letters(), *sentinels]
    fast = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = ByteLevelDecoder()
    single, pair = _TEMPLATES[family]
    marks = [(mark, i) for i, mark in enumerate(_MARKS)]
    fast.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token=_MARKS[PAD],
        eos_token=_MARKS[EOS],
        unk_token=_MARKS[UNK],
        cls_token=_MARKS[CLS],
        sep_token=_MARKS[SEP],
        bos_token=_MARKS[BOS],
        mask_token=_MARKS[MASK],
        additional_special_tokens=sentinels,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
