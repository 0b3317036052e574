"""Default learning rates: the published cell, or a stand-in that says what it borrows."""

import pytest
import yaml

from trishul_ray.config import GENERAL, HAND
from trishul_ray.loading import build_experiment, default_learning_rate, load_experiment
from trishul_ray.methods.base import _REGISTRY, method_class, method_names, register
from trishul_ray.methods.fedit import FedIT, FedITConfig

#: Raje et al., "RAVAN", NeurIPS 2025, arXiv 2506.05568, Table 8, row by row as printed. A row is
#: CIFAR-100, SVHN, 20 Newsgroups, MRQA and, in the IID halves alone, GLUE.
RAVAN_TABLE_8 = {
    ("lower", "iid"): {
        "fedit": (5e-3, 1e-3, 1e-3, 1e-3, 1e-4),
        "fedex": (1e-3, 1e-3, 1e-3, 1e-3, 1e-4),
        "ffalora": (1e-2, 1e-2, 1e-2, 5e-3, 1e-3),
        "fedsb": (1e-3, 5e-3, 5e-3, 1e-3, 1e-4),
        "ravan": (5e-4, 5e-4, 5e-4, 1e-4, 5e-5),
    },
    ("higher", "iid"): {
        "fedit": (5e-3, 1e-3, 1e-3, 5e-4, 1e-4),
        "fedex": (1e-3, 1e-3, 1e-3, 5e-4, 1e-4),
        "ffalora": (1e-2, 1e-2, 1e-2, 1e-2, 1e-3),
        "fedsb": (1e-3, 1e-3, 5e-3, 5e-4, 1e-4),
        "ravan": (5e-4, 5e-4, 1e-4, 1e-4, 5e-5),
    },
    ("lower", "dirichlet"): {
        "fedit": (5e-3, 1e-3, 1e-3, 1e-3),
        "fedex": (1e-3, 1e-3, 1e-3, 1e-3),
        "ffalora": (1e-2, 1e-2, 1e-2, 5e-3),
        "fedsb": (5e-4, 5e-3, 1e-3, 5e-4),
        "ravan": (5e-4, 5e-4, 5e-4, 1e-4),
    },
    ("higher", "dirichlet"): {
        "fedit": (5e-3, 1e-3, 1e-3, 5e-4),
        "fedex": (1e-3, 5e-4, 1e-3, 5e-4),
        "ffalora": (1e-2, 1e-2, 1e-2, 5e-3),
        "fedsb": (5e-4, 1e-3, 1e-3, 5e-4),
        "ravan": (5e-4, 5e-4, 1e-4, 1e-4),
    },
}
DATASETS = ("cifar100", "svhn", "20newsgroups", "mrqa", "glue/rte")


def test_the_whole_published_table():
    checked = 0
    for (budget, kind), methods in RAVAN_TABLE_8.items():
        for method, rates in methods.items():
            for dataset, rate in zip(DATASETS, rates, strict=False):
                made = load_experiment(
                    None,
                    [
                        f"dataset={dataset}",
                        f"method={method}",
                        f"budget={budget}",
                        f"partition.kind={kind}",
                    ],
                ).optimizer
                assert made.lr == rate, (dataset, method, budget, kind)
                assert made.lr_source == "RAVAN Table 8"
                checked += 1
    assert checked == 90


@pytest.mark.parametrize(
    ("overrides", "rate", "source"),
    [
        ([], 5e-4, "RAVAN Table 8; borrowed from ravan, for trishul"),
        (
            ["method=fedit", "optimizer.name=sgd"],
            5e-3,
            "RAVAN Table 8; borrowed from Adam, for SGD",
        ),
        (
            ["method=ravan", "budget=16"],
            5e-4,
            "RAVAN Table 8; borrowed from the budgets of LoRA rank 32 and 64, for 16",
        ),
        (
            ["method=ravan", "model=vit-digits"],
            5e-4,
            "RAVAN Table 8; borrowed from google/vit-base-patch16-224-in21k, for vit-digits",
        ),
        (
            ["method=ravan", "partition.kind=natural"],
            5e-4,
            "RAVAN Table 8; borrowed from a Dirichlet partition, for natural clients",
        ),
        (["method=fullft"], 1e-4, "our choice: no source names a rate for fullft"),
        (["method=fedit", "optimizer.lr=0.3"], 0.3, HAND),
    ],
)
def test_on_cifar100(overrides, rate, source):
    options = load_experiment(None, ["dataset=cifar100", *overrides]).optimizer
    assert (options.lr, options.lr_source) == (rate, source)


