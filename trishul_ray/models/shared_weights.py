"""Share the weights of a frozen backbone between all processes of a machine.

The prepared weights are written once to ``<cache>/weights/<key>/weights.pt``. They are validated,
with positions resized, cast to the run's precision, and quantized with ``model.quantize``. Every
process builds the modules on the meta device and points them at the memory-mapped file. The pages
exist once in the page cache, and the system can reclaim them. The mapping is private: a write
copies the page and never reaches the file. Each process verifies the checksum before it maps the
file. A head that a run draws from its seed is not in the file; each process has a separate copy.

``torch.save`` aligns tensors to 64 bytes, as PyTorch allocates them. With another alignment, a
matrix product may round differently.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from trishul_ray.models.compute import cast, configure_compute, quantize_layers, run_dtype
from trishul_ray.models.find_model import source_files, weights_source
from trishul_ray.models.weights import Plan, build_weights, draw_head
from trishul_ray.storage.integrity import make_once, stamp

#: Part of every file's key. Increment it when the content of the files changes.
FORMAT_VERSION = 4

#: Folder of the prepared weights in the cache, and the name of the file in each of its folders.
FOLDER, WEIGHTS = "weights", "weights.pt"


class Resident(NamedTuple):
    """A backbone loaded for a worker.

    Attributes:
        model: On the CPU, in the run's precision, in eval mode.
        source: Identity of the weights, the same on every machine: the SHA-256 of a folder's files,
            or a hub name with its commit. Empty if the architecture is built in and the weights are
            drawn from the seed, or if the commit is unknown.
        drawn: Parameters that the checkpoint lacks and that are drawn from the seed.
    """

    model: nn.Module
    source: str
    drawn: tuple[str, ...]


def load_resident(plan: Plan, cache: Path) -> Resident:
    """Load a backbone with shared weights; see :meth:`Backbone.load_resident`."""
    config, seed = plan.config, plan.seed
    key = weights_key(plan)

    def write(new: Path) -> None:
        model, drawn = build_weights(plan)
        cast(model, run_dtype(config))
        quantize_layers(model, config.quantize, run_dtype(config))
        commit = getattr(plan.architecture, "_commit_hash", None)
        source = weights_source(plan.files, commit, drawn=config.init == "random")
        content = {"tensors": _tensors(model, drawn), "drawn": drawn, "source": source}
        try:
            with (new / WEIGHTS).open("wb") as file:
                torch.save(content, file)
        except RuntimeError as error:  # Raised after the OSError of a full disk.
            raise error.__context__ or error from None

    folder = make_once(cache, f"{FOLDER}/{key}", write)
    stored: dict[str, Any] = torch.load(folder / WEIGHTS, mmap=True, weights_only=True)
    with torch.device("meta"):
        model = plan.module()
        quantize_layers(model, config.quantize, run_dtype(config))
    drawn = stored["drawn"]
    heads = {name: torch.empty(model.get_parameter(name).shape) for name in drawn}
    _assign(model, stored["tensors"] | heads)
    set_head(model, drawn, seed, run_dtype(config))
    configure_compute(model, config)
    return Resident(model.eval(), stored["source"], tuple(drawn))


def weights_key(plan: Plan) -> str:
    """Hash everything that determines the prepared weights.

    This includes the seed of random weights, but not of a head drawn for a checkpoint.
    """
    location = plan.files.location
    if plan.config.init == "random":
        source: Any = ["seed", plan.seed, weights_source(plan.files, None, drawn=True)]
    elif isinstance(location, Path):
        # Use stamps: hashing gigabytes in every process would take longer than mapping them.
        source = [str(location.resolve()), [(f.name, *stamp(f)) for f in source_files(location)]]
    else:
        source = [location, getattr(plan.architecture, "_commit_hash", None)]
    key = [
        FORMAT_VERSION,
        [torch.__version__, transformers.__version__],
        source,
        plan.kind,
        plan.config.precision,
        plan.config.image_size,
        plan.architecture.to_json_string(),
    ]
    if (kind := plan.config.quantize) != "none":
        key += [kind, importlib.metadata.version("bitsandbytes")]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _tensors(model: nn.Module, drawn: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return every parameter and buffer, also non-persistent ones, once, under its first name."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items() if name not in drawn}


def set_head(model: nn.Module, names: Sequence[str], seed: int, dtype: torch.dtype) -> None:
    """Draw the parameters ``names`` of a resident model in place, for another seed."""
    parameters = [model.get_parameter(name) for name in names]
    devices = [parameter.device for parameter in parameters]
    for parameter in parameters:
        # Draw in float32 on the CPU, so that device and precision do not affect the values.
        parameter.data = torch.empty(parameter.shape)
    draw_head(model, names, seed)
    for parameter, device in zip(parameters, devices, strict=True):
        parameter.data = parameter.data.to(device, dtype)


def _assign(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Replace the tensors of a model of transformers on the meta device."""
    model.load_state_dict(tensors, assign=True, strict=False)
    model.tie_weights()
    # Include buffers that are not saved.
    for name in dict(model.named_buffers()).keys() & tensors.keys():
        module, _, last = name.rpartition(".")
        model.get_submodule(module)._buffers[last] = tensors[name]
    if left := [name for name, tensor in _tensors(model).items() if tensor.is_meta]:
        raise RuntimeError(f"{type(model).__name__}: the prepared weights lack {left[0]}")
