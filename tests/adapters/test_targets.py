from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trishul_ray.adapters.targets import block_of, classifier_parameters, find_layers
from trishul_ray.errors import InputError

EXPECTED = {
    "vit": (["vit.layers.{}.attention.q_proj", "vit.layers.{}.attention.v_proj"], 3),
    "bert": ([f"bert.encoder.layer.{{}}.attention.self.{n}" for n in ("query", "value")], 2),
    "roberta": ([f"roberta.encoder.layer.{{}}.attention.self.{n}" for n in ("query", "value")], 2),
    "llama": ([f"model.layers.{{}}.self_attn.{n}_proj" for n in "qv"], 2),
    "t5": ([f"encoder.block.{{}}.layer.0.SelfAttention.{n}" for n in "qv"], 2),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_default_targets_are_query_and_value(backbone, name):
    patterns, blocks = EXPECTED[name]
    names = [p.format(i) for i in range(blocks) for p in patterns]
    if name == "t5":
        names += [n.replace("encoder", "decoder") for n in names]
    layers = find_layers(backbone(name))
    assert [layer.name for layer in layers] == names


def test_widths_are_the_shape_of_the_weight(backbone):
    model = backbone("llama")
    layers = find_layers(model)
    for layer in layers:
        assert model.get_submodule(layer.name).weight.shape == (layer.d_out, layer.d_in)
    assert (layers[1].d_out, layers[1].d_in) == (12, 24)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("vit", ["query", "value"]),
        ("vit", ["attention.query", "v_proj"]),
        ("bert", ["q_proj", "v_proj"]),
        ("bert", ["self.query", "self.value"]),
    ],
)
def test_names_of_other_releases_find_the_same_layers(backbone, family, targets):
    model = backbone(family)
    assert find_layers(model, targets) == find_layers(model)


def test_a_full_path_names_one_layer(backbone):
    path = "vit.layers.1.mlp.fc1"
    assert [layer.name for layer in find_layers(backbone("vit"), [path])] == [path]


def test_cross_attention_needs_its_full_name(backbone):
    model = backbone("t5")
    assert not any("EncDec" in layer.name for layer in find_layers(model))
    cross = find_layers(model, ["EncDecAttention.q"])
    assert [layer.name for layer in cross] == [
        f"decoder.block.{i}.layer.1.EncDecAttention.q" for i in (0, 1)
    ]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("encoder.block.11.layer.0.SelfAttention.q", "encoder.block.11"),
        ("vit.layers.3.attention.q_proj", "vit.layers.3"),
        ("classifier", "classifier"),
    ],
)
def test_blocks(name, block):
    assert block_of(name) == block


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("vit", ["quary"], "no module is named 'quary'; nearest: q"),
        ("llama", ["q_porj"], "nearest: .*q_proj"),
        ("t5", ["SelfAttention.Q"], r"nearest: .*SelfAttention\.q"),
        ("vit", ["zzz"], "nearest: q_proj, attention.q_proj"),
        ("vit", ["attention"], "'vit.layers.0.attention' is a ViTAttention; only nn.Linear"),
        ("vit", [], "adapter.targets is empty"),
    ],
)
def test_targets_that_match_nothing_adaptable_raise(backbone, family, targets, message):
    with pytest.raises(InputError, match=message):
        find_layers(backbone(family), targets)


def test_a_model_without_query_and_value_needs_targets():
    model = nn.Sequential(OrderedDict(query_key_value=nn.Linear(3, 3), up=nn.Linear(3, 3)))
    model.config = SimpleNamespace(model_type="nobodys")
    with pytest.raises(InputError, match=r"'nobodys'; allowed: all-linear, .*: query_.*, up"):
        find_layers(model)
    assert [layer.name for layer in find_layers(model, ["up"])] == ["up"]


@pytest.mark.parametrize("family", ["bert", "vit", "t5", "llama", "llama-classifier"])
def test_all_linear_layers_are_inside_blocks(backbone, family):
    model = backbone(family)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    expected = [name for name in linear if block_of(name) != name]
    assert [layer.name for layer in find_layers(model, ["all-linear"])] == expected


def test_a_target_that_shares_its_weight_is_rejected(backbone):
    model = backbone("llama")
    head = [layer.name for layer in find_layers(model, ["lm_head", "q_proj"])]
    assert head[-1] == "lm_head"
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(InputError, match="'lm_head' shares its weight with another module"):
        find_layers(model, ["q_proj", "lm_head"])
    inside = model.model.layers
    inside[1].mlp.up_proj.weight = inside[0].mlp.up_proj.weight
    with pytest.raises(InputError, match=r"'model.layers.0.mlp.up_proj' shares its weight"):
        find_layers(model, ["up_proj"])
    assert len(find_layers(model, ["all-linear"])) == 2 * 7 - 2


def test_custom_model_adapts_all_linear_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            self.attention = nn.MultiheadAttention(3, 1)  # it reads the weight of an inner layer
            self.classifier = nn.Linear(3, 2)

    assert [layer.name for layer in find_layers(Net())] == ["blocks.0", "blocks.1"]
    with pytest.raises(InputError, match="Sequential has no linear layer to adapt"):
        find_layers(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("vit", ["classifier.weight", "classifier.bias"]),
        (
            "bert",
            [f"{m}.{p}" for m in ("bert.pooler.dense", "classifier") for p in ("weight", "bias")],
        ),
        (
            "roberta",
            [f"classifier.{m}.{p}" for m in ("dense", "out_proj") for p in ("weight", "bias")],
        ),
        ("llama-classifier", ["score.weight"]),
        ("llama", []),
        ("t5", []),
    ],
)
def test_classifier_parameters(backbone, family, names):
    assert classifier_parameters(backbone(family)) == names


def test_the_meta_device_is_enough(backbone):
    model = backbone("vit").to("meta")
    assert next(model.parameters()).device == torch.device("meta")
    assert len(find_layers(model)) == 6
