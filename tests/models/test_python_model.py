"""Modules passed from Python: their content, and their calls."""

import pickle

import pytest
import torch
from torch import nn

from trishul_ray.adapters.targets import find_layers
from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import InputError
from trishul_ray.models.find_model import local_weights_source
from trishul_ray.models.python_model import (
    PythonBackbone,
    as_passed,
    content_of,
    pass_model,
    passed_model,
    remember,
)
from trishul_ray.models.tokenizers import byte_tokenizer


class Scaled(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale, self.layer = scale, nn.Linear(3, 2)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, pixels):
        return self.scale * self.layer(pixels)


def backbone_of(module, tmp_path, tokenizer=None):
    passed = pass_model(module, tokenizer)
    config = ModelConfig(name=passed.name, content=f"{passed.content} {passed.name}")
    return PythonBackbone(config, StoragePaths(tmp_path, None))


def test_the_content_is_what_the_module_computes():
    same = content_of(Scaled(), None)
    assert content_of(Scaled().train(), None) == same
    changed = Scaled()
    changed.layer.weight.data[0, 0] += 1
    others = [
        content_of(changed, None),
        content_of(Scaled(2.0), None),
        content_of(Scaled().bfloat16(), None),
        content_of(Scaled(), byte_tokenizer("bert")),
        content_of(nn.Sequential(nn.Linear(3, 2)), None),
    ]
    assert len({same, *others}) == len(others) + 1


def test_shapes_of_a_module_share_their_weights(tmp_path):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    module[1].weight = module[0].weight
    shapes = backbone_of(module, tmp_path).shapes
    assert [layer.name for layer in find_layers(shapes)] == ["2"]
    with pytest.raises(InputError, match="'0' shares its weight with another module"):
        find_layers(shapes, ["0"])


def test_module_is_kept_unchanged(tmp_path):
    module = Scaled()
    backbone = backbone_of(module, tmp_path)
    module.layer.weight.data.zero_()
    loaded = backbone.load_resident("image-classification", 2, seed=0)
    assert loaded.model.layer.weight.unique() == 0.5 and loaded.source.startswith("sha256:")
    again = pickle.loads(pickle.dumps(backbone))
    assert type(again) is PythonBackbone
    assert local_weights_source(again.config, again.paths) == loaded.source
    assert all(p.is_meta for p in backbone.shapes.parameters())
    with pytest.raises(InputError, match=r"set task\.kind=classification"):
        backbone.load("causal-lm", None, seed=0)
    other = ModelConfig(name="python:Scaled", content="sha256:0 python:Scaled")
    with pytest.raises(InputError, match="is not stored: pass the same model again"):
        passed_model(other)
    assert passed_model(ModelConfig(name="vit-digits")) is None
    assert remember(backbone.passed) is backbone.passed


class Named(nn.Module):
    def forward(self, input_ids, extra=None):
        return input_ids + 1


class Positional(nn.Module):
    def forward(self, ids, mask):
        return ids * mask


class Anything(nn.Module):
    def forward(self, **inputs):
        return inputs["attention_mask"]


@pytest.mark.parametrize(("kind", "want"), [(Named, 3), (Positional, 10), (Anything, 5)])
def test_inputs_are_passed_as_forward_takes_them(kind, want, tmp_path):
    backbone = backbone_of(kind(), tmp_path, byte_tokenizer("bert"))
    model = backbone.load("sequence-classification", 2, seed=0)
    inputs = {"input_ids": torch.tensor(2), "attention_mask": torch.tensor(5)}
    assert int(model(**inputs)) == want
    plain = as_passed(model)
    assert plain is model and not plain._forward_pre_hooks
    if kind is Positional:
        assert int(plain(torch.tensor(3), torch.tensor(4))) == 12
        with pytest.raises(TypeError):
            plain(**inputs)
