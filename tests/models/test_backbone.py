import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageClassification,
    ConvNextConfig,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    SiglipConfig,
    ViTConfig,
)

from trishul_ray.adapters.targets import find_layers
from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models import backbone as backbone_module
from trishul_ray.models.backbone import Backbone

ROOT = Path(__file__).parents[2]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 8, "patch_size": 2, "num_channels": 3,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """Write a small ViT classifier of 7 classes to a mirror, as ``owner/vit``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForImageClassification.from_config(ViTConfig(**SMALL, num_labels=7))
    model.save_pretrained(tmp_path / "hub/owner/vit")
    return tmp_path


def load(where: Path, classes: int, *, seed: int = 0, **fields):
    config = ModelConfig(name=fields.pop("name", "owner/vit"), **fields)
    return Backbone(config, StoragePaths(where, where / "hub")).load(
        "image-classification", classes, seed=seed
    )


def same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_known_architectures_need_no_network(tmp_path):
    counts = {
        ("google/vit-base-patch16-224-in21k", 100): 85_798_656 + 76_900,
        ("google-t5/t5-base", None): 222_903_552,
        ("meta-llama/Llama-3.2-1B", None): 1_235_814_400,
        ("FacebookAI/roberta-base", 2): 124_055_040 + 768 * 768 + 768 + 2 * 768 + 2,
        ("FacebookAI/roberta-large", 2): 354_310_144 + 1024 * 1024 + 1024 + 2 * 1024 + 2,
        ("sentence-transformers/all-MiniLM-L6-v2", 2): 22_713_216 + 2 * 384 + 2,
    }
    for (name, classes), want in counts.items():
        model = Backbone(ModelConfig(name=name), StoragePaths(tmp_path, None)).meta_model(
            None, classes
        )
        assert sum(p.numel() for p in model.parameters()) == want
        assert {p.device.type for p in model.parameters()} == {"meta"}
    vit = ModelConfig(name="google/vit-base-patch16-224-in21k")
    images = Backbone(vit, StoragePaths(tmp_path, None)).preprocessing
    assert (images.image_size, images.channels, images.mean) == (224, 3, (0.5, 0.5, 0.5))


def test_another_image_size_interpolates_positions_as_transformers_does(saved):
    native, resized = load(saved, 7), load(saved, 7, image_size=12)
    image = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = native(pixel_values=image, interpolate_pos_encoding=True).logits
        got = resized(pixel_values=image).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert resized.config.image_size == 12
    config = ModelConfig(name="owner/vit", image_size=12)
    assert Backbone(config, StoragePaths(saved, saved / "hub")).preprocessing.image_size == 12


def test_unsupported_image_size_is_rejected(saved):
    with pytest.raises(InputError, match="image_size=13 is not a multiple of the model's patch, 2"):
        load(saved, 7, image_size=13)
    tiny = ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32)
    AutoModelForImageClassification.from_config(tiny).save_pretrained(saved / "hub/owner/conv")
    with pytest.raises(InputError, match=r"image_size=64: this convnext model takes only .* 32"):
        load(saved, 7, name="owner/conv", image_size=64)


def test_image_size_of_a_vision_part_is_read(tmp_path):
    small = {**SMALL, "image_size": 16, "patch_size": 4, "num_channels": 1}
    SiglipConfig(vision_config=small, text_config={"vocab_size": 40}).save_pretrained(tmp_path)

    def backbone(size):
        config = ModelConfig(name=str(tmp_path), init="random", image_size=size)
        return Backbone(config, StoragePaths(tmp_path, None))

    for size in (None, 16):
        images = backbone(size).preprocessing
        assert (images.image_size, images.channels) == (16, 1)
    with pytest.raises(InputError, match=r"image_size=32: this siglip.* takes only images of 16"):
        backbone(32).load("image-classification", 3, seed=0)


def test_shared_weights_are_known_without_weights(tmp_path):
    LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    backbone = Backbone(ModelConfig(name=str(tmp_path)), StoragePaths(tmp_path, None))
    with pytest.raises(InputError, match="'lm_head' shares its weight"):
        find_layers(backbone.shapes, ["lm_head"])


def test_normalization_is_read_where_it_is_given(saved):
    config = ModelConfig(name="owner/vit")
    file = saved / "hub/owner/vit/preprocessor_config.json"
    read = lambda: Backbone(config, StoragePaths(saved, saved / "hub")).preprocessing  # noqa: E731
    assert read().mean is None and read().image_size == 8 and read().channels == 3
    file.write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}))
    assert read().mean == (0.1, 0.2, 0.3) and read().std == (1.0, 2.0, 3.0)
    file.write_text(json.dumps({"do_normalize": False, "image_mean": [0.1] * 3}))
    assert read().mean == (0.0,) * 3 and read().std == (1.0,) * 3
    file.write_text("{")
    with pytest.raises(CorruptFileError, match=r"preprocessor_config.json: not a readable"):
        read()


@pytest.mark.parametrize("damage", ["gone", "pickle", "config"])
def test_unreadable_checkpoints_are_named(saved, damage):
    folder = saved / "hub/owner/vit"
    file = folder / "model.safetensors"
    if damage == "pickle":
        torch.save(load_file(file), folder / "pytorch_model.bin")
    if damage in ("gone", "pickle"):
        file.unlink()
    if damage == "config":
        (folder / "config.json").write_text("{ not json")
    with pytest.raises(CorruptFileError, match=r"model.name='owner/vit': cannot load") as caught:
        load(saved, 7)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_git_lfs_pointer_is_named(saved, file):
    (saved / "hub/owner/vit" / file).write_text(LFS)
    with pytest.raises(CorruptFileError, match=f"{file} is a Git LFS pointer.* `git lfs pull`"):
        load(saved, 7)


def test_pickle_is_converted_by_the_suggested_line(saved):
    folder, right = saved / "hub/owner/vit", load(saved, 7)
    torch.save(right.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CorruptFileError, match=r"pytorch_model.bin is not read, .*may run"
    ) as error:
        load(saved, 7)
    code = re.search(r'python -c "(.*)"$', str(error.value))[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(load(saved, 7), right)


@pytest.mark.parametrize("how", ["gptq", "awq", "bitsandbytes"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_quantized_checkpoint_is_rejected_early(saved, how, init):
    file = saved / "hub/owner/vit/config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": how}}
    file.write_text(json.dumps(config))
    (file.parent / "model.safetensors").unlink()
    backbone = Backbone(
        ModelConfig(name="owner/vit", init=init), StoragePaths(saved, saved / "hub")
    )
    said = rf"'owner/vit': its weights are quantized \({how}\): .*unquantized weights.*quantize"
    with pytest.raises(InputError, match=said):
        backbone.preprocessing  # noqa: B018


def test_code_of_a_checkpoint_is_never_run(saved):
    folder = saved / "hub/owner/vit"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(saved / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(InputError):
        load(saved, 7)
    assert not (saved / "ran").exists()


def test_unknown_names_are_rejected(saved):
    with pytest.raises(InputError, match=r"'vit-digit' is neither .*did you mean 'vit-digits'"):
        load(saved, 10, name="vit-digit")
    with pytest.raises(InputError, match=r"'vit-digits' is not pretrained yet .*trishul run"):
        load(saved, 10, name="vit-digits")
    (saved / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no config\.json"):
        load(saved, 10, name=str(saved / "empty"))
    (saved / "hub/owner/none").mkdir()
    with pytest.raises(InputError, match=r"mirror folder .*owner/none has no config\.json"):
        load(saved, 10, name="owner/none")


def test_backbone_is_resolved_once(saved, monkeypatch):
    backbone = Backbone(ModelConfig(name="owner/vit"), StoragePaths(saved, saved / "hub"))
    searched = []
    find_model = backbone_module.find_model
    monkeypatch.setattr(
        backbone_module, "find_model", lambda *a: searched.append(a) or find_model(*a)
    )
    before = backbone.architecture.to_dict()
    assert backbone.family == "image-classification" and backbone.preprocessing.image_size == 8
    assert backbone.meta_model(None, 3).config.num_labels == 3
    assert backbone.load("image-classification", 4, seed=0).config.num_labels == 4
    # Changes for a run's task do not affect the cached architecture.
    assert backbone.architecture.to_dict() == before and backbone.architecture.num_labels == 7
    assert len(searched) == 1
    stored = pickle.dumps(backbone)
    again = pickle.loads(stored)
    assert vars(again) == {"config": backbone.config, "paths": backbone.paths}
    assert len(stored) < 1000 and again.location == backbone.location


OFFLINE = """
import sys
from pathlib import Path
from trishul_ray.errors import InputError
from trishul_ray.config.fields import ModelConfig
from trishul_ray.models.backbone import Backbone
from trishul_ray.config.paths import StoragePaths
try:
    backbone = Backbone(ModelConfig(name="nobody/vit"), StoragePaths(Path(sys.argv[1]), None))
    backbone.load("image-classification", 2, seed=0)
