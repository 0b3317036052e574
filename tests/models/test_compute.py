import copy
import itertools

import pytest
import torch
from transformers import ConvNextConfig, ConvNextForImageClassification
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import find_layers
from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import InputError
from trishul_ray.models.attention import ATTENTION, recompute_activations, unread_mask
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import cast, configure_compute

KINDS = {
    "vit-digits": "image-classification",
    "bert-tiny": "sequence-classification",
    "t5-tiny": "seq2seq-lm",
    "llama-tiny": "causal-lm",
}


def backbone(name, tmp_path, **fields):
    config = ModelConfig(name=name, init="random", **fields)
    classes = 4 if KINDS[name].endswith("classification") else None
    model = Backbone(config, StoragePaths(tmp_path, None)).load(KINDS[name], classes, seed=0)
    if fields.get("precision") == "bf16":
        cast(model, torch.bfloat16)
    configure_compute(model, config)
    return model


def inputs(name):
    generator = torch.Generator().manual_seed(2)
    if name == "vit-digits":
        return {"pixel_values": torch.randn(3, 1, 8, 8, generator=generator)}
    tokens = torch.randint(7, 263, (3, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    more = {"decoder_input_ids": tokens[:, :5]} if name == "t5-tiny" else {}
    return {"input_ids": tokens, "attention_mask": mask, **more}


def adapt(model, dropout=0.0):
    adapters = {spec.name: LoRA(2, dropout=dropout) for spec in find_layers(model)}
    return AdaptedModel(model, adapters, seed=0, train_head=True)


def gradient(adapted, given, saved=None):
    """Return the gradient of a loss in all trainables; store saved tensors in ``saved``."""
    vector = adapted.initial()
    vector += 0.1 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
    grad = torch.zeros_like(vector)
    adapted.bind(Trained(vector), grad)

    def note(tensor):
        if saved is not None:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = adapted.forward(**given).logits.float().square().mean()
    loss.backward()
    adapted.unbind()
    return grad


@pytest.mark.parametrize("name", KINDS)
def test_recomputed_activations_give_the_same_gradient(name, tmp_path):
    given = inputs(name)
    kept, recomputed = [], []
    want = gradient(adapt(backbone(name, tmp_path)), given, kept)
    got = gradient(adapt(backbone(name, tmp_path, gradient_checkpointing=True)), given, recomputed)
    assert want.abs().max() > 0
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    assert sum(recomputed) < 0.5 * sum(kept)


def test_recomputing_survives_a_copy(tmp_path):
    model = backbone("llama-tiny", tmp_path)
    given = inputs("llama-tiny")
    want = model(**given).logits
    recompute_activations(model)
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].forward.block is twin.model.layers[0]
    with torch.inference_mode():
        assert torch.equal(twin(**given).logits, want)
        cached = twin(**given, use_cache=True).past_key_values
    assert cached.get_seq_length() == 12
    assert torch.equal(twin(**given, use_cache=True).logits, want)


@pytest.mark.parametrize("of_adapters", [False, True])
@pytest.mark.parametrize("name", ["t5-tiny", "bert-tiny"])
def test_dropout_is_drawn_alike_when_recomputed(tmp_path, name, of_adapters):
    grads = []
    for recomputed in (False, True):
        model = backbone(name, tmp_path, gradient_checkpointing=recomputed)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
        adapted = adapt(model, dropout=0.3 * of_adapters)
        adapted.train(not of_adapters)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            grads.append(gradient(adapted, inputs(name)))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-7)


def test_a_model_without_blocks_says_so():
    shape = ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32)
    model = ConvNextForImageClassification(shape)
    with pytest.raises(InputError, match=r"model\.gradient_checkpointing: ConvNextEmbeddings"):
        recompute_activations(model.convnext.embeddings)


@pytest.mark.parametrize("name", KINDS)
def test_bf16_logits_and_gradient_approximate_fp32(name, tmp_path):
    given = inputs(name)
    full, half = backbone(name, tmp_path), backbone(name, tmp_path, precision="bf16")
    assert half.config._attn_implementation == full.config._attn_implementation == ATTENTION
    lower = {k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}
    with torch.inference_mode():
        want, got = full(**given).logits, half(**lower).logits
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0.05 * float(want.abs().max()))
    want, got = gradient(adapt(full), given), gradient(adapt(half), lower)
    assert float((got - want).norm()) < 0.1 * float(want.norm())


def test_float32_attention_is_attention_in_float32(tmp_path):
    model = backbone("t5-tiny", tmp_path, precision="bf16")
    attention = model.encoder.block[0].layer[0].SelfAttention
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 128, generator=generator).bfloat16()
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., 6:] = False
    got, bias, _ = attention(x, mask=mask)
    q, k, v = (layer(x).view(2, 9, 4, 32).transpose(1, 2).double() for layer in
               (attention.q, attention.k, attention.v))  # fmt: skip
    scores = (q @ k.transpose(-1, -2) + bias.double()).masked_fill(~mask, -torch.inf)
    heads = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 128)
    torch.testing.assert_close(got, attention.o(heads.bfloat16()), rtol=0.01, atol=0.02)


def test_casting_keeps_computed_buffers(tmp_path):
    model = backbone("llama-tiny", tmp_path)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_no_keys_and_values_are_kept_in_training(tmp_path):
    model = backbone("llama-tiny", tmp_path)
    given = inputs("llama-tiny")
    assert model(**given).past_key_values is None
    assert model.generation_config.use_cache is not False
    tokens = model.generate(**given, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (3, 15)


@pytest.mark.parametrize("causal", [True, False])
def test_mask_is_left_out_during_a_capture(monkeypatch, causal):
    """Transformers would build a mask, and other kernels would compute the attention."""
    lengths = [(q, kv) for q, kv in itertools.product((1, 4, 8), (4, 8)) if q <= kv]
    for (q, kv), causal_skip, skip, local in itertools.product(
        lengths, (True, False), (True, False), (None, 3, 20)
    ):
        options = {
            **{"batch_size": 2, "q_length": q, "kv_length": kv, "local_size": local},
            "allow_is_causal_skip": causal_skip,
            "allow_is_bidirectional_skip": skip,
            "mask_function": causal_mask_function if causal else bidirectional_mask_function,
        }
        masks = []
        for capturing in (False, True):
            monkeypatch.setattr(
                torch.cuda, "is_current_stream_capturing", lambda found=capturing: found
            )
            masks.append(unread_mask(**options))
        one, other = masks
        assert (one is None) == (other is None), options
        assert one is None or torch.equal(one, other)
