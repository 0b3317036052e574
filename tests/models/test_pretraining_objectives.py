import dataclasses

import numpy as np
import pyarrow as pa
import pytest
import torch

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.places import Places
from trishul_ray.data.dataset import DatasetInfo, Split, write_split
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import (
    BOS,
    BUILTINS,
    CLS,
    EOS,
    FIRST_BYTE,
    FIRST_SENTINEL,
    MASK,
    SEP,
)
from trishul_ray.models.pretraining import (
    REMOVED_SPANS,
    byte_tokens,
    causal_batch,
    denoising_batch,
    ensure_pretrained,
    get_builtin,
    masked_batch,
    new_backbone,
    save_backbone,
    train_backbone,
)
from trishul_ray.runtime.random_streams import numpy_rng

TEXT_MODELS = {
    "bert-tiny": "sequence-classification",
    "t5-tiny": "seq2seq-lm",
    "llama-tiny": "causal-lm",
}
ROWS = np.arange(FIRST_BYTE, FIRST_BYTE + 128)[None] + np.arange(4)[:, None]  # [4, 128]


def short(name):
    builtin = BUILTINS[name]
    small = {"epochs": 3, "steps": 4, "batch_size": 4, "length": 64, "lr": 1e-2}
    return dataclasses.replace(builtin, recipe=dataclasses.replace(builtin.recipe, **small))


@pytest.fixture
def texts(tmp_path):
    """A split of 60 short texts."""
    lines = [f"the {a} {b} sat on the mat\n" * 3 for a in ("red", "old") for b in range(30)]
    info = DatasetInfo(name="mats", kind="text", fields=("head", "body"))
    columns = {
        "head": pa.array(["Ä"] * 60, pa.string()),
        "body": pa.array(lines, pa.string()),
        "label": np.zeros(60, np.int64),
    }
    write_split(tmp_path / "train.arrow", columns, info)
    return Split(tmp_path / "train.arrow")


def test_tokens_are_all_fields_of_all_rows_in_order(texts):
    tokens = byte_tokens(texts)
    ends = np.flatnonzero(tokens == EOS)
    assert len(ends) == 60
    first = bytes((tokens[: ends[0]] - FIRST_BYTE).astype(np.uint8))
    assert first.decode() == "Ä\n" + "the red 0 sat on the mat\n" * 3


def test_a_causal_row_is_its_own_label():
    batch = causal_batch(ROWS, numpy_rng(0, "test"))
    assert (batch["input_ids"][:, 0] == BOS).all()
    assert (batch["input_ids"][:, 1:] == ROWS).all()
    assert (batch["labels"] == batch["input_ids"]).all()


def test_masked_places_are_labelled_with_what_stood_there():
    batch = masked_batch(np.repeat(ROWS, 50, 0), numpy_rng(0, "test"))
    seen, labels = batch["input_ids"], batch["labels"]
    rows = np.repeat(ROWS, 50, 0)
    assert (seen[:, 0] == CLS).all() and (seen[:, -1] == SEP).all()
    inner, wanted = seen[:, 1:-1], labels[:, 1:-1]
    chosen = wanted != -100
    assert (wanted[chosen] == rows[chosen]).all() and (inner[~chosen] == rows[~chosen]).all()
    assert 0.12 < chosen.mean() < 0.22
    assert (inner[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.03)
    assert (inner[chosen] == rows[chosen]).mean() == pytest.approx(0.1, abs=0.03)
    assert (labels[:, [0, -1]] == -100).all()


def test_what_was_cut_out_can_be_put_back():
    for draw in range(8):
        batch = denoising_batch(ROWS, numpy_rng(draw, "test"))
        for given, target, row in zip(batch["input_ids"], batch["labels"], ROWS, strict=True):
            assert given[-1] == EOS and target[-1] == EOS
            marks = np.flatnonzero(target >= FIRST_SENTINEL)
            assert list(target[marks] - FIRST_SENTINEL) == list(range(REMOVED_SPANS))
            spans = {t: s for t, *s in np.split(target[:-1], marks[1:])}
            restored = [b for a in given[:-1] for b in spans.get(a, [a])]
            assert restored == list(row)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_learning_lowers_the_loss_and_repeats_bit_for_bit(name, texts):
    told = []
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = train_backbone(short(name), texts, on_epoch=lambda *step: told.append(step))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert [epoch for epoch, _ in told] == [1, 2, 3] and told[2][1] < 0.9 * told[0][1]
    torch.manual_seed(7)
    again = train_backbone(short(name), texts)
    for one, two in zip(first.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert getattr(first.config, "use_cache", True)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_pretrained_text_model_is_found_under_its_name(name, texts, tmp_path):
    builtin = BUILTINS[name]
    model = new_backbone(builtin)
    save_backbone(model, builtin, texts, builtin.folder(tmp_path))
    places = Places(tmp_path, None)
    kind = TEXT_MODELS[name]
    classes = 3 if kind == "sequence-classification" else None
    for where in (name, str(builtin.folder(tmp_path))):
        backbone = Backbone(ModelConfig(name=where), places)
        loaded = backbone.load(kind, classes, seed=1)
        stored = dict(model.named_parameters())
        both = [n for n, _ in loaded.named_parameters() if n in stored]
        assert len(both) >= len(stored) - 6  # all but the head of the masked model
        assert all(torch.equal(loaded.get_parameter(n), stored[n]) for n in both)
        want = Backbone(ModelConfig(name=name), places).tokenizer("ab")["input_ids"]
        assert backbone.tokenizer("ab")["input_ids"] == want


def test_another_dataset_makes_another_model():
    assert get_builtin("t5-tiny", "20newsgroups").hash == BUILTINS["t5-tiny"].hash
    other = get_builtin("t5-tiny", "mrqa")
    assert other.recipe.dataset == "mrqa" and other.hash != BUILTINS["t5-tiny"].hash
    assert len({builtin.hash for builtin in BUILTINS.values()}) == len(BUILTINS)


def test_rows_without_text_or_with_too_little_are_refused(texts, tmp_path):
    info = dataclasses.replace(texts.info, fields=())
    write_split(tmp_path / "none.arrow", {"label": np.zeros(2, np.int64)}, info)
    with pytest.raises(InputError, match="mats holds no text to pretrain on"):
        train_backbone(short("llama-tiny"), Split(tmp_path / "none.arrow"))
    columns = {"head": pa.array(["a"]), "body": pa.array(["b"]), "label": np.zeros(1, np.int64)}
    write_split(tmp_path / "few.arrow", columns, texts.info)
    with pytest.raises(InputError, match=r"mats holds 4 bytes of text: .* more than 64"):
        train_backbone(short("llama-tiny"), Split(tmp_path / "few.arrow"))


def test_where_the_text_is_not_to_be_had_one_line_says_so(tmp_path):
    backbone = Backbone(ModelConfig(name="llama-tiny"), Places(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"'llama-tiny' is not pretrained yet.*init=random") as e:
        ensure_pretrained(backbone, on_ray=False)
    assert "\n" not in str(e.value) and str(tmp_path / "nowhere") in str(e.value)
