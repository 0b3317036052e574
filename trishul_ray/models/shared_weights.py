"""One copy of a frozen backbone in a machine's memory, whatever the number of actors.

The prepared weights (checkpoint read and checked, positions resized, cast to the run's precision)
are written once to ``<cache>/weights/<key>.safetensors``. Every process builds the modules without
memory and points them at the mapped file, so that the pages lie once in the page cache and are
given back under pressure. The mapping is private: a write would copy the page, never reach the
file. What a run draws from its seed (a new head) is not in the file, and each process's own.

The file is an ordinary safetensors file whose tensors begin at multiples of 64 bytes, as PyTorch
allocates them: a matrix product may round differently elsewhere.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from trishul_ray.data.prepare import make_cache_folder
from trishul_ray.models.backbone import (
    backbone_config,
    build_module,
    draw_head,
    draw_weights,
    load_checkpoint,
)
from trishul_ray.models.compute import cast, run_dtype, set_up
from trishul_ray.models.lookup import resolve_model

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig
    from trishul_ray.tasks.base import Architecture


#: Part of every file's key: raise it when what is written changes.
FORMAT_VERSION = 2


#: Bytes to which tensors are aligned.
ALIGNMENT = 64


#: Files that no process has opened for so long are removed.
KEPT_SECONDS = 30 * 24 * 3600


_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Resident(NamedTuple):
    """A backbone as a worker keeps it.

    Attributes:
        model: on the CPU, in the run's precision, in eval mode.
        source: what its weights are, the same on every machine: the SHA-256 of a folder's
            safetensors files, or a hub name with its commit; empty where they are drawn from
            the seed, or no commit is known.
    """

    model: nn.Module
    source: str


def resident_backbone(
    config: "ModelConfig",
    architecture: "Architecture",
    num_classes: int | None,
    *,
    seed: int,
    hub: Path | None,
    cache: Path,
) -> Resident:
    """The backbone as a worker keeps it: on the CPU, in the run's precision, in eval mode.

    The same bits as :func:`~trishul_ray.models.backbone.load_backbone` and a cast give; weights
    are shared with every other process of this machine that asked for the same.

    Args:
        config: names the model; its precision, and its switches of how it computes.
        architecture: which of transformers' model classes.
        num_classes: outputs of a classification head.
        seed: of whatever is drawn.
        hub: a local mirror.
        cache: folder of built-in backbones and of the files that are shared.

    Raises:
        InputError: no such model, or one of another kind.
        CorruptFileError: the checkpoint is malformed.
    """
    shape = backbone_config(config, architecture, num_classes, hub=hub, cache=cache)
    file = weights_file(config, shape, architecture, seed=seed, hub=hub, cache=cache)
    make_cache_folder(file.parent)
    dtype = run_dtype(config)
    found = None
    # Under the lock: who comes second waits for the file instead of making it again.
    with FileLock(file.with_suffix(".lock")):
        if file.is_file():
            found = _mapped(file, config, shape, architecture, seed)
        if found is None:
            if config.init == "random":
                whole, drawn = build_module(config, shape, architecture), list[str]()
                draw_weights(whole, seed)
            else:
                whole, drawn = load_checkpoint(config, shape, architecture, hub=hub, cache=cache)
            cast(whole, dtype)
            _remove_unused(file.parent)
            state = {name: tensor for name, tensor in _tensors(whole) if name not in drawn}
            source = _source_of(config, shape, hub=hub, cache=cache)
            write_aligned(file, state, {"drawn": json.dumps(drawn), "source": source})
            del whole, state
            found = _mapped(file, config, shape, architecture, seed)
    if found is None:
        raise RuntimeError(f"{file} was written and cannot be read")
    set_up(found.model, config)
    found.model.eval()
    return found


def weights_file(
    config: "ModelConfig",
    shape: PretrainedConfig,
    architecture: "Architecture",
    *,
    seed: int,
    hub: Path | None,
    cache: Path,
) -> Path:
    """Where the prepared weights lie: named by everything that decides them.

    Args:
        config: names the model.
        shape: of :func:`~trishul_ray.models.backbone.backbone_config`.
        architecture: which of transformers' model classes.
        seed: decides random weights; a head drawn for a checkpoint is not in the file.
        hub: a local mirror.
        cache: the folder.
    """
    if config.init == "random":
        source: Any = ["seed", seed]
    else:
        where = resolve_model(config, hub=hub, cache=cache)
        if isinstance(where, Path):
            files = sorted([*where.glob("*.safetensors"), *where.glob("*.json")])
            stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
            source = [str(where.resolve()), stats]
        else:
            source = [where, getattr(shape, "_commit_hash", None)]
    decides = [
        FORMAT_VERSION,
        [torch.__version__, transformers.__version__],
        source,
        architecture,
        config.precision,
        config.image_size,
        shape.to_json_string(),
    ]
    digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    return cache / "weights" / f"{digest}.safetensors"


def _source_of(
    config: "ModelConfig", shape: PretrainedConfig, *, hub: Path | None, cache: Path
) -> str:
    """See :class:`Resident`."""
    if config.init == "random":
        return ""
    where = resolve_model(config, hub=hub, cache=cache)
    if isinstance(where, Path):
        return folder_source(where)
    commit = getattr(shape, "_commit_hash", None)
    return f"{where}@{commit}" if commit else ""


def folder_source(folder: Path) -> str:
    """What the weights in a folder are: ``sha256:`` and the hash of its safetensors files."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def write_aligned(file: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write a safetensors file, tensor after tensor, each at a multiple of 64 bytes.

    Between tensors whose size is none, tensors of padding bytes named ``pad.N``. Written beside
    and renamed.

    Args:
        file: the place.
        tensors: by name, on the CPU.
        notes: the file's metadata.
    """
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    place = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        kind = _DTYPES[tensor.dtype]
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
        if gap := -place % ALIGNMENT:
            header[f"pad.{name}"] = {
                "dtype": "U8",
                "shape": [gap],
                "data_offsets": [place, place + gap],
            }
            place += gap
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as sink:
            sink.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
                sink.write(data.data)
                sink.write(b"\0" * (-data.nbytes % ALIGNMENT))
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, under its first name, also those that no state has."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _mapped(
    file: Path,
    config: "ModelConfig",
    shape: PretrainedConfig,
    architecture: "Architecture",
    seed: int,
) -> Resident | None:
    """The model on the mapped file; None where the file is not what the model needs."""
    with torch.device("meta"):
        model = build_module(config, shape, architecture)
    try:
        with safe_open(file, "pt") as source:
            notes = source.metadata() or {}
            drawn, origin = list(json.loads(notes["drawn"])), notes["source"]
            found = {
                name: source.get_tensor(name)
                for name in source.keys()  # noqa: SIM118  # not a dict
                if not name.startswith("pad.")
            }
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
    wanted = {name: tensor.shape for name, tensor in _tensors(model) if name not in drawn}
    if wanted != {name: tensor.shape for name, tensor in found.items()}:
        return None
    for name in drawn:
        found[name] = torch.empty(model.get_parameter(name).shape)
    _assign(model, found)
    draw_head(model, drawn, seed)
    for name in drawn:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(run_dtype(config))
    os.utime(file)
    return Resident(model, origin)


def _assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put ``tensors`` in the place of the model's, wherever a tensor of several names stands."""
    names = {id(tensor): name for name, tensor in _tensors(model)}
    # Both the old (an id must stay taken) and the new one, so that tied weights stay tied.
    parameters = {n: nn.Parameter(tensors[n]) for n, _ in model.named_parameters()}
    old = list(_tensors(model))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameters[names[id(parameter)]]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = tensors[names[id(buffer)]]
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise RuntimeError(f"{type(module).__name__}.{name} is a tensor of no state")
    del old


def _remove_unused(folder: Path) -> None:
    """Remove weights that no process has opened for a month; one that maps them keeps them."""
    oldest = time.time() - KEPT_SECONDS
    for file in folder.glob("*.safetensors"):
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)
