"""Share the weights of a frozen backbone between all processes of a machine.

The prepared weights (read and checked, positions resized, cast to the run's precision) are written
once to ``<cache>/weights/<key>.safetensors``. Every process builds the modules on the meta device
and points them at the memory-mapped file. The pages exist once in the page cache, and the system
can reclaim them. The mapping is private: a write copies the page and never reaches the file. A head
that a run draws from its seed is not in the file; each process holds its own.

The file is an ordinary safetensors file whose tensors begin at multiples of 64 bytes, as PyTorch
allocates them. At another alignment a matrix product may round differently.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from trishul_ray.files import make_cache_folder, remove_unused, stamp
from trishul_ray.models.compute import cast, configure_compute, run_dtype
from trishul_ray.models.lookup import source_files, weights_source
from trishul_ray.models.weights import build_module, draw_head, draw_weights, load_checkpoint

if TYPE_CHECKING:
    from trishul_ray.models.backbone import Backbone, ModelKind

#: Part of every file's key. Raise it when the content of the files changes.
FORMAT_VERSION = 2

#: Folder of the prepared weights in the cache.
FOLDER = "weights"

#: Tensors begin at multiples of this many bytes.
ALIGNMENT = 64

_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Resident(NamedTuple):
    """A backbone as a worker keeps it.

    Attributes:
        model: On the CPU, in the run's precision, in eval mode.
        source: Identity of the weights, the same on every machine: the SHA-256 of a folder's
            files, or a hub name with its commit. Empty if the architecture is built in and the
            weights are drawn from the seed, or the commit is unknown.
        drawn: Parameters that the checkpoint lacks and that are drawn from the seed.
    """

    model: nn.Module
    source: str
    drawn: tuple[str, ...]


def load_resident(
    backbone: "Backbone", kind: "ModelKind", num_classes: int | None, *, seed: int
) -> Resident:
    """Load a backbone with shared weights; see :meth:`Backbone.load_resident`."""
    config = backbone.model_config(kind, num_classes)
    file = weights_file(backbone, config, kind, seed=seed)
    make_cache_folder(file.parent)
    resident = None
    # A second process waits at the lock for the file instead of making it again.
    with FileLock(file.with_suffix(".lock")):
        if file.is_file():
            resident = _map_model(file, backbone, config, kind, seed)
        if resident is None:
            if backbone.config.init == "random":
                model, drawn = build_module(backbone, config, kind), list[str]()
                draw_weights(model, seed)
            else:
                model, drawn = load_checkpoint(backbone, config, kind)
            cast(model, run_dtype(backbone.config))
            remove_unused_weights(backbone.places.cache)
            state = {name: tensor for name, tensor in _tensors(model) if name not in drawn}
            source = weights_source(backbone, getattr(config, "_commit_hash", None))
            metadata = {"drawn": json.dumps(drawn), "source": source}
            write_aligned(file, state, metadata)
            del model, state
            resident = _map_model(file, backbone, config, kind, seed)
    if resident is None:
        raise RuntimeError(f"{file} was written and cannot be read")
    configure_compute(resident.model, backbone.config)
    resident.model.eval()
    return resident


def weights_file(
    backbone: "Backbone", config: PretrainedConfig, kind: "ModelKind", *, seed: int
) -> Path:
    """Return the path of the prepared weights, named by everything that determines them.

    The seed determines random weights. A head drawn for a checkpoint is not in the file.
    """
    location = backbone.location
    if backbone.config.init == "random":
        source: Any = ["seed", seed, weights_source(backbone, None)]
    elif isinstance(location, Path):
        # Not by content: hashing gigabytes in every process would take longer than mapping them.
        source = [str(location.resolve()), [(f.name, *stamp(f)) for f in source_files(location)]]
    else:
        source = [location, getattr(config, "_commit_hash", None)]
    key = [
        FORMAT_VERSION,
        [torch.__version__, transformers.__version__],
        source,
        kind,
        backbone.config.precision,
        backbone.config.image_size,
        config.to_json_string(),
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return backbone.places.cache / FOLDER / f"{digest}.safetensors"


def write_aligned(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose tensors begin at multiples of 64 bytes.

    A tensor (on the CPU) whose size is no such multiple is followed by padding bytes, stored as a
    tensor named ``pad.NAME``. The file is written under a temporary name and renamed.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0

    def add(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal offset
        end = offset + size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end

    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        add(name, _DTYPES[tensor.dtype], list(tensor.shape), size)
        if padding := -offset % ALIGNMENT:
            add(f"pad.{name}", "U8", [padding], padding)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as sink:
            sink.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
                sink.write(data.data)
                sink.write(b"\0" * (-data.nbytes % ALIGNMENT))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, also non-persistent ones, once, under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _map_model(
    file: Path, backbone: "Backbone", config: PretrainedConfig, kind: "ModelKind", seed: int
) -> Resident | None:
    """Return the model on the mapped file, or None if the file does not fit the model."""
    with torch.device("meta"):
        model = build_module(backbone, config, kind)
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata() or {}
            drawn, source = list(json.loads(metadata["drawn"])), metadata["source"]
            tensors = {
                name: stored.get_tensor(name)
                for name in stored.keys()  # noqa: SIM118  # not a dict
                if not name.startswith("pad.")
            }
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
    expected = {name: tensor.shape for name, tensor in _tensors(model) if name not in drawn}
    if expected != {name: tensor.shape for name, tensor in tensors.items()}:
        return None
    for name in drawn:
        tensors[name] = torch.empty(model.get_parameter(name).shape)
    _replace_tensors(model, tensors)
    set_head(model, drawn, seed, run_dtype(backbone.config))
    os.utime(file)
    return Resident(model, source, tuple(drawn))


def set_head(model: nn.Module, names: Sequence[str], seed: int, dtype: torch.dtype) -> None:
    """Draw the parameters ``names`` of a resident model in place, for another seed."""
    parameters = [model.get_parameter(name) for name in names]
    devices = [parameter.device for parameter in parameters]
    for parameter in parameters:
        # Drawn in float32 on the CPU, so that device and precision do not change the draw.
        parameter.data = torch.empty(parameter.shape)
    draw_head(model, names, seed)
    for parameter, device in zip(parameters, devices, strict=True):
        parameter.data = parameter.data.to(device, dtype)


def _replace_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the model's tensors by ``tensors``, under every name that a tensor has."""
    names = {id(tensor): name for name, tensor in _tensors(model)}
    parameters = {n: nn.Parameter(tensors[n]) for n, _ in model.named_parameters()}
    # Keep the old tensors alive: a new one must not get the id of an old one, or tied weights
    # would come apart.
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
                raise RuntimeError(
                    f"{type(module).__name__}.{name} is neither parameter nor buffer"
                )
    del old


def remove_unused_weights(cache: Path) -> list[Path]:
    """Remove weights that no process has opened for a month; open mappings stay valid.

    Returns:
        The files that were removed.
    """
    return remove_unused((cache / FOLDER).glob("*.safetensors"))
