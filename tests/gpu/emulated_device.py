"""A device that records what a GPU would do: host waits, kernels, memory, kernels that raise.

Its tensors report the device ``emulated``, so code uses its path for GPUs. As on a GPU, an
operation cannot combine tensors on two devices. The host waits when it reads a value, uses a mask
as an index, copies to the host, or copies from memory that is not page-locked. A wait is recorded
only if the device has received work since the last wait.

The device computes on the CPU or, without numbers, only shapes and dtypes (on torch's meta device).
Models of any size then take seconds and no memory, and copies to the host are zeros.

A device cannot be unregistered: use this module in a separate process.
"""

import collections
import contextlib
import sys
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "emulated"
PACKAGE = str(Path(__file__).parents[2] / "trishul_ray") + "/"
#: Operations whose CUDA kernels return a size, or check for errors on the host.
WAITING = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "equal", "_linalg_eigh", "_linalg_svd", "_linalg_solve_ex", "linalg_cholesky",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
COPIES = {"copy_", "_to_copy", "_copy_from"}
#: Views, allocations and bookkeeping, in addition to the views that torch reports.
WITHOUT_KERNEL = {
    "detach_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "_unsafe_view", "set_", "resize_",
}  # fmt: skip
SEVERAL_KERNELS = {
    "native_layer_norm_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
}
#: Operations that raise on CUDA if algorithms must be deterministic, for any arguments: the list in
#: the documentation of ``use_deterministic_algorithms``.
RAISING = {
    "put_", "histc", "kthvalue", "median", "nanmedian", "segment_reduce", "index_reduce_",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "adaptive_max_pool2d_backward",
    "upsample_linear1d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward",
    "_upsample_bilinear2d_aa_backward", "upsample_bicubic2d_backward",
    "_upsample_bicubic2d_aa_backward", "_adaptive_avg_pool2d_backward",
    "avg_pool3d_backward", "max_pool3d_with_indices_backward", "max_unpool2d",
    "reflection_pad2d_backward", "replication_pad2d_backward", "_ctc_loss_backward",
    "_embedding_bag_dense_backward",
}  # fmt: skip


class _Module:
    """Functions that torch requires of the Python module of a device."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)


class EmulatedTensor(torch.Tensor):
    """A tensor on the device; ``values`` is the corresponding tensor on the CPU."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, values):
        self.values_ = values

    def __repr__(self):
        return f"EmulatedTensor({self.values_})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return EmulatedDevice.current.run(func, args, kwargs or {})


def on_device(value):
    return isinstance(value, EmulatedTensor)


class EmulatedDevice(TorchDispatchMode):
    """The device; enter it once.

    Attributes:
        waits: Operations that waited and their locations, oldest first.
        kernels: Number of launched kernels, keyed by operation.
        raising: Operations whose kernels raise if algorithms must be deterministic, and their
            locations.
        bytes: Current bytes of its tensors.
        peak: Maximum bytes of its tensors.
    """

    current = None

    def __init__(self, numbers=True):
        super().__init__()
        self.where = torch.device("cpu" if numbers else "meta")
        self.kernels, self.raising = collections.Counter(), []
        self.bytes, self.peak, self.owned = 0, 0, set()
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        # torch.tensor() on a device bypasses dispatch modes, but calls these two functions.
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("empty_strided", self._empty, "PrivateUse1")
        self.library.impl("_copy_from", self._copy_from, "PrivateUse1")
        # A parameter on the CPU cannot become one of another class in place, and an inference
        # tensor cannot be wrapped.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        torch.inference_mode = lambda mode=True: (
            torch.no_grad() if mode else contextlib.nullcontext()
        )
        self.waits, self.busy = [], False
        EmulatedDevice.current = self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def wait(self, reason):
        if self.busy:
            self.waits.append(f"{reason} at {_place()}")
        self.busy = False

    def run(self, func, args, kwargs):
        """Run an operation on the CPU, and wrap its results if they are on the device."""
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = any(map(on_device, tensors))
        results_here = here and name != "_local_scalar_dense"
        if kwargs.get("device") is not None:
            results_here = torch.device(kwargs["device"]).type == NAME
        if name == "copy_":
            results_here = on_device(args[0])
        if name == "_pin_memory":
            locked = args[0].clone()
            locked.page_locked = True
            return locked
        if not here and not results_here:
            return func(*args, **kwargs)
        self._note(name, args, kwargs, tensors, results_here)
        if results_here and not func.is_view:
            self.busy = True
        if results_here:
            self._count(name, func)
        elif self.where.type == "meta":
            return _zeros(name, args, kwargs)
        there = {"device": self.where} if kwargs.get("device") is not None else {}
        raw_args, raw_kwargs = tree_map_only(
            EmulatedTensor, lambda tensor: tensor.values_, (args, {**kwargs, **there})
        )
        if name == "_to_copy":  # always a copy, even if both are on the CPU
            out = func(*raw_args, **raw_kwargs).clone()
        else:
            out = func(*raw_args, **raw_kwargs)
        if name == "copy_":
            return args[0]
        if not results_here:
            return out
        tree_map_only(torch.Tensor, self._own, out)
        out = tree_map_only(torch.Tensor, EmulatedTensor, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if here else out

    def _note(self, name, args, kwargs, tensors, results_here):
        """Record the wait for this operation, if any; raise if it would fail on a GPU."""
        if name in COPIES:
            source = args[1] if name == "copy_" else args[0]
            if on_device(source) and not results_here:
                self.wait("copy to the host")
            elif not on_device(source):
                late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
                if not (late and getattr(source, "page_locked", False)):
                    self.wait(
                        "copy from pageable memory" if late else "blocking copy to the device"
                    )
        elif name == "_local_scalar_dense":
            self.wait("value read")
        elif name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(not on_device(index) or index.dtype == torch.bool for index in indices):
                self.wait("index by a mask or from the host")
        else:
            if name in WAITING:
                self.wait(name)
            if any(not on_device(tensor) and tensor.dim() for tensor in tensors):
                raise RuntimeError(f"{name}: expected all tensors on one device")

    def _count(self, name, func):
        if not (func.is_view or name in WITHOUT_KERNEL):
            self.kernels[name] += SEVERAL_KERNELS.get(name, 1)
        if name in RAISING:
            self.raising.append(f"{name} at {_place()}")

    def _own(self, values):
        """Count the bytes of a tensor until nothing refers to them any more."""
        storage = values.untyped_storage()
        if storage._cdata not in self.owned:
            self.owned.add(storage._cdata)
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._disown, storage._cdata, storage.nbytes())
        return values

    def _disown(self, key, size):
        self.owned.discard(key)
        self.bytes -= size

    def _empty(self, size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        return EmulatedTensor(
            self._own(torch.empty_strided(size, stride, dtype=dtype, device=self.where))
        )

    def _copy_from(self, source, target, non_blocking=False):
        self._note("_copy_from", (source,), {"non_blocking": non_blocking}, [], True)
        self.busy = True
        target.values_.copy_(source)
        return target


def _place():
    """Return the innermost line of the package."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _zeros(name, args, kwargs):
    """Return what the host receives from a device without numbers."""
    if name == "copy_":
        return args[0].zero_()
    if name == "_local_scalar_dense":
        return torch.zeros((), dtype=args[0].dtype).item()
    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


def fused_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Replace SDPA by the operation that it chooses on CUDA without cuDNN's kernel.

    This is flash attention, or the memory-efficient one with a mask or float32.
    """
    if enable_gqa and (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if attn_mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
