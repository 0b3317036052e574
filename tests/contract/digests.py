"""Small runs of all methods and optional sections, and a comparison of two commits.

The last bits of a result differ between processors. Therefore, write the results of one commit on
the machine that then compares another commit::

    python -m tests.contract.digests --write before.json        # at the commit before
    python -m tests.contract.digests --compare before.json      # at the commit after
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

import trishul_ray
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run

#: Overrides of all configurations.
BASE = (
    "model.init=random",
    "federation.clients=4",
    "federation.clients_per_round=3",
    "federation.rounds=3",
    "federation.local_steps=3",
    "federation.batch_size=8",
    "evaluation.limit=32",
    "evaluation.every=0",
    "optimizer.lr=0.01",
    "tracking.mlflow=false",
)

LIMITED = "federation.compute=uniform"
OWN = "evaluation.per_client=true"

#: Overrides, keyed by name. A name stays when its spelling changes.
CONFIGURATIONS = {
    # Each method of the core.
    "fedavg": "method=fedavg",
    "fedavg of cores": "method=fedavg method.adapter=multihead",
    "fedprox": "method=fedprox method.mu=0.1",
    "fedit": "method=fedit optimizer.schedule=cosine optimizer.clip_norm=0.5",
    "fedex": "method=fedex",
    "ffalora": "method=ffalora optimizer.name=sgd optimizer.momentum=0.9",
    "fedsb": "method=fedsb",
    "flora": "method=flora",
    "flexlora": f"method=flexlora {LIMITED}",
    "hetlora": f"method=hetlora method.prune=true {LIMITED}",
    "scaffold": "method=scaffold",
    "fullft": "method=fullft",
    "local": f"method=local {OWN}",
    "ravan": "method=ravan",
    "ravan, half of the heads": "method=ravan method.head_fraction=0.5 method.selection=gradient",
    "trishul": "method=trishul",
    "trishul, strong prox": "method=trishul method.lam=5 method.prox_every=2",
    "trishul, no prox": "method=trishul method.lam=0 method.scalars=fixed",
    "trishul, prox of the change": "method.prox_on=change method.lam=5 method.allocation=uniform",
    "trishul, by gradients": "method.allocation=gradient adapter.overflow=cap budget=2",
    "trishul, by curvature": "method.allocation=curvature",
    "trishul, limited": f"method.selection=weight method.block_scores=all {LIMITED}",
    # Each method of later papers.
    "ditto": f"method=ditto {OWN}",
    "federa": "method=federa",
    "florg": "method=florg",
    "fslora": f"method=fslora method.ratio=0.5 {LIMITED}",
    "lorafair": "method=lorafair",
    "fedplora": f"method=fedplora {LIMITED}",
    "fedrot": "method=fedrot",
    "fedsa": f"method=fedsa {OWN}",
    "fedsvd": "method=fedsvd",
    "florist": f"method=florist {LIMITED}",
    "frlora": "method=frlora",
    "rolora": "method=rolora",
    # Extensions of TRISHUL and RAVAN.
    "private": f"method=trishul-private method.private_heads=2 {OWN}",
    "all private": f"method=trishul-private method.private_heads=4 {OWN}",
    "ravan, private": f"method=ravan-private {OWN}",
    # Each section that is off by default.
    "codecs": "uploads.codec=int4 uploads.error_feedback=true downloads.codec=int8",
    "topk": "method=scaffold uploads.codec=topk downloads.codec=topk",
    "adagrad": "method=fedit server.optimizer=adagrad",
    "yogi": "method.lam=5 server.optimizer=yogi",
    "server sgd": "server.optimizer=sgd",
    "adam": "server.optimizer=adam uploads.codec=int8",
    "clock": "devices.kind=lognormal cohort.extra=1.3",
    "clock, selected": "devices.kind=lognormal cohort.deadline=600 cohort.dropout=0.1 "
    "cohort.select=power_of_choice",
    "async": "devices.kind=lognormal async.kind=fedbuff async.concurrency=4",
    "async, immediate": "method=fedit devices.kind=lognormal async.kind=fedasync "
    "federation.clients_per_round=1 async.concurrency=3 server.optimizer=sgd",
    "privacy": "privacy.noise=0.3 uploads.codec=int8",
    "privacy, survey": "method=fedsb privacy.noise=0.3 privacy.sampling=fixed",
    "privacy, private": "method=trishul-private method.private_heads=2 privacy.noise=1 "
    f"privacy.sampling=fixed {OWN}",
    "attacked": "attack.share=0.5 attack.scale=-3 robust.rule=median",
    # Computation of a client.
    "stacked": "federation.stacked=2",
    "stacked, private": f"federation.stacked=3 method=trishul-private method.private_heads=2 {OWN}",
    "quantized": "model.quantize=nf4 adapter.path=factored",
    "held out": f"federation.held_out=0.25 {OWN} method=fedsa",
    "diagnosed": "evaluation.diagnostics_cohort=all method=ravan federation.weighting=size",
}


@cache
def known(name):
    """Return whether this installation has the method and the sections of a configuration."""
    if not Path(trishul_ray.__file__).with_name("lab").exists():  # a copy of only the core
        try:
            experiment_of(name)
        except InputError:
            return False
    return True


def usable(name):
    """Return whether this installation can run a configuration."""
    library = name != "quantized" or importlib.util.find_spec("bitsandbytes") is not None
    return library and known(name)


def experiment_of(name, *more):
    """Return the experiment of a configuration."""
    return load_experiment(None, [*BASE, *CONFIGURATIONS[name].split(), *more])


def run_inline(experiment):
    """Return the last checkpoint of a run in this process."""
    driver = InlineDriver(experiment, prepare_run(experiment), "digests")
    try:
        while not driver.finished:
            driver.step()
        return driver.checkpoint
    finally:
        driver.close()


def plain(value):
    """Convert a checkpoint to JSON: arrays become their type, shape and hash."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        left_out = "seconds", "state_sha256"  # The state itself is compared.
        return {str(k): plain(v) for k, v in value.items() if not str(k).endswith(left_out)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{value.dtype} {value.shape} {digest}"
    return value


def outcome(checkpoint):
    """Return the state and records of a run, without seconds and the name of the attempt."""
    left = plain(checkpoint)
    for name in ("attempt", "sources", "info"):
        del left[name]
    return json.loads(json.dumps(left))


def differences(one, other, path=""):
    """Yield the differences of two outcomes."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            inner = f"{path}.{key}" if path else key
            yield from differences(one.get(key), other.get(key), inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif one != other:
        yield path


def compare(before, after):
    """Print one line per configuration; return whether all are equal."""
    equal = True
    for name in after:
        if name not in before:
            print(f"new     {name}")
            continue
        found = list(differences(before[name]["outcome"], after[name]["outcome"]))
        found = [path for path in found if path != "experiment_id"]
        same = before[name]["id"] == after[name]["id"]
        note = "same id" if same else f"id {before[name]['id']} -> {after[name]['id']}"
        if found:
            note += f"; {len(found)} values, first {', '.join(found[:3])}"
        print(f"{'differs' if found else 'equal  '} {name}: {note}")
        equal &= not found
    if missing := [name for name in before if name not in after and usable(name)]:
        print(f"not run: {', '.join(missing)}")
    return equal


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with these outcomes")
    parser.add_argument("names", nargs="*", help="configurations; all by default")
    given = parser.parse_args()
    chosen = given.names or list(CONFIGURATIONS)
    if unknown := [name for name in chosen if name not in CONFIGURATIONS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {'; '.join(CONFIGURATIONS)}")
    found = {}
    with tempfile.TemporaryDirectory() as home:
        cache = os.environ.get("TRISHUL_CACHE", f"{home}/cache")
        for name in filter(usable, chosen):
            paths = [f"storage.cache={cache}", f"storage.runs={home}/{len(found)}"]
            experiment = experiment_of(name, *paths, "resources.backend=inline")
            found[name] = {"id": experiment.id, "outcome": outcome(run_inline(experiment))}
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    if given.compare and not compare(json.loads(given.compare.read_text()), found):
        sys.exit(1)


if __name__ == "__main__":
    main()
