"""Numbers that others published and that need neither pretrained weights nor the hub."""

import math
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant
from transformers import LlamaConfig

from trishul_ray.adapters.budget import count_parameters
from trishul_ray.config.paths import StoragePaths
from trishul_ray.experiment.compatibility import target_layers
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.privacy.accounting import Guarantee
from trishul_ray.methods.base import build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.flops import row_flops

NOWHERE = StoragePaths(Path("none"), None)
MEGABYTE = 2**20
#: Architectures of the study in :func:`test_megabytes_of_a_published_study`, and bytes of a number.
STUDY = {
    "TinyLlama": (
        LlamaConfig(
            hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
            intermediate_size=5632, vocab_size=32000,
        ),
        4,
    ),
    "Llama-3.2-3B": (
        LlamaConfig(
            hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
            head_dim=128, intermediate_size=8192, vocab_size=128256,
        ),
        2,
    ),
}  # fmt: skip


def sent(*words):
    """Numbers of an adapter that a client sends in a round."""
    made = load_experiment(None, ["model.init=random", *words])
    targets = target_layers(Backbone(made.model, NOWHERE).meta_model(), made)
    return count_parameters(build_method(made.method).adapters(targets), targets.layers).adapter


@pytest.mark.parametrize(
    ("model", "fedit", "ffalora"),
    [("TinyLlama", 257.8125, 98.3125), ("Llama-3.2-3B", 262.5, 110.25)],
)
def test_megabytes_of_a_published_study(model, fedit, ffalora, tmp_path):
    """Traffic per client in 15 rounds, up and down, rank 16 on query and value.

    Source: github.com/jerryadamsfranklin/fedlora-partition-variance, analysis/comm.csv, column
    fit_slope_per_active, doi 10.5281/zenodo.22861074. FFA-LoRA sends A there once; here A is drawn
    from the seed and is not sent.
    """
    config, width = STUDY[model]
    config.save_pretrained(tmp_path)
    words = [f"model={tmp_path}", "adapter.rank=16", "dataset=synthetic/instructions"]
    both, one = (sent(*words, f"method={method}") for method in ("fedit", "ffalora"))
    assert 15 * 2 * both * width / MEGABYTE == fedit
    assert (15 * 2 * one + (both - one)) * width / MEGABYTE == ffalora


def test_trainable_parameters_of_roberta_large():
    """Hu et al., "LoRA", arXiv 2106.09685, Table 2: 0.8M with rank 8 on query and value."""
    words = ["preset=ffalora-glue", "method=fedit"]
    assert sent(*words) == 24 * 2 * 8 * 2 * 1024 == 786_432
    assert sent(*words[:1], "method=ffalora", "adapter.rank=8") == 786_432 / 2


def test_epsilon_of_dp_sgd():
    """Abadi et al., 2016, arXiv 1607.00133: q = 0.01, σ = 4, δ = 1e-5, 10,000 steps: ε about 1.26.

    Their moments accountant takes integer orders up to 32 and the classic conversion. The
    privacy-loss distribution gives less for the same mechanism.
    """
    orders = range(2, 34)
    accountant = RdpAccountant(orders)
    accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(4.0)), 10_000)
    classic = min(r + math.log(1e5) / (a - 1) for a, r in zip(orders, accountant.rdp, strict=True))
    assert classic == pytest.approx(1.26, abs=5e-3)
    tight = Guarantee("poisson", 4.0, 100, 1, 1e-5, 10_000).epsilon()
    assert tight == pytest.approx(0.95, abs=5e-3)


def test_epsilon_of_the_protocol_of_fedsvd():
    """ε = 6, δ = 1e-5: github.com/seanie12/fed-svd, fedmm/fedavg/client.py, ``dp_init``.

    SST-2, a sixth of the rows per client, batches of 128: 88 batches. The rate is halved because
    half of the clients join a round, which needs secret cohorts; all 1,000 steps count. A client
    whose cohorts are known takes 500 steps at the full rate: the same noise gives more.
    """
    batches, steps = math.ceil(67_349 / 6 / 128), 1000
    noise = 0.55817  # of opacus.accountants.utils.get_noise_multiplier, which dp_init calls
    theirs = PRVAccountant()
    theirs.history = [(noise, 0.5 / batches, steps)]
    assert theirs.get_epsilon(1e-5) == pytest.approx(6, rel=2e-3)
    ours = Guarantee("poisson", noise, 2 * batches, 1, 1e-5, steps)
    assert ours.epsilon() == pytest.approx(6, rel=1e-2)
    known = Guarantee("poisson", noise, batches, 1, 1e-5, steps // 2)
    assert known.epsilon() == pytest.approx(8.01, abs=0.01)


def test_operations_of_vit_b16():
    """17.564 x 10^9 multiply-adds at 224 pixels: torchvision, ViT_B_16_Weights.IMAGENET1K_V1."""
    made = load_experiment(None, ["dataset=cifar100"])
    forward, _, _ = row_flops(made.model, NOWHERE, made.task)
    head = 768 * 1000  # of ImageNet's classes, which the backbone here does not have
    assert forward / 2 + head == pytest.approx(17.564e9, rel=1e-4)