def test_all_that_is_borrowed_is_named():
    words = ["dataset=glue/rte", "partition.kind=dirichlet", "optimizer.name=sgd", "budget=8"]
    source = load_experiment(None, words).optimizer.lr_source
    assert source == (
        "RAVAN Table 8; borrowed from ravan, for trishul; from Adam, for SGD; from the budgets of "
        "LoRA rank 32 and 64, for 8; from an IID partition, for Dirichlet"
    )


def test_digits_are_nobodys_published_value():
    source = load_experiment().optimizer.lr_source
    assert source == (
        "our choice by kind of adapter: no source names a rate for digits; borrowed from ravan, "
        "for trishul"
    )


def test_a_saved_config_keeps_its_rate(tmp_path):
    experiment = load_experiment(None, ["dataset=cifar100", "method=ffalora"])
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(experiment.to_dict()))
    assert load_experiment(path) == experiment


def test_fields_without_a_look_up_say_so():
    assert build_experiment({}).optimizer.lr_source == GENERAL
    assert build_experiment({"optimizer": {"lr": 0.1}}).optimizer.lr_source == HAND


@pytest.mark.parametrize("dataset", ["cifar100", "svhn", "20newsgroups", "mrqa", "glue", "mine"])
def test_every_built_in_method_has_one(dataset):
    for name in method_names():
        for rank in (32, 64):
            for iid in (True, False):
                like = method_class(name).rates_like
                found = default_learning_rate(dataset, name, rank, iid, rates_like=like)
                assert found is not None and 0 < found[0] < 1 and found[1]
    assert default_learning_rate(dataset, "somebodys", 32, True) is None


@pytest.fixture
def newcomer():
    """``newcomer(rates_like=...)`` registers a child of FedIT as method ``newcomer``."""

    def make(**attributes):
        config = type(
            "NewcomerConfig",
            (FedITConfig,),
            {"name": "newcomer", "__annotations__": {"name": str}},
        )
        cls = type("Newcomer", (FedIT,), {"Config": config, **attributes})
        return register("newcomer")(cls)

    method_names()
    yield make
    _REGISTRY.pop("newcomer", None)


def test_a_newcomer_has_the_rates_of_the_method_it_names(newcomer):
    newcomer(rates_like="ffalora")
    options = load_experiment(None, ["method=newcomer"]).optimizer
    parent = load_experiment(None, ["method=ffalora"]).optimizer
    assert options.lr == parent.lr == 5e-3
    assert "borrowed from ffalora, for newcomer" in options.lr_source


def test_a_newcomer_that_names_none_has_its_parents(newcomer):
    newcomer()
    options = load_experiment(None, ["method=newcomer"]).optimizer
    assert options.lr == load_experiment(None, ["method=fedit"]).optimizer.lr == 2e-3
    assert "borrowed from fedit, for newcomer" in options.lr_source


def test_without_either_the_general_default_is_named_as_such(newcomer):
    newcomer(rates_like=None)
    options = load_experiment(None, ["method=newcomer"]).optimizer
    assert options.lr == 5e-4 and options.lr_source == GENERAL


@pytest.mark.parametrize(
    ("attributes", "overrides", "says"),
    [
        ({"rates_like": None}, [], "warning: learning rate 0.0005: general default"),
        ({}, [], "learning rate 0.002: our choice by kind of adapter"),
        ({}, ["optimizer.lr=0.3"], "learning rate 0.3: set by hand"),
    ],
)
def test_a_run_says_which_rate_it_takes_and_why(
    newcomer, called, tmp_path, monkeypatch, cache, attributes, overrides, says
):
    newcomer(**attributes)
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    # More clients than rows: the run is refused before the first round.
    words = ["method=newcomer", "federation.clients=2000", "tracking.mlflow=false", *overrides]
    code, _, said = called("run", *words)
    told = [line for line in said.splitlines() if "learning rate" in line]
    assert code == 2 and len(told) == 1
    assert told[0].startswith(says)
