"""Federated parameter-efficient fine-tuning with spectral multi-head adapters, on Ray.

Run an experiment or a sweep, or load a finished run::

    import trishul_ray

    result = trishul_ray.run("digits", method="fedit", rounds=10)
    result.history["accuracy"].plot()
    result.predict(images)
    trishul_ray.sweep(axes={"method": ["fedit", "trishul"], "seed": range(3)}, rounds=10)
    trishul_ray.list_runs()

Importing the package does not import torch, transformers or Ray: the first call of a function does.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trishul_ray.errors import CorruptFileError, InputError, RunError, StorageError
from trishul_ray.federation.determinism import set_environment
from trishul_ray.version import __version__

if TYPE_CHECKING:
    from trishul_ray.api import load, run, sweep
    from trishul_ray.plugins.loading import load_plugin
    from trishul_ray.report.summary import list_runs
    from trishul_ray.result import Result

set_environment()  # must precede the import of torch
# Seconds that the hub's clients wait before they read their caches; the default is 10.
os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
# Ray reads this variable when it is imported. Otherwise it sends no token to a cluster with an
# address.
if os.environ.get("RAY_ADDRESS") and (
    os.environ.get("RAY_AUTH_TOKEN")
    or os.environ.get("RAY_AUTH_TOKEN_PATH")
    or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
):
    os.environ.setdefault("RAY_AUTH_MODE", "token")
if os.path.expanduser("~") == "~":
    # MLflow fails for a user without a home directory, as in some containers.
    os.environ["HOME"] = os.path.abspath(os.environ.get("TRISHUL_CACHE") or os.devnull)

__all__ = [
    "CorruptFileError",
    "InputError",
    "Result",
    "RunError",
    "StorageError",
    "__version__",
    "list_runs",
    "load",
    "load_plugin",
    "run",
    "sweep",
]

#: Modules of the names that are imported on first use.
_LAZY = {
    "Result": "result",
    "load": "api",
    "load_plugin": "plugins.loading",
    "run": "api",
    "list_runs": "report.summary",
    "sweep": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
