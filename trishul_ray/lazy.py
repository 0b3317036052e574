"""PyTorch, imported at its first use.

A configuration consists of the classes of the methods, which compute with tensors. Modules that
are imported to read one write ``from trishul_ray.lazy import torch`` instead of ``import torch``,
so that a mistyped field is answered at once: importing torch takes seconds.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["torch"]

if TYPE_CHECKING:
    import torch
else:

    class _Torch(ModuleType):
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch("torch")
