"""Run local steps of real sizes on the emulated device, without numbers; print JSON.

    python counted_steps.py FOLDER

For every setup, report the kernels of a local step of a client or of stacked clients, the maximum
GiB of tensors in it with its estimate, the lines where the host waits, and operations whose kernels
raise. For some setups, also report the kernels and the GiB of an evaluated chunk.
"""

import gc
import json
import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from emulated_device import NAME, EmulatedDevice, fused_attention

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.messages import EvalJob, TrainJob, to_array
from trishul_ray.federation.worker import evaluation, local
from trishul_ray.federation.worker.context import ModelContext, WorkerContext, build_model_context
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import cast, configure_compute, run_dtype
from trishul_ray.models.find_model import KNOWN
from trishul_ray.models.shared_weights import Resident
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.stages import Stages

COMMON = [
    "model.init=random", "budget=lower", "federation.local_steps=3", "tracking.mlflow=false",
    "evaluation.batch_size=64", "resources.backend=inline",
    "adapter.init=random_normal",  # cheap to draw; the kernels are the same for any basis
]  # fmt: skip
#: Setups that also evaluate a chunk: with merged weights in fp32, without in bf16, and a large
#: model.
EVALUATED = ("vit trishul", "vit trishul fp32", "llama trishul")
IMAGES = ["dataset=cifar100", "model=vit-b16", "model.precision=bf16"]
TEXTS = [
    "adapter.matching=published",
    "task.template='{text}:'",
    "task.verbalizers=['a', 'b']",
    "model.precision=bf16",
]
FP32, STACKED = "model.precision=fp32", "federation.stacked=3"
#: Setups, keyed by name: the backbone, and further fields.
SETUPS = {
    **{f"vit {m}": ("vit", [f"method={m}"]) for m in ("trishul", "ravan", "fedit", "fullft")},
    "vit trishul fp32": ("vit", ["method=trishul", FP32]),
    "vit trishul stacked": ("vit", ["method=trishul", STACKED]),
    "vit fedit stacked": ("vit", ["method=fedit", STACKED]),
    "t5 trishul": ("t5", ["method=trishul"]),
    "llama trishul": ("llama", ["method=trishul"]),
}


class Rows:
    """Equal rows of one shape."""

    def __init__(self, row):
        self.row, self.columns = row, tuple(row)

    def __len__(self):
        return 1000

    def batch(self, rows):
        return {k: torch.from_numpy(np.repeat(v[None], len(rows), 0)) for k, v in self.row.items()}


class Shards:
    def shard(self, client):
        return np.arange(400)


def images():
    classes = tuple(map(str, range(100)))
    norm = {"image_shape": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    info = DatasetInfo("cifar100", "image", classes=classes, **norm)
    return IMAGES, info, {"pixels": np.zeros((3, 32, 32), np.uint8), "label": np.int64(0)}


def texts(folder, kind):
    """Return T5-Base and LLaMA-3.2-1B, at the paper's lengths."""
    name, length = {"t5": ("google-t5/t5-base", 256), "llama": ("meta-llama/Llama-3.2-1B", 128)}[
        kind
    ]
    KNOWN[name]().save_pretrained(folder / kind)
    byte_tokenizer(kind).save_pretrained(folder / kind)
    row = {"input_ids": np.full(length, 5, np.int32), "length": np.int32(length)}
    if kind == "t5":
        row |= {"target_ids": np.full(16, 5, np.int32), "target_length": np.int32(16)}
    lengths = [f"task.max_length={length}", "task.target_length=16"]
    overrides = ["dataset=synthetic/topics", f"model={folder / kind}", *lengths, *TEXTS]
    info = DatasetInfo("rte", "text", classes=("a", "b"), fields=("text",))
    return overrides, info, row | {"label": np.int64(0)}


def load_shapes(self, kind, num_classes, *, seed):
    """Replace Backbone.load_resident: return the modules, without weights."""
    model = self.meta_model(kind, num_classes)
    cast(model, run_dtype(self.config))
    configure_compute(model, self.config)
    return Resident(model, "", ())


class Enough(Exception):
    """End a client's round after its second step."""


class StepRows(Rows):
    """Rows of two steps, which record where each starts and ends."""

    def __init__(self, row, note):
        super().__init__(row)
        self.note, self.steps = note, 0

    def batch(self, rows):
        self.note()
        if self.steps == 2:
            raise Enough
        self.steps += 1
        return super().batch(rows)


def counted(device, experiment, info, row, evaluated):
    states = []

    def note():
        states.append((device.kernels.total(), device.bytes, len(device.waits)))
        device.peak = device.peak if states[2:] else device.bytes

    context = build_model_context(experiment, info)
    parts = {part.name: getattr(context, part.name) for part in fields(ModelContext)}
    context = WorkerContext(
        **parts, train=StepRows(row, note), scored={"test": (Rows(row), np.arange(1000))},
        shards=Shards(), stages=Stages.of(experiment),
    )  # fmt: skip
    context.task.prepare_batch(
        Rows(row).batch([0]), context.device, context.dtype
    )  # copies constants
    method, layout, answers = context.method, context.model.layout, {}
    if method.survey_plan is not None:
        answers = {spec.name: torch.zeros(spec.d_out, spec.d_in) for spec in context.model.specs}
    start = method.initial_state(layout, context.model.initial(), answers).map(to_array)
    jobs = [TrainJob(round=2, client=client) for client in range(experiment.federation.stacked)]
    device.raising.clear()
    with suppress(Enough):
        local.train_clients(context, start, jobs)
    # The first step also creates the optimizer's state.
    _, (began, _, first), (ended, _, last) = states
    found = {"kernels": ended - began, "waits": device.waits[first:last]}
    found["GiB"] = device.peak / 2**30
    if evaluated:
        model, size = evaluation.EvaluatedModel(context), experiment.evaluation.batch_size
        for first in (0, size):  # The model is bound for both.
            before, device.peak = device.kernels.total(), device.bytes
            evaluation.evaluate_chunk(model, start, EvalJob(2, first, first + size))
        found["kernels of evaluation"] = device.kernels.total() - before
        found["GiB of evaluation"] = device.peak / 2**30
    return found | {"raising": device.raising}


def known(device):
    """Count operations whose counts are known."""
    with device:
        values = torch.ones(4, 4, device=NAME)
        before, taken = device.kernels.total(), device.bytes
        product = (values @ values).T.mul_(2.0)
        found = {"kernels": device.kernels.total() - before, "bytes": device.bytes - taken}
        values.median(), float(product.sum())
        found |= {"raising": list(device.raising), "waits": list(device.waits)}
        try:
            values + torch.ones(4, 4)
        except RuntimeError as error:
            found["two devices"] = str(error)
    return found


def main(folder):
    device = EmulatedDevice(numbers=False)
    torch.nn.functional.scaled_dot_product_attention = fused_attention
    kinds = {"vit": images(), "t5": texts(folder, "t5"), "llama": texts(folder, "llama")}
    results = {"known": known(device)}
    for name, (kind, more) in SETUPS.items():
        gc.collect()  # objects in cycles of the previous setup
        overrides, info, row = kinds[kind]
        experiment = load_experiment(None, [*COMMON, *overrides, *more])
        resources = experiment.resources.model_copy(update={"device": NAME})
        experiment = experiment.model_copy(update={"resources": resources})
        with device, patch.object(Backbone, "load_resident", load_shapes):
            results[name] = counted(device, experiment, info, row, name in EVALUATED)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
