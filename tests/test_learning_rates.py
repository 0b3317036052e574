"""Default learning rates: the published cell, or a stand-in that says it is one."""

import pytest

from trishul_ray.learning_rates import default_learning_rate
from trishul_ray.loading import load_experiment
from trishul_ray.methods.registry import method_names


@pytest.mark.parametrize(
    ("overrides", "rate", "source"),
    [
        (["method=fedit"], 5e-3, "RAVAN Table 8"),
        (["method=ffalora", "budget=higher"], 1e-2, "RAVAN Table 8"),
        (["method=fedsb", "partition.kind=iid"], 1e-3, "RAVAN Table 8"),
        (["method=fedsb"], 5e-4, "RAVAN Table 8"),
        (["method=trishul"], 5e-4, "no published value for trishul; that of ravan (RAVAN Table 8)"),
        (["method=fullft"], 1e-4, "no published value for fullft; our choice"),
        (["method=fedit", "optimizer.lr=0.3"], 0.3, "set by hand, or the general default"),
    ],
)
def test_on_cifar100(overrides, rate, source):
    options = load_experiment(None, ["dataset=cifar100", *overrides]).optimizer
    assert options.lr == rate
    assert options.lr_source == source


def test_a_saved_config_keeps_its_rate(tmp_path):
    import yaml

    experiment = load_experiment(None, ["dataset=cifar100", "method=ffalora"])
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(experiment.to_dict()))
    assert load_experiment(path) == experiment


@pytest.mark.parametrize("dataset", ["cifar100", "svhn", "20newsgroups", "mrqa", "glue", "mine"])
def test_every_built_in_method_has_one(dataset):
    for name in method_names():
        for rank in (32, 64):
            for iid in (True, False):
                rate, source = default_learning_rate(dataset, name, rank, iid)
                assert 0 < rate < 1
                assert source
    assert default_learning_rate(dataset, "somebodys", 32, True) is None
