"""Random configurations, most of them invalid: each is a run or one line with the error.

A configuration is resolved, checked against its backbone, prepared and built as in a run. Some of
the valid ones run a round of one step, because nothing else reaches the server of a method.
"""

import random

import pytest

from trishul_ray.errors import InputError
from trishul_ray.experiment.compatibility import check_fits
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base import method_names

#: Texts that some layer might interpret as a path, a number or a pattern.
ODD = ["a" * 300, "../../x", "~nobody/x", "", " ", "a\0b", "{x}", "[x", "null", "-1", "é", "*", "/"]
NUMBERS = [0, 1, 2, 3, 5, 64, 65, 70, 100, 1000, 10**9, -1, 0.5, 1e-9, 1e9, ".nan", ".inf", "x"]

#: Values to try in each field. The first entries are valid.
FIELDS = {
    "data.name": ["digits", "digits", "learning_rates", "cifar100", "table", "images", *ODD],
    "data.path": ["null", "nowhere", *ODD],
    "data.columns": ["{}", "{text: body}", "{a: }", "[1]"],
    "data.train_limit": ["null", 1, 20, 100, *NUMBERS],
    "data.test_share": NUMBERS,
    "data.validation_share": [0, 0.2, *NUMBERS],
    "partition.kind": ["iid", "dirichlet", "natural", "x"],
    "partition.by": ["auto", "label", "group"],
    "partition.alpha": [0.3, *NUMBERS],
    "partition.variant": ["per-client", "per-label"],
    "partition.min_size": [1, 2, *NUMBERS],
    "task.kind": ["auto", "classification", "text2text", "verbalizer"],
    "task.max_length": NUMBERS,
    "task.template": ["null", *ODD],
    "model.name": ["vit-digits", "vit-digits", "bert-tiny", "t5-tiny", *ODD],
    "model.train_head": ["true", "false", "x"],
    "model.precision": ["fp32", "bf16"],
    "model.image_size": ["null", 8, 16, 0, 3, -1, "x"],
    "adapter.heads": [1, 2, 4, *NUMBERS],
    "adapter.rank": ["null", 1, 4, *NUMBERS],
    "adapter.matching": ["matched", "published"],
    "adapter.init": ["null", "gram_schmidt", "random_normal", "rv_random_normal", "constant",
                     "shared_subspace", "x"],
    "adapter.sigma": ["null", 1, *NUMBERS],
    "adapter.overflow": ["auto", "independent", "cap"],
    "adapter.targets": ["null", "[query]", "[dense]", "[]", "[x]", "[vit]", '[""]'],
    "budget": [1, 2, 4, 8, "lower", "higher", *NUMBERS],
    "method.name": method_names(),
    "method.lam": [0, 0.01, *NUMBERS],
    "method.allocation": ["waterfill", "uniform", "gradient", "curvature"],
    "method.scalars": ["trainable", "fixed"],
    "method.head_fraction": [1, *NUMBERS],
    "method.adapter": ["lora", "ffa", "multihead"],
    "optimizer.name": ["adam", "sgd", "x"],
    "optimizer.lr": [0.001, *NUMBERS],
    "optimizer.schedule": ["constant", "linear", "cosine"],
    "optimizer.warmup": [0, 0.1, *NUMBERS],
    "optimizer.clip_norm": ["null", 1, *NUMBERS],
    "federation.clients": [4, 10, 20, 0, -1, 2000, 10**9, "x"],
    "federation.clients_per_round": [2, 3, 0, 5, -1, "x"],
    "federation.compute": ["full", "uniform", "bell", "custom"],
    "federation.compute_shares": ["null", "[0, 0, 1, 0]", "[1, 1, 1, 1]", "[1]", "x"],
    "federation.weighting": ["uniform", "size"],
    "federation.quorum": NUMBERS,
    "evaluation.limit": [8, 1, *NUMBERS],
    "storage.hub": ["null", "nowhere", *ODD],
    "seed": [0, 1, *NUMBERS],
    "nonsense": [1],
    "adapter": [1],
}  # fmt: skip
SMALL = [
    "model.init=random",
    "federation.clients=4",
    "federation.clients_per_round=2",
    "federation.rounds=1",
    "federation.local_steps=1",
    "federation.batch_size=2",
    "evaluation.limit=8",
    "evaluation.diagnostics_every=0",
    "tracking.mlflow=false",
    "resources.backend=inline",
    "resources.device=cpu",
]
#: Known cases that the random draw need not hit.
KNOWN = [
    ["method=flexlora", "budget=70"],
    ["method=flexlora", "adapter.rank=65"],
    ["method=fedsb", "adapter.rank=65"],
    ["method=ravan", "adapter.rank=65"],
    ["method=fedavg", "method.adapter=multihead", "adapter.rank=65"],
    ["data.name=" + "a" * 300],
    ["data.name=../../x"],
    ["data.name=learning_rates"],
    ["model.name=" + "a" * 300],
    ["model.name=~nobody/x"],
    ["storage.hub=" + "a" * 300],
    ["data.name=table", "data.path=" + "a" * 300],
]
#: Number of configurations, and the fraction of valid ones that run a round.
DRAWN, RUNS = 200, 10


def draw(number):
    """Draw a few random fields on top of a small valid run."""
    rng = random.Random(number)
    names = rng.sample(sorted(FIELDS), rng.choice([1, 1, 2, 2, 3, 4]))
    if rng.random() < 0.5 and "method.name" not in names:
        names.append("method.name")
    # Valid entries are first in each list: draw them more often.
    return [f"{name}={FIELDS[name][int(len(FIELDS[name]) * rng.random() ** 2)]}" for name in names]


def outcome_of(words, folder, cache, run):
    """Return ``"run"``, or the error line."""
    paths = [f"storage.cache={cache}", f"storage.runs={folder}"]
    try:
        experiment = load_experiment(None, [*SMALL, *paths, *words])
        check_fits(experiment)
        prepared = prepare_run(experiment)
        if run:
            driver = InlineDriver(experiment, prepared, "a")
            driver.begin()
            driver.step()
    except InputError as error:
        return str(error)
    return "run"


def is_one_line(text):
    return bool(text.strip()) and "\n" not in text and "Traceback" not in text and len(text) < 2000


@pytest.mark.parametrize("words", KNOWN, ids=lambda words: " ".join(words)[:40])
def test_known_cases(words, tmp_path, cache):
    found = outcome_of(words, tmp_path, cache, run=True)
    assert found != "run" and is_one_line(found), found


@pytest.mark.slow
def test_two_hundred_configurations(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults, runs = [], 0
    for number in range(DRAWN):
        words = draw(number)
        try:
            found = outcome_of(words, tmp_path / "runs", cache, run=number % RUNS == 0)
        except Exception as error:
            faults.append(f"{words}: {type(error).__name__}: {error}"[:400])
            continue
        runs += found == "run"
        if not is_one_line(found):
            faults.append(f"{words}: {found!r}"[:400])
    assert not faults, f"{len(faults)} of {DRAWN}:\n" + "\n".join(faults)
    assert DRAWN / 5 < runs < DRAWN * 4 / 5, "the draw has become all sound or all wrong"
