"""Lazy modules, which import slow libraries at their first use.

Importing torch takes seconds, and transformers even longer. Modules that are needed to validate a
configuration or to list datasets use ``from trishul_ray.runtime.lazy import torch`` instead of
``import torch``. Thus, commands respond immediately to a mistyped field, or if all runs have
already finished.

``pc`` and ``pq`` are ``pyarrow.compute`` and ``pyarrow.parquet``, and ``pd`` is pandas.
"""

import importlib
import signal
import threading
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "datasets",
    "import_ahead",
    "mlflow",
    "pc",
    "pd",
    "pq",
    "ray",
    "scipy",
    "sklearn",
    "torch",
    "torchmetrics",
    "transformers",
]

if TYPE_CHECKING:
    import datasets
    import datasets.table
    import mlflow
    import mlflow.entities
    import pandas as pd
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import ray.tune.search.variant_generator
    import scipy.linalg
    import scipy.optimize
    import scipy.stats
    import sklearn.datasets
    import torch
    import torchmetrics.functional.text
    import transformers
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            module = importlib.import_module(self.__name__)
            try:
                return getattr(module, name)
            except AttributeError:
                # The name may be a submodule that the package does not import.
                with suppress(ModuleNotFoundError):
                    return importlib.import_module(f"{self.__name__}.{name}")
                raise

    datasets = _Lazy("datasets")
    mlflow = _Lazy("mlflow")
    pc = _Lazy("pyarrow.compute")
    pd = _Lazy("pandas")
    pq = _Lazy("pyarrow.parquet")
    ray = _Lazy("ray")
    scipy = _Lazy("scipy")
    sklearn = _Lazy("sklearn")
    torch = _Lazy("torch")
    torchmetrics = _Lazy("torchmetrics")
    transformers = _Lazy("transformers")


def import_ahead(*names: str) -> threading.Thread:
    """Import modules in a background thread, while the caller waits for something else.

    Join the thread before importing any of these modules. If two threads import modules with
    circular imports, one of them may see a partially initialized module.
    """

    def run() -> None:
        # Leave signals to the main thread, which may block them while Ray starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for name in names:
            importlib.import_module(name)

    ahead = threading.Thread(target=run)
    ahead.start()
    return ahead
