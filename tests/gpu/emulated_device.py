"""A device that computes on the CPU and notes every line at which the host would wait for a GPU.

Its tensors report the device ``emulated``, so code takes its route for GPUs. As on a GPU, tensors
on two devices cannot meet in one operation. The host waits where it reads a value, uses a mask as
an index, copies to the host, or copies from memory that is not page-locked. A wait is noted only if
the device has been given work since the last one.

A device cannot be unregistered: use this in a process of its own.
"""

import contextlib
import sys
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


class _Module:
    """Functions that torch asks of the Python module of a device."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)


class EmulatedTensor(torch.Tensor):
    """A tensor on the device; ``values`` is the tensor on the CPU that it stands for."""

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
    """The device; enter it once. ``waits`` lists what waited and where, oldest first."""

    current = None

    def __init__(self):
        super().__init__()
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        # torch.tensor() on a device goes around dispatch modes; these two are what it calls.
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
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            place = "elsewhere"
            if frame is not None:
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.waits.append(f"{reason} at {place}")
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
        on_cpu = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        raw_args, raw_kwargs = tree_map_only(
            EmulatedTensor, lambda tensor: tensor.values_, (args, {**kwargs, **on_cpu})
        )
        if name == "_to_copy":  # always a copy, also where both are on the CPU
            out = func(*raw_args, **raw_kwargs).clone()
        else:
            out = func(*raw_args, **raw_kwargs)
        if name == "copy_":
            return args[0]
        if not results_here:
            return out
        out = tree_map_only(torch.Tensor, EmulatedTensor, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if here else out

    def _note(self, name, args, kwargs, tensors, results_here):
        """Note what this operation would wait for; raise if it would fail on a GPU."""
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

    @staticmethod
    def _empty(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        return EmulatedTensor(torch.empty_strided(size, stride, dtype=dtype))

    def _copy_from(self, source, target, non_blocking=False):
        self._note("_copy_from", (source,), {"non_blocking": non_blocking}, [], True)
        self.busy = True
        target.values_.copy_(source)
        return target
