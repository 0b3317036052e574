"""What the parts of gpu.py share: the place of a measurement, experiments, timing, CUDA graphs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _limit import now
from _results import Section
from _setups import LARGE, synthetic
from torch import Tensor
from transformers import ViTConfig

from trishul_ray.data.dataset import PreparedDataset
from trishul_ray.data.partition import partition
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.local import LocalSteps
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.prepare import Prepared, prepare_run
from trishul_ray.federation.workbench import Workbench, new_run
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.lookup import KNOWN
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.rng import numpy_rng

#: Rows of the noise that stands for CIFAR-100: many enough for some rounds, and as in the paper.
SOME_ROWS = {"train": 10_000, "test": 1_000}
ALL_ROWS = {"train": 50_000, "test": 10_000}
FEW_ROWS = {"train": 400, "test": 64}


@dataclass(frozen=True)
class Place:
    """Where a part is measured.

    Attributes:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        scratch: a folder for data and weights.
        add: takes each section of the result as soon as it is known; a section with the title of
            an earlier one replaces it.
    """

    device: torch.device
    scratch: Path
    add: Callable[[Section], None]

    @property
    def rehearsal(self) -> bool:
        """Whether shapes are tiny and nothing is worth timing."""
        return self.device.type == "cpu"

    def times(self, full: int, rehearsed: int = 2) -> int:
        """How often to repeat something."""
        return rehearsed if self.rehearsal else full


def experiment_at(place: Place, *overrides: str) -> Experiment:
    """An experiment on the device, without tracking, in the scratch folder."""
    return load_experiment(
        None,
        [
            f"resources.device={place.device.type}",
            "resources.backend=inline",
            "tracking.mlflow=false",
            f"storage.runs={place.scratch / 'runs'}",
            f"storage.cache={place.scratch / 'cache'}",
            *overrides,
        ],
    )


def vision(
    place: Place, *overrides: str, rows: dict[str, int] | None = None
) -> tuple[Experiment, Prepared]:
    """ViT-B/16 with random weights on noise of CIFAR-100's shape; a tiny ViT in a rehearsal."""
    model = [f"model={LARGE}", "model.init=random", "budget=lower"]
    if place.rehearsal:
        folder = place.scratch / "tiny-vit"
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ).save_pretrained(folder)
        model = [f"model={folder}", "model.init=random", "budget=2", "federation.batch_size=4"]
        rows = FEW_ROWS
    experiment = experiment_at(place, "dataset=cifar100", "dataset=synthetic", *model, *overrides)
    return experiment, dealt(experiment, synthetic(place.scratch / "noise", rows or SOME_ROWS))


def dealt(experiment: Experiment, dataset: PreparedDataset) -> Prepared:
    """A dataset with its rows divided among the clients."""
    fed = experiment.federation
    labels = dataset.train.labels
    return Prepared(dataset, partition(labels, experiment.partition, fed.clients, experiment.seed))


def text(place: Place, kind: str, *overrides: str) -> tuple[Experiment, Prepared]:
    """T5-Base or LLaMA-3.2-1B with random weights, on letters that fill the paper's lengths.

    ``kind`` is ``t5`` or ``llama``. Words and tokens mean nothing; every token is a letter.
    """
    folder, file = place.scratch / kind, place.scratch / f"{kind}.csv"
    known = {"t5": "google-t5/t5-base", "llama": "meta-llama/Llama-3.2-1B"}[kind]
    length = {"t5": 256, "llama": 128}[kind]
    config = KNOWN[known]()
    model = ["adapter.matching=published", "budget=lower"]
    if place.rehearsal:
        config, length = BUILTINS[f"{kind}-tiny"].config(), 24
        model = ["adapter.rank=4", "adapter.heads=2", "federation.batch_size=4"]
    config.save_pretrained(folder)
    byte_tokenizer(kind).save_pretrained(folder)
    rng = numpy_rng(0, "letters")
    letters = rng.integers(ord("a"), ord("z") + 1, (600, length), dtype="uint8")
    lines = [f"{bytes(row).decode()},{'abcd'[i % 4]}" for i, row in enumerate(letters)]
    file.write_text("\n".join(["text,label", *lines]) + "\n")
    experiment = experiment_at(
        place,
        "dataset=table",
        f"data.path={file}",
        f"model={folder}",
        "model.init=random",
        "model.precision=bf16",
        "task.template='{text}:'",
        "task.verbalizers=['a', 'b', 'c', 'd']",
        f"task.max_length={length}",
        "task.target_length=16",
        *model,
        *overrides,
    )
    return experiment, prepare_run(experiment)


def first_steps(bench: Workbench) -> LocalSteps:
    """The local steps of client 0 in round 1; compute them inside ``bound()``."""
    start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
    return LocalSteps(bench, new_run(bench, start, 1, 0), TrainJob(round=1, client=0))


def per_call(place: Place, call: Callable[[], object], calls: int, repeats: int = 5) -> list[float]:
    """Seconds of a call, ``repeats`` times the mean of ``calls`` that are not waited for."""
    call()
    found = []
    for _ in range(place.times(repeats)):
        began = now(place.device)
        for _ in range(place.times(calls)):
            call()
        found.append((now(place.device) - began) / place.times(calls))
    return found


def on_device(place: Place, call: Callable[[], object]) -> float:
    """Median seconds of a call between two events of the device: 3 to 20 calls, as they last."""
    if place.rehearsal:
        return statistics.median(per_call(place, call, 1))
    call()
    began = now(place.device)
    call()
    seconds = now(place.device) - began
    found = []
    for _ in range(max(3, min(20, int(0.5 / seconds)))):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found)


def captured(place: Place, call: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of a call, to replay; the call itself in a rehearsal."""
    if place.rehearsal:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries set themselves up before the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_into(static: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
    """Put a batch where a graph expects it."""
    for name, value in batch.items():
        static[name].copy_(value)


def milliseconds(seconds: Sequence[float], digits: int = 2) -> str:
    """``median (min-max)`` in milliseconds."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.{digits}f} ({low * 1e3:.{digits}f}-{high * 1e3:.{digits}f})"


def memory(device: torch.device) -> dict[str, Any]:
    """GiB that this process has taken at most, and that are taken of the whole device."""
    gib = 2**30
    if device.type == "cpu":
        import psutil

        return {"process": psutil.Process().memory_info().rss / gib, "device": 0.0, "total": 0.0}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "process": torch.cuda.max_memory_reserved(device) / gib,
        "device": (total - free) / gib,
        "total": total / gib,
    }
