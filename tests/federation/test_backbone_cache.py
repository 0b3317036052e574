"""Runs on a reused backbone give the bytes of a newly loaded one."""

import itertools
import weakref
from itertools import pairwise

import pytest
import torch
from method_runs import PUBLISHED
from transformers import ViTConfig, ViTModel

from trishul_ray.contract.methods import without_timings
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import KEPT_ON_CPU, BackboneCache, build_context
from trishul_ray.methods.base import method_class

TINY = [
    "federation.clients=2",
    "federation.clients_per_round=2",
    "federation.rounds=1",
    "federation.local_steps=2",
    "federation.batch_size=4",
    "evaluation.limit=16",
    "evaluation.diagnostics_every=0",
    "optimizer.lr=0.01",
    "budget=2",
    "adapter.heads=2",
    "task.max_length=32",
    "task.target_length=8",
    "resources.backend=inline",
    "tracking.mlflow=false",
]

TEXTS = ["dataset=table", "model.init=random"]
#: Each leaves something that the next must not see; four backbones share three cache entries.
SETTINGS = {
    "heads": ["method=trishul", "method.allocation=gradient", "budget=3", "adapter.heads=4"],
    "limits": ["method=hetlora", "method.prune=true", "federation.compute=uniform"],
    "another head": ["seed=1", "method=fedit", "optimizer.name=sgd"],
    "frozen head": ["method=ravan", "model.train_head=false", "adapter.targets=[query, key]"],
    "no dropout": ["method=fullft", "seed=2"],
    "dropout": ["method=fedit", "model.dropout=true", "model.gradient_checkpointing=true"],
    "bf16": ["method=fedex", "model.precision=bf16"],
    "bf16, full": ["method=fullft", "model.precision=bf16", "seed=1"],
    "encoder": [*TEXTS, "model.name=bert-tiny", "method=scaffold"],
    "text to text": [*TEXTS, "model.name=t5-tiny", "method=flora"],
    "decoder": [*TEXTS, "model.name=llama-tiny", "method=fedsb", "task.template='{text} is'"],
}


@pytest.fixture(scope="module")
def paths(cache, tmp_path_factory):
    """Write a headless checkpoint, whose head the seed draws, and a table of texts."""
    folder = tmp_path_factory.mktemp("paths")
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_hidden_layers": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    ViTModel(ViTConfig(**shape, **sizes, **dropout)).save_pretrained(folder / "vit")
    rows = [f"text {n} on {n % 2},{'left' if n % 2 else 'right'}" for n in range(40)]
    (folder / "texts.csv").write_text("\n".join(["text,label", *rows]))
    return folder, cache


@pytest.fixture(scope="module")
def make(paths):
    """``make("method=fedit", ...)`` returns an experiment with a new folder for its run."""
    folder, cache = paths
    numbers = itertools.count()

    def experiment(*overrides):
        where = [f"storage.cache={cache}", f"storage.runs={folder}/runs-{next(numbers)}"]
        source = f"model={folder}/vit"
        if "dataset=table" in overrides:
            source = f"data.path={folder}/texts.csv"
        return load_experiment(None, [*TINY, source, *where, *overrides])

    return experiment


def outcome(experiment, backbones=None):
    """Return the digest of a run's state, and its metrics."""
    driver = InlineDriver(experiment, prepare_run(experiment), "a", backbones)
    report = driver.begin()
    while not report.finished:
        report = driver.step()
    result = driver.final()
    driver.close()
    records = without_timings(result.checkpoint.records)
    context = weakref.ref(driver.executor.context)
    del driver
    # Free it before the next garbage collection: on a GPU, the next run needs the memory.
    assert context() is None
    return result.digest, records, result.spec.sources


def every_pair(items):
    """Walk through ``items`` such that each follows each, including itself (de Bruijn)."""
    walk = []
    for i, item in enumerate(items):
        walk += [item, *itertools.chain.from_iterable((item, other) for other in items[i + 1 :])]
    walk.append(items[0])
    assert sorted(pairwise(walk)) == sorted(itertools.product(items, repeat=2))
    return walk


def options_of(name):
    limits = ["federation.compute=uniform"] if method_class(name).takes_limits else []
    return [f"method={name}", "federation.local_steps=1", *limits]


#: One method per kind of adapter, of trained parameters and of changes to frozen weights.
KINDS = ["fedit", "ffalora", "flora", "fedsb", "fullft", "scaffold", "trishul"]


def test_every_method_runs_after_every_kind(make):
    fresh = {name: outcome(make(*options_of(name))) for name in PUBLISHED}
    backbones = BackboneCache()
    for name in [*every_pair(KINDS), *PUBLISHED]:
        assert outcome(make(*options_of(name)), backbones) == fresh[name], name
    assert len(backbones._kept) == 1


def test_other_settings_and_tasks_after_each_other(make):
    fresh = {name: outcome(make(*options)) for name, options in SETTINGS.items()}
    backbones = BackboneCache()
    names = list(SETTINGS)
    for name in [*names, *reversed(names)]:
        assert outcome(make(*SETTINGS[name]), backbones) == fresh[name], name
        assert len(backbones._kept) <= KEPT_ON_CPU


def test_a_backbone_is_kept_until_its_files_change(make, paths):
    backbones, experiment = BackboneCache(), make("method=fullft")

    def module(experiment):
        context = build_context(experiment, prepare_run(experiment), backbones)
        context.close()
        return context.model.model

    def everything(module):
        states = {name: (t.dtype, t.tolist()) for name, t in module.state_dict().items()}
        flags = [(p.requires_grad, p.grad) for p in module.parameters()]
        return states, flags, [m.training for m in module.modules()], str(module)

    first = module(experiment)
    before = everything(first)
    outcome(experiment, backbones)
    assert module(make("method=fedit")) is first and everything(first) == before
    assert module(make("seed=1")) is first and everything(first) != before
    assert module(experiment) is first and everything(first) == before
    config = paths[0] / "vit" / "config.json"
    config.write_text(config.read_text() + "\n")
    again = module(make("method=fullft"))
    assert again is not first and everything(again) == before
