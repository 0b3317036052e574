import dataclasses
from functools import partial

import pytest
import torch

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS, VIT_DIGITS
from trishul_ray.models.pretraining import (
    ensure_pretrained,
    image_batches,
    needs_pretraining,
    new_backbone,
    save_backbone,
    train_backbone,
)
from trishul_ray.storage.integrity import make_once

SHORT = dataclasses.replace(VIT_DIGITS, recipe=dataclasses.replace(VIT_DIGITS.recipe, epochs=2))


@pytest.fixture
def digits(tmp_path):
    return prepare("digits", cache=tmp_path, hub=None)


def weights(model: torch.nn.Module) -> bytes:
    return b"".join(t.numpy().tobytes() for t in model.state_dict().values())


def accuracy(model: torch.nn.Module, split) -> float:
    right = []
    for batch in image_batches(VIT_DIGITS, split, 0):
        with torch.inference_mode():
            right.append(model(batch["pixel_values"]).logits.argmax(1) == batch["labels"])
    return float(torch.cat(right).float().mean())


def test_training_is_repeatable_and_keeps_globals(digits):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = train_backbone(SHORT, digits.split("pretrain"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(5)
    torch.set_num_threads(2)
    try:
        assert weights(train_backbone(SHORT, digits.split("pretrain"))) == weights(first)
    finally:
        torch.set_num_threads(threads)


def test_the_recipe_leaves_room_to_improve(digits):
    model = train_backbone(VIT_DIGITS, digits.split("pretrain"))
    assert 0.75 <= accuracy(model, digits.test) <= 0.88


def test_vit_tiny_reads_enlarged_digits(digits):
    vit = BUILTINS["vit-tiny"]
    short = dataclasses.replace(vit, recipe=dataclasses.replace(vit.recipe, epochs=1))
    model = train_backbone(short, digits.split("pretrain"))
    assert model(torch.zeros(1, 3, 64, 64)).logits.shape == (1, 10)


def test_saved_weights_load_back(digits, tmp_path):
    model = new_backbone(VIT_DIGITS)
    save = partial(save_backbone, model, VIT_DIGITS, digits.train)
    folder = make_once(tmp_path, VIT_DIGITS.place, save)
    save_backbone(model, VIT_DIGITS, digits.train, tmp_path / "again")
    for file in folder.glob("[!.]*"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    backbone = Backbone(ModelConfig(name="vit-digits"), StoragePaths(tmp_path, None))
    loaded = backbone.load("image-classification", 10, seed=0)
    assert weights(loaded) == weights(model)
    images = backbone.preprocessing
    assert images.image_size == 8 and images.channels == 1
    assert (images.mean, images.std) == (digits.info.mean, digits.info.std)


def test_folder_name_depends_on_the_recipe():
    other = dataclasses.replace(
        VIT_DIGITS, architecture={**VIT_DIGITS.architecture, "patch_size": 4}
    )
    assert len({VIT_DIGITS.hash, SHORT.hash, other.hash}) == 3


def test_random_backbones_need_no_pretraining(tmp_path):
    paths = StoragePaths(tmp_path, None)
    backbone = Backbone(ModelConfig(name="vit-digits", init="random"), paths)
    ensure_pretrained(backbone)
    ensure_pretrained(Backbone(ModelConfig(name="owner/model"), paths))
    assert not list(tmp_path.iterdir())
    model = backbone.load("image-classification", 10, seed=0)
    assert weights(model) == weights(new_backbone(VIT_DIGITS))


def test_text_model_has_no_pretrained_weights(tmp_path):
    backbone = Backbone(ModelConfig(name="bert-tiny"), StoragePaths(tmp_path, None))
    with pytest.raises(InputError, match=r"'bert-tiny' has no pretrained weights; set model.init"):
        ensure_pretrained(backbone, on_ray=False)


@pytest.mark.slow
def test_ray_train_gives_the_same_bytes(digits, tmp_path, monkeypatch, local_ray):
    monkeypatch.setitem(BUILTINS, SHORT.name, SHORT)
    backbone = Backbone(ModelConfig(name=SHORT.name), StoragePaths(tmp_path, None))
    ensure_pretrained(backbone)
    loaded = backbone.load("image-classification", 10, seed=0)
    assert weights(loaded) == weights(train_backbone(SHORT, digits.split("pretrain")))
    assert not needs_pretraining(backbone)
    assert not list(tmp_path.glob("train-*"))


@pytest.mark.slow
def test_pretraining_precedes_the_client_actors(trishul, small_words, tmp_path):
    words = [word for word in small_words if not word.startswith("model.init=")]
    run = trishul("run", *words, "federation.rounds=1", TRISHUL_CACHE=str(tmp_path / "empty"))
    run.wait_for("pretraining vit-digits", 300)
    code, _, errors = run.end(300)
    assert code == 0, errors
