"""Parameter counts of the papers' settings, on the meta device."""

import math

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.adapters.base import LayerSpec
from trishul_ray.adapters.budget import (
    check_heads_fit,
    count_parameters,
    fed_sb_rank,
    ffa_rank,
    lora_rank_budget,
    multihead_rank,
)
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.adapters.targets import find_layers
from trishul_ray.errors import InputError

HEADS = 4


@pytest.fixture(scope="module")
def sites():
    """Targeted layers of ViT-B/16, T5-Base and LLaMA-3.2-1B."""
    with torch.device("meta"):
        vit = hf.ViTForImageClassification(hf.ViTConfig(num_labels=100))
        t5 = hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=12)
        )
        llama = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=128256,
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=64,
                tie_word_embeddings=True,
            )
        )
    return {"vit": find_layers(vit), "t5": find_layers(t5), "llama": find_layers(llama)}


def adapters(method, layers, budget, matching):
    """Create the method's adapter on every layer; Fed-SB is one head without a scalar."""
    build = {
        "lora": lambda s: LoRA(budget),
        "ffa": lambda s: LoRA(ffa_rank(s, budget, matching), train_A=False),
        "fed_sb": lambda s: MultiHead(1, fed_sb_rank(s, budget, matching), train_scale=False),
        "ravan": lambda s: MultiHead(HEADS, multihead_rank(s, budget, HEADS, matching)),
    }[method]
    return {spec.name: build(spec) for spec in layers}


PUBLISHED = {
    ("vit", 32): {"lora": 1179648, "ffa": 1179648, "fed_sb": 1172184, "ravan": 1161600},
    ("vit", 64): {"lora": 2359296, "ffa": 2359296, "fed_sb": 2351256, "ravan": 2336256},
    ("t5", 32): {"lora": 2359296, "ffa": 2359296, "fed_sb": 2344368, "ravan": 2323200},
    ("t5", 64): {"lora": 4718592, "ffa": 4718592, "fed_sb": 4702512, "ravan": 4672512},
    ("llama", 32): {"lora": 3407872, "ffa": 2621440, "fed_sb": 1562912, "ravan": 1548800},
    ("llama", 64): {"lora": 6815744, "ffa": 5242880, "fed_sb": 3135008, "ravan": 3115008},
}


@pytest.mark.parametrize("method", ["lora", "ffa", "fed_sb", "ravan"])
@pytest.mark.parametrize(("model", "budget"), PUBLISHED)
def test_counts_with_the_published_ranks(sites, model, budget, method):
    layers = sites[model]
    counts = count_parameters(adapters(method, layers, budget, "published"), layers)
    assert counts.adapter == PUBLISHED[model, budget][method]
    # There are 4 scalars on each of 24 matrices of ViT-B/16.
    assert counts.scalars == (HEADS * len(layers) if method == "ravan" else 0)


@pytest.mark.parametrize("method", ["lora", "ffa", "fed_sb", "ravan"])
@pytest.mark.parametrize(("model", "budget"), [k for k in PUBLISHED if k[0] != "llama"])
def test_both_modes_agree_at_width_768(sites, model, budget, method):
    layers = sites[model]
    assert adapters(method, layers, budget, "matched") == adapters(
        method, layers, budget, "published"
    )


def test_matrices_match_the_papers(sites):
    assert len(sites["vit"]) == 24
    assert len(sites["t5"]) == 48
    widths = [(s.d_out, s.d_in) for s in sites["llama"]]
    assert widths == [(2048, 2048), (512, 2048)] * 16
    assert {(s.d_out, s.d_in) for s in sites["vit"] + sites["t5"]} == {(768, 768)}
    assert len({s.block for s in sites["vit"]}) == 12
    assert len({s.block for s in sites["t5"]}) == 24
    assert len({s.block for s in sites["llama"]}) == 16


@pytest.mark.parametrize(
    ("budget", "q", "v"),
    [
        (32, (131072, 64, 362, 181), (81920, 160, 286, 143)),
        (64, (262144, 128, 512, 256), (163840, 320, 404, 202)),
    ],
)
def test_matched_ranks_of_llama(sites, budget, q, v):
    for spec, (entries, ffa, fed_sb, ravan) in zip(sites["llama"][:2], (q, v), strict=True):
        assert lora_rank_budget(spec, budget) == entries
        assert ffa_rank(spec, budget) == ffa
        assert fed_sb_rank(spec, budget) == fed_sb
        assert multihead_rank(spec, budget, HEADS) == ravan


@given(
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 512),
    st.integers(1, 32),
    st.sampled_from(["matched", "published"]),
)
def test_the_rank_is_the_largest_within_the_budget(d_out, d_in, budget, heads, matching):
    spec = LayerSpec("layer", "layer", d_out, d_in)
    entries = budget * (1536 if matching == "published" else d_out + d_in)
    if entries < heads:
        with pytest.raises(InputError, match="fewer entries than"):
            multihead_rank(spec, budget, heads, matching)
        return
    rank = multihead_rank(spec, budget, heads, matching)
    assert heads * rank**2 <= entries < heads * (rank + 1) ** 2
    assert rank == math.floor(math.sqrt(entries / heads))


@pytest.mark.parametrize(
    ("width", "rank", "cap"),
    [(512, 110, 4), (768, 110, 6), (2048, 110, 18), (512, 156, 3), (768, 156, 4), (2048, 156, 13)],
)
def test_heads_that_fit(width, rank, cap):
    spec = LayerSpec("layer", "layer", width, 2048)
    check_heads_fit(spec, cap, rank)
    with pytest.raises(InputError, match=f"exceeds the width {width} of layer .*overflow=indep"):
        check_heads_fit(spec, cap + 1, rank)


def test_counts_add_up_and_follow_the_model(make):
    bench = make("vit", "mixed")
    adapted = bench.adapted
    counts = count_parameters(adapted.adapters, adapted.specs)
    assert counts.adapter + counts.scalars + adapted.classifier_size == adapted.layout.size
    assert adapted.classifier_size == 5 * 24 + 5
    assert adapted.backbone_size == 0
    assert counts.scalars == 4
