"""Backbones in 4 and 8 bits: bytes that they save, and time that they cost a step.

    python benchmarks/quantized.py [PART ...] [options]

Parts (all by default):

    shape    LLaMA-3.2-1B on the meta device: bytes of its weights by how they are stored
    actors   memory of Ray actors that hold a small LLaMA (see memory.py), and of a process's step
    fold     an update of 1 % of a weight, quantized again with the weight: its error
    step     a local step of LoRA on the small LLaMA beside that without quantization, by turns

The small LLaMA has random weights, which cost what pretrained ones do. `trishul table quantized`
compares what is learned. Seconds are CPU time of the one thread that runs. Results go to
benchmarks/results/.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import get_args

import memory
import torch
from _results import Report, Section, Times, paired, told_by
from torch import nn
from transformers import LlamaConfig

from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, Trained
from trishul_ray.adapters.quantized import QuantizedLinear
from trishul_ray.adapters.targets import find_layers
from trishul_ray.config.fields import ModelConfig, Quantization
from trishul_ray.config.places import Places
from trishul_ray.federation.on_ray.session import ray_session
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.compute import quantize_layers, run_dtype

ALL = ("shape", "actors", "fold", "step")
MIB = 2**20
#: Storage of weights: precision, and quantization.
WEIGHTS = {
    "fp32": ("fp32", "none"),
    "bf16": ("bf16", "none"),
    "int8": ("bf16", "int8"),
    "nf4": ("bf16", "nf4"),
}


def main() -> None:
    """Measure the parts that are asked for."""
    options = _arguments()
    torch.set_num_threads(1)
    report = Report("quantized", options, "processes")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        options.model = str(small_llama(folder / "llama", options.width, options.blocks))
        if "shape" in options.parts:
            report.add(shape())
        if "actors" in options.parts:
            with ray_session():
                for name in ("bf16", "int8", "nf4"):
                    options.precision, options.quantize = WEIGHTS[name]
                    report.add(memory.measure(options, folder, shared=True))
            report.add(peaks(options, folder))
        if "fold" in options.parts:
            report.add(fold())
        if "step" in options.parts:
            report.add(step(options, folder))


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__, ALL)
    add = parser.add_argument
    add("--width", type=int, default=768, help="of the small LLaMA")
    add("--blocks", type=int, default=12, help="of the small LLaMA")
    add("--actors", type=int, default=3)
    add("--threads", type=int, default=1, help="CPU threads of an actor")
    add("--batch", type=int, default=4, help="rows of a timed step")
    add("--tokens", type=int, default=64, help="of a row of a timed step")
    add("--steps", type=int, default=9, help="timed steps")
    return parser.parse_args()


def small_llama(folder: Path, width: int, blocks: int) -> Path:
    """Write the configuration of a LLaMA of the given size; return its folder."""
    LlamaConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1), intermediate_size=4 * width, vocab_size=16_000,
        tie_word_embeddings=True,
    ).save_pretrained(str(folder))  # fmt: skip
    return folder


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def shape() -> Section:
    """LLaMA-3.2-1B by how its weights are stored."""
    rows, data = [], {}
    for name, (precision, kind) in WEIGHTS.items():
        config = ModelConfig(name="meta-llama/Llama-3.2-1B", precision=precision)
        dtype = run_dtype(config)
        model = Backbone(config, Places(Path("unused"), None)).meta_model().to(dtype)
        quantize_layers(model, _kind(kind), dtype)
        size = stored_bytes(model)
        layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
        weights = sum(m.in_features * m.out_features for m in layers)
        bits = 8 * sum(map(stored_bytes, layers)) / weights if layers else 8 * dtype.itemsize
        rows.append([name, f"{bits:.3f}", f"{size / 2**30:.2f}"])
        data[name] = size
    return Section(
        "LLaMA-3.2-1B on the meta device", ["weights", "bits in blocks", "GiB"], rows, data=data
    )


def _kind(text: str) -> Quantization:
    assert text in get_args(Quantization)
    return text  # type: ignore[return-value]


def _adapted(options: argparse.Namespace, weights: str, cache: Path) -> AdaptedModel:
    precision, kind = WEIGHTS[weights]
    config = ModelConfig.model_validate(
        {"name": options.model, "init": "random", "precision": precision, "quantize": kind}
    )
    backbone = Backbone(config, Places(cache, None))
    model = backbone.load_resident("causal-lm", None, seed=0).model
    adapters = {spec.name: LoRA(rank=8) for spec in find_layers(model)}
    return AdaptedModel(model, adapters, seed=0, train_head=False)


def _step(options: argparse.Namespace, adapted: AdaptedModel) -> None:
    vector = adapted.initial()
    grad = torch.zeros_like(vector)
    tokens = torch.arange(options.batch * options.tokens).view(options.batch, -1)
    adapted.bind(Trained(vector), grad)
    adapted.forward(input_ids=tokens, labels=tokens).loss.backward()
    adapted.unbind()


def _peak(options: argparse.Namespace, weights: str, cache: Path) -> tuple[float, float]:
    """MiB: resident with the model, every page read, and at most during a step."""
    torch.set_num_threads(1)
    adapted = _adapted(options, weights, cache)
    for tensor in (*adapted.model.parameters(), *adapted.model.buffers()):
        tensor.sum()
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _step(options, adapted)
    return loaded / 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peaks(options: argparse.Namespace, cache: Path) -> Section:
    """Memory of a step beside the weights, by their storage, each in a new process."""
    rows, data = [], {}
    for name in WEIGHTS:
        for _ in range(2):  # the first one prepares the file of weights
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                loaded, peak = pool.apply(_peak, (options, name, cache))
        rows.append([name, f"{loaded:.0f}", f"{peak:.0f}", f"{peak - loaded:.0f}"])
        data[name] = (loaded, peak)
    return Section(
        f"One process and a step of {options.batch} x {options.tokens} tokens",
        ["weights", "loaded, MiB", "peak, MiB", "the step, MiB"],
        rows,
        ["largest resident set, with interpreter and libraries; quantized ones also import "
         "bitsandbytes"],
        data=data,
    )  # fmt: skip


def fold() -> Section:
    """An update of a share of the weight, written into a quantized weight."""
    generator = torch.Generator().manual_seed(0)
    weight, update = torch.randn(2, 768, 768, generator=generator) * 0.02
    rows, data = [], {}
    for kind in ("int8", "nf4"):
        for share in (0.01, 0.1):
            added = share * update
            dense = [_dequantized(weight, kind), _dequantized(weight + added, kind)]
            moved = dense[1] - dense[0]
            again = _dequantized(dense[0] + added, kind) - dense[0]
            errors = [float((m - added).norm() / added.norm()) for m in (moved, again)]
            rows.append([kind, f"{share:.0%}", *(f"{e:.2f}" for e in errors)])
            data[f"{kind} {share}"] = errors
    return Section(
        "An update written into a quantized weight, 768 x 768 normal entries",
        ["weights", "update / weight", "error, weight known", "error, weight dequantized"],
        rows,
        ["error: of what the weight moved by, over the update (Frobenius); quantized again from "
         "the unquantized weight plus the update, or from the dequantized one plus it; no method "
         "does either"],
        data=data,
    )  # fmt: skip


def _dequantized(weight: torch.Tensor, kind: str) -> torch.Tensor:
    rows, columns = weight.shape
    linear, chosen = nn.Linear(columns, rows, bias=False), _kind(kind)
    assert chosen != "none"
    linear.weight.data = weight
    return QuantizedLinear(linear, chosen, torch.float32).weight


def step(options: argparse.Namespace, cache: Path) -> Section:
    """A step by how weights are stored, by turns."""
    models = {name: _adapted(options, name, cache) for name in WEIGHTS}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.steps + 1):
        for name, adapted in models.items():
            began = time.process_time()
            _step(options, adapted)
            if turn:  # the first one warms up
                seconds[name].append(time.process_time() - began)
    times = {name: Times.of(values) for name, values in seconds.items()}
    base = times["bf16"]
    rows = [
        [name, t.show(1e3, 0), f"{t.median / base.median:.2f}", paired(t, base).show()]
        for name, t in times.items()
    ]
    return Section(
        f"A local step of LoRA, rank 8, {options.batch} x {options.tokens} tokens, LLaMA of "
        f"{options.blocks} blocks of width {options.width}",
        ["weights", "CPU ms", "/ bf16", "/ bf16, neighbours"],
        rows,
        ["int8 and NF4 compute in bf16; every layer is dequantized in both passes"],
        data=seconds,
    )


if __name__ == "__main__":
    main()
