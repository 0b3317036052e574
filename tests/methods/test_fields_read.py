"""A shared field is in a run's identity if, and only if, it has an effect."""

import copy
import functools
import itertools

import pytest
import torch
from method_runs import SINGLE

from trishul_ray.adapters.model import AdaptedModel
from trishul_ray.errors import InputError
from trishul_ray.experiment.compatibility import target_layers
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.methods.base import build_method, method_class
from trishul_ray.models.choose_backbone import backbone_of

#: Another value for each shared field.
OTHER = {
    "budget": "3",
    "adapter.targets": "[q_proj]",
    "adapter.heads": "2",
    "adapter.rank": "2",
    "adapter.alpha": "3.5",
    "adapter.dropout": "0.1",
    "adapter.matching": "published",
    "adapter.init": "rv_random_normal",
    "adapter.sigma": "0.3",
    "adapter.overflow": "independent",
    "adapter.path": "factored",
}
BASE = ["model=vit-digits", "model.init=random", "tracking.mlflow=false", "optimizer.lr=0.01"]
#: Fields on which another field depends: its init, heads that do not fit, and for ``matching`` a
#: matrix that is not square.
NEEDS = {
    "adapter.matching": ["adapter.targets=[fc1]"],
    "adapter.sigma": ["adapter.init=rv_random_normal"],
    "adapter.overflow": ["adapter.heads=3", "adapter.rank=30", "adapter.init=gram_schmidt"],
}
CASES = [
    (name, kind, rank)
    for name in SINGLE
    for kind, rank in itertools.product(
        ("lora", "ffa", "multihead")
        if "adapter" in method_class(name).Config.model_fields
        else "-",
        ((), ("adapter.rank=4",)),
    )
]


@functools.cache
def backbone():
    """Return the backbone of all cases, whose weights are all equal."""
    experiment = load_experiment(None, BASE)
    model = (
        backbone_of(experiment.model, experiment.storage.paths).meta_model().to_empty(device="cpu")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


def built(words):
    """Return the adapters, their computation, and the start; or None if the fields are rejected."""
    experiment = load_experiment(None, words)
    model = copy.deepcopy(backbone())
    method = build_method(experiment.method, experiment.adapter)
    try:
        adapters = method.adapters(target_layers(model, experiment))
        adapted = AdaptedModel(
            model, adapters, seed=1, train_head=True, train_all=method.train_all,
            path=experiment.adapter.path,
        )  # fmt: skip
    except InputError:
        return experiment, None
    path = experiment.adapter.path if adapters else None
    return experiment, (adapters, path, adapted.layout, adapted.initial().numpy().tobytes())


@pytest.mark.parametrize(("name", "kind", "rank"), CASES)
def test_identity_has_fields_with_an_effect(name, kind, rank):
    words = [*BASE, f"method={name}", *rank]
    if kind != "-":
        words.append(f"method.adapter={kind}")
    compared = None
    for field, value in OTHER.items():
        before = [*words, *NEEDS.get(field, [])]
        try:
            if before != compared:
                compared, (one, first) = before, built(before)
            two, second = built([*before, f"{field}={value}"])
        except InputError as error:
            assert "cannot be set with method.ranks_by" in str(error)
            continue
        assert (one.id == two.id) == (first == second), field
        read = build_method(one.method).fields_read
        assert read is None or read <= {name.removeprefix("adapter.") for name in OTHER}


def test_full_fine_tuning_id_ignores_budget():
    ids = {
        load_experiment(None, [*BASE, "method=fullft", *words]).id
        for words in ([], ["budget=8"], ["adapter.heads=2", "adapter.init=constant"])
    }
    assert len(ids) == 1
