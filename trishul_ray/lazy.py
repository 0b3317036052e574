"""PyTorch, transformers, datasets, MLflow and parts of Arrow, imported at their first use.

A configuration consists of the classes of the methods, which compute with tensors. Modules that
are imported to read one, or to list datasets, write ``from trishul_ray.lazy import torch`` instead
of ``import torch``, so that a mistyped field is answered at once, as is a command that finds all
its runs finished: importing torch takes seconds, and transformers more.
``pc`` and ``pq`` are ``pyarrow.compute`` and ``pyarrow.parquet``.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["datasets", "mlflow", "pc", "pq", "torch", "transformers"]

if TYPE_CHECKING:
    import datasets
    import datasets.table
    import mlflow
    import mlflow.entities
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import torch
    import transformers
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self.__name__), name)

    datasets = _Lazy("datasets")
    mlflow = _Lazy("mlflow")
    torch = _Lazy("torch")
    transformers = _Lazy("transformers")
    pc = _Lazy("pyarrow.compute")
    pq = _Lazy("pyarrow.parquet")
