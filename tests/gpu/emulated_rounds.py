"""Run one round of many configurations on the emulated device and on the CPU; print JSON.

    python emulated_rounds.py CACHE

For every configuration, report the waits before the first step of the last client, during its
steps, and after them, the change of the state, and its difference from the CPU's.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from emulated_device import NAME, EmulatedDevice

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation import inline
from trishul_ray.federation.checkpoint import CheckpointStore
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.server import Server
from trishul_ray.federation.worker import local
from trishul_ray.methods.base import method_names
from trishul_ray.storage.store import Store

COMMON = [
    "model.init=random", "federation.clients=4", "federation.clients_per_round=2",
    "federation.rounds=2", "federation.local_steps=2", "federation.batch_size=4",
    "evaluation.limit=8", "evaluation.batch_size=8", "evaluation.diagnostics_every=0",
    "task.max_length=48", "task.target_length=4", "tracking.mlflow=false",
    # Adam would amplify the rounding noise of a zero gradient to a whole step.
    "optimizer.name=sgd", "optimizer.lr=0.1",
]  # fmt: skip


LIMITED = ["federation.compute=uniform", "federation.clients_per_round=4"]
TEXT = ["adapter.rank=4", "adapter.heads=2"]
CONFIGURATIONS = {
    **{name: [f"method={name}"] for name in method_names()},
    "adam": ["optimizer.name=adam", "optimizer.lr=0.001", "optimizer.clip_norm=1"],
    "bf16": ["model.precision=bf16"],
    "limited": [*LIMITED, "optimizer.weight_decay=0.1", "method.prox_on=change"],
    "chosen heads": ["method.head_fraction=0.5", "method.selection=gradient"],
    "pruned ranks": ["method=hetlora", "method.prune=true", *LIMITED],
    "control variates": ["method=scaffold", "method.option=I"],
    "stacked": ["federation.stacked=2"],
    "encoder": ["dataset=synthetic/topics", "model=bert-tiny", *TEXT],
    "encoder-decoder": ["dataset=synthetic/topics", "model=t5-tiny", *TEXT],
    "decoder": ["dataset=synthetic/rte", "model=llama-tiny", *TEXT],
    "decoder bf16": ["dataset=synthetic/rte", "model=llama-tiny", "model.precision=bf16", *TEXT],
}


class MarkedRows:
    """Training rows that record the number of waits before each batch."""

    def __init__(self, rows, waits, marks):
        self.rows, self.waits, self.marks = rows, waits, marks

    def __getattr__(self, name):
        return getattr(self.rows, name)

    def batch(self, indices):
        self.marks.append(len(self.waits))
        return self.rows.batch(indices)


def server_of(experiment):
    executor = InlineExecutor(experiment, prepare_run(experiment))
    store = CheckpointStore(
        Store.open(tempfile.mkdtemp(dir=experiment.storage.runs)), experiment.id
    )
    return Server(experiment, executor, store, "attempt"), executor.context


def trained(server):
    """Return the state of the server, or of the clients of a method that sends nothing."""
    shared, kept = server.checkpoint.state.shared, server.checkpoint.client_states
    if shared.size:
        return shared
    states = [kept[client] for client in sorted(kept)]
    arrays = [state[name] for state in states for name in sorted(state)]
    return np.concatenate(arrays) if arrays else np.zeros(1)


def on_cpu(experiment):
    server, _ = server_of(experiment)
    start = trained(server)
    server.step()
    return start, trained(server)


def emulated(experiment, device):
    resources = experiment.resources.model_copy(update={"device": NAME})
    server, context = server_of(experiment.model_copy(update={"resources": resources}))
    waits, marks, spans = device.waits, [], []
    context.train = MarkedRows(context.train, waits, marks)

    def train_clients(*args):
        waits.clear()
        marks.clear()
        device.busy = False
        found = local.train_clients(*args)
        steps = marks[-experiment.federation.local_steps :]
        # The end belongs to the last step, because nothing separates them.
        spans.append((waits[: steps[0]], waits[steps[0] : steps[-1]], waits[steps[-1] :]))
        return found

    with patch.object(inline, "train_clients", train_clients):
        server.step()
    return trained(server), dict(zip(("start", "steps", "end"), spans[-1], strict=True))


def known_waits(device):
    """Return lines whose waits must be recorded, and one whose wait must not."""
    found = {}
    with device:
        values = torch.arange(6.0, device=NAME)
        for name, act in {
            "read": lambda: float(values[0]),
            "branch": lambda: bool((values > 2).any()),
            "mask": lambda: values[values > 2],
            "mask of the host": lambda: values[torch.arange(6) > 2],
            "to the host": lambda: values.cpu(),
            "blocking": lambda: torch.ones(6).to(NAME),
            "pageable": lambda: torch.ones(6).to(NAME, non_blocking=True),
            "made from numbers": lambda: torch.tensor([1.0, 2.0], device=NAME),
            "page-locked": lambda: torch.ones(6).pin_memory().to(NAME, non_blocking=True),
            "arithmetic": lambda: torch.where(values > 2, values, 0.0).sum(),
        }.items():
            device.waits.clear()
            device.busy = True
            act()
            found[name] = list(device.waits)
        try:
            values + torch.ones(6)
        except RuntimeError as error:
            found["two devices"] = [str(error)]
    return found


def main(cache):
    device = EmulatedDevice()
    results = {"known waits": known_waits(device)}
    with tempfile.TemporaryDirectory() as runs:
        common = [*COMMON, f"storage.cache={cache}", f"storage.runs={runs}"]
        for name, overrides in CONFIGURATIONS.items():
            experiment = load_experiment(None, [*common, *overrides])
            before, expected = on_cpu(experiment)
            with device:
                state, found = emulated(experiment, device)
            found["moved"] = float(np.abs(expected - before).max())
            found["difference"] = float(np.abs(state - expected).max())
            results[name] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
