"""Frozen linear layers whose weights are stored in 4 or 8 bits, with bitsandbytes.

``nf4`` is the format of QLoRA (Dettmers et al., arXiv 2305.14314): 4-bit quantiles of a normal
distribution in blocks of 64 weights, with 8-bit scales that are themselves scaled in blocks of 256,
for a total of 4.13 bits per weight. ``int8`` quantizes rows as LLM.int8() (Dettmers et al., arXiv
2208.07339): steps of 1/127 of a row's largest weight. Inputs are not quantized.

A layer computes with the dequantized weight, which exists only during the product and is created
again for the gradient of the input. The fused kernels of bitsandbytes are not used, because they
depend on the batch's shape. A stored weight never changes; updates are stored separately.

Legend: d_out, d_in widths of the layer; n = d_out d_in.
"""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trishul_ray.errors import InputError, how_to_install

# It warns about missing kernels for fused products, which are not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

#: Storage type of a weight.
Storage: TypeAlias = Literal["nf4", "int8"]
#: Number of weights per scale, and of scales per nested scale.
BLOCK, NESTED_BLOCK = 64, 256


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose ``weight`` is dequantized on access: a new tensor every time.

    Args:
        linear: The layer; on the meta device, it determines only the shapes of the stored tensors.
        kind: Storage type of its weight.
        dtype: Dtype of ``weight``.

    Attributes:
        squared_norm: ``||W||_F^2`` of the weight before quantization, float64.
    """

    def __init__(self, linear: nn.Linear, kind: Storage, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.kind, self.dtype = linear.bias, kind, dtype
        weight = linear.weight.detach()
        stored = _empty(kind, *weight.shape) if weight.is_meta else _quantize(weight, kind)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.squared_norm: Tensor
        self.register_buffer("squared_norm", weight.double().square().sum())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [d_out, d_in], rounded once from float32, equal on any device."""
        library, stored = _functional(), dict(self.named_buffers(recurse=False))
        size = self.out_features * self.in_features
        if self.kind == "int8":
            dense = library.int8_vectorwise_dequant(stored["codes"], stored["scales"])
        else:
            scales = library.QuantState(
                stored["nested_scales"],
                code=stored["nested_code"],
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
            state = library.QuantState(
                stored["scales"],
                # On a CPU, bitsandbytes 0.50 uses another block's scales in rows that are not a
                # multiple of a block, and compiles code for odd rows. Here all weights are one row
                # of even length.
                shape=torch.Size([1, size + size % 2]),
                blocksize=BLOCK,
                quant_type=self.kind,
                dtype=torch.float32,
                offset=stored["offset"],
                state2=scales,
            )
            dense = library.dequantize_4bit(stored["codes"], state)
        weight: Tensor = dense.view(-1)[:size].view(self.out_features, self.in_features)
        return weight.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer, [..., d_in] -> [..., d_out]."""
        with self.dense() as weight:
            return nn.functional.linear(x, weight, self.bias)

    @contextmanager
    def dense(self) -> Iterator[Tensor]:
        """Yield :attr:`weight`, which computations inside do not keep for the backward pass."""
        weight = self.weight
        memory = weight.untyped_storage().data_ptr()

        def pack(saved: Tensor) -> Any:
            if saved.untyped_storage().data_ptr() == memory:
                return saved.shape, saved.stride(), saved.storage_offset()
            return saved

        def unpack(packed: Any) -> Tensor:
            return packed if torch.is_tensor(packed) else self.weight.as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield weight


def dequantize_layers(model: nn.Module) -> None:
    """Replace quantized layers by plain layers with their dequantized weights, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            with torch.device("meta"):
                linear = nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight = nn.Parameter(module.weight, requires_grad=False)
            linear.bias = module.bias
            model.set_submodule(name, linear.train(module.training))


def squared_norm(linear: nn.Linear) -> Tensor:
    """Return ``||W||_F^2`` of a layer before quantization, float64."""
    if isinstance(linear, QuantizedLinear):
        return linear.squared_norm
    return linear.weight.detach().double().square().sum()


def check_library(kind: Storage) -> None:
    """Raise an InputError if bitsandbytes, which ``kind`` requires, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"model.quantize={kind!r} needs bitsandbytes: "
            + how_to_install("quant", "bitsandbytes>=0.50.2,<0.51")
        )


def _functional() -> Any:
    import bitsandbytes.functional  # takes two seconds

    return bitsandbytes.functional


def _empty(kind: Storage, d_out: int, d_in: int) -> dict[str, Tensor]:
    """Return tensors like those of :func:`_quantize`, on the meta device."""
    blocks = -(-d_out * d_in // BLOCK)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((-(-d_out * d_in // 2), 1), torch.uint8),
        "scales": ((blocks,), torch.uint8),
        "nested_scales": ((-(-blocks // NESTED_BLOCK),), torch.float32),
        "nested_code": ((256,), torch.float32),
        "offset": ((), torch.float32),
    }
    if kind == "int8":
        shapes = {"codes": ((d_out, d_in), torch.int8), "scales": ((d_out,), torch.float32)}
    return {n: torch.empty(size, dtype=t, device="meta") for n, (size, t) in shapes.items()}


def _quantize(weight: Tensor, kind: Storage) -> dict[str, Tensor]:
    """Quantize a weight [d_out, d_in] on the CPU, and return the tensors to store."""
    library = _functional()
    if kind == "int8":
        codes, scales, _ = library.int8_vectorwise_quant(weight)
        return {"codes": codes, "scales": scales}
    codes, state = library.quantize_4bit(weight.reshape(1, -1), blocksize=BLOCK, quant_type=kind)
    # In float64, so that the number of threads does not change the stored mean.
    offset = state.absmax.double().mean().float()
    scales, nested = library.quantize_blockwise(state.absmax - offset, blocksize=NESTED_BLOCK)
    return {
        "codes": codes,
        "scales": scales,
        "nested_scales": nested.absmax,
        "nested_code": nested.code.clone(),
        "offset": offset,
    }