except InputError as error:
    print(error)
"""


def test_missing_model_without_network_is_one_line(tmp_path):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)],
        env=env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    said = done.stdout.strip()
    assert said.startswith("model.name='nobody/vit' not found: no mirror is set (storage.hub")
    assert "; set TRISHUL_HUB to a folder with nobody/vit/config.json and its weights, " in said
    assert "\n" not in said and done.stderr.strip() == ""


HUB = os.environ.get("TRISHUL_HUB", "")
NAME = "trishul/vit-cifar10-128x6"


@pytest.mark.skipif(
    not HUB or not (Path(HUB) / NAME).is_dir(), reason=f"TRISHUL_HUB is not set or lacks {NAME}"
)
def test_real_pretrained_vit(tmp_path):
    backbone = Backbone(ModelConfig(name=NAME), StoragePaths(tmp_path, Path(HUB)))
    model = backbone.load("image-classification", 100, seed=0)
    stored = load_file(Path(HUB) / NAME / "model.safetensors")
    assert model.classifier.weight.shape == (100, 128)
    assert torch.equal(model.vit.embeddings.cls_token, stored["vit.embeddings.cls_token"])
    images = backbone.preprocessing
    assert images.mean == (0.4914, 0.4822, 0.4465) and images.image_size == 32
    assert backbone.architecture.num_labels == 10


@pytest.fixture
def dinov2(tmp_path):
    """Write a small DINOv2 with the published patch and image size, 14 and 518."""
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2,
        image_size=518, patch_size=14,
    )  # fmt: skip
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    return str(tmp_path / "dino")


def test_dinov2_takes_images_of_the_size_asked_for(dinov2, tmp_path):
    """Its code interpolates the positions in every call; here only once, at loading."""
    paths = StoragePaths(tmp_path, None)
    pixels = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    own = Backbone(ModelConfig(name=dinov2), paths).load("image-classification", 3, seed=0)
    asked = Backbone(ModelConfig(name=dinov2, image_size=56), paths)
    model = asked.load("image-classification", 3, seed=0)
    assert asked.preprocessing.image_size == 56
    assert model.dinov2.embeddings.position_embeddings.shape == (1, 17, 32)
    with torch.inference_mode():
        assert torch.equal(model(pixels).logits, own(pixels).logits)
    assert len(find_layers(model)) == 4  # query and value of 2 blocks
    with pytest.raises(
        InputError, match=r"image_size=32 is not a multiple of the model's patch, 14"
    ):
        Backbone(ModelConfig(name=dinov2, image_size=32), paths).load(
            "image-classification", 3, seed=0
        )
