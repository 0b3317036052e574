"""The narrowed last block gives the outputs and gradients of the whole block."""

import copy

import pytest
import torch

from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import find_layers
from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import configure_compute
from trishul_ray.models.last_block import narrow_last_block

CLASSIFIERS = {
    "vit-digits": ("image-classification", "vit.layers"),
    "bert-tiny": ("sequence-classification", "bert.encoder.layer"),
    "llama-tiny": ("causal-lm", "model.layers"),
}


def models(name, tmp_path, **fields):
    """Create a model as in a run, a copy that computes everything, and its last block."""
    kind, blocks = CLASSIFIERS[name]
    config = ModelConfig(name=name, init="random", **fields)
    model = Backbone(config, StoragePaths(tmp_path, None)).load(kind, 4, seed=0)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and scales other than 0 and 1
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    whole = copy.deepcopy(model)
    configure_compute(model, config)
    configure_compute(whole, config)
    del whole.get_submodule(blocks)[-1].forward
    return model, whole, model.get_submodule(blocks)[-1]


def inputs(name):
    generator = torch.Generator().manual_seed(2)
    if name == "vit-digits":
        return {"pixel_values": torch.randn(3, 1, 8, 8, generator=generator)}
    tokens = torch.randint(7, 263, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    if name == "bert-tiny":
        mask[1, 8:] = 0
        return {"input_ids": tokens, "attention_mask": mask}
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    masks = {"attention_mask": mask, "position_ids": positions}
    return {"input_ids": tokens, **masks, "logits_to_keep": 1, "use_cache": False}


def logits_and_gradient(model, given):
    adapted = AdaptedModel(
        model, {s.name: LoRA(2) for s in find_layers(model)}, seed=0, train_head=True
    )
    vector = adapted.initial()
    vector += 0.1 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
    grad = torch.zeros_like(vector)
    adapted.bind(Trained(vector), grad)
    logits = adapted.forward(**given).logits
    logits.float().square().mean().backward()
    adapted.detach()
    return logits.detach(), grad


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("unmasked", [False, True])
def test_logits_and_gradients_equal_whole_block(name, unmasked, tmp_path):
    given = inputs(name)
    if unmasked:
        given.pop("attention_mask", None)
    model, whole, block = models(name, tmp_path)
    tokens = []
    block.register_forward_hook(lambda _, __, out: tokens.append(out.shape[1]))
    got, want = logits_and_gradient(model, given), logits_and_gradient(whole, given)
    assert tokens == [1]
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


def test_decoder_computes_all_requested_outputs(tmp_path):
    model, whole, _ = models("llama-tiny", tmp_path)
    given = inputs("llama-tiny")
    with torch.inference_mode():
        narrow = model(**given).logits
        for more in ({"logits_to_keep": 3}, {"logits_to_keep": 0}, {"use_cache": True}):
            got, want = model(**given | more), whole(**given | more)
            assert torch.equal(got.logits, want.logits)
        assert torch.equal(model(**given).logits, narrow)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_dropout_and_recomputed_activations_take_the_whole_block(name, tmp_path):
    model, _, block = models(name, tmp_path, gradient_checkpointing=True)
    tokens = []
    block.register_forward_hook(lambda _, __, out: tokens.append(out.shape[1]))
    block.train()
    model(**inputs(name))
    assert tokens[0] > 1
    assert block.forward.recomputing is not None


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_merged_copy_computes_everything(name, tmp_path):
    model, _, _ = models(name, tmp_path)
    adapted = AdaptedModel(model, {}, seed=0, train_head=True)
    merged = adapted.merge(Trained(adapted.initial()))
    given = inputs(name) | {"output_hidden_states": True}
    states = merged(**given).hidden_states
    assert {state.shape[1] for state in states} == {states[0].shape[1]} and states[0].shape[1] > 1
    assert "forward" in vars(model.get_submodule(CLASSIFIERS[name][1])[-1])


def test_other_models_stay_unchanged():
    model = torch.nn.Linear(2, 2)
    narrow_last_block(model)
    assert "forward" not in vars(model)
