"""Libraries that take long to import, imported at their first use.

A configuration consists of the classes of the methods, which compute with tensors. Modules that
are imported to read one, or to list datasets, write ``from trishul_ray.runtime.lazy import torch``
instead of ``import torch``, so that a mistyped field is answered at once, as is a command that
finds all its runs finished: importing torch takes seconds, and transformers more.
``pc`` and ``pq`` are ``pyarrow.compute`` and ``pyarrow.parquet``, ``pd`` is pandas.
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
                # Perhaps a part that it does not import by itself.
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
    """Import modules in a thread while this one waits for something else.

    Join it before importing any of them here: two threads that import modules which import one
    another may get one that is not complete.
    """

    def run() -> None:
        # Signals are for the main thread, which may hold them back while Ray starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for name in names:
            importlib.import_module(name)

    ahead = threading.Thread(target=run)
    ahead.start()
    return ahead
